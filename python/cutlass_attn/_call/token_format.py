"""Formats in which caches of serving engines store latent tokens: kernels/core/token_format.hpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TokenFormat:
    columns: int  # of K
    columns_v: int
    fp8_columns: int  # the first ones, in e4m3
    group: int  # columns of a scale
    token_bytes: int
    row_bytes: int  # of a token without scales that lie behind the rows of its page
    bf16_at: int  # byte of a row


FORMATS = {
    "ds_mla": TokenFormat(576, 512, 512, 128, 656, 656, 528),
    "ds_mla_v4": TokenFormat(512, 512, 448, 64, 584, 576, 448),
}


def values_of(v_cache: Any, kv_format: str | None) -> int:
    """Columns of V; of an unknown format, which the call refuses, those of the array."""
    known = FORMATS.get(kv_format or "")
    return v_cache.shape[-1] if known is None else known.columns_v


def unpacked(stored: np.ndarray, kv_format: str, dtype: str) -> np.ndarray:
    """The numbers of a cache (pages, page, 1, bytes of a token), (pages, page, 1, columns) float32,
    as kernels convert them to `dtype`: float16, bfloat16 or float32."""
    form = FORMATS[kv_format]
    pages, size = stored.shape[:2]
    data = np.ascontiguousarray(stored).reshape(pages, -1)
    rows = data[:, : size * form.row_bytes].reshape(pages, size, form.row_bytes)
    if kv_format == "ds_mla":
        scales = np.ascontiguousarray(rows[..., form.fp8_columns : form.bf16_at]).view(np.float32)
    else:
        exponents = data[:, size * form.row_bytes :].reshape(pages, size, 8)[..., :-1]
        scales = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents.astype(np.int32) - 127))
        scales = scales.astype(np.float32)
    first = _E4M3[rows[..., : form.fp8_columns]] * np.repeat(scales, form.group, axis=-1)
    rest = np.ascontiguousarray(rows[..., form.bf16_at :]).view(np.uint16).astype(np.uint32) << 16
    numbers = np.concatenate([first, rest.view(np.float32)], axis=-1)
    return _rounded(numbers, dtype)[:, :, None]


def _e4m3() -> np.ndarray:
    """The number of each byte."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.ldexp(1.0, exponent - 10)
    )
    size[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3()


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return x
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))
