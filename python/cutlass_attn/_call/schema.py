"""Schemas of torch operators, derived from the signatures of the public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .call import SIGNATURES
from .keywords import refusal

# Schema types by the types of a signature. An operator gets a number that may be an array as a
# tensor. A float is a Scalar, which may also be a symbol of torch.compile: tensor.item().
_TYPES = {
    "Array": "Tensor",
    "Array | None": "Tensor?",
    "Array | Sequence[int] | int | None": "Tensor?",
    "Window": "SymInt[]?",
    "bool": "bool",
    "float": "Scalar",
    "float | Array | None": "Tensor?",
    "float | None": "Scalar?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "str": "str",
    "str | PrequantizedKV | None": "str?",  # the operator has no PrequantizedKV
    "str | None": "str?",
}


class Schema:
    """Parameters of an operator: those of `function` for which `names` is true, then `more`.

    The schema has no defaults, and arguments are passed by position: inductor has a parameter of
    its own named "kernel", which would collide with the keyword.
    """

    def __init__(
        self,
        function: str,
        names: Callable[[str], bool],
        more: dict[str, str] | None = None,
        mutates: tuple[str, ...] = (),
        returns: str = "(Tensor, Tensor, Tensor)",
    ):
        self.function = function
        parameters = {n: p for n, p in SIGNATURES[function].parameters.items() if names(n)}
        self.defaults = {n: p.default for n, p in parameters.items()}
        self.defaults |= dict.fromkeys(more or {})
        types = {n: _TYPES[p.annotation] for n, p in parameters.items()} | (more or {})
        types |= {name: f"Tensor(a{i}!)" for i, name in enumerate(mutates)}
        self.types = types
        self.parameters = ", ".join(f"{x} {name}" for name, x in types.items())
        self.text = f"({self.parameters}) -> {returns}"

    def arguments(self, **given: Any) -> tuple[Any, ...]:
        """Keywords as positional arguments. Raises TypeError for an unknown keyword."""
        if not all(name in self.defaults for name in given):
            names = [name for name in given if name not in self.defaults]
            error = refusal(self.function, names, self.defaults)
            # Not `or`: torch.compile (2.11) cannot tell whether an exception is true.
            raise TypeError(str(names)) if error is None else error
        return tuple(given.get(name, default) for name, default in self.defaults.items())

    def by_name(self, args: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.defaults, args, strict=True))

    def call_of(self, args: tuple[Any, ...]) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Positional arguments as q, k, v and a dict of the rest."""
        given = self.by_name(args)
        return given.pop("q"), given.pop("k"), given.pop("v"), given
