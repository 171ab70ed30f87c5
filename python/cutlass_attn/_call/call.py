"""A call: its operands and the keywords that were given, in one piece."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from .. import _C

# Of the public functions that are calls. Each signature is written once, above its docstring; the
# operator's schema follows it.
SIGNATURES: dict[str, inspect.Signature] = {}

# Say nothing to a backward pass, which chooses a kernel of its own and adds up in fp32.
OF_FORWARD = frozenset(("kernel", "accumulate", "verify", "num_splits", "split_size"))
# Which rows of a dense call's batch entries count.
PADDING = ("seqused_q", "seqused_k", "leftpad_q", "leftpad_k")
# Of a decoding step: what only one with new keys is given, and all that their writing reads.
NEW_KEYS = ("k_new", "v_new", "rotary_cos", "rotary_sin", "rotary_interleaved")
OF_APPEND = (
    *("cache_seqlens", "block_table", "cache_batch_idx", "causal", "window"),
    *("k_scale", "v_scale", *NEW_KEYS),
)

P = ParamSpec("P")


def computes(described: Callable[P, Any]) -> Callable[[Callable[..., Any]], Callable[P, Any]]:
    """Decorates what computes `described`, a function that is no more than a signature and a
    docstring: with both of them, and its keywords as they were given."""
    SIGNATURES[described.__name__] = inspect.signature(described)
    return functools.wraps(described)


@dataclass(frozen=True)
class Call:
    """A call of `attention` that is looked at, or run more than once.

    `attention` itself goes to `_C.forward` without one: building it would take as long as a tenth
    of the host's time of a call.
    """

    q: Any
    k: Any
    v: Any
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **instead: Any) -> Any:
        """The result; `instead` replaces options."""
        return _C.forward(self.q, self.k, self.v, {**self.options, **instead})

    def facts(self) -> _C.Call:
        """What it asks for, checked. Raises TypeError, ValueError."""
        return _C.describe(self.q, self.k, self.v, self.options)

    def explained(self, device: Any = None, **instead: Any) -> _C.Explanation:
        """What dispatch says of each variant; `device` is a devices.Device, by default q's."""
        return _C.explain(self.q, self.k, self.v, self.options, device=device, **instead)

    def explained_gradients(self, device: Any = None, **instead: Any) -> _C.Explanation:
        """The same of the backward pass, with a gradient of the bias if that needs one."""
        options = {name: x for name, x in self.options.items() if name not in OF_FORWARD}
        if getattr(options.get("bias"), "requires_grad", False):
            one = self.q.new_empty((1,))  # which broadcasts
            options["grad_bias"] = one if one.itemsize == 8 else one.float()
        return _C.explain_backward(self.q, self.k, self.v, options, device=device, **instead)

    def with_options(self, **more: Any) -> Call:
        """The same operands, with further options or others."""
        return Call(self.q, self.k, self.v, {**self.options, **more})
