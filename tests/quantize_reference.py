"""The oracle of 8-bit attention: each mode in numpy, from its definition.

All arithmetic is in fp64 but for the roundings that make a mode what it is, so a result differs
from a kernel's by no more than a 16-bit kernel's does from `reference.attention`. Nothing is shared
with the library. Arrays are those of one head, (rows, head_dim); `attention` loops over heads.

- Keys lose the mean of 64 sampled ones, which softmax does not see, and are rounded to s8 with a
  scale for each lane group of a tile of 64 keys: keys 8 j + 2 t and 8 j + 2 t + 1 have group t of
  four. Queries have a scale each.
- "qk": P V is that of a 16-bit kernel.
- "int8": values are s8 with a scale a key: the largest of the tile divided by a number of eighths,
  8 to 255. The weights take it over before they are rounded to u8, relative to the largest of their
  row and tile. So one value that is far larger, or far smaller with a far larger weight (an
  attention sink), costs the others of its tile no bits.
- "fp8": weights and values are e4m3, values with a power of 2 for a scale of each tile, and weights
  with one for which those of a row and tile add up to 448.

The row sum is that of weights before they are rounded, in all modes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import reference

TILE = 64
MODES = ("qk", "int8", "fp8")
# fp8: the sum of a tile's weights; the least that a tile's largest value becomes.
FP8_SUM, FP8_VALUE = 448.0, 64.0
# int8: a key's scale is at least so much of the largest of its tile.
LEAST_SCALE = 1 / 32


class Quantized(NamedTuple):
    values: np.ndarray  # integers, or numbers of e4m3, as fp64
    scale: np.ndarray  # broadcasts to them

    def dequantized(self):
        return self.values * self.scale


def round_e4m3(x):
    """Nearest number of e4m3 (4 bits of exponent, 3 of mantissa), ties to even; 448 is the largest,
    which what is beyond becomes, 2^-9 the smallest."""
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)
    spacing = np.ldexp(1.0, exponent - 3)
    return np.clip(np.rint(x / spacing) * spacing, -448.0, 448.0)


def to_s8(x, largest):
    """Rounded to 127 steps of `largest` / 127, all of them in fp32; zeros where that is 0, and NaN
    where it is not finite."""
    x, largest = np.float32(x), np.float32(largest)
    with np.errstate(invalid="ignore", divide="ignore"):
        inverse = np.float64(np.float32(127) / largest)
        steps = np.where(largest >= 2.0**-100, np.rint(np.float64(x) * inverse), 0.0)
        steps = np.where(np.isfinite(largest), steps, np.nan)
    return Quantized(steps, np.float64(largest * np.float32(1 / 127)))


def largest_of(x, axis=None):
    """The largest |x|, NaN where one is not finite."""
    with np.errstate(invalid="ignore"):
        return np.abs(np.where(np.isfinite(x), x, np.nan)).max(axis=axis, keepdims=True)


def key_shift(k):
    """The mean of 64 keys, evenly spread, or of all of fewer; in fp32, as eight sums. What is not
    finite counts as 0."""
    count = min(len(k), 64)
    if count == 0:
        return np.zeros(k.shape[1])
    sample = np.zeros((64, k.shape[1]), np.float32)
    sample[:count] = k[[i * len(k) // count for i in range(count)]]
    sample[~np.isfinite(sample)] = 0
    sums = np.zeros((8, k.shape[1]), np.float32)
    for row in sample.reshape(8, 8, -1):
        sums += row
    total = np.zeros(k.shape[1], np.float32)
    for row in sums:
        total += row
    return np.float64(total * np.float32(1 / np.float32(count)))


def quantize_keys(k, shift):
    """By tile and lane group; the last tile's groups have only the keys that there are."""
    with np.errstate(invalid="ignore"):
        shifted = np.float32(k) - np.float32(shift)
    largest = np.zeros((len(k), 1))
    for first in range(0, len(k), TILE):
        keys = np.arange(first, min(first + TILE, len(k)))
        for group in range(4):
            of_group = keys[keys % 8 // 2 == group]
            if len(of_group):
                largest[of_group] = largest_of(shifted[of_group])
    return to_s8(shifted, largest)


def quantize_queries(q):
    return to_s8(q, largest_of(q, axis=1))


def quantize_values_s8(v):
    """A scale a key: 8 / e of the largest of the tile's, e the largest integer from 8 to 255 that
    clips nothing, in fp32."""
    largest = np.float32(np.abs(v).max(axis=1, keepdims=True))
    of_tile = np.zeros_like(largest)
    for first in range(0, len(v), TILE):
        of_tile[first : first + TILE] = largest[first : first + TILE].max()
    largest = np.maximum(largest, of_tile * np.float32(LEAST_SCALE))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.float32(127) / largest * (of_tile * np.float32(8 / 127))
        eighths = np.where(of_tile > 0, np.clip(np.floor(ratio), 8, 255), 8)
        inverse = np.float32(127) / of_tile * np.float32(eighths / 8)
        steps = np.where(of_tile > 0, np.rint(v * np.float64(inverse)), 0.0)
    return Quantized(steps, np.float64(of_tile * np.float32(1 / 127)) * 8 / eighths)


def quantize_values_e4m3(v):
    """A scale a tile."""
    scale = np.zeros((len(v), 1))
    for first in range(0, len(v), TILE):
        tile = slice(first, first + TILE)
        scale[tile] = 2.0 ** np.floor(np.log2(np.abs(v[tile]).max() or 1.0)) / FP8_VALUE
    return Quantized(round_e4m3(v / scale), scale)


def multiply_int8(logits, v):
    """The sum of weights times values, and of the weights, both relative to exp(row max)."""
    weights, total, top = weights_of(logits)
    values = quantize_values_s8(v)
    result = np.zeros((len(logits), v.shape[1]))
    for first in range(0, len(v), TILE):
        tile = slice(first, first + TILE)
        scale = values.scale[tile, 0]
        if not scale.any():  # all of the tile's values are zeros
            continue
        # Weights take over what their keys' scales have beyond the largest.
        folded = weights[:, tile] * scale
        step = folded.max(axis=1, initial=0.0, keepdims=True) / 255
        integers = np.rint(folded / np.where(step == 0, 1.0, step))
        result += integers * step @ values.values[tile]
    return result, total, top


def multiply_fp8(logits, v):
    """The same for e4m3."""
    weights, total, top = weights_of(logits)
    values = quantize_values_e4m3(v).dequantized()
    result = np.zeros((len(logits), v.shape[1]))
    for first in range(0, len(v), TILE):
        tile = slice(first, first + TILE)
        unit = weights[:, tile].sum(axis=1, keepdims=True) / FP8_SUM
        rounded = round_e4m3(weights[:, tile] / np.where(unit == 0, 1.0, unit)) * unit
        result += rounded @ values[tile]
    return result, total, top


def weights_of(logits):
    """Relative to exp(row max); their sum, and the row max."""
    top = logits.max(axis=1, initial=-np.inf, keepdims=True)
    weights = np.exp(logits - _finite(top))
    return weights, weights.sum(axis=1, keepdims=True), top


def multiply_exact(logits, v):
    weights, total, top = weights_of(logits)
    return weights @ v, total, top


MULTIPLY = {"qk": multiply_exact, "int8": multiply_int8, "fp8": multiply_fp8}


def _finite(top):
    return np.where(top == -np.inf, 0.0, top)


def _raised(top, own):
    """The row max with a tile's own, and the factor of what was summed before."""
    new = np.maximum(top, own)
    return new, np.where(top == -np.inf, 0.0, np.exp(_finite(top) - _finite(new)))


class Result(NamedTuple):
    exact: np.ndarray  # (B, Hq, Sq, Dv), fp64, by the arithmetic of the mode
    lse: np.ndarray  # (B, Hq, Sq)
    unfused: np.ndarray  # (B, Hq, Sq, Dv) fp32, of "qk": with P and the result rounded to the dtype


def attention(
    q,
    k,
    v,
    dtype,
    mode="qk",
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
):
    """`reference.attention` with the arithmetic of a mode: one of MODES."""
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    entries = (batch, heads, seqlen_q, seqlen_k)
    visible = np.zeros((seqlen_q, seqlen_k), bool)
    for i in range(seqlen_q):
        first, end = reference.visible_keys(i, seqlen_q, seqlen_k, causal, window, attention_chunk)
        visible[i, first:end] = True
    position = np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    distance = np.abs(np.arange(seqlen_k) - position)
    bias = np.broadcast_to(0.0 if bias is None else bias.astype(np.float64), entries)
    mask = np.broadcast_to(True if mask is None else mask, entries)
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, (batch, heads))
    out = np.zeros((batch, heads, seqlen_q, v.shape[3]))
    lse = np.zeros((batch, heads, seqlen_q))
    unfused = np.zeros(out.shape, np.float32)
    for b, h in np.ndindex(batch, heads):
        at = b, h * heads_kv // heads
        q_, k_, v_ = (x.astype(np.float64) for x in (q[b, h], k[at], v[at]))
        shift = key_shift(k_)
        keys, queries = quantize_keys(k_, shift), quantize_queries(q_)
        # Only the product with the shift is what softmax does not see; a softcap has to have it.
        logits = queries.dequantized() @ keys.dequantized().T + (q_ @ shift)[:, None]
        logits *= scale
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        logits += bias[b, h] - slopes[b, h] * distance
        logits[~(visible & mask[b, h])] = -np.inf
        sink = -np.inf if sinks is None else np.float64(sinks[h])
        out[b, h], lse[b, h] = _finished(*MULTIPLY[mode](logits, v_), sink)
        if mode != "qk":
            continue
        weights, _ = _finished(*weights_of(logits), sink)
        rounded = reference.round_to(weights, dtype).astype(np.float64)
        unfused[b, h] = reference.round_to(rounded @ v_, dtype)
    return Result(out, lse, unfused)


