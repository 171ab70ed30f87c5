"""The functions of torch and operators of Python that symbols support."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .graph import UnsupportedModError
from .symbols import FUNCTIONS, Row, Symbol, apply, called, lifted

_BINARY = {  # names of functions, methods and operators: operation
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "mul": "mul",
    "multiply": "mul",
    "div": "div",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "floor_divide": "floordiv",
    "floordiv": "floordiv",
    "remainder": "mod",
    "mod": "mod",
    "lshift": "shl",
    "bitwise_left_shift": "shl",
    "rshift": "shr",
    "bitwise_right_shift": "shr",
    "and": "and",
    "bitwise_and": "and",
    "or": "or",
    "bitwise_or": "or",
    "xor": "xor",
    "bitwise_xor": "xor",
    "minimum": "min",
    "maximum": "max",
    "lt": "lt",
    "less": "lt",
    "le": "le",
    "less_equal": "le",
    "gt": "gt",
    "greater": "gt",
    "ge": "ge",
    "greater_equal": "ge",
    "eq": "eq",
    "ne": "ne",
    "not_equal": "ne",
}
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}
_UNARY = [
    "abs",
    "neg",
    "sign",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "tanh",
    "sin",
    "cos",
    "tan",
    "atan",
    "erf",
]
_ROUNDING = ("floor", "ceil", "round", "trunc")  # of integers nothing
_OPERATORS = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "pow",
]
_COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]


def _binary(op: str) -> Callable[..., Symbol]:
    def function(input: Any, other: Any, *, alpha: Any = 1, out: None = None) -> Symbol:
        if out is not None or (alpha != 1 and op not in ("add", "sub")):
            raise TypeError
        return apply(op, input, other if alpha == 1 else other * alpha)

    return function


def _unary(op: str) -> Callable[..., Symbol]:
    return lambda input: apply(op, input)


def _reverse(function: Callable[..., Symbol]) -> Callable[..., Symbol]:
    return lambda input, other: function(other, input)


def _kind(x: Any) -> str:
    if isinstance(x, Symbol):
        return x.node.kind
    return "bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float"


def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode not in (None, "floor"):
        raise TypeError
    return apply("div" if rounding_mode is None else "floordiv", input, other)


def _pow(input: Any, exponent: Any) -> Symbol:
    if isinstance(exponent, (int, float)) and exponent in (1, 2, 3, 4):
        product = input
        for _ in range(int(exponent) - 1):
            product = product * input
        return product  # as torch computes squares and cubes
    if "float" not in (_kind(input), _kind(exponent)):
        raise UnsupportedModError("an integer power of integers beyond 4 is not supported")
    return apply("pow", input, exponent)


def _where(condition: Any, input: Any, other: Any) -> Symbol:
    return apply("where", condition, input, other)


def _logical(op: str) -> Callable[..., Symbol]:
    return lambda input, other: apply(op, apply_bool(input), apply_bool(other))


def apply_bool(x: Any) -> Any:
    return apply("to_bool", x) if isinstance(x, Symbol) else bool(x)


def _not(input: Any) -> Symbol:
    return apply("not" if input.node.kind == "bool" else "invert", input)


def _rounded(op: str) -> Callable[..., Symbol]:
    return lambda input: input if input.node.kind != "float" else apply(op, input)


def _clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """clamp by `where`, so that the derivative at a bound is 1, as in torch."""
    if min is not None:
        input = _where(input < min, min, input)
    return input if max is None else _where(input > max, max, input)


def _relu(input: Any, inplace: bool = False) -> Symbol:
    return _where(input <= 0, 0, input)


def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Symbol:
    return _where(input > 0, input, input * negative_slope)


def _softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Symbol:
    """softplus without torch's threshold, which is not needed: exp(-abs(x)) does not overflow."""
    x = input * beta
    positive = apply("max", x, 0.0)
    return (positive + apply("log1p", apply("exp", -apply("abs", x)))) / beta


def _gelu(input: Any, approximate: str = "none") -> Symbol:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (input + 0.044715 * (input * input * input))
        return 0.5 * input * (apply("tanh", inner) + 1.0)
    return 0.5 * input * (apply("erf", input * math.sqrt(0.5)) + 1.0)


