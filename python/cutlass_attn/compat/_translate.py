"""Translates masks of other libraries to options of `cutlass_attn.attention`."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from .._call import torch_library

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


def float_mask(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """`mask_or_bias` of a float mask that layers may share.

    Without gradients, on a GPU, and where all heads share a mask of 16 bits, a bool mask goes with
    the bias: False where no weight is left. It changes no result, and lets kernels skip tiles. Both
    are kept for later calls on the same stream, until the mask dies or torch counts a write to it.
    """
    is_shared = mask.dim() < 3 or mask.shape[-3] == 1 or mask.stride(-3) == 0
    if torch.is_grad_enabled() or not is_shared or mask.itemsize != 2 or not _is_on_gpu(mask):
        return mask_or_bias(mask)
    stream_of = torch_library.current_stream
    is_seen = torch_library.must_see(mask) or mask.is_inference()
    if is_seen or stream_of is None or _is_capturing():
        return with_visible(mask)
    return kept(mask, stream_of(mask.get_device()))


def _is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


_is_capturing = torch.cuda.is_current_stream_capturing


def with_visible(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bias of a float mask, and which keys have a weight beside it.

    A query whose keys are all masked keeps them, as its result may be an average of V. NaN is not
    masked. In float16 only -inf masks a key: logits reach its lowest number.
    """
    bias = bounded_bias(mask)
    lowest = -torch.inf if bias.dtype == torch.float16 else _LOWEST_BIAS
    is_low = bias <= lowest
    return {"bias": bias, "mask": ~(is_low & ~is_low.all(-1, keepdim=True))}


class _Kept(NamedTuple):
    owner: weakref.ref[torch.Tensor]  # the tensor that the mask is, or is a view of
    state: tuple[Any, ...]
    options: dict[str, torch.Tensor]  # without a bias that is the mask, which it would keep alive


_MOST = 4
_kept: list[_Kept] = []  # the most recently used first; lists are replaced, never changed


def kept(mask: torch.Tensor, stream: int) -> dict[str, torch.Tensor]:
    """`with_visible(mask)`, of an earlier call if the mask is the same and unchanged."""
    global _kept
    owner = mask if mask._base is None else mask._base
    place = (stream, mask.dtype, mask.data_ptr(), mask.shape, mask.stride())
    state = (mask._version, *place)
    known = _kept
    found = next((x for x in known if x.owner() is owner and x.state == state), None)
    if found is None:
        options = with_visible(mask)
        own = {name: x for name, x in options.items() if x is not mask}
        found = _Kept(weakref.ref(owner, _forget), state, own)
    others = [x for x in known if x is not found and x.owner() is not None and x.state[1:] != place]
    _kept = [found, *others][:_MOST]
    return {"bias": mask, **found.options}


def _forget(dead: weakref.ref[torch.Tensor]) -> None:
    global _kept
    _kept = [x for x in _kept if x.owner is not dead]


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
