"""The operators `torch.ops.cutlass_attn.attention_forward` and `attention_backward`.

torch.compile, torch.export and dispatch modes see calls of `attention` as these operators. Plain
eager calls do not use them: see INTERCEPTORS in torch_library.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from . import nested, torch_library
from .autograd import Differentiable
from .call import NUMBERS, Call
from .schema import Schema

# Options that an operator does not have: mods are translated to other options before.
_NOT_ITS = ("out", "verify", "score_mod", "mask_mod", "block_mask")
_SCHEMA = Schema("attention", lambda name: name not in _NOT_ITS)


def _call_of(args: tuple[Any, ...]) -> Call:
    """The operator's arguments as a call."""
    q, k, v, options = _SCHEMA.call_of(args)
    return Call(q, k, v, options)


@torch.library.custom_op("cutlass_attn::attention_forward", mutates_args=(), schema=_SCHEMA.text)
def attention_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention output, log-sum-exp and largest logits; the last two have no elements unless
    `return_lse` and `return_max_logit`."""
    call = _call_of(args)
    result = _C.forward(call.q, call.k, call.v, call.options, dispatched=True)
    return torch_library.all_results(call.q, result, call.options)


@attention_forward.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _call_of(args)
    options = call.options
    for name, x in zip("qkv", args):
        torch_library.require_dims(name, x, 4, torch_library.DIMS[options["layout"] == "bshd"])
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    # Symbolic sizes are checked at run time: reading them here would specialise the graph.
    sizes = [size for x in tensors for size in x.shape]
    keys = [options["attention_chunk"] or 0, *(options["window"] or ())]
    numbers = [options[name] for name in NUMBERS]
    if all(x is None or type(x) in (int, float) for x in (*sizes, *keys, *numbers)):
        call.facts()
    batch, *middle, _d = call.q.shape
    heads, rows = middle[::-1] if options["layout"] == "bshd" else middle
    out = torch_library.empty(call.q, (batch, *middle, call.v.shape[-1]))
    return torch_library.with_shapes(out, call.q, options, (batch, heads, rows), (heads,))


ATTENTION = Differentiable(
    _SCHEMA, attention_forward, "attention_backward", _C.forward, _C.backward
)
eager, record = ATTENTION.eager, ATTENTION.record


def recorded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`attention` through torch's dispatcher, as under torch.compile and torch.export."""
    if options.pop("verify", False):
        raise ValueError(torch_library.NO_VERIFY)
    if isinstance(options.get("quantize"), _C.PrequantizedKV):
        raise ValueError(torch_library.NO_PREQUANTIZED)
    if any(x.is_nested for x in (q, k, v)):
        return nested.attention(q, k, v, options)
    torch_library.refuse_nested(options)
    torch_library.options_for_operator(q, options)
    return ATTENTION.recorded(q, k, v, options)
