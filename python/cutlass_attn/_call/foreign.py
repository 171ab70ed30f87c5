"""Arguments that are not arrays of the call's library: lists of lengths, one length for all
sequences, and arrays of other libraries (CuPy, JAX, numpy next to torch), read through DLPack.

They are converted after a call was refused, so that other calls do not pay for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .call import NUMBERS, PADDING
from .keywords import refusal

# Arguments that may be lists of int, and whether one int is allowed for all sequences. seqused is
# before leftpad because it limits the range of leftpad.
_LISTS = {
    "cu_seqlens_q": False,
    "cu_seqlens_k": False,
    "seqused_q": True,
    "seqused_k": True,
    "leftpad_q": True,
    "leftpad_k": True,
    "cache_seqlens": True,
    "cache_batch_idx": False,
    "cache_leftpad": True,
    "slot_mapping": False,
}
_NO_ARRAYS = (int, float, str, tuple, list)
_PACKED = {"cu_seqlens_q": "q", "cu_seqlens_k": "k"}


def retried(function: Callable[..., Any], given: Mapping[str, Any], refused: TypeError) -> Any:
    """Repeats a refused call with its other arguments converted to arrays.

    Raises TypeError: for an unknown keyword, as `converted` does, or `refused` if there is nothing
    to convert.
    """
    try:
        arrays = converted(given)
    except TypeError as error:
        arrays, refused = None, error.with_traceback(None)
    if arrays is None:
        known = inspect.signature(function).parameters
        raise refusal(function.__name__, given, known) or refused
    return function(**{**given, **arrays})


def converted(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments that are not arrays of the call's library, converted to it; None if all are.

    The library is numpy if all operands are numpy arrays, else torch.

    Raises TypeError, ValueError: the values of a list are wrong for the argument.
    """
    given = {name: x for name, x in given.items() if x is not None}
    like = [*given.values(), None][0]  # torch 2.5 cannot trace next() with a default
    if not hasattr(like, "__dlpack__"):
        return None
    found = {name: _by_dlpack(name, x) for name, x in given.items() if _is_foreign(name, x, given)}
    given = {**given, **found}
    like = next(iter(given.values()))
    for name, may_be_one in _LISTS.items():
        x = given.get(name)
        # torch.compile refuses hasattr of an int that is a symbol.
        if may_be_one and isinstance(x, (int, np.integer)) and not isinstance(x, bool):
            x = given[name] = [x] * _num_sequences(like, given.get("cu_seqlens_q"))
        if x is None or (not isinstance(x, int) and hasattr(x, "__dlpack__")):
            continue
        if not isinstance(x, (list, tuple)):
            raise TypeError(
                f"{name} must be an array of the same library as {next(iter(given))}, got "
                f"{_type_name(x)}; allowed: an array, a list of int{', an int' * may_be_one}"
            )
        found[name] = _listed(name, x, given, like)
    return found or None


def _num_sequences(q: Any, offsets: Any) -> int:
    if isinstance(offsets, (list, tuple)):
        return len(offsets) - 1
    sizes = [*(q if offsets is None else offsets).shape, 0]  # 0: of no dimensions, an error later
    return sizes[0] if offsets is None else sizes[0] - 1


def _torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def _is_foreign(name: str, x: Any, given: Mapping[str, Any]) -> bool:
    """Whether this is an array of another library than the call's."""
    torch = _torch()
    # torch.compile traces this function, and refuses hasattr of a number that is a symbol.
    if isinstance(x, _NO_ARRAYS) or (torch and isinstance(x, torch.Tensor)):
        return False
    if not hasattr(x, "__dlpack__"):
        return False
    if not isinstance(x, np.ndarray):
        return True
    if name in NUMBERS and torch and torch.compiler.is_dynamo_compiling():
        return False  # `options_for_operator` reads it
    arrays = (y for y in given.values() if not isinstance(y, _NO_ARRAYS))
    operands = [y for y in arrays if hasattr(y, "__dlpack__")]
    return not all(isinstance(y, np.ndarray) for y in operands)


def _by_dlpack(name: str, x: Any) -> Any:
    try:
        import torch
    except ImportError:
        raise TypeError(
            f"{name} is a {_type_name(x)}, which only torch can read here: install torch, or pass "
            "numpy arrays"
        ) from None
    if isinstance(x, np.ndarray) and torch.compiler.is_dynamo_compiling():
        return torch.as_tensor(x)  # which it can trace; np.float32(2) is an array to it
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
    # On a CPU kernels/runtime/check_lengths.cpp also checks arrays.
    if shape and values and values[0] > 0 and sum(values) == shape[0]:
        raise ValueError(
            f"{name} is {values}, lengths that sum up to the {shape[0]} rows of {operand}; "
            f"allowed: offsets, {[sum(values[:i]) for i in range(len(values) + 1)]}"
        )
    if name in PADDING and given.get("cu_seqlens_q") is None:
        _check_range(name, values, given)
    return _array(name, values, like)


def _check_range(name: str, values: list[int], given: Mapping[str, Any]) -> None:
    """Checks the lengths of a dense call, for GPUs too. Raises ValueError."""
    kind, operand = name.split("_")
    x = given.get(operand)
    shape = getattr(x, "shape", ())
    if len(shape) != 4 or getattr(x, "is_nested", False):
        return  # whose rows are packed, or an error later
    rows = shape[1 if given.get("layout") == "bshd" else 2]
    ends, why = None, f"the rows of {operand}"
    if kind == "leftpad":
        ends = given.get(f"seqused_{operand}")
        why = f"the end of the valid rows of {operand} in that entry"
    if not isinstance(ends, (list, tuple)) or len(ends) != len(values):
        ends = [rows] * len(values)
    for i, (value, most) in enumerate(zip(values, ends, strict=True)):
        if not 0 <= value <= most:
            raise ValueError(f"{name}[{i}] is {value}, allowed: 0 to {most}, {why}")


def _array(name: str, values: list[int], like: Any) -> Any:
    """A list as an array of the argument's dtype, on the device of `like`."""
    for i, value in enumerate(values):
        if not -(2**31) <= value < 2**31:
            raise ValueError(
                f"{name} has {value}, allowed: numbers of 32 bits; that is {name}[{i}]"
            )
    if isinstance(like, np.ndarray):
        return np.array(values, np.int64 if name == "slot_mapping" else np.int32)
    torch = _torch()
    dtype = torch.int64 if name == "slot_mapping" else torch.int32
    return torch.tensor(values, dtype=dtype, device=like.device)


def _type_name(x: Any) -> str:
    module = type(x).__module__
    return type(x).__qualname__ if module == "builtins" else f"{module}.{type(x).__qualname__}"
