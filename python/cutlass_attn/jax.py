"""Attention for JAX, on GPUs and CPUs, with gradients.

    from cutlass_attn.jax import attention
    out = jax.jit(attention, static_argnames="causal")(q, k, v, causal=True)

It works under jit, grad, vmap and shard_map. Forward-mode derivatives (jvp) and second derivatives
are errors of JAX. docs/jax.md is the user's page.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _C

__all__ = ["attention"]

for (_name, _platform), _handler in _C.jax_handlers().items():
    jax.ffi.register_ffi_target(_name, _handler, platform=_platform)

_DTYPES = ("float16", "bfloat16", "float32")
Window = int | tuple[int | None, int | None] | None


class _Options(NamedTuple):
    """Attributes of the foreign functions, which have one type for each."""

    causal: bool
    window_left: int
    window_right: int
    attention_chunk: int
    softmax_scale: float
    softcap: float
    bshd: bool
    deterministic: bool

    def attributes(self) -> dict[str, Any]:
        types = {bool: np.bool_, int: np.int32, float: np.float32}
        return {name: types[type(x)](x) for name, x in self._asdict().items()}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: Window = None,
    attention_chunk: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bhsd",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention, ``softmax(softmax_scale * q @ k^T + mask) @ v``, as `cutlass_attn.attention`.

    B is the batch size, Hq and Hkv the numbers of query and KV heads, Sq and Sk those of queries
    and keys, D and Dv head dims. All keywords are static under jit.

    Args:
        q: (B, Hq, Sq, D): float16, bfloat16 or float32.
        k: (B, Hkv, Sk, D), of q's dtype; Hkv divides Hq.
        v: (B, Hkv, Sk, Dv), of q's dtype.
        causal: query i sees keys up to ``i + Sk - Sq``: the last query sees the last key.
        window: sliding window around key ``i + Sk - Sq``: query i sees `left` keys before it and
            `right` keys after it. One int for both sides or a pair; None or -1 is unlimited.
        attention_chunk: chunk length: query i sees only keys in the chunk of key ``i + Sk - Sq``.
        softmax_scale: factor of q @ k^T; None is ``1 / sqrt(D)``.
        softcap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``.
        layout: order of the dimensions of q, k, v and the result: "bhsd" or "bshd".
        deterministic: gradients have the same bits in every run.
        return_lse: also return the log-sum-exp.

    Returns:
        (B, Hq, Sq, Dv) in q's dtype, in the layout. With ``return_lse`` a pair of it and the
        log-sum-exp, natural, (B, Hq, Sq) float32: -inf for a query that sees no key.

    Raises:
        TypeError: a keyword has a wrong type.
        ValueError: a shape, a dtype or a keyword is not allowed.
        XlaRuntimeError: when it runs: no kernel takes the call on this device, or CUDA reported an
            error.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    _check(
        q,
        k,
        v,
        causal=causal,
        window=window,
        attention_chunk=attention_chunk,
        softmax_scale=softmax_scale,
        softcap=softcap,
        layout=layout,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    left, right = window if isinstance(window, (tuple, list)) else (window, window)
    options = _Options(
        causal=causal,
        window_left=_side(left),
        window_right=-1 if causal else _side(right),
        attention_chunk=0 if attention_chunk is None else operator.index(attention_chunk),
        softmax_scale=scale,
        softcap=float(softcap),
        bshd=layout == "bshd",
        deterministic=deterministic,
    )
    return _with_lse(q, k, v, options) if return_lse else _without_lse(q, k, v, options)


def _side(keys: Any) -> int:
    """One side of a window as an attribute of 32 bits; -1 is unlimited."""
    return -1 if keys is None else min(operator.index(keys), 2**31 - 1)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, **keywords: Any) -> None:
    """Raises the errors of `cutlass_attn.attention`, by arrays of these shapes with equal rows."""
    if str(q.dtype) not in _DTYPES:
        raise ValueError(f"q is {q.dtype}; allowed: {', '.join(_DTYPES)}")
    like_q, like_k, like_v = (
        np.broadcast_to(np.zeros(x.shape[-1:], x.dtype), x.shape) for x in (q, k, v)
    )
    _C.describe(like_q, like_k, like_v, keywords)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, options: _Options) -> Any:
    heads, rows = (2, 1) if options.bshd else (1, 2)
    call = jax.ffi.ffi_call(
        "cutlass_attn_forward",
        (
            jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((q.shape[0], q.shape[heads], q.shape[rows]), jnp.float32),
        ),
        vmap_method="broadcast_all",
    )
    return call(q, k, v, **options.attributes())


def _backward(options: _Options, saved: Any, grad_out: jax.Array, *grad_lse: jax.Array) -> Any:
    q, k, v, _, _ = saved
    inputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    if any(x.size == 0 for x in (q, k, v)):  # for which no kernel runs
        return tuple(jnp.zeros(x.shape, x.dtype) for x in inputs)
    call = jax.ffi.ffi_call("cutlass_attn_backward", inputs, vmap_method="broadcast_all")
    return call(*saved, grad_out, *grad_lse, **options.attributes())


def _run(q: jax.Array, k: jax.Array, v: jax.Array, options: _Options) -> Any:
    out, lse = _forward(q, k, v, options)
    return (out, lse), (q, k, v, out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _with_lse(q: jax.Array, k: jax.Array, v: jax.Array, options: _Options) -> Any:
    return _forward(q, k, v, options)


_with_lse.defvjp(_run, lambda options, saved, grads: _backward(options, saved, *grads))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _without_lse(q: jax.Array, k: jax.Array, v: jax.Array, options: _Options) -> jax.Array:
    return _forward(q, k, v, options)[0]


def _run_without_lse(q: jax.Array, k: jax.Array, v: jax.Array, options: _Options) -> Any:
    (out, _), saved = _run(q, k, v, options)
    return out, saved


_without_lse.defvjp(_run_without_lse, _backward)
