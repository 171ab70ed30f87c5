"""The oracle of the backward pass: the gradients of attention in fp64, from its definition alone.

As tests/reference.py it shares no code with the library.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import reference


class Gradient(NamedTuple):
    exact: np.ndarray  # fp64
    unfused: np.ndarray  # the yardstick: P, dS and the results rounded to the dtype of the inputs


class Backward(NamedTuple):
    out: np.ndarray  # (B, Hq, Sq, Dv), rounded to the dtype: what a forward pass hands over
    lse: np.ndarray  # (B, Hq, Sq) fp64
    q: Gradient
    k: Gradient
    v: Gradient
    logits: Gradient  # (B, Hq, Sq, Sk), which the gradient of a bias sums up
    sinks: Gradient  # (B, Hq, Sq, 1), what each query adds to it


def gradients(
    q,
    k,
    v,
    grad_out,
    grad_lse,
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
) -> Backward:
    """Arguments as those of reference.attention(); grad_out is like its result, grad_lse (B, Hq,
    Sq)."""
    heads, head_dim = q.shape[1], q.shape[3]
    seqlen_q, heads_kv, seqlen_k = q.shape[2], k.shape[1], k.shape[2]
    shared = [h * heads_kv // heads for h in range(heads)]
    options = {
        "scale": head_dim**-0.5 if softmax_scale is None else softmax_scale,
        "softcap": softcap,
        "bias": 0.0 if bias is None else bias,
        "slopes": 0.0 if alibi_slopes is None else alibi_slopes[..., None, None],
        "sinks": sinks,
    }
    visible = np.zeros((*q.shape[:3], seqlen_k), bool)
    for i in range(seqlen_q):
        first, end = reference.visible_keys(i, seqlen_q, seqlen_k, causal, window, attention_chunk)
        visible[:, :, i, first:end] = True
    if mask is not None:
        visible &= mask
    dropped = np.round(dropout_p * 32768) / 32768
    factor = np.ones(visible.shape)
    if kept is not None:
        factor = kept / (1 - dropped) if dropped < 1 else np.zeros(kept.shape)
    data = q, k[:, shared], v[:, shared], grad_out, grad_lse, visible, factor

    def run(work, rounded):
        grads = _gradients(work, rounded, *(x.astype(work) for x in data[:5]), *data[5:], options)
        for name in ("k", "v"):  # the sum over the query heads of a KV head
            grads[name] = sum_to(grads[name].astype(np.float64), shared, heads_kv)
        return grads

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        exact = run(np.float64, lambda x: x)
        if dtype == "float32":
            yardstick = run(np.float32, lambda x: x)
        else:
            yardstick = run(np.float64, lambda x: reference.round_to(x, dtype).astype(np.float64))
    result = {name: Gradient(exact[name], yardstick[name]) for name in exact}
    for name in ("q", "k", "v"):
        rounded = reference.round_to(yardstick[name], dtype)
        result[name] = Gradient(exact[name], rounded)
    out, lse = result.pop("out"), result.pop("lse")
    return Backward(reference.round_to(out.exact, dtype), lse.exact, **result)


def sum_to(x, shared, heads_kv):
    total = np.zeros((x.shape[0], heads_kv, *x.shape[2:]))
    for head, head_kv in enumerate(shared):
        total[:, head_kv] += x[:, head]
    return total


def _gradients(work, rounded, q, k, v, grad_out, grad_lse, visible, factor, options):
    product = reference._product
    seqlen_q, seqlen_k = visible.shape[2:]
    scale, cap = work(options["scale"]), work(options["softcap"])
    logits = product(q, k.swapaxes(2, 3)) * scale
    slope = np.full(logits.shape, scale)
    if cap:
        bent = np.tanh(logits / cap)
        logits, slope = cap * bent, (1 - bent * bent) * scale
    distance = np.abs(np.arange(seqlen_k) - (np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q))
    logits = logits - np.asarray(options["slopes"], work) * distance.astype(work)
    logits = np.where(visible, logits + np.asarray(options["bias"], work), work(-np.inf))

    top = logits.max(axis=-1, initial=-np.inf, keepdims=True)
    if options["sinks"] is not None:
        sink = options["sinks"].astype(work)[:, None, None]
        top = np.maximum(top, sink)
    base = np.where(top == -np.inf, work(0), top)
    total = np.exp(logits - base).sum(axis=-1, keepdims=True)
    if options["sinks"] is not None:
        total = total + np.exp(sink - base)
    lse = top + np.log(total)
    p = np.where(lse == -np.inf, work(0), np.exp(logits - np.where(lse == -np.inf, 0, lse)))
    p = p.astype(work)

    factor = factor.astype(work)
    p_dropped = rounded(p * factor)
    out = product(p_dropped, v)
    grad_p = product(grad_out, v.swapaxes(2, 3)) * factor
    delta = (grad_out * rounded(out)).sum(axis=-1, keepdims=True) - grad_lse[..., None]
    grad_logits = rounded(p * (grad_p - delta))
    grad_s = rounded(grad_logits * slope)
    grad_sinks = np.zeros(delta.shape)
    if options["sinks"] is not None:
        p_sink = np.where(lse == -np.inf, 0, np.exp(sink - lse))
        grad_sinks = -rounded(p_sink) * delta
    return {
        "out": out,
        "lse": lse[..., 0],
        "q": product(grad_s, k),
        "k": product(grad_s.swapaxes(2, 3), q),
        "v": product(p_dropped.swapaxes(2, 3), grad_out),
        "logits": grad_logits,
        "sinks": grad_sinks,
    }
