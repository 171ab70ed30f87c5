"""Which of this build's kernels a call would run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _C, quantized
from ._attention import Array, cast, find_torch
from ._call.call import SIGNATURES, Call
from ._call.keywords import misplaced, refusal
from ._call.packed import dense_calls
from ._variants import Variant, variants
from .decode import explained_decode
from .devices import CUDA, Device, parse_device
from .varlen import explained_varlen
from .verify import beyond, library_of, predicted_errors


@dataclass(frozen=True)
class Verdict:
    """Whether one variant runs a call, and if not, why."""

    variant: Variant
    chosen: bool
    reason: str  # why it cannot run, was not asked for or is not preferred; empty if chosen
    splits: int = 1  # if chosen: thread blocks that share the keys of a tile
    workspace_bytes: int = 0  # if chosen: of the memory that its kernels use among themselves
    score: str = ""  # if chosen: the terms that its GPU kernel adds to a logit, as softcap_alibi


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call would run and why every other one not; prints as a table."""

    call: str
    device: str
    verdicts: tuple[Verdict, ...]
    quantize: str | None = None
    # Of `quantize`, of the head with the largest: what the result's RMS error is expected to be,
    # relative to its RMS. None without it, and for tensors without numbers.
    predicted_error: float | None = None
    max_error: float | None = None
    # The same of each head, (B, Hq): what `max_error` decides by.
    predicted_errors: np.ndarray | None = None
    # With `max_error`, of each head, (B, Hq): whether it would run in 16 bits.
    in_16_bits: np.ndarray | None = None

    @property
    def chosen(self) -> Variant | None:
        """The variant that would run; None if no kernel accepts the call."""
        return next((verdict.variant for verdict in self.verdicts if verdict.chosen), None)

    @property
    def splits(self) -> int:
        """Number of thread blocks that split the keys of a tile (split-KV); 1: not split."""
        return next((verdict.splits for verdict in self.verdicts if verdict.chosen), 1)

    @property
    def score(self) -> str:
        """The terms that the GPU kernel is composed of, such as "softcap_alibi"; "identity" if none
        is there, "" for kernels of the CPU and for calls that would be refused."""
        return next((verdict.score for verdict in self.verdicts if verdict.chosen), "")

    @property
    def workspace_bytes(self) -> int:
        """Device memory in bytes that the kernels use beside the operands and the result."""
        return next((verdict.workspace_bytes for verdict in self.verdicts if verdict.chosen), 0)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __str__(self) -> str:
        width = max(len(verdict.variant.key) for verdict in self.verdicts)
        lines = [f"{self.call} on {self.device}"]
        for verdict in self.verdicts:
            mark = "->" if verdict.chosen else "  "
            text = verdict.reason
            if verdict.chosen:
                text = "runs" if verdict.variant.compiled else "runs, compiled at first use"
                if verdict.splits > 1:
                    text += f", keys in {verdict.splits} splits"
                if verdict.workspace_bytes > 0:
                    text += f", {verdict.workspace_bytes} bytes of workspace"
            lines.append(f"{mark} {verdict.variant.key:<{width}}  {text}")
        if self.chosen is None:
            lines.append("no kernel takes this call")
        if self.quantize is not None:
            lines.append(self._error())
        return "\n".join(lines)

    def _error(self) -> str:
        error = f"quantize={self.quantize!r}: an RMS error of "
        if self.predicted_error is not None:
            error += f"{self.predicted_error:.1%} is predicted from q, k and v"
            if self.in_16_bits is None:
                return error
            return (
                f"{error}; {self.in_16_bits.sum()} of {self.in_16_bits.size} heads are beyond "
                f"max_error={self.max_error:g}, or share a key head with one, and run in 16 bits"
            )
        of_random, of_others = quantized.ERRORS_FOUND[self.quantize or ""]
        return (
            error + f"{of_random:.1%} was found for normal inputs, up to {of_others:.1%} for others"
        )


