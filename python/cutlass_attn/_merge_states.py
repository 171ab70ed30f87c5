"""Results of attention over two sets of keys, merged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _C
from ._attention import Array
from ._call.call import P, computes
from ._call.foreign import converted
from ._call.keywords import misplaced, refusal
from .decode import check_array, check_like, layout_of

if TYPE_CHECKING:
    from ._types import Layout


def _of_states(described: Callable[P, Any]) -> Callable[P, Any]:
    @computes(described)
    def merge_states(
        o_a: Array = None,
        lse_a: Array = None,
        o_b: Array = None,
        lse_b: Array = None,
        *more: Any,
        **options: Any,
    ) -> tuple[Array, Array]:
        if more or lse_b is None:
            raise misplaced("merge_states", ("o_a", "lse_a", "o_b", "lse_b"), more, options)
        if unknown := refusal("merge_states", options):
            raise unknown
        given = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
        if arrays := converted(given):
            given |= arrays
        return _merge(**given, **options)

    return merge_states


@_of_states
def merge_states(
    o_a: Array, lse_a: Array, o_b: Array, lse_b: Array, *, layout: Layout = "bhsd"
) -> Any:
    """Merge attention results over two disjoint sets of keys (split KV, shared prefix) exactly.

    With w the softmax of the two log-sum-exps, the result is ``w_a * o_a + w_b * o_b``, in float32.
    On CUDA it is one kernel with the same bits in every run, in any batch, and with the sides
    exchanged. On a CPU, if an input needs a gradient, under torch.compile or a dispatch mode, or if
    rows are not contiguous, torch or numpy compute it, with other last bits.

    Args:
        o_a: (B, Hq, Sq, Dv), or (B, Sq, Hq, Dv) with ``layout="bshd"``: a result of `attention` in
            that layout, or of `attention_decode`, whose own is "bshd"; or (T, Hq, Dv), a result
            of `attention_varlen`. A torch tensor or numpy array.
        lse_a: its log-sum-exp as ``return_lse`` returns it: natural logarithms, float32, (B, Hq,
            Sq) or (Hq, T). -inf, and +inf as in flash_attn, mean that a query saw no key.
            (FlashInfer's ``merge_state`` has base 2 and (T, Hq).) Float64 ones are refused.
        o_b: the other result, of o_a's shape and dtype.
        lse_b: its log-sum-exp, of lse_a's shape.
        layout: order of the dimensions of o_a, o_b and the result: "bhsd" or "bshd". Ignored for
            packed results (T, Hq, Dv).

    Returns:
        A pair: the merged result, of o_a's shape and dtype, and its log-sum-exp, of lse_a's shape.
        Where neither side saw a key, zeros and -inf.

    Raises:
        TypeError: an argument is neither a torch tensor nor a numpy array, or they are mixed.
        ValueError: shapes, dtypes or devices differ, or the layout is unknown.
    """


def _merge(
    o_a: Array, lse_a: Array, o_b: Array, lse_b: Array, layout: str = "bhsd"
) -> tuple[Array, Array]:
    layout_of({"layout": layout})
    is_numpy = isinstance(o_a, np.ndarray)
    check_array("o_a", o_a, like=o_a)
    if o_a.ndim not in (3, 4):
        dims = "(B, Hq, Sq, Dv)" if layout == "bhsd" else "(B, Sq, Hq, Dv)"
        raise ValueError(f"o_a must have shape {dims} or (T, Hq, Dv), got {tuple(o_a.shape)}")
    is_bhsd = o_a.ndim == 4 and layout == "bhsd"
    *before, rows, heads, _ = o_a.shape
    shape = (*before, rows, heads) if is_bhsd else (*before, heads, rows)
    dtype = str(o_a.dtype).removeprefix("torch.")
    for name, x, due, of in (
        ("o_b", o_b, o_a.shape, dtype),
        ("lse_a", lse_a, shape, "float32"),
        ("lse_b", lse_b, shape, "float32"),
    ):
        check_array(name, x, like=o_a)
        if tuple(x.shape) != tuple(due) and due is shape:
            raise ValueError(
                f"{name} must have shape (B, Hq, Sq), or (Hq, T) of packed rows, {tuple(due)} for "
                f"o_a {tuple(o_a.shape)} with layout={layout!r}, got {tuple(x.shape)}"
            )
        check_like(name, x, due, of, like=o_a, is_needed=True)
    if is_numpy:
        return _merged(np, o_a, lse_a, o_b, lse_b, is_bhsd)
    import torch

    if o_a.is_cuda and not torch.compiler.is_compiling():
        merged = _merged_on_gpu(o_a, lse_a, o_b, lse_b, is_bhsd)
        if merged is not None:
            return merged
    return _merged(torch, o_a, lse_a, o_b, lse_b, is_bhsd)


def _merged_on_gpu(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, is_bhsd: bool) -> Any:
    """By one kernel; None where that does not take it."""
    if not is_bhsd:
        return _C.merge(o_a, lse_a, o_b, lse_b)
    # The kernel has rows before heads: here each head is an entry of the batch, with one head.
    o_a, o_b = (x.flatten(0, 1).unsqueeze(2) for x in (o_a, o_b))
    sizes = lse_a.shape[:2]
    merged = _C.merge(o_a, lse_a.flatten(0, 1)[:, None], o_b, lse_b.flatten(0, 1)[:, None])
    if merged is None:
        return None
    o, lse = merged
    return o.squeeze(2).unflatten(0, sizes), lse.squeeze(1).unflatten(0, sizes)


def _merged(xp: Any, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, is_bhsd: bool) -> tuple[Any, Any]:
    """With numpy or torch, which differentiates it."""
    a, b = (xp.where(x == math.inf, -math.inf, x) for x in (lse_a, lse_b))
    top = xp.maximum(a, b)
    finite = xp.where(top == -math.inf, xp.zeros_like(top), top)
    weight_a, weight_b = xp.exp(a - finite), xp.exp(b - finite)
    total = weight_a + weight_b
    divisor = xp.where(total == 0, xp.ones_like(total), total)

    def weighted(o: Any, weight: Any) -> Any:
        # What an empty side holds does not count, be it NaN.
        weight = weight / divisor
        weight = (weight if is_bhsd else xp.swapaxes(weight, -1, -2))[..., None]
        o = o.astype(np.float32) if xp is np else o.float()
        # Before the product, which has a gradient of `weight` that is o.
        return xp.where(weight == 0, xp.zeros_like(o), o) * weight

    o = weighted(o_a, weight_a) + weighted(o_b, weight_b)
    lse = xp.where(total == 0, top, finite + xp.log(divisor))
    return (o.astype(o_a.dtype) if xp is np else o.to(o_a.dtype)), lse
