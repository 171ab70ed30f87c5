"""Translates a score_mod to options of `attention`: scale, softcap, ALiBi, bias, mask."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from .graph import Graph, Node, UnsupportedModError, evaluate, in_float32, loads
from .masks import Interval, Lengths, linear

# Terms without the score: coefficient of each product of a node that depends on q or k with a
# factor that does not, None for either where it is 1.
Terms = dict[tuple[Node | None, Node | None], float]
# The same, by the first of both: {basis: {factor: coefficient}}.
Groups = dict[Node | None, dict[Node | None, float]]

_LARGEST = 1 << 24  # elements of a bias that is made of distances k - q
_TAKEN = (
    "score_mod may scale the score by numbers, cap it by c * tanh(score / c), add terms, and mask "
    "it by torch.where(visible, score, -float('inf'))"
)


@dataclass
class Score:
    """score_mod(score) = capped(scale * score) + terms, where `mask` is True, -inf elsewhere."""

    scale: float = 1.0
    softcap: float = 0.0
    terms: Terms = field(default_factory=dict)
    masks: list[Node] = field(default_factory=list)


def split(graph: Graph) -> Score:
    """The score_mod's parts, from the outermost operation inwards.

    Raises:
        UnsupportedModError: it has other parts.
    """
    result = Score()
    node = graph.result
    if "score" not in node.depends:
        _refuse("its result does not depend on score")
    factor = 1.0
    while node.op != "variable":
        inner = _inner(node)
        others = [x for x in node.args if x is not inner]
        if node.op == "tanh":
            result.softcap = abs(factor)
            factor *= _factor(inner)
            break
        if node.op in ("add", "sub"):
            is_negated = node.op == "sub" and inner is node.args[0]
            _expand(graph, others[0], -factor if is_negated else factor, result.terms)
            if node.op == "sub" and inner is node.args[1]:
                factor = -factor
        elif node.op == "where":
            condition, *branches = node.args
            other = branches[1] if branches[0] is inner else branches[0]
            if inner is condition or not (other.is_number and other.value == -math.inf):
                _refuse("torch.where chooses between the score and something else than -inf")
            if factor < 0:
                _refuse("a masked score is negated")
            is_first = inner is branches[0]
            result.masks.append(condition if is_first else graph.apply("not", condition))
        else:
            factor *= _own_factor(node, inner)
        node = inner
    if factor == 0:
        _refuse("the score is multiplied by 0")
    if not all(math.isfinite(in_float32(x)) for x in (factor, *result.terms.values())):
        _refuse("a number is not finite in float32")
    result.scale = factor
    return result


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModError(
        f"score_mod is not one that a kernel computes: {what}. {_TAKEN}. "
        "A term that depends on both q_idx and kv_idx must be read from a tensor, as in "
        "score + bias[h, q_idx, kv_idx]"
    )


def _inner(node: Node) -> Node:
    """The argument that depends on the score."""
    inner = {x for x in node.args if "score" in x.depends}
    if len(inner) > 1 or node.args.count(next(iter(inner))) > 1:
        _refuse(f"the score is used more than once, in {node.op}")
    return inner.pop()


def _own_factor(node: Node, inner: Node) -> float:
    """The number that a node multiplies its argument by."""
    if node.op == "neg":
        return -1.0
    other = next((x for x in node.args if x is not inner), None)
    if node.op == "mul" or (node.op == "div" and inner is node.args[0]):
        if other is not None and other.is_number:
            value = float(other.value)
            if node.op == "mul":
                return value
            return 1 / value if value else math.inf
        _refuse(f"{node.op} of the score and something else than a Python number")
    _refuse(f"{node.op} of the score")


def _factor(node: Node) -> float:
    """The factor of the score within tanh."""
    factor = 1.0
    while node.op != "variable":
        inner = _inner(node)
        if node.op not in ("mul", "div", "neg"):
            _refuse(f"{node.op} within tanh")
        factor *= _own_factor(node, inner)
        node = inner
    return factor


def _expand(graph: Graph, node: Node, coefficient: float, terms: Terms) -> None:
    """Adds coefficient * node to the terms."""
    for (basis, factor), value in _terms(graph, node).items():
        key = basis, factor
        terms[key] = terms.get(key, 0.0) + coefficient * value


def _terms(graph: Graph, node: Node) -> Terms:
    if node.is_number:
        return {(None, None): float(node.value)}
    if not node.depends & {"q", "k"}:
        return {(None, node): 1.0}
    result: Terms = {}
    if node.op in ("add", "sub"):
        _expand(graph, node.args[0], 1.0, result)
        _expand(graph, node.args[1], -1.0 if node.op == "sub" else 1.0, result)
        return result
    if node.op == "neg":
        _expand(graph, node.args[0], -1.0, result)
        return result
    if node.op == "to_float" and node.args[0].kind == "int":
        return _terms(graph, node.args[0])
    if node.op in ("mul", "div"):
        first, second = node.args
        if node.op == "mul" and first.depends.isdisjoint("qk"):
            first, second = second, first
        if second.depends.isdisjoint("qk"):
            return _multiplied(graph, _terms(graph, first), second, node.op)
    return {(node, None): 1.0}


def _multiplied(graph: Graph, terms: Terms, by: Node, op: str) -> Terms:
    if by.is_number:
        value = float(by.value)
        factor = value if op == "mul" else 1 / value if value else math.inf
        return {key: coefficient * factor for key, coefficient in terms.items()}
    one = graph.number(1.0)
    return {
        (basis, graph.apply(op, one if own is None else own, by)): coefficient
        for (basis, own), coefficient in terms.items()
    }


@dataclass
class Operands:
    """A score_mod's terms as operands of `attention`."""

    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    lse_shift: torch.Tensor | float = 0.0  # of terms that are one number for each row


