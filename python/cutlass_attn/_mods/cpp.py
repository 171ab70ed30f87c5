"""The C++ of a mod: a struct with its captured tensors and numbers, and a function of one logit."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .derivative import Derivative
from .graph import Graph, Node, UnsupportedModError, in_float32, ordered
from .masks import linear
from .operations import OPERATIONS

# C++ functions that the generated code calls. Integers are int, or int64_t if a captured int64
# takes part. An integer divided by 0 is 0.
PRELUDE = """\
CA_HOST_DEVICE int32_t saturated(int32_t i) { return i; }
CA_HOST_DEVICE int32_t saturated(int64_t i) {
  return i < -2147483647 ? -2147483647 : i > 2147483647 ? 2147483647 : int32_t(i);
}
template <class T, int kRank>
struct Captured {
  T const* data;
  int64_t stride[kRank > 0 ? kRank : 1];  // in elements
  int32_t size[kRank > 0 ? kRank : 1];

  // Address of an element. Negative indices wrap around, others beyond the end give the last entry.
  template <class... Index>
  CA_HOST_DEVICE T const* at(Index... index) const {
    int32_t const given[] = {saturated(index)..., 0};
    int64_t offset = 0;
    for (int r = 0; r < kRank; ++r) {
      int32_t i = given[r] < 0 ? given[r] + size[r] : given[r];
      i = i < 0 ? 0 : i < size[r] ? i : size[r] - 1;
      offset += i * stride[r];
    }
    return data + offset;
  }
  template <class... Index>
  CA_HOST_DEVICE T operator()(Index... index) const {
    return *at(index...);
  }
};

