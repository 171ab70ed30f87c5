"""The functions of FlashMLA (github.com/deepseek-ai/FlashMLA) on `attention_decode`.

    from cutlass_attn.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

They take FlashMLA's arguments and return what it returns, on any GPU from compute capability 8.0 on
and on a CPU: pages of any size, any number of query heads, float16 as well as bfloat16, and indices
over a cache of 16 bits. docs/latent.md is the user's page.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._call.token_format import FORMATS
from .._merge_states import merge_states
from ..decode import attention_decode, decode_with_max_logits

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


class FlashMLASchedMeta:
    """Stands for FlashMLA's plan of a step: splits are chosen in each call here."""


def get_mla_metadata(*_args: Any, **_kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A stand-in for FlashMLA's plan of a step, and None for its number of splits.

    Arguments are accepted and ignored, as `flash_mla_with_kvcache` ignores both results: it chooses
    splits in each call.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoding over a paged latent cache: `attention_decode` with V a view of K.

    Args:
        q: (B, Sq, Hq, D): float16 or bfloat16 (on a CPU also float32).
        k_cache: (pages, page, 1, D), of q's dtype. V is its first head_dim_v columns. With
            is_fp8_kvcache tokens in 8 bits, (pages, page, 1, 656) or, of DeepSeek V4, 584.
        block_table: (B, pages per sequence) int32; unused with indices.
        cache_seqlens: (B,) int32; unused with indices.
        head_dim_v: columns of V.
        tile_scheduler_metadata: ignored, as is num_splits.
        softmax_scale: None is ``D ** -0.5``.
        causal: bottom-right: the last query sees the last key. Must be False with indices.
        is_fp8_kvcache: whether k_cache has tokens in 8 bits.
        indices: (B, Sq, topk) int32: rows of the cache, page number x page size + row; -1: none.
        attn_sink: (Hq,) float32: joins the softmax's denominator.
        extra_k_cache: a second cache, of k_cache's kind: its own pass, and the results are merged.
        extra_indices_in_kvcache: (B, Sq, topk) int32: rows of the second cache.
        topk_length: (B,) int32: how many indices of a sequence's lists count.
        extra_topk_length: the same for the second cache.

    Returns:
        The result (B, Sq, Hq, head_dim_v), and the log-sum-exp (B, Hq, Sq) float32, natural and
        without the sink: +inf for a query that sees no key, as FlashMLA has it.

    Raises:
        ValueError: as `attention_decode`, or a token of a size that no format has.
    """
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None) or (
        extra_k_cache is not None and indices is None
    ):
        raise ValueError(
            "extra_k_cache goes with extra_indices_in_kvcache and indices, got one without another"
        )
    if extra_topk_length is not None and extra_k_cache is None:
        raise ValueError("extra_topk_length is given without extra_k_cache")
    if not is_fp8_kvcache:
        _check_columns("head_dim_v", head_dim_v, k_cache)
    options: dict[str, Any] = {"block_table": block_table, "causal": causal}
    if indices is not None:
        options = {"indices": indices, "topk_lengths": topk_length, "causal": causal}
        cache_seqlens = None
    elif topk_length is not None:
        raise ValueError("topk_length is the length of indices, but indices is not given")
    options |= {"softmax_scale": softmax_scale, "return_lse": True}
    caches = [(k_cache, options)]
    if extra_k_cache is not None:
        more = {"indices": extra_indices_in_kvcache, "topk_lengths": extra_topk_length}
        caches.append((extra_k_cache, {**options, **more}))
    if is_fp8_kvcache:
        caches = [
            (cache.view(torch.uint8), {**its, "kv_format": _format_of(cache, head_dim_v)})
            for cache, its in caches
        ]
    states = [
        attention_decode(
            q, cache, cache if is_fp8_kvcache else cache[..., :head_dim_v], cache_seqlens, **its
        )
        for cache, its in caches
    ]
    (out, lse), *others = states
    for other, other_lse in others:
        # Rounded once, after the sink: FlashMLA's tests have no room for three roundings.
        out, lse = merge_states(out.float(), lse, other.float(), other_lse, layout="bshd")
    return _with_sink(out, lse, attn_sink).to(q.dtype), _of_no_key(lse)


def _check_columns(name: str, columns: int, cache: torch.Tensor) -> None:
    """Raises ValueError: V is no part of the cache's columns, of which a slice would be shorter."""
    if not 1 <= columns <= cache.shape[-1]:
        raise ValueError(f"{name} is {columns}, allowed: 1 to {cache.shape[-1]}, as K has columns")


def _format_of(cache: torch.Tensor, head_dim_v: int) -> str:
    for name, form in FORMATS.items():
        if cache.shape[-1] == form.token_bytes and head_dim_v == form.columns_v:
            return name
    raise ValueError(
        f"is_fp8_kvcache is True, with {cache.shape[-1]} bytes a token and head_dim_v "
        f"{head_dim_v}; allowed: {', '.join(str(x.token_bytes) for x in FORMATS.values())} bytes, "
        "and 512"
    )


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prefill in which each query token has a list of the keys that it sees.

    Args:
        q: (T, Hq, D): float16 or bfloat16 (on a CPU also float32).
        kv: (Tk, 1, D), of q's dtype. V is its first d_v columns.
        indices: (T, 1, topk) int32: rows of kv. -1, and Tk or more, is none.
        sm_scale: factor of q @ k^T.
        d_v: columns of V.
        attn_sink: (Hq,) float32: joins the softmax's denominator.
        topk_length: (T,) int32: how many indices of a token count.

    Returns:
        The result (T, Hq, d_v); the largest logits (T, Hq) float32, q @ k^T times sm_scale, -inf
        for a token that sees no key; and the log-sum-exp (T, Hq) float32, natural: +inf for such a
        token. Both are without the sink. As ref_sparse_attn_fwd of FlashMLA's tests/ref.py.

    Raises:
        ValueError: as `attention_decode`.
    """
    if q.dim() != 3 or kv.dim() != 3 or indices.dim() != 3 or indices.shape[1] != 1:
        raise ValueError(
            "q, kv and indices must have shapes (T, Hq, D), (Tk, 1, D) and (T, 1, topk), got "
            f"{tuple(q.shape)}, {tuple(kv.shape)} and {tuple(indices.shape)}"
        )
    _check_columns("d_v", d_v, kv)
    if not indices.is_cuda:  # where those beyond the cache are refused
        indices = indices.masked_fill((indices < 0) | (indices >= kv.shape[0]), -1)
    # Each token is a sequence of one query, whose lists have lengths of their own.
    out, lse, max_logits = decode_with_max_logits(
        q[:, None],
        kv[None],
        kv[None, ..., :d_v],
        cache_seqlens=None,
        indices=indices,
        topk_lengths=topk_length,
        softmax_scale=sm_scale,
        return_lse=True,
    )
    return _with_sink(out, lse, attn_sink)[:, 0], max_logits[..., 0], _of_no_key(lse)[..., 0]


def _with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """The result (B, Sq, Hq, Dv) with a sink in the denominator, which its LSE lacks."""
    if sink is None:
        return out
    if sink.shape != (out.shape[2],):
        raise ValueError(f"attn_sink must have shape ({out.shape[2]},), got {tuple(sink.shape)}")
    share = torch.sigmoid(lse - sink[:, None])
    share = share.masked_fill(lse == -math.inf, 0.0)  # of no key; -inf - -inf is NaN
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)


def _of_no_key(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)
