"""`warmup`: compile kernels before a call needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import _C, jit
from ._call.keywords import refusal
from ._explain import explain, parameters_of
from .devices import CUDA, parse_device


def warmup(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    names: str | Iterable[str] = (),
    device: int | str | None = None,
    grad: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> list[str]:
    """Compile ahead, and load, the kernels that a call needs, so that the first call does not wait.

        warmup(q, k, v, causal=True)                  # for attention(q, k, v, causal=True)
        warmup(q, k, v, grad=True, device="sm_90")    # and its gradients, for a GPU elsewhere
        warmup(names="sm80/general", device="sm_89")  # all JIT variants of a kernel

    Do this before a CUDA graph is captured. A call runs one entry: a variant with the terms that
    the call's options ask for, such as "sm90/bf16/d128/128x128x8+softcap_alibi". An entry compiles
    in 2 to 20 s, unless it is in the build or in the cache. Needs NVRTC: docs/jit.md.

    Args:
        q: queries of an example call. Shapes, dtypes and strides matter, numbers do not: with
            `device`, tensors on torch's "meta" device will do.
        k: keys of the example call.
        v: values of the example call.
        names: instead of a call: one or more entries; keys of `cutlass_attn.variants()`, which
            stand for all their entries; or names of kernels, which stand for all their variants
            that are not in the build.
        device: an ordinal, "cuda" or "cuda:1" for a GPU that is present, onto which kernels are
            also loaded; "sm_89" or a product such as "RTX 4090" to compile into the cache only.
            None: the device of q, or GPU 0.
        grad: also compile the kernels of the gradients of q, k and v.
        progress: called before each entry with its name, the number done, and the number in total.
        **options: keywords of the example call: those of `attention`; with ``cu_seqlens_q`` those
            of `attention_varlen`, with ``cache_seqlens`` those of `attention_decode`.

    Returns:
        Names of the entries, outside the build, that are ready now.

    Raises:
        TypeError: neither a call nor names are given, or both.
        ValueError: a name or the device is unknown, no kernel accepts the call, or the build has no
            source for a variant.
        CompilerNotFound: NVRTC or CUDA's headers are missing; the message says what to install.
        CompileError: NVRTC refuses the code.
        RuntimeError: the GPU does not exist or has no driver.
    """
    if isinstance(q, str):
        raise TypeError(f"q is {q!r}; allowed: an array, or names of kernels as names={q!r}")
    if (q is None) == (not names):
        raise TypeError(
            "warmup() takes an example call, warmup(q, k, v, causal=True), or names of kernels, "
            'warmup(names="sm80/general"); ' + ("neither is given" if q is None else "both are")
        )
    if unknown := refusal("warmup", options, parameters_of(options)):
        raise unknown
    if device is None and q is not None and str(getattr(q, "device", "cpu")).startswith("cuda"):
        device = str(q.device)
    where = f"cuda:{device or 0}" if device is None or type(device) is int else str(device)
    (kind, index, capability, _sms), _ = parse_device(where)
    if kind != CUDA:
        raise ValueError(
            f'device is {device!r}; allowed: 0, "cuda", "cuda:0", "sm_89", "RTX 4090" or alike'
        )
    if q is not None and not capability and (absent := _C.device_info(CUDA, index)["unavailable"]):
        raise RuntimeError(f'{absent}; for a GPU elsewhere pass device="sm_90" or alike')
    entries = jit.left_out(names) if q is None else _of_call(q, k, v, where, grad, options)
    jit.prepare(entries, index, capability, progress)
    return entries


def _of_call(q: Any, k: Any, v: Any, device: str, grad: bool, options: dict[str, Any]) -> list[str]:
    """Names of the entries that a call and its gradients run and that this build left out."""
    if reason := jit.available():  # explain() would then choose another variant
        raise jit.CompilerNotFound(reason)
    entries = []
    for of_gradients in (False, True) if grad else (False,):
        found = explain(
            q, k, v, device=device, **options, **({"grad": True} if of_gradients else {})
        )
        if found.chosen is None:
            raise ValueError(str(found))
        if any(verdict.at_first_use for verdict in found.verdicts):
            if found.score_mod is not None:
                entries.append(f"{found.chosen.key}+{found.score}+{found.score_mod}")
            else:
                entries.append(jit.entry_name(found.chosen.key, found.score))
    return entries
