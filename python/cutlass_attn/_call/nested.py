"""`attention` of nested tensors of layout torch.jagged, which are packed sequences in memory."""

from __future__ import annotations

from typing import Any

import torch

from . import serving_operator, torch_library
from .keywords import refuse_nested

# Options of `attention` that `attention_varlen` does not have.
_LACKING = {
    **dict.fromkeys(("out", "bias", "mask", "seqused_q", "leftpad_q", "leftpad_k", "max_error")),
    "accumulate": "fp32",
}


def attention(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Calls `attention_varlen`; the result and the log-sum-exp are nested like q.

    Raises TypeError, ValueError: a tensor or an option is not supported for nested tensors.
    """
    layout = options.pop("layout", "bhsd")
    torch_library.refuse_nested(options)
    for name, x in zip("qkv", (q, k, v)):
        if not x.is_nested or x.layout is not torch.jagged:
            raise TypeError(
                f"q, k and v must all be nested tensors of layout torch.jagged, or none of them; "
                f"{name} is {'nested' if x.is_nested else 'dense'}, of layout {x.layout}"
            )
    for name, default in _LACKING.items():
        given = options.pop(name, default)
        if given is not default and (default is None or given != default):
            refuse_nested(q, {name: default})
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    elif layout != "bshd":
        raise ValueError(f'layout must be "bhsd" or "bshd", got {layout!r}')
    for name, x in zip("qkv", (q, k, v)):
        if x.dim() != 4 or x._ragged_idx != 1 or x.lengths() is not None:
            raise ValueError(
                f"{name} must be nested over its sequences, which lie behind each other: shape "
                f"(batch, heads, jagged, head_dim), or (batch, jagged, heads, head_dim) with "
                f'layout="bshd", got {tuple(x.shape)}'
            )
    return_lse = options.get("return_lse", False)
    rows, keys = (x.offsets() for x in (q, k))
    result = serving_operator.varlen(
        q.values(),
        k.values(),
        v.values(),
        cu_seqlens_q=rows.int(),
        cu_seqlens_k=keys.int(),
        **options,
    )
    out, *more = result if isinstance(result, tuple) else (result,)
    out = torch.nested.nested_tensor_from_jagged(out, rows)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    if return_lse:
        nested = torch.nested.nested_tensor_from_jagged(more[0].t().contiguous(), rows)
        more[0] = nested.transpose(1, 2)
    return (out, *more) if more else out
