"""Arguments that are no arrays of the call's library: lists of lengths, a length that all sequences
share, and arrays of other libraries (CuPy, JAX, numpy next to torch), which come by DLPack.

Looked at where a call has been refused, so that others do not pay for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .keywords import refusal

# Lists of int; where one int may stand for all sequences, an argument with B entries, and how many
# it has more.
_PER_SEQUENCE = {
    "cu_seqlens_q": ("", 0),
    "cu_seqlens_k": ("", 0),
    "seqused_q": ("q", 0),
    "seqused_k": ("cu_seqlens_q", 1),
    "leftpad_q": ("q", 0),
    "leftpad_k": ("q", 0),
    "cache_seqlens": ("q", 0),
    "cache_batch_idx": ("", 0),
    "cache_leftpad": ("q", 0),
    "slot_mapping": ("", 0),
}
_PACKED = {"cu_seqlens_q": "q", "cu_seqlens_k": "k"}


def retried(function: Callable[..., Any], given: Mapping[str, Any], refused: TypeError) -> Any:
    """A call that was refused, with arrays for what is none. Raises TypeError: a keyword that the
    function lacks, or `refused` if everything is an array."""
    arrays = converted(given)
    if arrays is None:
        known = inspect.signature(function).parameters
        raise refusal(function.__name__, given, known) or refused
    return function(**{**given, **arrays})


def converted(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Those of a call's arguments that are something else, as arrays of its library: numpy's if
    all operands are, else torch's. None: there are none.

    Raises TypeError, ValueError: what a list holds is not what the argument stands for.
    """
    given = {name: x for name, x in given.items() if x is not None}
    like = next(iter(given.values()), None)
    if not hasattr(like, "__dlpack__"):
        return None
    found = {name: _by_dlpack(name, x) for name, x in given.items() if _is_foreign(x, given)}
    given = {**given, **found}
    like = next(iter(given.values()))
    for name, (of, more) in _PER_SEQUENCE.items():
        x = given.get(name)
        if isinstance(x, (list, tuple)):
            found[name] = _listed(name, x, given, like)
        elif (
            hasattr(given.get(of), "__len__")
            and isinstance(x, (int, np.integer))
            and not isinstance(x, bool)
        ):
            found[name] = _array(name, [int(x)] * (len(given[of]) - more), like)
    return found or None


def _torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def _is_foreign(x: Any, given: Mapping[str, Any]) -> bool:
    """Is this an array, of another library than the call's?"""
    torch = _torch()
    # The first of these are all that a call has under torch.compile, which traces this.
    if isinstance(x, (int, float, str, tuple, list)) or (torch and isinstance(x, torch.Tensor)):
        return False
    if not hasattr(x, "__dlpack__"):
        return False
    if not isinstance(x, np.ndarray):
        return True
    operands = [y for y in given.values() if hasattr(y, "__dlpack__")]
    return not all(isinstance(y, np.ndarray) for y in operands)


def _by_dlpack(name: str, x: Any) -> Any:
    try:
        import torch
    except ImportError:
        raise TypeError(
            f"{name} is a {_type_name(x)}, which is read by way of torch: install torch, or pass "
            "numpy arrays"
        ) from None
    try:
        return torch.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is a {_type_name(x)} that torch.from_dlpack() does not take: {error}"
        ) from error


def _listed(name: str, x: list[Any] | tuple[Any, ...], given: Mapping[str, Any], like: Any) -> Any:
    for entry in x:
        if isinstance(entry, bool) or not isinstance(entry, (int, np.integer)):
            raise TypeError(
                f"{name} must be a list of int or an int32 array, got a list with {entry!r}"
            )
    values = [int(entry) for entry in x]
    operand = _PACKED.get(name)
    shape = getattr(given.get(operand or ""), "shape", None)
    # Of a call on a CPU kernels/runtime/check_lengths.cpp sees that, arrays included.
    if shape and values and values[0] > 0 and sum(values) == shape[0]:
        raise ValueError(
            f"{name} is {values}, lengths that sum up to the {shape[0]} rows of {operand}; "
            f"allowed: offsets, {[sum(values[:i]) for i in range(len(values) + 1)]}"
        )
    return _array(name, values, like)


def _array(name: str, values: list[int], like: Any) -> Any:
    """Of the dtype that the argument has, on the device of `like`."""
    if any(not -(2**31) <= value < 2**31 for value in values):
        raise ValueError(f"{name} has {max(values, key=abs)}, allowed: numbers of 32 bits")
    if isinstance(like, np.ndarray):
        return np.array(values, np.int64 if name == "slot_mapping" else np.int32)
    torch = _torch()
    dtype = torch.int64 if name == "slot_mapping" else torch.int32
    return torch.tensor(values, dtype=dtype, device=like.device)


def _type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"
