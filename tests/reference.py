"""The oracle: attention in fp64, from nothing but its definition.

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
    lse_error: np.ndarray  # (B, Hq, Sq) fp64: what fp16 accumulation may move lse by
    max_logit: np.ndarray | None = None  # (Hq,) fp64: the largest that is seen, without sinks


def visible_keys(query, seqlen_q, seqlen_k, causal, window, chunk=None):
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
    if chunk is not None:
        first = max(first, position // chunk * chunk)
        last = min(last, position // chunk * chunk + chunk - 1)
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
    attention_chunk=None,
    softmax_scale=None,
    softcap=0.0,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    kept=None,
    accumulate="fp32",
    units=None,
) -> Expected:
    """q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv): float arrays that dtype holds.

    bias (float) and mask (bool) broadcast to (B, Hq, Sq, Sk), alibi_slopes to (B, Hq); sinks is
    (Hq,). kept is bool, (B, Hq, Sq, Sk): the weights that dropout leaves. With accumulate other
    than "fp32" the unfused result has sums rounded to fp16, as the rule of cutlass_attn.testing
    derives; then without bias, slopes, softcap and dropout. units: see attention_int8().
    """
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    shared = [h * heads_kv // heads for h in range(heads)]  # KV heads are shared out in order
    k, v = k[:, shared], v[:, shared]
    keys = np.arange(seqlen_k)
    visible = np.zeros((batch, heads, seqlen_q, seqlen_k), bool)
    distance = np.zeros((seqlen_q, seqlen_k))
    for i in range(seqlen_q):
        first, end = visible_keys(i, seqlen_q, seqlen_k, causal, window, attention_chunk)
        visible[:, :, i, first:end] = True
        distance[i] = np.abs(keys - (i + seqlen_k - seqlen_q))
    if mask is not None:
        visible &= mask
    slopes = np.float32(0) if alibi_slopes is None else alibi_slopes[..., None, None]
    terms = slopes, distance, np.float32(0) if bias is None else bias
    sink = None if sinks is None else sinks[:, None, None]
    factor = np.float64(1) if kept is None else _factors(kept, dropout_p)
    lse_error = np.zeros((batch, heads, seqlen_q))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        logits = _logits(np.float64, q, k, scale, softcap, *terms)
        max_logit = np.where(visible, logits, -np.inf).max(axis=(0, 2, 3), initial=-np.inf)
        p, lse = _softmax(logits, visible, sink)
        exact = _weighted(np.float64, p * factor, visible, v)
        if dtype == "float32":
            p, _ = _softmax(_logits(np.float32, q, k, scale, softcap, *terms), visible, sink)
            unfused = _weighted(np.float32, p * np.float32(factor), visible, v)
        elif accumulate != "fp32":
            unfused, lse_error = _with_sums_in_fp16(q, k, v, visible, scale, sink, accumulate)
        else:
            if units is not None:
                p = p * _in_one_step(units, lse)
                lse_error = np.where(visible, units, 0).max(axis=-1, initial=0)
            p = round_to(p * factor, dtype)
            unfused = round_to(_weighted(np.float64, p, visible, v), dtype)
    return Expected(exact, lse, unfused, lse_error, max_logit)


def attention_of_lists(q, k, v, indices, lengths, dtype, **options) -> Expected:
    """The same over lists of rows: k (rows, D), v (rows, Dv), indices (B, Sq, topk) with -1 for
    none, lengths (B,). Its max_logit is of each query, (B, Hq, Sq)."""
    results = []
    for b, queries in enumerate(q):
        of_entry = []
        for i in range(queries.shape[1]):
            rows = [row for row in indices[b, i, : lengths[b]] if row >= 0]
            one = queries[None, :, i : i + 1]
            keys, values = (x[None, None, rows] for x in (k, v))
            found = attention(one, keys, values, dtype, **options)
            of_entry.append(found._replace(max_logit=found.max_logit[None, :, None]))
        results.append(of_entry)
    return Expected(
        *(
            np.concatenate([np.concatenate([x[n] for x in row], axis=2) for row in results])
            for n in range(5)
        )
    )


def _rounded_to_int8(x, axes):
    """x as integers of 8 bits times a scale for what `axes` go over, in float64; and the scale."""
    amax = np.abs(x).max(axis=axes, keepdims=True, initial=0).astype(np.float32)
    scale, inverse = amax * np.float32(1 / 127), np.float32(127) / amax
    scale = np.where(np.isfinite(amax), np.where(amax < 2.0**-100, 0, scale), np.nan)
    integers = np.where(scale == 0, 0, np.rint(x.astype(np.float64) * inverse))
    return integers * scale, scale.astype(np.float64)


def attention_int8(q, k, v, dtype, *, softmax_scale=None, **options) -> Expected:
    """The same of q and k as products in 8 bits have them: kernels/core/quantize.hpp.

    Where nothing but softmax follows, the unfused computation has exponents by one multiply-add
    that begins at 1.5 * 2^23 units of the integer products: lse may be off by one of them.
    """
    seqlen = k.shape[2]
    count = min(64, seqlen)
    keys = k[:, :, [i * seqlen // count for i in range(count)]]
    keys = np.where(np.isfinite(keys), keys, 0).astype(np.float32)
    with np.errstate(all="ignore"):
        sums = [sum(keys[:, :, i] for i in range(g, count, 8)) for g in range(min(8, count))]
        shift = sum(sums, np.zeros((*k.shape[:2], k.shape[3]), np.float32)) * np.float32(
            1 / max(count, 1)
        )
        shift = np.where(np.isfinite(shift), shift, 0)[:, :, None].astype(np.float32)
        q8, q_scale = _rounded_to_int8(q, (3,))
        k8, k_scale = np.zeros(k.shape), np.zeros((*k.shape[:2], 1, seqlen))
        for tile in range(0, seqlen, 64):
            for t in range(4):
                own = [j for j in range(tile, min(tile + 64, seqlen)) if j % 8 // 2 == t]
                k8[:, :, own], scale = _rounded_to_int8(k[:, :, own] - shift, (2, 3))
                k_scale[:, :, :, own] = scale
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    terms = ("softcap", "bias", "mask", "alibi_slopes", "attention_chunk")
    units = None
    if scale > 0 and not any(np.any(options.get(name)) for name in terms):
        shared = [h * k.shape[1] // q.shape[1] for h in range(q.shape[1])]
        units = scale * q_scale * k_scale[:, shared]
    # What a row's logits have in common is there as further columns.
    both_q = np.concatenate((q8, q), axis=3)
    both_k = np.concatenate((k8, np.broadcast_to(shift, k.shape)), axis=3)
    return attention(both_q, both_k, v, dtype, softmax_scale=scale, units=units, **options)


def _in_one_step(units, lse):
    """What the rounding of 1.5 * 2^23 units and the row max does to a weight."""
    base = np.where(np.isfinite(lse), lse, 0)[..., None] / np.log(2)
    offset = 1.5 * 2**23 * units / np.log(2) + base
    return np.exp2(offset - offset.astype(np.float32))


def _with_sums_in_fp16(q, k, v, visible, scale, sink, accumulate):
    """The result, and a bound of what the sums of q.k change in a row's logits."""
    dots, error = np.zeros(visible.shape), np.zeros(visible.shape)
    for d in range(0, q.shape[-1], 8):
        dots += q[..., d : d + 8].astype(np.float64) @ k[..., d : d + 8].astype(
            np.float64
        ).swapaxes(2, 3)
        if accumulate in ("fp16", "fp16_qk"):
            dots = dots.astype(np.float16).astype(np.float64)
            error += np.spacing(np.abs(dots).astype(np.float16)) / 2
    weights, total, _ = _weights(dots * scale, visible, sink)
    weights = weights.astype(np.float16).astype(np.float64)
    result = np.zeros((*q.shape[:3], v.shape[3]))
    for first in range(0, v.shape[2], 32):
        part = np.zeros_like(result)
        for j in range(first, min(first + 32, v.shape[2]), 8):
            part += weights[..., j : j + 8] @ v[..., j : j + 8, :]
            if accumulate in ("fp16", "fp16_pv"):
                part = part.astype(np.float16).astype(np.float64)
        result += part
    lse_error = scale * np.where(visible, error, 0).max(axis=-1, initial=0)
    return round_to(result / total[..., None], "float16"), lse_error


