"""Collectives of torch.distributed, by the names that this version has, and copies around them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has the other name for it, and a warning for this one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """A tensor (ranks, *x.shape) and the work to wait for before reading it."""
    received = x.new_empty((dist.get_world_size(group), *x.shape))
    return received, _all_gather(received, x.contiguous()[None], group=group, async_op=True)


def copy(to: torch.Tensor, x: torch.Tensor) -> None:
    """Copies a tensor of the same dtype and shape, in words of 8 bytes where that is possible: a
    copy of strided tensors takes as long for an element of 2 bytes as for one of 8."""
    if _has_words(to) and _has_words(x):
        to, x = to.view(torch.int64), x.view(torch.int64)
    to.copy_(x)


def _has_words(x: torch.Tensor) -> bool:
    elements = 8 // x.element_size()
    numbers = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    is_divisible = x.stride(-1) == 1 and all(n % elements == 0 for n in numbers)
    return is_divisible and x.data_ptr() % 8 == 0  # of another library's, it may not be
