"""Translates masks of other libraries to options of `cutlass_attn.attention`."""

from __future__ import annotations

from typing import Any

import torch

# A key with a bias below the first number has no weight left, unless the whole row is as low. In a
# row that is, torch's result is an average of V, as the bias absorbs the logits. The second number
# absorbs them as well; the lowest numbers of float32 and bfloat16 would mask the key on mma.sync
# (docs/numerics.md). A power of 2 survives the LSE's conversion to units of log2 and back, so that
# backward passes compute exp(logit - LSE) as 1. Other numbers may give infinity.
_LOW_BIAS = -1e8
_LOWEST_BIAS = -(2.0**100)


def top_left_causal(seqlen_q: int, seqlen_k: int) -> tuple[int, dict[str, Any]]:
    """Keys that the queries see, and options for them, where query i sees keys 0 to i.

    That is torch's causal mask; `attention` aligns the mask at the last key instead. With as many
    queries as keys they are equal. More keys are cut off, since no query sees them. With fewer keys
    than queries, torch's mask is `attention`'s with a window to the right.
    """
    if seqlen_q <= seqlen_k:
        return seqlen_q, {"causal": True}
    return seqlen_k, {"window": (-1, seqlen_q - seqlen_k)}


def mask_or_bias(mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Options for a mask of torch: bool, True where a query sees a key, or float, added."""
    if mask is None:
        return {}
    if mask.dtype == torch.bool:
        return {"mask": mask}
    return {"bias": bounded_bias(mask)}


def bounded_bias(bias: torch.Tensor) -> torch.Tensor:
    """The bias with -2^100 for numbers below -1e8 other than -inf, such as the lowest of its dtype.

    A dimension along which it is expanded comes back with size 1: not a byte is copied for it.
    """
    if bias.dtype == torch.float16:  # has no such numbers
        return bias
    for dim in range(0 if bias.requires_grad else bias.dim()):
        if bias.stride(dim) == 0 and bias.shape[dim] > 1:
            bias = bias.narrow(dim, 0, 1)
    low = bias.masked_fill(bias < _LOW_BIAS, _LOWEST_BIAS)
    return low.masked_fill_(bias.isneginf(), -torch.inf)
