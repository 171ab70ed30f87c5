"""Implementations of `attention`: this library's kernels and PyTorch's backends. dev/bench has
others, and those of other calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..._attention import attention
from ..._explain import explain
from ..._explanation import Explanation
from ..._variants import accumulate_of, quantize_of, variants
from .problems import OPS, Inputs

OURS = "cutlass_attn"
TORCH_BACKENDS = ("flash", "cudnn", "efficient", "math")
# PyTorch's unfused backend holds the scores and their softmax in float32, and one of the two again.
_MATH_BYTES_PER_SCORE = 12
# How PyTorch says that a backend cannot run a call: on a GPU, on a CPU.
_TORCH_REFUSALS = ("No available kernel", "No viable backend")


class Unsupported(Exception):
    """An implementation does not compute a shape; the message says why."""


@dataclass(frozen=True)
class Bound:
    """An implementation with its arguments bound."""

    name: str  # the exact code that runs: of this library, the variant
    run: Callable[[], Any]
    to_bhsd: Callable[[Any], Any] = lambda result: result  # from what `run` returns
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered before timing
    accumulate: str = "fp32"  # its accumulator, by which the result is judged
    quantize: str | None = None  # its 8-bit mode, or FP8_CACHE, by which the result is judged
    with_lse: Callable[[], tuple[Any, Any]] | None = None  # runs it with the log-sum-exp
    is_emulated: bool = False  # a GPU kernel on the CPU, whose time means nothing


@dataclass(frozen=True)
class Impl:
    """An implementation. `prepare` raises Unsupported, or an error of the library."""

    name: str  # as asked for: "cutlass_attn:auto", "torch:flash", "xformers"
    prepare: Callable[[Inputs], Bound]
    version: str = ""
    ops: tuple[str, ...] = OPS  # what it computes

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS + ":")


def ours(
    kernels: Iterable[str],
    op: str = "forward",
    prepare: Callable[[str, Inputs], Bound] | None = None,
) -> list[Impl]:
    """This library's implementations of `op`: names of kernels, keys of variants, or "auto".

    `prepare` takes such a name; by default it makes a call of `attention`. Raises ValueError for an
    unknown name.
    """
    there = variants("backward" if op == "backward" else "forward")
    known = {name for variant in there for name in (variant.key, variant.kernel)} | {"auto"}
    names = list(dict.fromkeys(kernels))
    for name in names:
        if name not in known:
            raise ValueError(
                f"there is no kernel {name!r}; `cutlass-attn info --all` lists them and"
                f" variants such as {there[0].key!r}"
            )
    prepare = prepare or prepare_attention
    return [Impl(f"{OURS}:{name}", partial(prepare, name)) for name in names]


def torchs(backends: Iterable[str]) -> list[Impl]:
    """PyTorch's implementations: backends of TORCH_BACKENDS, or "auto"."""
    return [Impl(f"torch:{name}", partial(prepare_torch, name)) for name in backends]


def describe_error(error: BaseException) -> str:
    """The first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def refusal(explanation: Explanation, kernel: str) -> str:
    """Why a kernel or variant, or with "auto" every kernel, does not accept a call."""
    reasons = [
        verdict.reason
        for verdict in explanation
        if kernel in ("auto", verdict.variant.key, verdict.variant.kernel)
    ]
    return "; ".join(dict.fromkeys(reasons)) or "there is no kernel of that name"


def prepare_attention(kernel: str, inputs: Inputs) -> Bound:
    options: dict[str, Any] = {"causal": inputs.shape.causal, **inputs.keywords.ours}
    # Who names a kernel asks for its sums, and for its products.
    sums, products = accumulate_of(kernel), quantize_of(kernel)
    if kernel != "auto":  # else the call is the one that a user writes
        options |= {"kernel": kernel, "accumulate": sums, "quantize": products}
    operands = inputs.q, inputs.k, inputs.v
    explanation = explain(*operands, **options)
    chosen = explanation.chosen
    if chosen is None:
        raise Unsupported(refusal(explanation, kernel))
    return Bound(
        f"{OURS}:{chosen.key}",
        partial(attention, *operands, **options),
        accumulate=sums,
        quantize=products,
        with_lse=partial(attention, *operands, **options, return_lse=True),
        is_emulated=chosen.kernel.endswith("-simt"),
    )


def torch_backend(name: str) -> AbstractContextManager[Any]:
    """Within it, PyTorch's attention runs this backend, one of TORCH_BACKENDS, or fails.

    "auto" leaves the choice to PyTorch.
    """
    if name == "auto":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return sdpa_kernel(backends[name])  # type: ignore[no-any-return]


def is_refusal(error: RuntimeError) -> bool:
    """Whether the error means that a backend does not support the call, not that it failed."""
    return any(refused in str(error) for refused in _TORCH_REFUSALS)


def torch_attention(q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """PyTorch's attention of (B, H, S, D) tensors, with its keywords.

    Raises Unsupported for a causal mask over unequal lengths, which it aligns differently.
    """
    from torch.nn.functional import scaled_dot_product_attention

    if causal and q.shape[2] != k.shape[2]:
        raise Unsupported("aligns a causal mask top-left: another computation where lengths differ")
    if q.shape[1] == k.shape[1]:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, **options)


def prepare_torch(backend: str, inputs: Inputs) -> Bound:
    q, k, v, shape = inputs.q, inputs.k, inputs.v, inputs.shape
    options = inputs.keywords.torch
    if options is None:
        raise Unsupported(f"has no {inputs.problem.option}")
    if backend == "math":
        scores = shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
        needed, there = scores * _MATH_BYTES_PER_SCORE, _memory(q.device)
        if needed > there / 2:
            raise Unsupported(
                f"its scores would take {needed / 1e9:.0f} GB, more than half of the device's "
                f"{there / 1e9:.0f} GB"
            )
    context = partial(torch_backend, backend)
    try:
        with context(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch_attention(q, k, v, shape.causal, **options)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        raise Unsupported(_torch_reason(error, caught)) from None
    run = partial(torch_attention, q, k, v, shape.causal, **options)
    return Bound(f"torch:{backend}", run, context=context)


def _torch_reason(error: RuntimeError, caught: list[warnings.WarningMessage]) -> str:
    """Why a backend cannot run: torch's warnings have the reasons, its error does not."""
    said = [str(warning.message).partition(" (Triggered internally")[0] for warning in caught]
    said = [x for x in said if not x.endswith("because:") and "runtime disabled" not in x]
    return " ".join(dict.fromkeys(said)) or describe_error(error).partition(" This is likely")[0]


def _memory(device: Any) -> int:
    """Bytes of memory of a torch device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
