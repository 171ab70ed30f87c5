"""`torch.ops.cutlass_attn.attention_forward`: what torch.compile, torch.export and dispatch modes
see of `attention`. Plain eager calls go past it: see INTERCEPTORS in _torch."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import _C, _torch
from .functional import attention

# Types of a schema, by those in the signature of `attention`.
_TYPES = {
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
    for name, parameter in inspect.signature(attention).parameters.items()
    if name not in ("out", "verify")
}


# Without defaults, and called with all arguments by position: inductor has a parameter of its own
# that is named "kernel" where it passes on keywords.
_SCHEMA = (
    f"({', '.join(f'{_TYPES[p.annotation]} {name}' for name, p in _PARAMETERS.items())}) "
    "-> (Tensor, Tensor)"
)
_DEFAULTS = tuple((name, parameter.default) for name, parameter in _PARAMETERS.items())[3:]


def arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[Any, ...]:
    """Of the operator, for keywords of `attention`. Raises TypeError for others."""
    for name in options:
        if name not in _PARAMETERS:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
    return (q, k, v, *[options.get(name, default) for name, default in _DEFAULTS])


def _options(args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments after q, k and v, by name."""
    return {name: x for (name, _), x in zip(_DEFAULTS, args[3:])}


@torch.library.custom_op("cutlass_attn::attention_forward", mutates_args=(), schema=_SCHEMA)
def attention_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and log-sum-exp; the latter has no elements unless `return_lse`."""
    q, k, v = args[:3]
    options = _options(args)
    result = _C.forward(q, k, v, options, dispatched=True)
    return result if options["return_lse"] else (result, _torch.empty_lse(q, (0,)))


@attention_forward.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = args[:3]
    options = _options(args)
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    # Symbolic sizes are checked when they have become numbers: reading them would fix them here.
    sizes = [size for x in tensors for size in x.shape]
    keys = [options["attention_chunk"] or 0, *(options["window"] or ())]
    if all(type(number) is int for number in (*sizes, *keys)):
        _C.describe(q, k, v, options)
    batch, *middle, _d = q.shape
    heads, rows = middle[::-1] if options["layout"] == "bshd" else middle
    lse_shape = (batch, heads, rows) if options["return_lse"] else (0,)
    return _torch.empty(q, (batch, *middle, v.shape[-1])), _torch.empty_lse(q, lse_shape)
