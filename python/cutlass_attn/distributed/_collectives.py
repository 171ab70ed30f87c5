"""Collectives of torch.distributed under the names that this torch has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has the other name for it, and a warning for this one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """(ranks, *x.shape), once the work that comes with it has been waited for."""
    received = x.new_empty((dist.get_world_size(group), *x.shape))
    return received, _all_gather(received, x.contiguous()[None], group=group, async_op=True)
