"""Collectives of torch.distributed, by the names that this version of torch has."""

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