def explain(
    q: Array = None,
    k: Array = None,
    v: Array = None,
    *more: Any,
    device: str | None = None,
    grad: bool = False,
    **options: Any,
) -> Explanation:
    """Show which kernel a call would run, and why the kernels preferred to it cannot run it.

    Takes the arguments of `attention`, with ``cu_seqlens_q`` those of `attention_varlen`, with
    ``cache_seqlens`` those of `attention_decode` (its caches are k and v), and `device` and `grad`.
    Nothing runs and nothing is written. Only shapes, strides, dtypes and addresses matter, so
    tensors on torch's "meta" device will do. With `quantize` the numbers of q, k and v are read as
    well, to predict the error: up to 256 queries and 8 tiles of 64 keys per head, of up to 8 packed
    sequences. That waits for the GPU.

    Args:
        device: where the call would run. None: the device of q. "cpu"; "cuda" or "cuda:1" for a GPU
            that is present; an architecture such as "sm_89" for one that need not be: tiles are
            then chosen as for a common GPU of it (sm_80 A100, 108 SMs; sm_86 A40, 84; sm_89 RTX
            4090, 128; sm_90 H100, 132; sm_100 B200, 148; sm_120 RTX 5090, 170).
        grad: explain the backward pass of `attention` instead: the gradients of q, k, v, sinks, and
            of a bias that needs one. ``kernel`` and ``accumulate`` do not affect it.

    Returns:
        An `Explanation`: print it, or read its ``chosen`` variant.

    Raises:
        TypeError: an argument has a wrong type, is missing, or is not known.
        ValueError: an argument is out of range or contradicts another, or `grad` is True for packed
            sequences or decoding. A call that merely no kernel accepts is explained.
    """
    function = _function_of(options)
    if more or v is None:
        raise misplaced("explain", ("q", "k", "v"), more, options)
    known = (*SIGNATURES[function].parameters, "device", "grad")
    if unknown := refusal("explain", options, known):
        raise unknown
    find_torch()
    where, name = parse_device(str(getattr(q, "device", "cpu")) if device is None else device)
    if where.kind == CUDA:
        from . import jit

        # The answer depends on it.
        jit.available(where.ordinal if _is_present(where) else None)
    call = Call(q, k, v, options)
    if function != "attention_decode":
        call = cast(call, "cuda" if where.kind == CUDA else "cpu")
    if function != "attention":
        if grad:
            raise ValueError(f"grad is True, allowed for {function}: False")
        verdicts = _SERVING[function](call.q, call.k, call.v, options, where)
        dtype, max_error = str(call.q.dtype).removeprefix("torch."), None
        quantize = options.get("quantize")
    else:
        verdicts = call.gradient_verdicts(where) if grad else call.verdicts(where)
        facts = call.facts()
        dtype, quantize, max_error = facts.dtype, facts.quantize, facts.max_error
    errors = _predicted_errors(call, function) if quantize else None
    by_key = {variant.key: variant for variant in variants(None)}
    return Explanation(
        ", ".join(["gradients of " * grad + dtype, *_words(call, function)]),
        name,
        tuple(
            Verdict(by_key[x.key], x.chosen, x.reason, x.splits, x.workspace_bytes, x.score)
            for x in verdicts
        ),
        quantize,
        None if errors is None else float(np.max(errors, initial=0.0)),
        max_error,
        errors if function == "attention" else None,
        None if errors is None or max_error is None else beyond(call.facts(), errors),
    )


def _predicted_errors(call: Call, function: str) -> np.ndarray | None:
    """Of each head, of packed sequences of up to 8 of them, evenly spread; None where there are no
    numbers on the host to be had."""
    if function == "attention":
        return predicted_errors(call)
    if not library_of(call.q).has_numbers(call.q):
        return None
    calls = [one for _b, _rows, one in dense_calls(call.q, call.k, call.v, call.options)]
    few = quantized.spread(8, len(calls))
    errors = [predicted_errors(calls[i]) for i in few]
    return np.concatenate([x.ravel() for x in errors if x is not None] or [np.zeros(0)])


_SERVING = {"attention_varlen": explained_varlen, "attention_decode": explained_decode}


def _function_of(options: dict[str, Any]) -> str:
    """Whose arguments these are."""
    if "cache_seqlens" in options:
        return "attention_decode"
    return "attention_varlen" if "cu_seqlens_q" in options else "attention"


# What help() and inspect show: the signature of `attention`, and what is explain's own.
_SIGNATURE = SIGNATURES["attention"]
explain.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *_SIGNATURE.parameters.values(),
        *(inspect.signature(explain).parameters[name] for name in ("device", "grad")),
    ],
    return_annotation="Explanation",
)
# Of no say in what a kernel has to do, or in the reasons that are given anyway.
_NOT_NAMED = {"return_lse", "out", "kernel", "verify", "validate", "rng_state"}


def _words(call: Call, function: str) -> Iterator[str]:
    """What a call asks for: shapes, and options that are not what they are by default."""
    names = SIGNATURES[function].parameters
    given = {**dict(zip(names, (call.q, call.k, call.v), strict=False)), **call.options}
    for name, parameter in names.items():
        value = given.get(name, parameter.default)
        if name in _NOT_NAMED:
            continue
        if shape := getattr(value, "shape", ()):
            yield f"{name} {tuple(shape)}"
        elif value != parameter.default:
            yield name if value is True else f"{name} {value}"


def _is_present(where: Device) -> bool:
    """Is this a GPU that can be used?"""
    return not where.compute_capability and not _C.device_info(CUDA, where.ordinal)["unavailable"]