def _logits(work, q, k, scale, softcap, slopes, distance, bias):
    logits = _product(q.astype(work), k.astype(work).swapaxes(2, 3))
    logits *= work(scale)
    if softcap:
        logits = work(softcap) * np.tanh(logits / work(softcap))
    return logits - slopes.astype(work) * distance.astype(work) + bias.astype(work)


def _softmax(logits, visible, sink):
    """Softmax over the keys that are seen, and the logarithm of its denominator."""
    weights, total, top = _weights(logits, visible, sink)
    return weights / total[..., None], top + np.log(total)


def _weights(logits, visible, sink):
    """exp(logit - largest), 0 where a key is not seen; their sum, which the sink is part of, or 1
    where it is 0; and the largest."""
    top = np.where(visible, logits, -np.inf).max(axis=-1, initial=-np.inf, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink.astype(logits.dtype))
    base = np.where(top == -np.inf, logits.dtype.type(0), top)
    weights = np.where(visible, np.exp(logits - base), logits.dtype.type(0))
    total = weights.sum(axis=-1)
    if sink is not None:
        total += np.exp(sink.astype(logits.dtype) - base)[..., 0]
    return weights, np.where(total == 0, logits.dtype.type(1), total), top[..., 0]


def _factors(kept, dropout_p):
    """What dropout multiplies weights by. Its probability is a multiple of 2^-15."""
    dropped = np.round(dropout_p * 32768) / 32768
    return kept / (1 - dropped) if dropped < 1 else np.zeros(kept.shape)


def _weighted(work, p, visible, v):
    p, v = p.astype(work), v.astype(work)
    if np.isfinite(v).all():
        return _product(p, v)
    result = np.zeros((*p.shape[:3], v.shape[3]), work)
    for j in range(p.shape[3]):  # what is not finite reaches the rows that see it alone
        result += np.where(visible[..., j, None], p[..., j, None] * v[..., None, j, :], work(0))
    return result


def _product(a, b):
    """a @ b; in fp32 term after term, as a plain kernel adds up, where a BLAS has an order of its
    own and fp64 hides it."""
    if a.dtype == np.float64:
        return a @ b
    result = np.zeros((*a.shape[:3], b.shape[3]), a.dtype)
    for i in range(a.shape[3]):
        result += a[..., i, None] * b[..., None, i, :]
    return result