def _finished(result, total, top, sink):
    """Divided by the sum of the weights, which a sink joins, and the logarithm of that."""
    new, before = _raised(top, np.full_like(top, sink))
    total = total * before + np.exp(sink - _finite(new))
    with np.errstate(divide="ignore"):
        lse = _finite(new) + np.log(total)
    return result * before / np.where(total == 0, 1.0, total), lse[:, 0]


# What a prediction looks at, and how far above what it measures it is: docs/eight-bit.md.
PREDICTED_QUERIES, DEVIATIONS, MARGIN = 32, 3.0, 1.1


_MASKS = ("causal", "window", "attention_chunk")


def _intervals(q, k, causal=False, window=None, attention_chunk=None):
    """Which queries see a key of their interval."""
    lens = q.shape[2], k.shape[2]
    ends = (
        reference.visible_keys(i, *lens, causal, window, attention_chunk) for i in range(lens[0])
    )
    return np.array([first < end for first, end in ends])


def predicted(q, k, v, dtype, mode, **options):
    """The prediction of each head, (B, Hq): a bound for the relative error of all queries from that
    of up to 32, evenly spread, by the ratio estimator of a sample without replacement."""
    rounded = attention(q, k, v, dtype, mode, **options).exact
    exact = reference.attention(q, k, v, dtype, **options).exact
    sees = _intervals(q, k, **{x: options[x] for x in _MASKS if x in options})
    first, seqlen = np.flatnonzero(sees)[0], np.flatnonzero(sees)[-1] + 1 - np.flatnonzero(sees)[0]
    seen = np.arange(seqlen)
    if seqlen > PREDICTED_QUERIES:
        seen = np.arange(PREDICTED_QUERIES) * (seqlen - 1) // (PREDICTED_QUERIES - 1)
    seen = first + seen
    rounded = reference.round_to(rounded, dtype)[:, :, seen]
    error = np.square(rounded - exact[:, :, seen]).sum(axis=3)
    size = np.square(exact[:, :, seen]).sum(axis=3)
    total = size.sum(axis=2, keepdims=True)
    ratio = error.sum(axis=2, keepdims=True) / total
    deviation = (error - ratio * size) / total * len(seen)
    variance = np.square(deviation).sum(axis=2) / max(len(seen) - 1, 1) / len(seen)
    variance *= 1 - len(seen) / seqlen
    unit = 2.0**-12 if dtype == "float16" else 2.0**-9
    return np.sqrt(MARGIN**2 * (ratio[..., 0] + DEVIATIONS * np.sqrt(variance)) + unit**2)