def operands(
    graph: Graph, terms: Terms, lengths: Lengths, visible: Interval, query: torch.Tensor
) -> Operands:
    """The terms for a call.

    Args:
        graph: of the score_mod.
        terms: its terms.
        lengths: of the call; keys are those that `attention` gets.
        visible: bounds of the visible keys.
        query: for its dtype and device.

    Raises:
        UnsupportedModError: a term depends on q and k by something else than a captured tensor.
        ValueError: a captured tensor is smaller than the call.
    """
    result = Operands()
    of_call = _Call(graph, lengths, query)
    groups: Groups = {}
    for (basis, factor), coefficient in terms.items():
        if coefficient != 0:
            groups.setdefault(basis, {})[factor] = coefficient
    shift = of_call.alibi(groups, visible, result)
    if number := groups.get(None, {}).pop(None, 0.0):
        constant = shift.setdefault(None, {})
        constant[None] = constant.get(None, 0.0) + number
    q, k = graph.variable("q"), graph.variable("k")
    parts = []
    if _is_distance(groups, q, k) and (exact := of_call.distances(groups[k])) is not None:
        del groups[q], groups[k]
        parts.append(exact)
    if q in groups:
        shift[q] = groups.pop(q)
    parts += [of_call.bias(basis, factors) for basis, factors in groups.items() if factors]
    if parts:
        bias = parts[0]
        for x in parts[1:]:
            bias = bias.to(of_call.real) + x.to(of_call.real)
        result.bias = bias if bias.dtype in (query.dtype, torch.float32) else bias.float()
    for basis, own in shift.items():
        result.lse_shift = result.lse_shift + of_call.value(basis, own)[..., 0]
    return result


def _is_distance(groups: Groups, q: Node, k: Node) -> bool:
    """Whether the terms of q and k are one of k - q."""
    return k in groups and groups.get(q) == {factor: -x for factor, x in groups[k].items()}


