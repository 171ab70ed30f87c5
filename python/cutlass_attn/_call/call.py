"""A call as an object: its operands and its keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from .. import _C

# Types of the public functions' signatures. Each signature is written once, above its docstring;
# the schema of the operator is derived from it.
SIGNATURES: dict[str, inspect.Signature] = {}

# Options of the forward pass only: the backward pass chooses its own kernel, with fp32 sums.
OF_FORWARD = frozenset(
    ("kernel", "accumulate", "verify", "num_splits", "split_size", "return_max_logit")
)
# Padding as lengths, of dense calls.
PADDING = ("seqused_q", "seqused_k", "leftpad_q", "leftpad_k")
# Options that are one number.
NUMBERS = ("softmax_scale", "softcap", "dropout_p", "max_error")
# Options that become others, or a part of a kernel: see _modified.
MODS = ("score_mod", "mask_mod", "block_mask")
# Of a decoding step: arguments that need k_new, and all arguments that appending keys reads.
NEW_KEYS = ("k_new", "v_new", "rotary_cos", "rotary_sin", "rotary_interleaved")
OF_APPEND = (
    *("cache_seqlens", "block_table", "cache_batch_idx", "kv_format", "causal", "window"),
    *("k_scale", "v_scale", *NEW_KEYS),
)

P = ParamSpec("P")


def computes(described: Callable[P, Any]) -> Callable[[Callable[..., Any]], Callable[P, Any]]:
    """Decorates the implementation of `described`, a function that has only a signature and a
    docstring: gives both to the implementation, which receives just the keywords that a caller
    wrote."""
    SIGNATURES[described.__name__] = inspect.signature(described)
    return functools.wraps(described)


@dataclass(frozen=True)
class Call:
    """A call of `attention` that is inspected, or run several times.

    `attention` passes its arguments to `_C.forward` without this object, which would add a tenth
    to a call's host time.
    """

    q: Any
    k: Any
    v: Any
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **instead: Any) -> Any:
        """The result; `instead` replaces options."""
        return _C.forward(self.q, self.k, self.v, {**self.options, **instead})

    def facts(self) -> _C.Call:
        """The call's parameters, checked. Raises TypeError, ValueError."""
        return _C.describe(self.q, self.k, self.v, self.options)

    def explained(self, device: Any = None, **instead: Any) -> _C.Explanation:
        """The verdict on each variant; `device` is a devices.Device, by default q's."""
        return _C.explain(self.q, self.k, self.v, self.options, device=device, **instead)

    def has_mask_map(self) -> bool:
        """Whether the map of the mask is kept from an earlier call, where q is."""
        is_here = getattr(getattr(self.q, "device", None), "type", "") in ("cpu", "cuda")
        return is_here and _C.has_mask_map(self.q, self.k, self.v, self.options)

    def explained_gradients(self, device: Any = None, **instead: Any) -> _C.Explanation:
        """The verdicts on the backward pass, with a gradient of the bias if that requires one."""
        options = {name: x for name, x in self.options.items() if name not in OF_FORWARD}
        if getattr(options.get("bias"), "requires_grad", False):
            one = self.q.new_empty((1,))  # broadcasts to any shape
            options["grad_bias"] = one if one.itemsize == 8 else one.float()
        return _C.explain_backward(self.q, self.k, self.v, options, device=device, **instead)

    def with_options(self, **more: Any) -> Call:
        """A call with these operands, and with options added or replaced."""
        return Call(self.q, self.k, self.v, {**self.options, **more})
