"""The graph of a mod: nodes, each of them once, and their evaluation by torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .operations import KINDS, OPERATIONS

_LARGEST = torch.finfo(torch.float32).max
VARIABLES = {"score": "float", "b": "int", "h": "int", "q": "int", "k": "int"}


def in_float32(value: float) -> float:
    """The number in float32: infinite beyond its range, as in torch."""
    return math.copysign(math.inf, value) if abs(value) > _LARGEST else value


class UnsupportedModError(NotImplementedError):
    """A score_mod or mask_mod cannot be traced, or is not supported."""


@dataclass(frozen=True, eq=False)
class Node:
    """One value. Equal nodes of a graph are one object, so `is` compares them."""

    op: str  # "variable", "number", "load" or a key of OPERATIONS
    args: tuple[Node, ...]
    kind: str
    value: Any  # variable: its name; number: a Python number; load: its index among captures
    depends: frozenset[str]  # the variables that it depends on

    @property
    def is_number(self) -> bool:
        return self.op == "number"


@dataclass(eq=False)
class Graph:
    """A mod: the result and the tensors that it reads. New nodes may be added to it."""

    device: torch.device  # of the call
    captures: list[torch.Tensor] = field(default_factory=list)
    root: Node | None = None
    records_gradients: bool = False  # whether torch does, while a score_mod is traced
    _nodes: dict[Any, Node] = field(default_factory=dict, repr=False)

    @property
    def result(self) -> Node:
        assert self.root is not None
        return self.root

    def variable(self, name: str) -> Node:
        return self._node("variable", (), VARIABLES[name], name, frozenset({name}))

    def number(self, value: bool | int | float) -> Node:
        kind = KINDS[(bool, int, float).index(type(value))]
        return self._node("number", (), kind, value, frozenset())

    def load(self, capture: torch.Tensor, index: Iterable[Node]) -> Node:
        """An element of a captured tensor."""
        at = next((i for i, x in enumerate(self.captures) if x is capture), len(self.captures))
        if at == len(self.captures):
            self.captures.append(capture)
        dtype = capture.dtype
        if dtype.is_complex:
            raise UnsupportedModError(f"a captured tensor has dtype {dtype}; real ones are read")
        if capture.layout != torch.strided:
            raise UnsupportedModError(
                f"a captured tensor has layout {capture.layout}; torch.strided is read"
            )
        kind = "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"
        args = tuple(index)
        return self._node("load", args, kind, at, frozenset().union(*(x.depends for x in args)))

    def has_gradient(self, node: Node) -> bool:
        """Whether the value is a float that depends on the score or on a tensor with a gradient."""
        return node.kind == "float" and (
            "score" in node.depends
            or any(x.op == "load" and self.captures[x.value].requires_grad for x in ordered(node))
        )

    def apply(self, op: str, *args: Node) -> Node:
        """The operation of arguments that are converted to one kind first."""
        of = OPERATIONS[op]
        if op.startswith("to_"):
            return self.converted(args[0], op.removeprefix("to_"))
        first, rest = (args[:1], args[1:]) if op == "where" else ((), args)
        kind = of.takes or max((x.kind for x in rest), key=KINDS.index)
        if not KINDS.index(of.lowest) <= KINDS.index(kind) <= KINDS.index(of.highest):
            raise UnsupportedModError(f"{op} of {kind} is not supported")
        converted = [self.converted(x, "bool") for x in first]
        converted += [self.converted(x, kind) for x in rest]
        for x in converted:
            if x.is_number and x.kind == "int" and not -(2**63) <= x.value < 2**63:
                raise UnsupportedModError(f"the integer {x.value} is beyond 64 bits")
        depends = frozenset().union(*(x.depends for x in args))
        return self._node(op, tuple(converted), of.gives or kind, None, depends)

    def converted(self, node: Node, kind: str) -> Node:
        if node.kind == kind:
            return node
        if node.is_number:
            return self.number({"bool": bool, "int": int, "float": float}[kind](node.value))
        return self._node(f"to_{kind}", (node,), kind, None, node.depends)

    def _node(
        self, op: str, args: tuple[Node, ...], kind: str, value: Any, depends: frozenset[str]
    ) -> Node:
        # repr distinguishes 0.0 from -0.0, and is equal for equal NaN.
        key = (op, tuple(map(id, args)), kind, repr(value))
        if key not in self._nodes:
            self._nodes[key] = Node(op, args, kind, value, depends)
        return self._nodes[key]


def ordered(*roots: Node) -> list[Node]:
    """All nodes that the roots are made of, arguments first."""
    result: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, is_ready = stack.pop()
        if is_ready:
            result.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(x, False) for x in reversed(node.args)]
    return result


def loads(*roots: Node) -> list[Node]:
    return [x for x in ordered(*roots) if x.op == "load"]


def evaluate(
    graph: Graph,
    root: Node,
    variables: Mapping[str, torch.Tensor],
    real: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The value of a node for tensors of variables, which broadcast; differentiable by torch.

    Args:
        graph: the graph of the node.
        root: the node.
        variables: a tensor for each variable that the node depends on, and at least one; they are
            on one device.
        real: dtype that "float" stands for.

    Returns:
        A tensor that broadcasts to the shape that all variables broadcast to.
    """
    dtypes = {"bool": torch.bool, "int": torch.int64, "float": real}
    device = next(iter(variables.values())).device
    order = ordered(root)
    last_use = {x: i for i, node in enumerate(order) for x in node.args}
    values: dict[Node, torch.Tensor] = {}
    for i, node in enumerate(order):
        if node.op == "variable":
            value = variables[node.value]
        elif node.is_number:
            number = in_float32(node.value) if dtypes[node.kind] == torch.float32 else node.value
            value = torch.full((), number, dtype=dtypes[node.kind], device=device)
        elif node.op == "load":
            value = _element(graph.captures[node.value], [values[x] for x in node.args], device)
        else:
            value = OPERATIONS[node.op].evaluate(*(values[x] for x in node.args))
        values[node] = value.to(dtypes[node.kind])
        for x in node.args:  # a value that nothing reads any more is freed
            if last_use[x] == i:
                values.pop(x, None)
    return values[root]


def _element(
    capture: torch.Tensor, index: list[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """capture[index]; negative indices wrap around, others beyond the end read the last entry."""
    if capture.device != device:
        if capture.numel() > 1:
            raise ValueError(
                f"a captured tensor of shape {tuple(capture.shape)} is on {capture.device}; "
                f"query is on {device}"
            )
        capture = capture.to(device)
    if not index:
        return capture.reshape(())
    wrapped = [torch.where(i < 0, i + n, i) for i, n in zip(index, capture.shape)]
    return capture[tuple(i.clamp(0, n - 1) for i, n in zip(wrapped, capture.shape))]
