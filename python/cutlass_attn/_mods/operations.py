"""The operations of a mod: for each one its C++ text, its derivative and its evaluation by torch.

Kinds stand for dtypes: "bool", "int" (int64 in torch; in C++ int, and int64_t where a captured
int64 takes part) and "float" (float32). Before an operation its arguments are converted to one
kind, so no operation mixes kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("bool", "int", "float")  # in the order of promotion


@dataclass(frozen=True)
class Operation:
    """One line of the table below."""

    cpp: str  # of the arguments {0}, {1}, ...; helpers are in `cpp.PRELUDE`
    evaluate: Callable[..., torch.Tensor]
    # From the gradient of the result, the result and the arguments, all of them symbols: the
    # gradient of each argument, None where it has none.
    derivative: Callable[..., tuple[Any, ...]]
    takes: str | None = None  # kind of the arguments; None: the highest of theirs
    gives: str | None = None  # kind of the result; None: that of the arguments
    lowest: str = "bool"  # the lowest kind that it takes, and the highest
    highest: str = "float"


def _flat(_g: Any, _y: Any, *args: Any) -> tuple[None, ...]:
    """The derivative of a function that is constant almost everywhere, or not of type float."""
    return (None,) * len(args)


def _float(
    cpp: str, evaluate: Callable[..., torch.Tensor], derivative: Callable[..., tuple[Any, ...]]
) -> Operation:
    return Operation(cpp, evaluate, derivative, takes="float")


def _comparison(cpp: str, evaluate: Callable[..., torch.Tensor]) -> Operation:
    return Operation(cpp, evaluate, _flat, gives="bool")


def _bits(cpp: str, evaluate: Callable[..., torch.Tensor], lowest: str = "bool") -> Operation:
    return Operation(cpp, evaluate, _flat, lowest=lowest, highest="int")


def _tie(g: Any, first: Any, second: Any) -> Any:
    """The gradient of an argument that is chosen where first < second; ties share it, as in
    torch."""
    return torch.where(first == second, g * 0.5, torch.where(first < second, g, 0.0))


def _power(g: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    of_base = torch.where(b == 0.0, 0.0, g * b * a ** (b - 1.0))
    return of_base, torch.where((a == 0.0) & (b >= 0.0), 0.0, g * y * torch.log(a))


OPERATIONS: dict[str, Operation] = {
    "add": Operation("({0} + {1})", torch.add, lambda g, y, a, b: (g, g)),
    "sub": Operation("({0} - {1})", torch.sub, lambda g, y, a, b: (g, -g), lowest="int"),
    "mul": Operation("({0} * {1})", torch.mul, lambda g, y, a, b: (g * b, g * a)),
    "div": _float("({0} / {1})", torch.div, lambda g, y, a, b: (g / b, -(g * y) / b)),
    # Python's: the quotient is rounded down, the remainder has the divisor's sign.
    "floordiv": Operation("floor_div({0}, {1})", torch.floor_divide, _flat, lowest="int"),
    "mod": Operation(
        "floor_mod({0}, {1})",
        torch.remainder,
        lambda g, y, a, b: (g, -g * torch.floor(a / b)),
        lowest="int",
    ),
    "fmod": Operation(  # the remainder has the dividend's sign
        "fmodf({0}, {1})",
        torch.fmod,
        lambda g, y, a, b: (g, -g * torch.trunc(a / b)),
        lowest="float",
    ),
    "neg": Operation("(-{0})", torch.neg, lambda g, y, a: (-g,), lowest="int"),
    "abs": Operation(
        "absolute({0})", torch.abs, lambda g, y, a: (g * torch.sign(a),), lowest="int"
    ),
    "sign": Operation("sign({0})", torch.sign, _flat, lowest="int"),
    "min": Operation(
        "minimum({0}, {1})", torch.minimum, lambda g, y, a, b: (_tie(g, a, b), _tie(g, b, a))
    ),
    "max": Operation(
        "maximum({0}, {1})", torch.maximum, lambda g, y, a, b: (_tie(g, b, a), _tie(g, a, b))
    ),
    "pow": _float("powf({0}, {1})", torch.pow, _power),
    "lt": _comparison("({0} < {1})", torch.lt),
    "le": _comparison("({0} <= {1})", torch.le),
    "gt": _comparison("({0} > {1})", torch.gt),
    "ge": _comparison("({0} >= {1})", torch.ge),
    "eq": _comparison("({0} == {1})", torch.eq),
    "ne": _comparison("({0} != {1})", torch.ne),
    "and": _bits("({0} & {1})", torch.bitwise_and),
    "or": _bits("({0} | {1})", torch.bitwise_or),
    "xor": _bits("({0} ^ {1})", torch.bitwise_xor),
    "not": Operation("(!{0})", torch.logical_not, _flat, takes="bool"),
    "invert": _bits("(~{0})", torch.bitwise_not, lowest="int"),
    "shl": _bits("({0} << {1})", torch.bitwise_left_shift, lowest="int"),
    "shr": _bits("({0} >> {1})", torch.bitwise_right_shift, lowest="int"),
    # The first argument is a bool; the kinds are those of the other two.
    "where": Operation(
        "({0} ? {1} : {2})",
        torch.where,
        lambda g, y, c, a, b: (None, torch.where(c, g, 0.0), torch.where(c, 0.0, g)),
    ),
    "to_bool": Operation("({0} != 0)", lambda a: a.to(torch.bool), _flat, gives="bool"),
    "to_int": Operation("int({0})", lambda a: a.to(torch.int64), _flat, gives="int"),
    # No gradient: only bool and int are converted to float.
    "to_float": Operation("float({0})", lambda a: a, _flat, gives="float"),
    "exp": _float("expf({0})", torch.exp, lambda g, y, a: (g * y,)),
    "exp2": _float("exp2f({0})", torch.exp2, lambda g, y, a: (g * y * math.log(2),)),
    "expm1": _float("expm1f({0})", torch.expm1, lambda g, y, a: (g * (y + 1.0),)),
    "log": _float("logf({0})", torch.log, lambda g, y, a: (g / a,)),
    "log2": _float("log2f({0})", torch.log2, lambda g, y, a: (g / (a * math.log(2)),)),
    "log1p": _float("log1pf({0})", torch.log1p, lambda g, y, a: (g / (a + 1.0),)),
    "sqrt": _float("sqrtf({0})", torch.sqrt, lambda g, y, a: (g / (2.0 * y),)),
    "rsqrt": _float("(1.0f / sqrtf({0}))", torch.rsqrt, lambda g, y, a: (-0.5 * g * y * y * y,)),
    "sigmoid": _float("sigmoid({0})", torch.sigmoid, lambda g, y, a: (g * (1.0 - y) * y,)),
    "tanh": _float("tanhf({0})", torch.tanh, lambda g, y, a: (g * (1.0 - y * y),)),
    "sin": _float("sinf({0})", torch.sin, lambda g, y, a: (g * torch.cos(a),)),
    "cos": _float("cosf({0})", torch.cos, lambda g, y, a: (-g * torch.sin(a),)),
    "tan": _float("tanf({0})", torch.tan, lambda g, y, a: (g * (y * y + 1.0),)),
    "atan": _float("atanf({0})", torch.atan, lambda g, y, a: (g / (a * a + 1.0),)),
    "erf": _float(
        "erff({0})",
        torch.erf,
        lambda g, y, a: (g * (2.0 / math.sqrt(math.pi)) * torch.exp(-(a * a)),),
    ),
    "floor": _float("floorf({0})", torch.floor, _flat),
    "ceil": _float("ceilf({0})", torch.ceil, _flat),
    "round": _float("rintf({0})", torch.round, _flat),  # halves to even
    "trunc": _float("truncf({0})", torch.trunc, _flat),
}
