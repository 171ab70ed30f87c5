"""Symbols: a mod is run once with them, and Python's operators and torch's functions make nodes.

torch calls `__torch_function__` for functions of symbols, but not for the index of
`tensor[symbol]`. For that, and to see side effects, `Tracing` is a mode for all torch functions.
"""

from __future__ import annotations

import functools
import linecache
import numbers
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from .graph import Graph, Node, UnsupportedModError

WAY_OUT = (
    "Compute it before the call: a tensor that the function reads by index, or the whole term as "
    "bias= or mask= of cutlass_attn.attention."
)
_BY_ELEMENTS = "write out the elements of a short one: sum(x * y for x, y in zip(t[q], t[k]))"
_OURS = tuple(os.path.dirname(os.path.abspath(x)) + os.sep for x in (__file__, torch.__file__))


class UnsupportedMethodError(UnsupportedModError, AttributeError):
    """A method of tensors that symbols lack; an AttributeError, so that hasattr() is False."""


def refuse(what: str, kind: type[UnsupportedModError] = UnsupportedModError) -> NoReturn:
    """Raises, with the line of the mod that is being run."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line).strip()
    raise kind(f"{os.path.basename(name)}:{line}: {what}\n    {text}\n{WAY_OUT}")


class Symbol:
    """A traced value, a tensor of no dimensions as far as the mod can tell."""

    __slots__ = ("graph", "node")
    __array_ufunc__ = None  # numpy's numbers leave operators to this class
    shape = torch.Size(())
    ndim = 0

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph = graph
        self.node = node

    @property
    def device(self) -> torch.device:
        return self.graph.device

    @property
    def dtype(self) -> torch.dtype:
        return {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[self.node.kind]

    def dim(self) -> int:
        return 0

    def size(self, dim: int | None = None) -> torch.Size:
        if dim is not None:
            refuse(f"size({dim}) of a traced value, which has no dimensions")
        return self.shape

    def numel(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"<traced {self.node.kind} {self.node.value or self.node.op}>"

    def __format__(self, _: str) -> str:
        return repr(self)

    def __hash__(self) -> NoReturn:
        refuse("a traced value is looked up in a dict or a set: make it a tensor")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        refuse("a traced value is given to numpy: make the array a tensor, by torch.from_numpy")

    def __bool__(self) -> NoReturn:
        refuse(
            "the function branches on a traced value. Use torch.where for if, & | ~ for and, or, "
            "not and chained comparisons, and torch.minimum and torch.maximum for min and max"
        )

    def _no_number(self, *_: Any) -> NoReturn:
        refuse("a traced value is used as a Python number. Use torch's functions, not math's")

    __int__ = __float__ = __complex__ = item = tolist = _no_number

    def __index__(self) -> NoReturn:
        refuse(
            "a traced value is an index of a list, or a count as in range(): make the list a "
            "tensor, as in torch.tensor([1, 2])[h]"
        )

    def _no_sequence(self, *_: Any) -> NoReturn:
        refuse("a traced value has no elements: it stands for one number")

    __len__ = __iter__ = __getitem__ = _no_sequence

    def __setitem__(self, *_: Any) -> NoReturn:
        refuse("side effect: a traced value is written to")

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS or is_in_place(name):
            return functools.partial(called, name, self)
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"Tensor.{name} is not supported", UnsupportedMethodError)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return called(_name(function), *args, **(kwargs or {}))


class Row:
    """A captured tensor with some of its dimensions indexed, as in `starts[b]` of (B, 2)."""

    def __init__(self, graph: Graph, tensor: torch.Tensor, index: tuple[Symbol | None, ...]):
        self.graph, self.tensor, self.index = graph, tensor, index

    def __getitem__(self, index: Any) -> Any:
        entries = iter(index if isinstance(index, tuple) else (index,))
        result: list[Symbol | None] = []
        for known in self.index:
            entry = known if known is not None else next(entries, None)
            if entry is None or (isinstance(entry, slice) and entry == slice(None)):
                result.append(None)
            else:
                result.append(self._checked(entry))
        if next(entries, None) is not None:
            refuse(f"too many indices for a captured tensor of shape {tuple(self.tensor.shape)}")
        if any(x is None for x in result):
            return Row(self.graph, self.tensor, tuple(result))
        try:
            node = self.graph.load(self.tensor, [x.node for x in result if x is not None])
        except UnsupportedModError as error:  # its dtype or layout
            refuse(str(error))
        return Symbol(self.graph, node)

    def _checked(self, entry: Any) -> Symbol:
        if not isinstance(entry, slice) and entry is not Ellipsis:
            symbol = lifted(self.graph, entry)
            if symbol.node.kind == "int":
                return symbol
        refuse("a captured tensor is indexed by traced values and by something else than integers")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(
            f"{name} of a row of a captured tensor is not supported; {_BY_ELEMENTS}",
            UnsupportedMethodError,
        )

    def __iter__(self) -> Any:
        size = next(n for n, i in zip(self.tensor.shape, self.index) if i is None)
        return (self[j] for j in range(size))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return called(_name(function), *args, **(kwargs or {}))


def lifted(graph: Graph, x: Any) -> Symbol:
    """A symbol, number or tensor of an expression, as a symbol."""
    if isinstance(x, Symbol):
        return x
    if isinstance(x, torch.Tensor):
        if x.numel() != 1:
            refuse(f"a captured tensor of shape {tuple(x.shape)} is used without an index")
        return Symbol(graph, graph.load(x.reshape(()) if x.dim() else x, ()))
    if isinstance(x, Row):
        shape = tuple(x.tensor.shape)
        refuse(f"a row of a captured tensor of shape {shape} is used as one value; {_BY_ELEMENTS}")
    if isinstance(x, (bool, int, float)):
        return Symbol(graph, graph.number(x))
    if isinstance(x, numbers.Real):  # numpy's
        return Symbol(graph, graph.number(int(x) if isinstance(x, numbers.Integral) else float(x)))
    refuse(f"{type(x).__name__} in an expression of traced values")


def _name(function: Any) -> str:
    """The name of a function of torch; that of an operator's method without its underscores."""
    return getattr(function, "__name__", str(function))


