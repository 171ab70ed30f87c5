"""Which of this build's kernels a call would run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import _C, quantized
from ._attention import Array, cast, find_torch
from ._call.call import SIGNATURES, Call
from ._call.keywords import misplaced, refusal
from ._call.packed import dense_calls
from ._explanation import Explanation, PassedOver, Verdict
from ._variants import variants
from .decode import explained_decode
from .devices import CUDA, Device, parse_device
from .varlen import explained_varlen
from .verify import beyond, library_of, predicted_errors


def explain(
    q: Array = None,
    k: Array = None,
    v: Array = None,
    *more: Any,
    device: str | None = None,
    grad: bool = False,
    **options: Any,
) -> Explanation:
    """Which kernel `attention` would run for the same arguments, and why no other one.

    What it returns prints as a few lines; its `table()` has a line for each variant.

    The arguments are those of `attention`, `device` and `grad`. With `cu_seqlens_q` they are those
    of `attention_varlen`, with `cache_seqlens` those of `attention_decode`, whose caches are k and
    v: nothing is written into them.

    Args:
        grad: the same of the backward pass: for gradients of q, k, v, sinks, and of a bias that
            needs one. ``kernel`` and ``accumulate`` are the forward pass's own and say nothing.
            Of `attention` alone.
        device: None for the device of q, k and v as it is now; "cpu"; "cuda" or "cuda:1" for a GPU
            present; "RTX 4090", say, for a product that need not be there
            (`devices.PRODUCTS` lists them); "sm_89" for a kind of GPU (the choice of a tile then
            takes it for a common one of its kind: sm_80 for an A100 of 108 SMs, sm_86 for an A40
            of 84, sm_89 for an RTX 4090 of 128, sm_90 for an H100 of 132, sm_100 for a B200 of
            148, sm_120 for an RTX 5090 of 170). Only shapes, strides, dtypes and addresses matter,
            so tensors on torch's "meta" device serve as well. Only with `quantize` numbers are
            looked at, for `Explanation.predicted_error` and, with `max_error`, `in_16_bits`: up to
            256 queries and 8 tiles of 64 keys of each head, and of up to 8 packed sequences, for
            which it waits for the GPU.

    Raises:
        TypeError, ValueError: as `attention`, for a call that is wrong on any device. A call that
            merely no kernel takes is explained instead.
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
        found = _SERVING[function](call.q, call.k, call.v, options, where)
        dtype, max_error = str(call.q.dtype).removeprefix("torch."), None
        quantize = options.get("quantize")
    else:
        found = call.explained_gradients(where) if grad else call.explained(where)
        facts = call.facts()
        dtype, quantize, max_error = facts.dtype, facts.quantize, facts.max_error
    errors = _predicted_errors(call, function) if quantize else None
    by_key = {variant.key: variant for variant in variants(None)}
    return Explanation(
        ", ".join(["gradients of " * grad + dtype, *_words(call, function)]),
        name,
        tuple(
            Verdict(by_key[x.key], x.chosen, x.reason, x.splits, x.workspace_bytes, x.max_launches)
            for x in found.verdicts
        ),
        quantize,
        None if errors is None else float(np.max(errors, initial=0.0)),
        max_error,
        errors if function == "attention" else None,
        None if errors is None or max_error is None else beyond(call.facts(), errors),
        tuple(PassedOver(x.kernel, x.reason, x.count) for x in found.passed_over),
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
