"""numpy arrays, as the library sees them; the counterpart of _torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._call import CPU

ARRAY = np.ndarray

DTYPES: dict[Any, int] = {np.dtype(np.float16): 0, np.dtype(np.float32): 2}
try:
    import ml_dtypes  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # then nobody can hold a bfloat16 array either
    pass
else:
    DTYPES[np.dtype(ml_dtypes.bfloat16)] = 1

# Of bias and vectors per head; of a mask; of a random state.
OPTION_DTYPES = (
    np.dtype(np.float32),
    np.dtype(np.bool_),
    (np.dtype(np.int64), np.dtype(np.uint64)),
)


def address(x: np.ndarray) -> int:
    return x.ctypes.data


def strides(x: np.ndarray) -> tuple[int, ...]:
    """In elements. Raises ValueError where numpy's bytes do not divide, as in a record's field."""
    size = x.itemsize
    if not x.flags.aligned or any(stride % size for stride in x.strides):
        raise ValueError(
            f"array of {x.dtype} has address or strides {x.strides} that are no multiple of "
            f"{size} bytes; call numpy.ascontiguousarray first"
        )
    return tuple(stride // size for stride in x.strides)


def place(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[int, int, int, int]:
    """Device, its index, its stream, threads (0: as many as this process may use)."""
    return CPU, 0, 0, 0


def needs_grad(*arrays: np.ndarray) -> bool:
    return False


def is_plain(*arrays: np.ndarray) -> bool:
    return True


def is_writable(x: np.ndarray) -> bool:
    return bool(x.flags.writeable)


def empty(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, like.dtype)


def empty_lse(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, np.float32)


def random_state(like: np.ndarray) -> np.ndarray:
    """Seed and offset from the operating system's entropy."""
    return np.random.default_rng().integers(2**64 - 1, size=2, dtype=np.uint64, endpoint=True)


def to_float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32, copy=False)