def _silu(input: Any, inplace: bool = False) -> Symbol:
    return input * apply("sigmoid", input)


def _square(input: Any) -> Symbol:
    return input * input


def _to(input: Any, *args: Any, dtype: Any = None, **_: Any) -> Symbol:
    """Conversion to a dtype. A device is ignored."""
    for x in (dtype, *args):
        if isinstance(x, torch.dtype):
            dtype = x
        elif isinstance(x, (Symbol, torch.Tensor)):
            dtype = x.dtype
    kind = {
        None: None,
        torch.bool: "bool",
        torch.int32: "int",
        torch.int64: "int",
        torch.float32: "float",
        torch.float64: "float",
    }.get(dtype, "")
    if kind == "":
        raise UnsupportedModError(f"a conversion to {dtype} is not supported: floats are float32")
    return input if kind is None else apply(f"to_{kind}", input)


def _converting(dtype: torch.dtype) -> Callable[..., Symbol]:
    return lambda input: _to(input, dtype)


def _same(input: Any, *_: Any, **__: Any) -> Any:
    return input


def _detach(input: Any) -> Any:
    if input.node.kind == "float":
        raise UnsupportedModError("detach of a float is not supported")
    return input


def _filled(value: Any) -> Callable[..., Symbol]:
    def function(input: Any, size: Any = (), *, dtype: Any = None, **_: Any) -> Symbol:
        if not isinstance(size, Symbol) and tuple(size) != ():
            raise TypeError
        return _to(lifted(input.graph, value), dtype or input.dtype)

    return function


def _new_full(input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    return _filled(fill_value)(input, size, dtype=dtype)


def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    return _filled(fill_value)(input, dtype=dtype)


FUNCTIONS |= {name: _binary(op) for name, op in _BINARY.items()}
FUNCTIONS |= {name: _logical(op) for name, op in _LOGICAL.items()}
FUNCTIONS |= {name: _unary(name) for name in _UNARY}
FUNCTIONS |= {name: _rounded(name) for name in _ROUNDING}
FUNCTIONS |= {
    "absolute": _unary("abs"),
    "negative": _unary("neg"),
    "sgn": _unary("sign"),
    "arctan": _unary("atan"),
    "div": _div,
    "divide": _div,
    "pow": _pow,
    "where": _where,
    "logical_not": lambda input: apply("not", input),
    "bitwise_not": _not,
    "invert": _not,
    "isnan": lambda input: input != input,
    "isinf": lambda input: apply("abs", input) == math.inf,
    "isfinite": lambda input: apply("abs", input) < math.inf,
    "fmod": _binary("fmod"),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda input, min: _clamp(input, min),
    "clamp_max": lambda input, max: _clamp(input, None, max),
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "softplus": _softplus,
    "gelu": _gelu,
    "silu": _silu,
    "square": _square,
    "reciprocal": lambda input: 1.0 / input,
    "to": _to,
    "type": _to,
    "type_as": _to,
    "float": _converting(torch.float32),
    "double": _converting(torch.float64),
    "int": _converting(torch.int32),
    "long": _converting(torch.int64),
    "bool": _converting(torch.bool),
    "clone": _same,
    "contiguous": _same,
    "cpu": _same,
    "cuda": _same,
    "detach": _detach,
    "squeeze": _same,
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": _full_like,
    "new_zeros": _filled(0),
    "new_ones": _filled(1),
    "new_full": _new_full,
    "rsub": _reverse(_binary("sub")),
}
FUNCTIONS["masked_fill"] = lambda input, mask, value: _where(mask, value, input)

# Operators: those of symbols, and those of tensors, which torch hands over by these names.
_operators = {f"__{x}__": FUNCTIONS[x] for x in (*_OPERATORS, *_COMPARISONS)}
_operators |= {f"__r{x}__": _reverse(FUNCTIONS[x]) for x in _OPERATORS}
_operators |= {f"__{x}__": FUNCTIONS[x] for x in ("neg", "abs", "invert")}
_operators["__pos__"] = _same
FUNCTIONS |= _operators


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return called(name, self, *args)

    return method


for _name in _operators:
    setattr(Symbol, _name, _method(_name))
    setattr(Row, _name, _method(_name))  # refused by lifted(), which names the alternative