def is_in_place(name: str) -> bool:
    """Whether the torch function of this name writes to a tensor."""
    if name.startswith("__"):
        return name == "__setitem__" or (
            name[2:3] == "i" and name not in ("__invert__", "__index__", "__int__", "__iter__")
        )
    return name.endswith("_") and not name.startswith("_")


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of torch, or an operator, with symbols."""
    result = _called(name, *args, **kwargs)
    if (
        isinstance(result, Symbol)
        and result.graph.records_gradients
        and not torch.is_grad_enabled()
        and result.graph.has_gradient(result.node)
    ):
        refuse(
            "an operation on the score, or on a tensor that requires a gradient, is in "
            "torch.no_grad() or in a torch.autograd.Function, whose backward() is not traced; if "
            "the call needs no gradient, make it in torch.no_grad()"
        )
    return result


def _called(name: str, *args: Any, **kwargs: Any) -> Any:
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, (Symbol, Row))]
    if name == "__getitem__":
        if isinstance(args[0], torch.Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            graph = next((x.graph for x in index if isinstance(x, (Symbol, Row))), None)
            if graph is None:
                refuse("a captured tensor is indexed by a list of traced values: write t[q, k]")
            if Ellipsis in [x for x in index if not isinstance(x, (Symbol, Row, torch.Tensor))]:
                refuse("a captured tensor is indexed by traced values and `...`")
            return Row(graph, args[0], (None,) * args[0].dim())[index]
        return args[0][args[1]]
    if is_in_place(name):
        refuse(f"side effect: {name} writes to a tensor")
    if name == "embedding":
        return _embedding(*args, **kwargs)
    if name not in FUNCTIONS or not found:
        refuse(f"torch.{name} is not supported")
    graph = found[0].graph
    try:
        result = FUNCTIONS[name](
            *(lifted(graph, x) if isinstance(x, (torch.Tensor, Row)) else x for x in args), **kwargs
        )
    except (TypeError, ValueError, OverflowError):
        refuse(f"torch.{name} is not supported with these arguments")
    except UnsupportedModError as error:
        if WAY_OUT in str(error):
            raise
        refuse(str(error))
    return result


def _embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Any:
    """A row of the table."""
    if padding_idx is not None or max_norm is not None or not isinstance(weight, torch.Tensor):
        refuse("torch.embedding is not supported with these arguments")
    return called("__getitem__", weight, input)


FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by the names that torch and Python call them


def apply(op: str, *args: Any) -> Any:
    graph = next(x.graph for x in args if isinstance(x, Symbol))
    return Symbol(graph, graph.apply(op, *(lifted(graph, x).node for x in args)))


class Tracing(TorchFunctionMode):
    """While a mod runs: functions of symbols make nodes, all others run, if they only read."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        name, kwargs = _name(function), kwargs or {}
        flat = [y for x in args for y in (x if isinstance(x, tuple) else (x,))]
        if any(isinstance(x, (Symbol, Row)) for x in (*flat, *kwargs.values())):
            return called(name, *args, **kwargs)
        if is_in_place(name) or kwargs.get("out") is not None or kwargs.get("inplace"):
            refuse(f"side effect: {name} writes to a tensor")
        if _is_random(name):
            refuse(f"torch.{name} would be drawn once for all logits")
        return function(*args, **kwargs)


@functools.cache
def _is_random(name: str) -> bool:
    """Whether the function of this name draws random numbers, by the tags of torch's operators."""
    if "dropout" in name or name == "gumbel_softmax":
        return True
    packet = None if name.startswith("_") else getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
        for overload in packet.overloads()
    )
