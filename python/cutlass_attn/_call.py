"""What one call asks for, checked as far as shapes, dtypes and keywords alone allow.

Everything that a kernel or a device decides is checked in C++ (`cutlass_attn::check` and dispatch),
for every language that calls the library.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _C

if TYPE_CHECKING:
    from ._options import Options

CPU, CUDA = 0, 1
DTYPES = ("float16", "bfloat16", "float32")  # indexed by the library's DType
ACCUMULATE = {"fp32": 0, "fp16_qk": 1, "fp16_pv": 2, "fp16": 3}  # the library's Accumulate
UNBOUNDED = -1
_INT32_MAX = 2**31 - 1

Window = int | tuple[int | None, int | None] | None


class Request(NamedTuple):
    """A call without its addresses, in the order in which `_C` reads it."""

    dtype: int
    bshd: bool
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float
    causal: bool
    window_left: int
    window_right: int
    accumulate: int

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        if self.bshd:
            return (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim_v)
        return (self.batch, self.num_heads_q, self.seqlen_q, self.head_dim_v)

    @property
    def logits_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_k)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.num_heads_q, self.seqlen_q)


def make_request(
    lib: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    window: Window,
    softmax_scale: float | None,
    softcap: float,
    layout: str,
    accumulate: str = "fp32",
) -> Request:
    """Reads shapes, dtypes and options; `lib` is _torch or _numpy. Raises ValueError, TypeError."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise ValueError(_rank_message(layout, q=q_shape, k=k_shape, v=v_shape))
    if layout == "bhsd":
        batch, num_heads_q, seqlen_q, head_dim = q_shape
        batch_k, num_heads_kv, seqlen_k, head_dim_k = k_shape
        batch_v, num_heads_v, seqlen_v, head_dim_v = v_shape
    elif layout == "bshd":
        batch, seqlen_q, num_heads_q, head_dim = q_shape
        batch_k, seqlen_k, num_heads_kv, head_dim_k = k_shape
        batch_v, seqlen_v, num_heads_v, head_dim_v = v_shape
    else:
        raise ValueError(f'layout must be "bhsd" or "bshd", got {layout!r}')

    if batch_k != batch or batch_v != batch:
        raise ValueError(f"q, k and v must have one batch size, got {batch}, {batch_k}, {batch_v}")
    if head_dim_k != head_dim:
        raise ValueError(f"q and k must have one head dim, got {head_dim} and {head_dim_k}")
    if num_heads_v != num_heads_kv:
        raise ValueError(f"k and v must have as many heads, got {num_heads_kv} and {num_heads_v}")
    if seqlen_v != seqlen_k:
        raise ValueError(f"k and v must be as long, got {seqlen_k} and {seqlen_v} keys")

    dtype = lib.DTYPES.get(q.dtype)
    if dtype is None:
        raise TypeError(f"q must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {q.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")

    if causal is not True and causal is not False:
        raise TypeError(f"causal must be True or False, got {causal!r}")
    window_left = window_right = UNBOUNDED
    if window is not None:
        window_left, window_right = _window(window, causal)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    elif type(softmax_scale) is not float:
        softmax_scale = number("softmax_scale", softmax_scale)
    if type(softcap) is not float:
        softcap = number("softcap", softcap)
    if type(accumulate) is not str:
        raise TypeError(f'accumulate must be a string such as "fp32", got {accumulate!r}')
    sums = ACCUMULATE.get(accumulate)
    if sums is None:
        raise ValueError(
            f'accumulate must be "fp32", "fp16", "fp16_qk" or "fp16_pv", got {accumulate!r}'
        )

    return Request(
        dtype,
        layout == "bshd",
        batch,
        num_heads_q,
        num_heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        softmax_scale,
        softcap,
        causal,
        window_left,
        window_right,
        sums,
    )


def _rank_message(layout: str, **shapes: Any) -> str:
    order = {"bshd": "(batch, seqlen, heads, head_dim)"}.get(
        layout, "(batch, heads, seqlen, head_dim)"
    )
    got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return f"q, k and v must have 4 dimensions, {order}, got {got}"


def number(name: str, value: Any) -> float:
    """`value` as a float. Raises TypeError unless it is a number."""
    if isinstance(value, (str, bytes, bool)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None


def _window(window: Any, causal: bool) -> tuple[int, int]:
    """(left, right) as the library reads them; a causal mask has no right side."""
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window must be an int or a pair (left, right), got {window!r}")
    left, right = (_window_side(window, side) for side in sides)
    return left, UNBOUNDED if causal else right


def _window_side(window: Any, side: Any) -> int:
    if side is None:
        return UNBOUNDED
    try:
        count = side.__index__()
    except AttributeError:
        count = None
    if count is None or isinstance(side, bool):
        raise TypeError(f"window must be an int or a pair (left, right) of int, got {window!r}")
    if count < UNBOUNDED:
        raise ValueError(f"window counts keys: 0 or more, -1 or None for all; got {window!r}")
    return min(count, _INT32_MAX)


def describe(
    lib: Any, request: Request, q: Any, k: Any, v: Any, options: Options, out: Any, lse: Any
) -> tuple[Any, ...]:
    """The tuple that `_C.forward` and `_C.explain` read. `out` and `lse` may be None."""
    address, strides = lib.address, lib.strides
    return (
        *request,
        address(q),
        strides(q),
        address(k),
        strides(k),
        address(v),
        strides(v),
        0 if out is None else address(out),
        _contiguous(request.out_shape) if out is None else strides(out),
        0 if lse is None else address(lse),
        options.describe(lib, request),
    )


def launch(
    lib: Any,
    request: Request,
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    out: Any,
    lse: Any,
    kernel: str,
) -> None:
    """Runs the call: enqueued on torch's current stream (CUDA), done on return (CPU)."""
    device, index, stream, num_threads = lib.place(q, k, v)
    call = describe(lib, request, q, k, v, options, out, lse)
    _C.forward(call, device, index, stream, kernel, num_threads)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    _, b, c, d = shape
    return (b * c * d, c * d, d, 1)
