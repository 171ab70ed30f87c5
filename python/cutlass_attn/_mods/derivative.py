"""The derivative of a mod by the chain rule, as nodes of its graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .graph import Graph, Node, ordered
from .operations import OPERATIONS
from .symbols import Symbol

_STEEP = {"pow", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tan"}


@dataclass(frozen=True)
class Derivative:
    """Gradients of a score_mod's result."""

    score: Node  # d result / d score
    loads: tuple[tuple[Node, Node], ...]  # elements of captured tensors, d result / d element
    # Whether d result / d score may be large where the score is not, as that of 1 / score.
    is_steep: bool


def derivative(graph: Graph, captures: Collection[int] = ()) -> Derivative:
    """Adds the derivative of the graph's result to the graph.

    Args:
        graph: of a score_mod.
        captures: indices of the captured tensors whose elements' derivatives are wanted.
    """
    root = graph.result
    order = ordered(root)
    wanted: set[Node] = set()
    for node in order:
        is_source = node.value == "score" if node.op == "variable" else False
        is_source |= node.op == "load" and node.value in captures
        if node.kind == "float" and (is_source or not wanted.isdisjoint(node.args)):
            wanted.add(node)
    gradients: dict[Node, Symbol] = {root: Symbol(graph, graph.number(1.0))}
    for node in reversed(order):
        if node not in wanted or node not in gradients or node.op in ("variable", "load"):
            continue
        args = [Symbol(graph, x) for x in node.args]
        of = OPERATIONS[node.op].derivative(gradients[node], Symbol(graph, node), *args)
        for x, gradient in zip(node.args, of):
            if gradient is not None and x in wanted:
                gradients[x] = gradients[x] + gradient if x in gradients else gradient
    zero = Symbol(graph, graph.number(0.0))
    score = gradients.get(graph.variable("score"), zero).node
    loads = [x for x in order if x.op == "load" and x in wanted and x in gradients]
    of_loads = tuple((x, gradients[x].node) for x in loads)
    return Derivative(score, of_loads, any(map(_is_steep, order)))


def _is_steep(node: Node) -> bool:
    *_, last = node.args or (node,)
    if node.op == "div":
        return "score" in last.depends
    if node.op == "pow" and last.is_number and last.value >= 1:
        return False
    return node.op in _STEEP and "score" in node.depends
