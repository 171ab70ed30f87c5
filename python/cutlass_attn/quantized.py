"""The rounding of `quantize` in numpy: the arithmetic of kernels/core/quantize.hpp."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TILE_KEYS, GROUPS, SAMPLES, PARTIAL_SUMS = 64, 4, 64, 8
LEAST = np.float32(2.0**-100)
FP8_SUM = 448.0  # the sum of a row's weights in a tile with "fp8"


@dataclass(frozen=True)
class Operands:
    """q and k after rounding to 8 bits: the product with the given k is q @ k^T + q_shift."""

    q: np.ndarray  # (B, Hq, Sq, D) float32: integers from -127 to 127 times the scale of the row
    k: np.ndarray  # (B, Hkv, Sk, D) float32, after the shift was subtracted
    shift: np.ndarray  # (B, Hkv, D) float32, subtracted from k
    q_shift: np.ndarray  # (B, Hq, Sq, 1) float64, products of the given q with the shift

    def unit(self) -> np.ndarray:
        """(B, Hq, Sq): the largest value of the last bit of an integer product."""
        group = self.q.shape[1] // max(self.k.shape[1], 1)
        of_keys = np.abs(self.k).max(axis=(2, 3), initial=0.0).repeat(group, axis=1)
        return np.abs(self.q).max(axis=3, initial=0.0) * of_keys[:, :, None] / np.float32(127**2)

    def columns(self, q: np.ndarray, seqlen_k: int) -> tuple[np.ndarray, np.ndarray]:
        """q and the first `seqlen_k` keys with twice the head dim, such that their products include
        q_shift: the given `q` follows the rounded one, and the shift follows every key."""
        k = self.k[:, :, :seqlen_k]
        shift = np.broadcast_to(self.shift[:, :, None], k.shape)
        return np.concatenate((self.q, q), axis=3), np.concatenate((k, shift), axis=3)


def shift_of(k: np.ndarray) -> np.ndarray:
    """The mean of up to 64 keys, (B, Hkv, D), of k (B, Hkv, Sk, D) in float32."""
    seqlen = k.shape[2]
    count = min(SAMPLES, seqlen)
    if count == 0:
        return np.zeros((*k.shape[:2], k.shape[3]), np.float32)
    samples = np.zeros((*k.shape[:2], SAMPLES, k.shape[3]), np.float32)
    samples[:, :, :count] = k[:, :, np.arange(count) * seqlen // count]
    samples[~np.isfinite(samples)] = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        partial = samples[:, :, :PARTIAL_SUMS].copy()
        for first in range(PARTIAL_SUMS, SAMPLES, PARTIAL_SUMS):
            partial += samples[:, :, first : first + PARTIAL_SUMS]
        total = partial[:, :, 0].copy()
        for i in range(1, PARTIAL_SUMS):
            total += partial[:, :, i]
        mean = total * (np.float32(1.0) / np.float32(count))
    return np.where(np.isfinite(mean), mean, np.float32(0.0))


def _rounded(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """x rounded to int8 as float32; the elements along `axes` share a scale."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(axis=axes, keepdims=True, initial=0.0)  # NaN if one is NaN
        is_finite = np.isfinite(amax)
        is_zero = amax < LEAST
        scale = np.where(is_zero, np.float32(0.0), amax * (np.float32(1.0) / np.float32(127.0)))
        scale[~is_finite] = np.nan
        divisor = np.where(is_zero | ~is_finite, np.float32(1.0), amax)
        inverse = np.where(is_zero, np.float32(0.0), np.float32(127.0) / divisor)
        # float64 holds the product of two float32 numbers exactly.
        x8 = np.rint(x.astype(np.float64) * inverse)
        return np.asarray(np.where(np.isnan(scale), np.nan, x8 * scale), np.float32)


