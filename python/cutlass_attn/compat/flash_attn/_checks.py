"""Checks lengths and block tables against the cache, for CPU tensors.

On a GPU only shapes and dtypes are checked, since reading the values would make the host wait; and
under torch.compile, where there are no values yet.
"""

from __future__ import annotations

import torch


def lengths_of(cu_seqlens_k: torch.Tensor | None) -> torch.Tensor:
    """The numbers of keys in pages. Raises TypeError."""
    if cu_seqlens_k is None:
        raise TypeError("cu_seqlens_k must be given with block_table, got None")
    return cu_seqlens_k.diff()


def check_pages(block_table: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor) -> None:
    """Raises RuntimeError, which names block_table, as flash_attn does.

    block_table is (B, pages per sequence), lengths (B,), pages (pages, page size, Hkv, D).
    """
    if block_table.dtype != torch.int32 or block_table.dim() != 2:
        raise RuntimeError(
            f"block_table must be int32 of two dimensions, (batch, pages per sequence), got "
            f"{block_table.dtype} of shape {tuple(block_table.shape)}"
        )
    if pages.dim() != 4:
        raise RuntimeError(
            "with block_table keys and values must be pages, (pages, page size, heads, head_dim), "
            f"got shape {tuple(pages.shape)}"
        )
    if block_table.shape[0] != lengths.shape[0]:
        raise RuntimeError(
            f"block_table has {block_table.shape[0]} rows for a batch of {lengths.shape[0]}"
        )
    if not _have_values(lengths):
        return
    page_size = pages.shape[1]
    capacity = block_table.shape[1] * page_size
    if (longest := int(lengths.max())) > capacity:
        raise RuntimeError(
            f"a sequence has {longest} keys but block_table covers {capacity}: "
            f"{block_table.shape[1]} pages of {page_size}"
        )
    if (shortest := int(lengths.min())) < 0:
        raise RuntimeError(f"a sequence of block_table has {shortest} keys")
    if block_table.device.type != "cpu":
        return
    used = torch.arange(block_table.shape[1], device="cpu") * page_size < lengths[:, None]
    bad = used & ((block_table < 0) | (block_table >= pages.shape[0]))
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise RuntimeError(
            f"block_table[{row}, {column}] is {int(block_table[row, column])}, but there are "
            f"{pages.shape[0]} pages"
        )


def check_appended(lengths: torch.Tensor, appended: int, capacity: int) -> None:
    """Raises RuntimeError, which names cache_seqlens. lengths is (B,)."""
    if not _have_values(lengths):
        return
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 0 or longest + appended > capacity:
        bad = shortest if shortest < 0 else longest
        raise RuntimeError(
            f"cache_seqlens has {bad}, but the cache has room for {capacity} keys"
            + (f", {appended} of them new" if appended else "")
        )


def _have_values(lengths: torch.Tensor) -> bool:
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return len(lengths) > 0