@dataclass
class _Call:
    graph: Graph
    lengths: Lengths
    query: torch.Tensor

    @property
    def real(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def value(self, basis: Node | None, factors: dict[Node | None, float]) -> torch.Tensor:
        """The sum of coefficient * factor, times basis; (b, h, q, k), each 1 or its size."""
        graph = self.graph
        total: Node | None = None
        for factor, coefficient in factors.items():
            number = graph.number(float(coefficient))
            term = number if factor is None else graph.apply("mul", number, factor)
            total = term if total is None else graph.apply("add", total, term)
        assert total is not None
        if basis is not None:
            total = graph.apply("mul", total, basis)
        variables = self.lengths.variables(self.query.device)
        value = evaluate(graph, graph.converted(total, "float"), variables, self.real)
        return value.expand(self.lengths.shape(total.depends))

    def alibi(
        self,
        groups: Groups,
        visible: Interval,
        result: Operands,
    ) -> Groups:
        """Moves ALiBi from the groups to slopes. Returns terms of rows, for the log-sum-exp."""
        offset, low, high = self.lengths.k - self.lengths.q, visible.low, visible.high
        slopes: dict[Node | None, float] = {}
        shift: Groups = {}
        q, k = self.graph.variable("q"), self.graph.variable("k")
        for basis in list(groups):
            distance = None if basis is None else _distance(basis)
            if distance is None:
                continue
            factors = groups[basis]
            if distance == -offset and not self._need_gradient(factors):
                for factor, coefficient in groups.pop(basis).items():
                    slopes[factor] = slopes.get(factor, 0.0) - coefficient
            elif high is not None and high <= -distance:  # then it is q - k - distance
                for factor, coefficient in groups.pop(basis).items():
                    for of, number in ((q, 1), (k, -1), (None, -distance)):
                        if number:
                            own = groups.setdefault(of, {})
                            own[factor] = own.get(factor, 0.0) + number * coefficient
            elif self._need_gradient(factors):
                raise UnsupportedModError(
                    "a captured tensor that requires a gradient multiplies abs(q_idx - kv_idx), "
                    "but ALiBi slopes have no gradient: detach it, or pass bias="
                )
        # |k - (q + offset)| is q + offset - k if no key after the diagonal is visible, and
        # k - (q + offset) if none before it is.
        is_after = low is not None and low >= offset
        sign = 1 if high is not None and high <= offset else -1 if is_after else 0
        if sign and _is_distance(groups, q, k) and not self._need_gradient(groups[k]):
            del groups[q]
            signed = groups.pop(k)
            for factor, coefficient in signed.items():
                slopes[factor] = slopes.get(factor, 0.0) + sign * coefficient
            if offset:
                shift[None] = {factor: offset * x for factor, x in signed.items()}
        if slopes:
            value = self.value(None, slopes).detach().to(self.real)[:, :, 0, 0]
            value = value.expand(-1, self.lengths.h)
            result.alibi_slopes = (value[0] if len(value) == 1 else value).contiguous()
        return shift

    def distances(self, factors: dict[Node | None, float]) -> torch.Tensor | None:
        """Factors times k - q for each row, if that is not too large. A bias of the keys alone is
        rounded by the size of k: near key 1024 by 6e-5, which a result in 16 bits does not show."""
        if self.query.dtype.itemsize < 4:
            return None
        q, k = self.graph.variable("q"), self.graph.variable("k")
        distance = self.graph.apply("sub", k, q)
        depends = distance.depends.union(*(x.depends for x in factors if x is not None))
        if math.prod(self.lengths.shape(depends)) > _LARGEST:
            return None
        return self.value(distance, factors)

    def _need_gradient(self, factors: dict[Node | None, float]) -> bool:
        read = loads(*(x for x in factors if x is not None))
        return any(self.graph.captures[x.value].requires_grad for x in read)

    def bias(self, basis: Node | None, factors: dict[Node | None, float]) -> torch.Tensor:
        table = basis
        while table is not None and table.op == "to_float":
            table = table.args[0]
        view = self._view(table) if table is not None and table.op == "load" else None
        if view is not None:
            if factors == {None: 1.0}:
                if not view.dtype.is_floating_point:
                    return view.to(self.real)
                # A tensor alone is cast as SDPA's attn_mask is; numbers and sums are not.
                device = self.query.device.type
                is_cast = device != "meta" and torch.is_autocast_enabled(device)
                return view.to(self.query.dtype) if is_cast else view
            return view * self.value(None, factors)
        if basis is not None and {"q", "k"} <= basis.depends:
            _refuse("a term depends on both q_idx and kv_idx")
        return self.value(basis, factors)

    def _view(self, load: Node) -> torch.Tensor | None:
        """The captured tensor as (b, h, q, k), if it is indexed by these variables and numbers."""
        tensor = self.graph.captures[load.value]
        if tensor.device != self.query.device:
            raise ValueError(
                f"a captured tensor of shape {tuple(tensor.shape)} is on {tensor.device}; "
                f"query is on {self.query.device}"
            )
        shape = tuple(tensor.shape)
        names: list[str] = []
        for x in load.args:
            dim = len(names)
            if x.is_number:  # as `graph.evaluate` reads it
                size = tensor.shape[dim]
                at = x.value + size if x.value < 0 else x.value
                tensor = tensor.select(dim, min(max(at, 0), size - 1))
                continue
            if x.op != "variable" or x.value in names:
                return None
            size = getattr(self.lengths, x.value)
            if tensor.shape[dim] < size:
                raise ValueError(
                    f"a captured tensor of shape {shape} has {tensor.shape[dim]} entries in the "
                    f"dimension of {x.value}; the call has {size}"
                )
            tensor = tensor.narrow(dim, 0, size)
            names.append(x.value)
        order = [x for x in "bhqk" if x in names]
        tensor = tensor.permute([names.index(x) for x in order])
        return tensor.reshape([getattr(self.lengths, x) if x in order else 1 for x in "bhqk"])


def _distance(basis: Node) -> int | None:
    """d of abs(k - q + d), or of abs(q - k - d)."""
    while basis.op == "to_float":
        basis = basis.args[0]
    if basis.op != "abs":
        return None
    inner = basis.args[0]
    while inner.op == "to_float":
        inner = inner.args[0]
    x = linear(inner)
    if x is None or x[0] + x[1] != 0 or abs(x[1]) != 1:
        return None
    return x[2] * x[1]
