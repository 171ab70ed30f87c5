"""`torch.ops.cutlass_attn.attention_forward`: what torch.compile, torch.export and dispatch modes
see of `attention`. Plain eager calls go past it: see INTERCEPTORS in torch_library."""

from __future__ import annotations

from typing import Any

import torch

from .call import SIGNATURES, Call

# Types of a schema, by those in the signature of `attention`.
TYPES = {
    "Array": "Tensor",
    "Array | None": "Tensor?",
    "Window": "SymInt[]?",
    "bool": "bool",
    "float": "float",
    "float | None": "float?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "str": "str",
}
# Of `attention`, but for those that through_operator() takes care of.
_PARAMETERS = {
    name: parameter
    for name, parameter in SIGNATURES["attention"].parameters.items()
    if name not in ("out", "verify")
}


# Without defaults, and called with all arguments by position: inductor has a parameter of its own
# that is named "kernel" where it passes on keywords.
_SCHEMA = (
    f"({', '.join(f'{TYPES[p.annotation]} {name}' for name, p in _PARAMETERS.items())}) "
    "-> (Tensor, Tensor)"
)
_DEFAULTS = tuple((name, parameter.default) for name, parameter in _PARAMETERS.items())[3:]


def arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[Any, ...]:
    """Of the operator, for keywords of `attention`. Raises TypeError for others."""
    for name in options:
        if name not in _PARAMETERS:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
    return (q, k, v, *[options.get(name, default) for name, default in _DEFAULTS])


def _call_of(args: tuple[Any, ...]) -> Call:
    """The operator's arguments as a call."""
    q, k, v, *rest = args
    return Call(q, k, v, {name: x for (name, _), x in zip(_DEFAULTS, rest)})


def _empty_lse(like: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("cutlass_attn::attention_forward", mutates_args=(), schema=_SCHEMA)
def attention_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and log-sum-exp; the latter has no elements unless `return_lse`."""
    call = _call_of(args)
    result = call.run(dispatched=True)
    return result if call.options["return_lse"] else (result, _empty_lse(call.q, (0,)))


@attention_forward.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call_of(args)
    options = call.options
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    # Symbolic sizes are checked when they have become numbers: reading them would fix them here.
    sizes = [size for x in tensors for size in x.shape]
    keys = [options["attention_chunk"] or 0, *(options["window"] or ())]
    if all(type(number) is int for number in (*sizes, *keys)):
        call.facts()
    batch, *middle, _d = call.q.shape
    heads, rows = middle[::-1] if options["layout"] == "bshd" else middle
    lse_shape = (batch, heads, rows) if options["return_lse"] else (0,)
    out = call.q.new_empty((batch, *middle, call.v.shape[-1]))
    return out, _empty_lse(call.q, lse_shape)
