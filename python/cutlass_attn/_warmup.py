"""Kernels compiled ahead of the calls that want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import jit
from ._explain import explain
from .devices import CUDA, parse_device


def warmup(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    names: str | Iterable[str] = (),
    device: int | str | None = None,
    grad: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **options: Any,
) -> list[str]:
    """Compiles ahead what a call would run, so that the first call does not wait for it.

        warmup(q, k, v, causal=True)                  # of attention(q, k, v, causal=True)
        warmup(q, k, v, grad=True, device="sm_90")    # and of its gradients, for a GPU elsewhere
        warmup(names="sm80/general", device="sm_89")  # all that this build left out of a kernel

    A kernel takes 2 to 20 s, unless it is in the cache or the build has compiled it.

    Args:
        q: queries of an example call. Shapes, dtypes and strides matter, numbers do not: with
            `device`, tensors on torch's "meta" device serve.
        k: its keys.
        v: its values.
        names: in place of a call, keys of `cutlass_attn.variants()`, or one of them, or a kernel's
            name for all it has that this build left out.
        device: CUDA ordinal of a GPU, "cuda" or "cuda:1", onto which kernels are loaded as well; or
            an architecture such as "sm_89", for a GPU that need not be there: they wait in the
            cache. None for the device of q, or GPU 0.
        grad: also what computes the gradients of q, k and v.
        progress: called with a key, how many are done and of how many, before each of them.
        **options: of the example call, as `explain` takes them: those of `attention`; with
            `cu_seqlens_q` of `attention_varlen`, with `cache_seqlens` of `attention_decode`.

    Returns:
        Keys of the variants that are ready now, of those that this build left out.

    Raises:
        TypeError: neither a call nor names are given, or both.
        ValueError: a name or the device is none of these, no kernel takes the call, or the build
            has no source for a variant.
        CompilerNotFound: NVRTC or CUDA's headers are missing; the message says what to install.
        CompileError: NVRTC refuses the code.
        RuntimeError: the GPU does not exist or has no driver.
    """
    if (q is None) == (not names):
        raise TypeError(
            "warmup() takes an example call, warmup(q, k, v, causal=True), or names of kernels, "
            'warmup(names="sm80/general"); ' + ("neither is given" if q is None else "both are")
        )
    if device is None and q is not None and str(getattr(q, "device", "cpu")).startswith("cuda"):
        device = str(q.device)
    where = f"cuda:{device or 0}" if device is None or type(device) is int else str(device)
    (kind, index, capability, _sms), _ = parse_device(where)
    if kind != CUDA:
        raise ValueError(f'device is {device!r}; allowed: 0, "cuda", "cuda:0", "sm_89" or alike')
    keys = jit.left_out(names) if q is None else _of_call(q, k, v, where, grad, options)
    jit.prepare(keys, index, capability, progress)
    return keys


def _of_call(q: Any, k: Any, v: Any, device: str, grad: bool, options: dict[str, Any]) -> list[str]:
    """Keys of what a call runs, and its gradients, that this build left out."""
    if reason := jit.available():  # the answer would be another variant
        raise jit.CompilerNotFound(reason)
    keys = []
    for of_gradients in (False, True) if grad else (False,):
        found = explain(
            q, k, v, device=device, **options, **({"grad": True} if of_gradients else {})
        )
        if found.chosen is None:
            raise ValueError(f"no kernel takes this call:\n{found}")
        if not found.chosen.compiled:
            keys.append(found.chosen.key)
    return keys
