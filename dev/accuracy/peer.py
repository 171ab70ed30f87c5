"""SageAttention 2++ in numpy, to compare errors with: arXiv 2505.21136, 2411.10958, 2410.02367, and
the sources of version 2.2 (its kernel for sm_89, `pv_accum_dtype="fp32+fp16"`).

- K is reduced by its mean over all keys. Q has one scale for rows g, g + 8, g + 16 and g + 24 of
  every 32; K has one for keys 8 j + 2 t and 8 j + 2 t + 1 of every 64: amax / 127 + 1e-7.
- V is e4m3 with one scale per channel over all keys, which maps its largest value to 2.25.
- Weights are e4m3, 448 at the running row max. Their sum adds the weights before rounding.
- Products of 32 keys are added in fp16 within a tile of 64; tiles are added in fp32.

Roundings are written out; everything else is fp64.
"""

from __future__ import annotations

import numpy as np
from cutlass_attn.quantized import round_e4m3
from cutlass_attn.testing import round_to

_TILE, _STEP, _ROWS = 64, 32, 32
_LARGEST_WEIGHT, _LARGEST_VALUE = 448.0, 2.25


def _quantized(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    scale = np.abs(x).max(axis=axes, keepdims=True) / 127 + 1e-7
    return np.rint(x / scale) * scale


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, dtype: str, scale: float
) -> np.ndarray:
    """Of one head: q (S, D), k and v (Sk, D), bias (Sk,), S a multiple of 32 and Sk of 64. The
    algorithm itself has no bias; it stands for the logits of other keys here."""
    (rows, head_dim), keys = q.shape, len(k)
    if rows % _ROWS or keys % _TILE:
        raise ValueError(f"{rows} queries and {keys} keys, not multiples of {_ROWS} and {_TILE}")
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    mean = round_to(k.mean(axis=0), dtype)
    k = round_to(k - mean, dtype).astype(np.float64)
    q8 = _quantized(q.reshape(-1, 4, 8, head_dim), (1, 3)).reshape(q.shape)
    k8 = _quantized(k.reshape(-1, 8, 4, 2, head_dim), (1, 3, 4)).reshape(k.shape)
    scores = q8 @ k8.T * scale + bias

    v_scale = np.abs(v).max(axis=0) / _LARGEST_VALUE
    v8 = round_e4m3(v / np.where(v_scale == 0, 1, v_scale))
    row_max = np.full((rows, 1), -np.inf)
    total, result = np.zeros((rows, 1)), np.zeros((rows, v.shape[1]))
    for first in range(0, keys, _TILE):
        tile = scores[:, first : first + _TILE]
        new = np.maximum(row_max, tile.max(axis=1, keepdims=True))
        rescale = np.exp(row_max - new)
        weights = np.exp(tile - new)
        total = total * rescale + weights.sum(axis=1, keepdims=True)
        p8 = round_e4m3(_LARGEST_WEIGHT * weights)
        part = np.zeros_like(result)
        for step in range(0, _TILE, _STEP):
            products = p8[:, step : step + _STEP] @ v8[first + step : first + step + _STEP]
            part = round_to(part + products, "float16").astype(np.float64)
        result = result * rescale + part
        row_max = new
    return result * v_scale / (_LARGEST_WEIGHT * total)
