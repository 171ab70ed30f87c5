"""The all-to-all of Ulysses (arXiv 2309.14509): rows of all heads, or all rows of some heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Tensors = tuple[torch.Tensor, ...]


def to_heads(group: Any, *tensors: torch.Tensor) -> Tensors:
    """Tensors (B, rows, heads, n) as (B, ranks * rows, heads / ranks, n), in one collective."""
    result: Tensors = _Exchange.apply(group, True, *tensors)
    return result


def to_rows(group: Any, *tensors: torch.Tensor) -> Tensors:
    """The inverse of `to_heads`."""
    result: Tensors = _Exchange.apply(group, False, *tensors)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, is_to_heads: bool, *tensors: torch.Tensor) -> Tensors:
        ctx.call = group, is_to_heads
        return _exchanged(group, is_to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, is_to_heads = ctx.call
        return None, None, *_exchanged(group, not is_to_heads, grads)


def _exchanged(group: Any, is_to_heads: bool, tensors: Tensors) -> Tensors:
    """One all-to-all of bytes, since log-sum-exps have another dtype than the output."""
    size = dist.get_world_size(group)
    by_rank = [
        _of_heads(x, size) if is_to_heads else x.unflatten(1, (size, -1)).transpose(0, 1)
        for x in tensors
    ]
    rows = [x.contiguous().view(size, -1).view(torch.uint8) for x in by_rank]
    sent = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    parts = received.split([x.shape[1] for x in rows], dim=1)
    results = []
    for part, like in zip(parts, by_rank):
        x = part.flatten().view(like.dtype).view(like.shape)  # of one dimension, as it may be empty
        # (ranks, B, rows, heads, n): ranks are in front of rows, or of heads.
        x = x.transpose(0, 1).flatten(1, 2) if is_to_heads else x.movedim(0, 2).flatten(2, 3)
        results.append(x)
    return tuple(results)


def _of_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.unflatten(2, (size, -1)).movedim(2, 0)
