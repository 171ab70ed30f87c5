"""Splits a mask into an interval of keys and a bool mask for its other conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .graph import Graph, Node, evaluate, ordered


@dataclass(frozen=True)
class Interval:
    """Visible keys of query q: low <= k - q <= high, and with a chunk q // chunk == k // chunk."""

    low: int | None = None
    high: int | None = None
    chunk: int | None = None

    def __and__(self, other: Interval) -> Interval | None:
        """The intersection of both; None if the chunks differ."""
        if None not in (self.chunk, other.chunk) and self.chunk != other.chunk:
            return None
        return replace(self.within(other.low, other.high), chunk=self.chunk or other.chunk)

    def within(self, low: int | None, high: int | None) -> Interval:
        """This interval with further bounds."""
        lows = [x for x in (self.low, low) if x is not None]
        highs = [x for x in (self.high, high) if x is not None]
        return Interval(max(lows, default=None), min(highs, default=None), self.chunk)


@dataclass(frozen=True)
class Lengths:
    """The sizes of a call's logits."""

    b: int
    h: int
    q: int
    k: int

    def variables(self, device: torch.device, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Indices that broadcast to (b, h, q, k), of some of the rows."""
        sizes = {"b": self.b, "h": self.h, "q": self.q, "k": self.k}
        index = {x: torch.arange(n, device=device) for x, n in sizes.items()}
        index["q"] = index["q"][rows]
        return {x: i.view([-1 if d == x else 1 for d in sizes]) for x, i in index.items()}

    def shape(self, depends: frozenset[str]) -> tuple[int, int, int, int]:
        b, h, q, k = (getattr(self, x) if x in depends else 1 for x in "bhqk")
        return b, h, q, k


def split(graph: Graph, root: Node) -> tuple[Interval, Node | None]:
    """The conditions, joined by `&`, that are an interval, and a node with all the others."""
    interval, rest = Interval(), None
    for condition in _conditions(root):
        if condition.is_number and condition.value is True:
            continue
        own = _interval(condition)
        both = None if own is None else interval & own
        if both is not None:
            interval = both
        else:
            rest = condition if rest is None else graph.apply("and", rest, condition)
    return interval, rest


def _conditions(node: Node) -> Iterator[Node]:
    if node.op == "and" and node.kind == "bool":
        for x in node.args:
            yield from _conditions(x)
    else:
        yield node


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def _interval(node: Node) -> Interval | None:
    op, args = node.op, node.args
    if op == "not":
        op, args = _OPPOSITE.get(args[0].op, ""), args[0].args
    if op not in ("lt", "le", "gt", "ge", "eq"):
        return None
    first, second = args if op not in ("gt", "ge") else reversed(args)
    op = {"gt": "lt", "ge": "le"}.get(op, op)
    if op == "eq" and (chunk := _chunk(first, second)):
        return Interval(chunk=chunk)
    bound = linear(second)
    if first.op == "abs" and bound and bound[:2] == (0, 0) and op != "eq":  # abs(x) <= bound
        x, size = linear(first.args[0]), bound[2] - (op == "lt")
        if x is None or x[0] + x[1] != 0 or abs(x[1]) != 1:
            return None
        middle = -x[2] * x[1]  # x is 0 where k - q is this
        return Interval(middle - size, middle + size)
    x = linear(first)
    if x is None or bound is None:
        return None
    q, k, c = (i - j for i, j in zip(x, bound))  # q * q_idx + k * k_idx + c <= 0
    if op == "lt":
        c += 1
    if (q, k) not in ((-1, 1), (1, -1)):
        return None
    if op == "eq":
        return Interval(-c * k, -c * k)
    return Interval(high=-c) if k == 1 else Interval(low=c)


def _chunk(first: Node, second: Node) -> int | None:
    """c of q // c == k // c."""
    if first.op == second.op == "floordiv" and first.args[1] is second.args[1]:
        size = first.args[1]
        names = {first.args[0].value, second.args[0].value}
        are_variables = first.args[0].op == second.args[0].op == "variable"
        if size.is_number and size.value >= 1 and are_variables and names == {"q", "k"}:
            return int(size.value)
    return None


def linear(node: Node) -> tuple[int, int, int] | None:
    """(x, y, z) where an integer node is x * q + y * k + z."""
    if node.kind != "int":
        return None
    if node.op == "variable" and node.value in ("q", "k"):
        return int(node.value == "q"), int(node.value == "k"), 0
    if node.is_number:
        return 0, 0, node.value
    if node.op not in ("add", "sub", "neg", "mul"):
        return None
    terms = [linear(x) for x in node.args]
    if None in terms:
        return None
    if node.op == "mul":
        (first, second) = terms if node.args[0].is_number else reversed(terms)
        return _each(lambda x: first[2] * x, second) if first[:2] == (0, 0) else None  # type: ignore
    if node.op == "neg":
        return _each(lambda x: -x, terms[0])
    return _each((lambda x, y: x + y) if node.op == "add" else (lambda x, y: x - y), *terms)


def _each(function: Callable[..., int], *terms: Any) -> tuple[int, int, int]:
    x, y, z = (function(*column) for column in zip(*terms))
    return x, y, z


def in_rows(lengths: Lengths, width: int, temporaries: int) -> Iterator[slice]:
    """Blocks of rows, so small that temporaries of 8 bytes take less memory than the bool mask.

    Args:
        lengths: of the mask.
        width: its elements in one row.
        temporaries: how many of a block's size there may be.
    """
    budget = max(width * lengths.q, 1 << 20)  # bytes; a small mask is one block
    count = max(1, budget // (8 * max(temporaries, 1) * max(width, 1)))
    for first in range(0, lengths.q, count):
        yield slice(first, min(first + count, lengths.q))


def dense(graph: Graph, root: Node, lengths: Lengths, device: torch.device) -> torch.Tensor:
    """The bool mask of a node: size 1 in each dimension that it does not depend on."""
    shape = lengths.shape(root.depends)
    if "q" not in root.depends:
        return evaluate(graph, root, lengths.variables(device)).expand(shape).contiguous()
    result = torch.empty(shape, dtype=torch.bool, device=device)
    width = shape[0] * shape[1] * shape[3]
    for rows in in_rows(lengths, width, len(ordered(root))):
        result[:, :, rows] = evaluate(graph, root, lengths.variables(device, rows))
    return result


def dense_interval(interval: Interval, lengths: Lengths, device: torch.device) -> torch.Tensor:
    """The (1, 1, q, k) mask of an interval that no option of `attention` is."""
    graph = Graph(device)
    q, k = graph.variable("q"), graph.variable("k")
    distance = graph.apply("sub", k, q)
    root = graph.number(True)
    if interval.low is not None:
        above = graph.apply("ge", distance, graph.number(interval.low))
        root = graph.apply("and", root, above)
    if interval.high is not None:
        below = graph.apply("le", distance, graph.number(interval.high))
        root = graph.apply("and", root, below)
    if interval.chunk is not None:
        size = graph.number(interval.chunk)
        chunks = (graph.apply("floordiv", x, size) for x in (q, k))
        root = graph.apply("and", root, graph.apply("eq", *chunks))
    return dense(graph, root, lengths, device)


def options(interval: Interval, lengths: Lengths) -> tuple[int, dict[str, Any]] | None:
    """How many of the keys, and options of `attention` for them, are this interval.

    `attention` counts from key q + Sk - Sq: where fewer keys are visible than that, the others are
    cut off. None: there are no such options.
    """
    keys = lengths.k
    if interval.high is not None and interval.high < keys - lengths.q:
        keys = lengths.q + interval.high
    offset = keys - lengths.q
    if keys < 1 or (interval.chunk is not None and offset != 0):
        return None
    right = left = None
    if interval.high is not None and interval.high < keys - 1:
        right = interval.high - offset
    if interval.low is not None and interval.low > 1 - lengths.q:
        left = offset - interval.low
        if left < 0:
            return None
    found: dict[str, Any] = {}
    if right == 0:
        found["causal"] = True
        right = None
    if left is not None or right is not None:
        found["window"] = (left, right)
    if interval.chunk is not None and interval.chunk < max(keys, lengths.q):
        found["attention_chunk"] = interval.chunk
    return keys, found
