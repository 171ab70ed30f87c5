"""The functions of numpy that `_C` calls (python/arrays.hpp); torch_library is its counterpart."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import _C

ARRAY = np.ndarray
broadcast_to = np.broadcast_to
is_masked = np.ma.is_masked


def empty(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, like.dtype)


def empty_lse(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, np.float64 if like.dtype == np.float64 else np.float32)


def zeros(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, like.dtype)


def filled(like: np.ndarray, dtype: str, shape: tuple[int, ...], value: float) -> np.ndarray:
    return np.full(shape, value, dtype)


def largest_per_head(x: np.ndarray) -> np.ndarray:
    """(Hq,), from (B, Hq, Sq) or (Hq, T): -inf without rows."""
    other = (0, 2) if x.ndim == 3 else (1,)
    return np.asarray(x.max(axis=other, initial=-np.inf))


def scratch(like: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, dtype)


def random_state(like: np.ndarray) -> np.ndarray:
    """Seed and offset from the operating system's entropy."""
    return np.random.default_rng().integers(2**64 - 1, size=2, dtype=np.uint64, endpoint=True)


def to_float32(x: Any) -> np.ndarray:
    return x.astype(np.float32, copy=False)


def on_host(x: Any) -> Any:
    return x


def has_numbers(x: np.ndarray) -> bool:
    return True


def take(x: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    return np.take(x, indices, axis=axis)


def from_float32(like: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x


_C.register_numpy(sys.modules[__name__])
