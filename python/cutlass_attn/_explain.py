"""Which of this build's kernels a call would run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import _C, quantized
from ._attention import Array, cast, find_torch
from ._call import batch_dims
from ._call.call import MODS, SIGNATURES, Call
from ._call.foreign import converted
from ._call.keywords import misplaced, refusal
from ._call.packed import dense_calls
from ._explanation import Explanation, PassedOver, Verdict
from ._variants import by_key
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
    """Show which kernel a call would run, and why the kernels preferred to it cannot run it.

    Takes the arguments of `attention`, with ``cu_seqlens_q`` those of `attention_varlen`, with
    ``cache_seqlens`` those of `attention_decode` (its caches are k and v), and `device` and `grad`.
    Nothing runs and nothing is written. Only shapes, strides, dtypes and addresses matter, so
    tensors on torch's "meta" device will do. With `quantize` the numbers are read as well, to
    predict the error of 32 queries of each head, of up to 8 packed sequences: that waits for the
    GPU, and copies q, k and v to the host.

    Args:
        device: where the call would run. None: the device of q. "cpu"; "cuda" or "cuda:1" for a GPU
            that is present; a product such as "RTX 4090" (`devices.PRODUCTS` lists them) or an
            architecture such as "sm_89" for one that need not be: tiles are then chosen as for a
            common GPU of it (sm_80 A100, 108 SMs; sm_86 A40, 84; sm_89 RTX 4090, 128; sm_90 H100,
            132; sm_100 B200, 148; sm_120 RTX 5090, 170).
        grad: explain the backward pass of `attention` instead: the gradients of q, k, v, sinks, and
            of a bias that needs one. ``kernel`` and ``accumulate`` do not affect it.

    Returns:
        An `Explanation`: print it for a few lines, or its ``table()`` for a line per variant.

    Raises:
        TypeError: an argument has a wrong type, is missing, or is not known.
        ValueError: an argument is out of range or contradicts another, no kernel has the name, or
            `grad` is True for packed sequences or decoding. A call that merely no kernel accepts is
            explained.
    """
    function = _function_of(options)
    if more or v is None:
        raise misplaced("explain", ("q", "k", "v"), more, options, (q, k, v))
    if unknown := refusal("explain", options, parameters_of(options)):
        raise unknown
    if _function_of(options) == "attention" and batch_dims.are_several(q):
        return explain(**batch_dims.first_call(q, k, v, options), device=device, grad=grad)
    given = {"q": q, "k": k, "v": v}
    if arrays := converted({**given, **options}):
        names = {"device": device, "grad": grad}
        return explain(**{**given, **options, **names, **arrays})
    where, name = parse_device(str(getattr(q, "device", "cpu")) if device is None else device)
    can_compile = False
    if where.kind == CUDA:
        from . import jit

        can_compile = not jit.available(where.ordinal if _is_present(where) else None)
    call = Call(q, k, v, options)
    if function != "attention_decode":
        call = cast(call, "cuda" if where.kind == CUDA else "cpu")
    score_mod, mod_name = None, None
    if find_torch() and not options.keys().isdisjoint(MODS):
        from . import _modified

        call, score_mod = _modified.explained(call, can_compile)
        options = call.options
    if function != "attention":
        if grad:
            raise ValueError(f"grad is True, allowed for {function}: False")
        found = _SERVING[function](call.q, call.k, call.v, options, where)
        dtype, max_error = str(call.q.dtype).removeprefix("torch."), None
        quantize = options.get("quantize")
    else:
        if score_mod is not None:
            from . import _compiled

            if where.kind != CUDA:
                raise ValueError(
                    "score_mod is none of softcap, ALiBi, bias and mask: torch evaluates it on a "
                    "CPU, and no kernel runs"
                )
            found, mod_name = _compiled.explained(call, score_mod, where, grad)
        else:
            found = call.explained_gradients(where) if grad else call.explained(where)
        facts = call.facts()
        dtype, quantize, max_error = facts.dtype, facts.quantize, facts.max_error
    is_gpu = where.kind == CUDA or "-simt" in options.get("kernel", "auto")
    errors = _predicted_errors(call, function, is_gpu) if quantize else None
    is_kept = device is None and not grad and function == "attention" and call.has_mask_map()
    of_mod = [] if mod_name is None else [f"score_mod {mod_name}"]
    explanation = Explanation(
        ", ".join(["gradients of " * grad + dtype, *_words(call, function), *of_mod]),
        name,
        quantize,
        None if errors is None else float(np.max(errors, initial=0.0)),
        max_error,
        errors if function == "attention" else None,
        None if errors is None or max_error is None else beyond(call.facts(), errors),
        tuple(PassedOver(x.kernel, x.reason, x.count) for x in found.passed_over),
        mod_name,
        tuple(found.copied),
    )
    chosen = None if found.chosen is None else _chosen(found.chosen, is_kept)
    return explanation._with_verdicts(chosen, lambda: _verdicts(found, is_kept))


def _verdicts(found: _C.Explanation, is_kept: bool) -> tuple[Verdict, ...]:
    variant_of = by_key()
    return tuple(
        _chosen(x, is_kept) if x.chosen else Verdict(variant_of[x.key], False, x.reason)
        for x in found.verdicts
    )


def _chosen(found: _C.Verdict, is_kept: bool) -> Verdict:
    return Verdict(
        by_key()[found.key],
        True,
        found.reason,
        found.splits,
        found.workspace_bytes,
        found.max_launches,
        found.score,
        found.at_first_use,
        is_kept,
    )


def _predicted_errors(call: Call, function: str, is_gpu: bool) -> np.ndarray | None:
    """Predicted RMS error of each head; of packed sequences, of up to 8 evenly spread ones.

    None if the values of the tensors cannot be read on the host.
    """
    if function == "attention":
        return predicted_errors(call, is_gpu)
    if not library_of(call.q).has_numbers(call.q):
        return None
    calls = [one for _b, _rows, one in dense_calls(call.q, call.k, call.v, call.options)]
    few = quantized.spread(8, len(calls))
    errors = [predicted_errors(calls[i], is_gpu) for i in few]
    return np.concatenate([x.ravel() for x in errors if x is not None] or [np.zeros(0)])


_SERVING = {"attention_varlen": explained_varlen, "attention_decode": explained_decode}


def _function_of(options: dict[str, Any]) -> str:
    """The name of the function that has these keywords."""
    if "cache_seqlens" in options:
        return "attention_decode"
    if "cu_seqlens_q" in options:
        return "attention_varlen"
    return "attention_decode" if "indices" in options else "attention"


def parameters_of(options: dict[str, Any]) -> tuple[str, ...]:
    """Names of the arguments that `explain` accepts with these keywords."""
    return (*SIGNATURES[_function_of(options)].parameters, "device", "grad")


# For help() and inspect: the parameters of `attention`, then explain's own.
_SIGNATURE = SIGNATURES["attention"]
explain.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *_SIGNATURE.parameters.values(),
        *(inspect.signature(explain).parameters[name] for name in ("device", "grad")),
    ],
    return_annotation="Explanation",
)
# Options that do not change which kernel runs, or that the reasons mention anyway.
_NOT_NAMED = {"return_lse", "out", "kernel", "verify", "validate", "rng_state"}
# Arrays that may have another dtype than q, on which the kernel then depends.
_OF_SOME_DTYPE = {"bias", "k", "v", "k_cache", "v_cache"}


def _words(call: Call, function: str) -> Iterator[str]:
    """The call in words: shapes, and the options that differ from their defaults."""
    names = SIGNATURES[function].parameters
    given = {**dict(zip(names, (call.q, call.k, call.v), strict=False)), **call.options}
    for name, parameter in names.items():
        value = given.get(name, parameter.default)
        if name in _NOT_NAMED:
            continue
        if shape := getattr(value, "shape", ()):
            dtype = _dtype(value) if name in _OF_SOME_DTYPE else ""
            yield f"{name} {tuple(shape)}{f' {dtype}' * (dtype not in ('', _dtype(call.q)))}"
        elif value != parameter.default:
            yield name if value is True else f"{name} {value}"


def _dtype(x: Any) -> str:
    return str(getattr(x, "dtype", "")).removeprefix("torch.")


def _is_present(where: Device) -> bool:
    """Whether this is a GPU of this machine that can be used."""
    return not where.compute_capability and not _C.device_info(CUDA, where.ordinal)["unavailable"]
