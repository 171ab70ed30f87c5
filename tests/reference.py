"""The oracle: attention stated query by query, in fp64, from nothing but its definition.

It shares no code with the library, in particular neither its mask nor its softmax: an oracle with
the kernel's own mask cannot catch a wrong mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Expected(NamedTuple):
    exact: np.ndarray  # (B, Hq, Sq, Dv) fp64
    lse: np.ndarray  # (B, Hq, Sq) fp64
    unfused: np.ndarray  # (B, Hq, Sq, Dv) fp32: P and O rounded to the dtype of the inputs
    lse_error: np.ndarray  # (B, Hq, Sq) fp64: what sums in fp16 may move lse by


def visible_keys(query, seqlen_q, seqlen_k, causal, window):
    """Keys that a query sees, as (first, past the last). The last query sits on the last key."""
    position = query + (seqlen_k - seqlen_q)
    first, last = 0, seqlen_k - 1
    left, right = window if isinstance(window, tuple) else (window, window)
    if left is not None and left >= 0:
        first = max(first, position - left)
    if right is not None and right >= 0:
        last = min(last, position + right)
    if causal:
        last = min(last, position)
    return (first, last + 1) if first <= last else (0, 0)


def round_bfloat16(x):
    """Nearest bfloat16, ties to even, as float32."""
    x = np.asarray(x, np.float32).astype(np.float64)
    spacing = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 8, -133))  # of the bfloat16s around x
    return (np.rint(x / spacing) * spacing).astype(np.float32)


def round_to(x, dtype):
    if dtype == "bfloat16":
        return round_bfloat16(x)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float32)


def attention(
    q,
    k,
    v,
    dtype,
    *,
    causal=False,
    window=None,
    softmax_scale=None,
    softcap=0.0,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    kept=None,
    accumulate="fp32",
) -> Expected:
    """q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv): float arrays that dtype holds.

    bias (float) and mask (bool) broadcast to (B, Hq, Sq, Sk), alibi_slopes to (B, Hq); sinks is
    (Hq,). kept is bool, (B, Hq, Sq, Sk): the weights that dropout leaves. With accumulate other
    than "fp32" the unfused result has sums rounded to fp16, as the rule of cutlass_attn.testing
    derives; then without bias, slopes, softcap and dropout.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    every = (batch, heads, seqlen_q, seqlen_k)
    bias = np.broadcast_to(np.float32(0) if bias is None else bias, every)
    mask = np.broadcast_to(True if mask is None else mask, every)
    slopes = np.broadcast_to(np.float32(0) if alibi_slopes is None else alibi_slopes, every[:2])
    exact = np.zeros((batch, heads, seqlen_q, head_dim_v))
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    unfused = np.zeros_like(exact, dtype=np.float32)
    lse_error = np.zeros_like(lse)
    for b, h, i in np.ndindex(batch, heads, seqlen_q):
        first, end = visible_keys(i, seqlen_q, seqlen_k, causal, window)
        seen = first + np.flatnonzero(mask[b, h, i, first:end])
        sink = None if sinks is None else sinks[h]
        if len(seen) == 0:
            lse[b, h, i] = -np.inf if sink is None else sink
            continue
        shared = h * heads_kv // heads  # query heads are shared out to the KV heads in order
        row, keys, values = q[b, h, i], k[b, shared, seen], v[b, shared, seen]
        distance = np.abs(seen - (i + seqlen_k - seqlen_q))
        terms = slopes[b, h], distance, bias[b, h, i, seen]
        factor = np.float64(1) if kept is None else _factors(kept[b, h, i, seen], dropout_p)
        with np.errstate(invalid="ignore", over="ignore"):
            p, lse[b, h, i] = _softmax(_logits(np.float64, row, keys, scale, softcap, *terms), sink)
            exact[b, h, i] = _weighted(np.float64, p * factor, values)
            if dtype == "float32":
                p, _ = _softmax(_logits(np.float32, row, keys, scale, softcap, *terms), sink)
                unfused[b, h, i] = _weighted(np.float32, p * np.float32(factor), values)
            elif accumulate != "fp32":
                unfused[b, h, i], lse_error[b, h, i] = _with_sums_in_fp16(
                    row, keys, values, scale, sink, accumulate
                )
            else:
                p = round_to(p * factor, dtype)
                unfused[b, h, i] = round_to(_weighted(np.float64, p, values), dtype)
    return Expected(exact, lse, unfused, lse_error)


def _with_sums_in_fp16(row, keys, values, scale, sink, accumulate):
    """A query's result, and a bound of what the sums of q.k change in a logit."""
    dots, error = np.zeros(len(keys)), np.zeros(len(keys))
    for d in range(0, len(row), 8):
        dots += keys[:, d : d + 8].astype(np.float64) @ row[d : d + 8].astype(np.float64)
        if accumulate in ("fp16", "fp16_qk"):
            dots = dots.astype(np.float16).astype(np.float64)
            error += np.spacing(np.abs(dots).astype(np.float16)) / 2
    logits = dots * scale
    top = logits.max() if sink is None else max(logits.max(), sink)
    weights = np.exp(logits - top)
    total = weights.sum() + (0 if sink is None else np.exp(sink - top))
    result = np.zeros(values.shape[1])
    for first in range(0, len(keys), 32):
        part = np.zeros_like(result)
        for j in range(first, min(first + 32, len(keys)), 8):
            here = slice(j, min(j + 8, first + 32))
            part += weights[here].astype(np.float16).astype(np.float64) @ values[here]
            if accumulate in ("fp16", "fp16_pv"):
                part = part.astype(np.float16).astype(np.float64)
        result += part
    return round_to(result / total, "float16"), scale * error.max()


# cumsum adds term after term, as a plain kernel does; in fp32 that matters.
def _logits(work, row, keys, scale, softcap, slope, distance, bias):
    products = keys.astype(work) * row.astype(work)
    logits = np.cumsum(products, axis=1, dtype=work)[:, -1] * work(scale)
    if softcap:
        logits = work(softcap) * np.tanh(logits / work(softcap))
    return logits - work(slope) * distance.astype(work) + bias.astype(work)


def _softmax(logits, sink):
    """Weights of the logits, and the logarithm of the denominator, which the sink is part of."""
    top = logits.max() if sink is None else max(logits.max(), logits.dtype.type(sink))
    base = 0 if top == -np.inf else top
    weights = np.exp(logits - base)
    total = weights.sum(dtype=logits.dtype)
    if sink is not None:
        total += np.exp(logits.dtype.type(sink) - base)
    if total == 0:
        return weights, -np.inf
    return weights / total, top + np.log(total)


def _factors(kept, dropout_p):
    """What dropout multiplies weights by. Its probability is a multiple of 2^-16."""
    dropped = np.round(dropout_p * 65536) / 65536
    return kept / (1 - dropped) if dropped < 1 else np.zeros(kept.shape)


def _weighted(work, p, values):
    return np.cumsum(p.astype(work)[:, None] * values.astype(work), axis=0, dtype=work)[-1]