template <class Int>
CA_HOST_DEVICE Int floor_div(Int a, Int b) {
  if (b == 0) return 0;
  Int const quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
template <class Int>
CA_HOST_DEVICE Int floor_mod(Int a, Int b) {
  if (b == 0) return 0;
  Int const rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
CA_HOST_DEVICE float floor_mod(float a, float b) {
  float const rest = fmodf(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
CA_HOST_DEVICE float floor_div(float a, float b) {
  if (b == 0) return a / b;
  float const quotient = (a - floor_mod(a, b)) / b;
  if (quotient == 0) return copysignf(0.0f, a / b);
  float const down = floorf(quotient);
  return quotient - down > 0.5f ? down + 1 : down;
}
template <class T>
CA_HOST_DEVICE T absolute(T x) {
  return x < 0 ? -x : x;
}
template <class T>
CA_HOST_DEVICE T sign(T x) {
  return T((x > 0) - (x < 0));
}
// NaN if one of the two is, as in torch.
template <class T>
CA_HOST_DEVICE T minimum(T a, T b) {
  return a < b || a != a ? a : b;
}
template <class T>
CA_HOST_DEVICE T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}
CA_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
"""

_TYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
    torch.float32: "float",
    torch.float64: "double",
}
_NAMES = {"bool": "bool", "int": "int", "float": "float"}
_ARGUMENTS = {"score": "float score", "b": "int b", "h": "int h", "q": "int q", "k": "int k"}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# Numbers that are written into the code, because compilers generate shorter code for them.
_LITERALS = (0, 1, math.inf, -math.inf)


@dataclass(frozen=True)
class Source:
    """The code, which does not depend on sizes, strides and numbers, and the values of members."""

    text: str
    captures: tuple[torch.Tensor, ...]  # members t0, t1, ...
    sums: tuple[int, ...]  # members s0, s1, ...: gradients of these captures of the graph
    ints: tuple[int, ...]  # members i[0], i[1], ...
    floats: tuple[float, ...]  # members f[0], f[1], ...


@dataclass
class _Members:
    captures: list[torch.Tensor]
    sums: list[int]
    ints: list[int]
    floats: list[float]


def source(
    graph: Graph, functions: Mapping[str, Node], name: str = "Mod", of: Derivative | None = None
) -> Source:
    """The struct `name`, with a member function for each of the nodes.

    All take (score, b, h, q, k), those of masks (b, h, q, k). Two mods with one graph have one
    text, whatever their numbers are, so one compiled kernel serves both.

    of: for a kernel, which asks for all members that core/terms/score_mod.hpp names.
    """
    own = _Members([], [], [], [])
    body = "".join(
        _function(graph, own, f"{_NAMES[root.kind]} {key}", _arguments(root), [root])
        for key, root in functions.items()
    )
    if of is not None:
        body += _derivative(graph, own, of)
    members = [
        f"  Captured<{_TYPES[x.dtype]}, {x.dim()}> t{j};\n" for j, x in enumerate(own.captures)
    ]
    members += [
        f"  Captured<float, {graph.captures[x].dim()}> s{j};\n" for j, x in enumerate(own.sums)
    ]
    members += [f"  int32_t i[{len(own.ints)}];\n"] if own.ints else []
    members += [f"  float f[{len(own.floats)}];\n"] if own.floats else []
    text = f"struct {name} {{\n{''.join(members)}{body}}};\n"
    return Source(text, *(tuple(x) for x in (own.captures, own.sums, own.ints, own.floats)))


def packed(source: Source, sums: Sequence[torch.Tensor] = ()) -> bytes:
    """The struct's members as they lie in memory. sums: float32 tensors, for source.sums."""
    result = b""
    for x in (*source.captures, *sums):
        if not all(0 < n < 2**31 for n in x.shape):
            raise UnsupportedModError(
                f"a captured tensor has shape {tuple(x.shape)}; kernels read sizes of 1 to 2^31 - 1"
            )
        rank = max(x.dim(), 1)
        own = struct.pack(
            f"=Q{rank}q{rank}i",
            x.data_ptr(),
            *(tuple(x.stride()) or (0,)),
            *(tuple(x.shape) or (1,)),
        )
        result += own + b"\0" * (-len(own) % 8)
    return result + struct.pack(
        f"={len(source.ints)}i{len(source.floats)}f", *source.ints, *source.floats
    )


def _arguments(root: Node) -> tuple[str, ...]:
    names = ("score", "b", "h", "q", "k")
    return names if root.kind == "float" else names[1:]


def _derivative(graph: Graph, own: _Members, of: Derivative) -> str:
    """What kernels ask about grad(), and the members for gradients of captured tensors."""
    names = ("score", "b", "h", "q", "k")
    spreads, values, addresses = [], "", ""
    for j, (load, value) in enumerate(of.loads):
        if load.value not in own.sums:
            own.sums.append(load.value)
        spreads.append(_spread(load))
        nth = f"Nth<{j}>"
        values += _function(graph, own, "float slope", (nth, *names), [value])
        at = f"const_cast<float*>(s{own.sums.index(load.value)}.at({{}}))"
        addresses += _function(graph, own, "float* sum", (nth, *names), load.args, at)
    # Where the score is neither in slopes and indices nor changed but by a term that is added.
    is_added = of.score.is_number and of.score.value == 1.0
    reads_score = bool(of.loads) and (
        not is_added or any("score" in x.depends for load, value in of.loads for x in (load, value))
    )
    constants = (
        f"  static constexpr bool kGradIsSteep = {str(of.is_steep).lower()};\n"
        f"  static constexpr int kSums = {len(of.loads)};\n"
        f"  static constexpr bool kSumsReadScore = {str(reads_score).lower()};\n"
    )
    if not of.loads:
        return constants
    return (
        f"{constants}"
        "  enum Spread { kEach, kPerHead, kPerQuery, kPerKey, kPerDistance };\n"
        f"  static constexpr Spread kSpread[] = {{{', '.join(spreads)}}};\n"
        f"  template <int>\n  struct Nth {{}};\n{values}{addresses}"
    )


def _spread(load: Node) -> str:
    """Which logits of a head read one element of a captured tensor."""
    if "score" in load.depends:
        return "kEach"
    dims = load.depends & {"q", "k"}
    if len(dims) < 2:
        return "kPerQuery" if "q" in dims else "kPerKey" if dims else "kPerHead"
    of_distance: set[Node] = set()  # nodes that depend on q and k only by q - k
    for node in ordered(load):
        is_comparison = node.op in _COMPARISONS
        terms = [linear(x) for x in (node.args if is_comparison else (node,))]
        sums = {None if x is None else x[0] + x[1] for x in terms}
        is_linear = sums == {0} or (is_comparison and len(sums) == 1 and None not in sums)
        has_known = bool(node.args) and of_distance.issuperset(node.args)
        if is_linear or has_known or node.depends.isdisjoint("qk"):
            of_distance.add(node)
    return "kPerDistance" if load in of_distance else "kEach"


def _function(
    graph: Graph,
    own: _Members,
    name: str,
    arguments: Sequence[str],
    roots: Sequence[Node],
    result: str = "{}",
) -> str:
    """A function that returns `result` of the nodes."""
    order = ordered(*roots)
    # Exponents, shifts and integer divisors are part of the text, too: a division by a number that
    # the compiler does not know is 20 instructions.
    constant = {x.args[1] for x in order if x.op in ("pow", "shl", "shr")}
    constant |= {x.args[1] for x in order if x.op in ("floordiv", "mod") and x.kind == "int"}
    text: dict[Node, str] = {}
    wide: set[Node] = set()  # integers that are int64_t
    lines: list[str] = []
    for node in order:
        if node.op == "variable":
            text[node] = node.value
            continue
        if node.is_number:
            text[node] = _number(node, node in constant, own.ints, own.floats)
            continue
        args = [text[x] for x in node.args]
        kind = _NAMES[node.kind]
        if node.op == "load":
            tensor = graph.captures[node.value]
            if tensor.dtype not in _TYPES:
                allowed = ", ".join(str(x).removeprefix("torch.") for x in _TYPES)
                raise UnsupportedModError(
                    f"a captured tensor has dtype {tensor.dtype}; kernels read {allowed}"
                )
            slot = next((j for j, x in enumerate(own.captures) if x is tensor), len(own.captures))
            if slot == len(own.captures):
                own.captures.append(tensor)
            is_wide = tensor.dtype == torch.int64
        else:
            is_wide = not wide.isdisjoint(node.args)
            if is_wide:
                args = [
                    f"int64_t({y})" if x.kind == "int" and x not in wide else y
                    for x, y in zip(node.args, args)
                ]
        if is_wide and node.kind == "int":
            wide.add(node)
            kind = "int64_t"
        if node.op == "load":
            expression = f"{kind}(t{slot}({', '.join(args)}))"
        else:
            expression = OPERATIONS[node.op].cpp.format(*args)
        text[node] = f"v{len(lines)}"
        lines.append(f"    {kind} const {text[node]} = {expression};\n")
    read = {x.value for x in order if x.op == "variable"}
    given = (
        x if x not in _ARGUMENTS else _ARGUMENTS[x] if x in read else _ARGUMENTS[x].split()[0]
        for x in arguments
    )
    return (
        f"  CA_HOST_DEVICE {name}({', '.join(given)}) const {{\n"
        f"{''.join(lines)}    return {result.format(', '.join(text[x] for x in roots))};\n  }}\n"
    )


def _number(node: Node, is_constant: bool, ints: list[int], floats: list[float]) -> str:
    value = node.value
    if node.kind == "bool":
        return str(value).lower()
    if node.kind == "int":
        if not -(2**31) <= value < 2**31:
            raise UnsupportedModError(f"the integer {value} is beyond 32 bits")
        if is_constant or value in _LITERALS:
            return f"({value})"
        return f"i[{_slot(ints, value)}]"
    value = in_float32(value)
    if math.isinf(value):
        return "(-__builtin_huge_valf())" if value < 0 else "__builtin_huge_valf()"
    if value in _LITERALS or (is_constant and math.isfinite(value)):
        return f"({float(value)!r}f)"
    return f"f[{_slot(floats, value)}]"


def _slot(numbers: list[int] | list[float], value: int | float) -> int:
    text = [repr(x) for x in numbers]
    if repr(value) not in text:
        numbers.append(value)  # type: ignore[arg-type]
        return len(text)
    return text.index(repr(value))
