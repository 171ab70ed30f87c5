"""Mods under torch.func: what is computed outside of its transforms, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def are_active() -> bool:
    """Whether this is within torch.func.grad, torch.vmap or alike."""
    return _functorch.peek_interpreter_stack() is not None


def outside() -> contextlib.AbstractContextManager[Any]:
    """For tensors that outlive the transforms: theirs are wrapped, and of no use after them."""
    return temporarily_clear_interpreter_stack() if are_active() else contextlib.nullcontext()


def have_wrapped(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a transform has wrapped one of the tensors."""
    return are_active() and any(_functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def refuse_mapped(option: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raises NotImplementedError if torch.vmap maps a tensor from which a mask is made."""
    if not are_active():
        return
    for x in tensors:
        shape = tuple(x.shape)
        while _functorch.is_functorch_wrapped_tensor(x):
            if _functorch.is_batchedtensor(x):
                raise NotImplementedError(
                    f"{option} makes a mask from a captured tensor of shape {shape} that "
                    "torch.vmap maps; allowed: one that it does not map, or the mask itself as "
                    "mask= of cutlass_attn.attention, a tensor that vmap may map"
                )
            x = _functorch.get_unwrapped(x)


def refuse_score() -> None:
    """Raises NotImplementedError under a transform, for a score_mod that is not options."""
    if are_active():
        raise NotImplementedError(
            "score_mod under torch.func (grad, vjp, vmap): no option of cutlass_attn.attention "
            "expresses this one, and transforms work only with those that become options "
            "(softmax_scale, softcap, ALiBi, bias, masks); differentiate it with torch.autograd, "
            "and call it once for each sample in place of vmap"
        )