def operands(q: np.ndarray, k: np.ndarray) -> Operands:
    """q (B, Hq, Sq, D) and k (B, Hkv, Sk, D), float32, as quantize="qk" rounds them."""
    shift = shift_of(k)
    group = q.shape[1] // max(k.shape[1], 1)
    of_queries = np.repeat(shift, group, axis=1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        q_shift = q.astype(np.float64) @ of_queries[..., None]
    batch, heads, seqlen, head_dim = k.shape
    tiles = -(-seqlen // TILE_KEYS)
    shifted = np.zeros((batch, heads, tiles * TILE_KEYS, head_dim), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted[:, :, :seqlen] = k - shift[:, :, None]
    # Key 8 a + 2 t + i of a tile is in its group t.
    grouped = shifted.reshape(batch, heads, tiles, TILE_KEYS // 8, GROUPS, 2, head_dim)
    k8 = _rounded(grouped, (3, 5, 6)).reshape(shifted.shape)[:, :, :seqlen]
    return Operands(_rounded(q, (3,)), k8, shift, q_shift)


# RMS errors found relative to the result's, docs/eight-bit.md: standard normal inputs, and others.
ERRORS_FOUND = {"qk": (0.011, 0.022), "int8": (0.014, 0.024), "fp8": (0.040, 0.041)}


def spread(most: int, count: int) -> np.ndarray:
    """At most `most` evenly spread integers below `count`."""
    return np.arange(count) if count < most else np.arange(most) * count // most


def weights_and_values(p: np.ndarray, v: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The weights p (Sq, Sk) and v (Sk, Dv) of a head, float64, as quantize="int8" or "fp8" rounds
    them for their product. The sum that it is divided by is that of p."""
    return _in_int8(p, v) if mode == "int8" else _in_fp8(p, v)


def _in_fp8(p: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rounded_p, rounded_v = np.zeros(p.shape), np.zeros(v.shape)
    for first in range(0, len(v), TILE_KEYS):
        tile = slice(first, first + TILE_KEYS)
        of_tile = np.abs(v[tile]).max(where=np.isfinite(v[tile]), initial=0.0)
        if of_tile >= LEAST:
            scale = 2.0 ** (np.floor(np.log2(of_tile)) - 6)
            rounded_v[tile] = round_e4m3(v[tile] / scale) * scale
        unit = p[:, tile].sum(axis=1, keepdims=True) / FP8_SUM
        rounded_p[:, tile] = round_e4m3(p[:, tile] / np.where(unit == 0, 1, unit)) * unit
    return rounded_p, rounded_v


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest number of e4m3, ties to even; beyond 448 it is 448."""
    _, exponent = np.frexp(x)
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    return np.asarray(np.clip(np.rint(x / spacing) * spacing, -448.0, 448.0))


def _in_int8(p: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rounded_p, rounded_v = np.zeros(p.shape), np.zeros(v.shape)
    for first in range(0, len(v), TILE_KEYS):
        tile = slice(first, first + TILE_KEYS)
        amax = np.abs(v[tile]).max(axis=1, initial=0.0)
        of_tile = amax.max(where=np.isfinite(amax), initial=0.0)
        if of_tile < LEAST:
            eighths, step = np.full(len(amax), 8.0), np.ones(len(amax))
        else:
            # A hair more: a quotient that is an integer may be rounded to less.
            ratio = 8 * of_tile / np.maximum(amax, of_tile / 32) * (1 + 2.0**-23)
            eighths = np.clip(np.floor(ratio), 8, 255)
            step = of_tile / 127 * 8 / eighths
        weights = p[:, tile] * 8 / eighths
        largest = weights.max(axis=1, initial=0.0, keepdims=True) / 255
        integers = np.rint(weights / np.where(largest == 0, 1, largest))
        rounded_p[:, tile] = integers * largest * eighths / 8
        rounded_v[tile] = np.rint(v[tile] / step[:, None]) * step[:, None]
    return rounded_p, rounded_v
