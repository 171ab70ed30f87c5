"""`trace`: runs a mod once on symbols."""

from __future__ import annotations

import dis
import functools
import inspect
import numbers
import os
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from . import functions  # noqa: F401  fills what symbols know
from .graph import Graph, UnsupportedModError
from .symbols import Row, Symbol, Tracing, lifted

_ARGUMENTS = {"score_mod": ("score", "b", "h", "q", "k"), "mask_mod": ("b", "h", "q", "k")}
_IN_ERRORS = {"q": "q_idx", "k": "kv_idx"}  # as FlexAttention names them


def trace(function: Callable[..., Any], argument: str, device: torch.device | None = None) -> Graph:
    """The graph of a function with FlexAttention's signature.

    Args:
        function: ``score_mod(score, b, h, q_idx, kv_idx)`` or ``mask_mod(b, h, q_idx, kv_idx)``.
            It may read tensors and numbers of its surroundings; `h` is the query head.
        argument: "score_mod" or "mask_mod": what it is.
        device: of the call, as `score.device` says it; None: a CPU.

    Raises:
        TypeError: it is not a function of 5 (mask_mod: 4) arguments, or its result is not one value
            of the right type.
        UnsupportedModError: an unsupported operation, a branch on a traced value or a side effect;
            the message quotes its line.
    """
    names = _ARGUMENTS[argument]
    if not callable(function):
        raise TypeError(f"{argument} must be a function, got {type(function).__name__}")
    count = _positional(function)
    if count not in (None, len(names)):
        raise TypeError(
            f"{argument} must have {len(names)} positional arguments, got {count}; allowed: "
            + ", ".join(_IN_ERRORS.get(name, name) for name in names)
        )
    if (code := _code(function)) and (effect := _side_effect(code)):
        raise UnsupportedModError(
            f"{argument} has a side effect, which would happen once for all logits: {effect}"
        )
    graph = Graph(device or torch.device("cpu"))
    graph.records_gradients = argument == "score_mod" and torch.is_grad_enabled()
    with Tracing():
        result = function(*(Symbol(graph, graph.variable(x)) for x in names))
        root = _result(graph, result, argument, function).node
    graph.records_gradients = False
    if argument == "score_mod":
        root = graph.converted(root, "float")
    elif root.kind != "bool":
        raise TypeError(f"mask_mod must return bool, got {root.kind}")
    graph.root = root
    return graph


def _positional(function: Callable[..., Any]) -> int | None:
    """The number of positional arguments without a default; None if it cannot be determined."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(x.kind is x.VAR_POSITIONAL for x in parameters):
        return None
    by_position = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    return sum(x.default is x.empty for x in by_position)


def _code(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def _result(graph: Graph, result: Any, argument: str, function: Callable[..., Any]) -> Symbol:
    """The result of the function as a symbol."""
    if isinstance(result, (Symbol, numbers.Real)) or (
        isinstance(result, torch.Tensor) and result.numel() == 1
    ):
        return lifted(graph, result)
    what = type(result).__name__
    if isinstance(result, Row):
        what = f"row of a captured tensor of shape {tuple(result.tensor.shape)}"
    elif isinstance(result, torch.Tensor):
        what = f"tensor of shape {tuple(result.shape)}"
    what = "None" if result is None else f"a {what}"
    code = _code(function)
    at = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
    raise TypeError(f"{argument} returned {what}, allowed: one value{at}")


@functools.lru_cache(maxsize=256)
def _side_effect(code: CodeType, outer: frozenset[str] | None = None) -> str | None:
    """The first statement that writes to something outside of the function, or of one that it
    defines; `outer`: variables outside of the function that defines this one."""
    free = frozenset(code.co_freevars)
    outside = free if outer is None else free & outer
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.starts_line is not None:
            line = getattr(instruction, "line_number", None) or int(instruction.starts_line)
        name = instruction.argval
        writes = instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR") or (
            instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and name in outside
        )
        if writes:
            return f"line {line} of {code.co_filename} writes to {name}"
    inner = (_side_effect(x, outside) for x in code.co_consts if isinstance(x, CodeType))
    return next(filter(None, inner), None)
