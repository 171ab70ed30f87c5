"""What this build of the library holds, and which of its kernels a call would run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from . import _C
from ._call import ACCUMULATE, CPU, CUDA, DTYPES, Window, describe, make_request
from ._options import make_options
from .functional import array_library, check_result_type, refuse_planned


@dataclass(frozen=True)
class Variant:
    """One compiled, or compilable, kernel instance."""

    key: str  # unique: kernel, dtype and, where compiled in, head dim and tile
    kernel: str
    device: str  # "cuda" or "cpu"
    dtype: str  # "float16", "bfloat16" or "float32"
    head_dim: int  # 0: any up to 512
    head_dim_v: int  # of V and the output; 0: any up to 512
    head_dim_multiple: int  # takes multiples up to these head dims; 0: them alone
    tile: str  # queries x keys x warps [c warps that share rows]; empty where there is none
    accumulate: str  # what it adds products up in: "fp32", "fp16", "fp16_qk" or "fp16_pv"
    options: tuple[str, ...]  # what it implements of the options that a kernel may lack
    tier: str  # "core", "full", or "tuned": of the user's tuning file
    compiled: bool  # False: left out of this build
    automatic: bool  # False: runs only when asked for by name


@dataclass(frozen=True)
class BuildInfo:
    """What this build was made of."""

    version: str
    tier: str
    cuda: str  # toolkit's version; empty for a CPU-only build
    architectures: str
    cutlass: str
    compiler: str
    simt: bool  # GPU kernels compiled for the CPU as well


@dataclass(frozen=True)
class Verdict:
    """What dispatch thinks of one variant for one call."""

    variant: Variant
    chosen: bool
    reason: str  # why it cannot run, was not asked for or is not preferred; empty if chosen


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call would run and why every other one not; prints as a table."""

    call: str
    device: str
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Variant | None:
        """The variant that would run; None if the call would be refused."""
        return next((verdict.variant for verdict in self.verdicts if verdict.chosen), None)

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
            lines.append(f"{mark} {verdict.variant.key:<{width}}  {text}")
        if self.chosen is None:
            lines.append("no kernel takes this call")
        return "\n".join(lines)


@cache
def _variants() -> tuple[Variant, ...]:
    rows: list[dict[str, Any]] = [dict(row) for row in _C.variants()]
    sums = list(ACCUMULATE)
    return tuple(
        Variant(**{**row, "dtype": DTYPES[row["dtype"]], "accumulate": sums[row["accumulate"]]})
        for row in rows
    )


def variants() -> list[Variant]:
    """Every variant of the manifest, in order of preference, compiled into this build or not."""
    return list(_variants())


def accumulate_of(kernel: str) -> str:
    """What a kernel, or the variant with this key, adds products up in; "fp32" for other names."""
    named = (v.accumulate for v in _variants() if kernel in (v.kernel, v.key))
    return next(named, "fp32")


def build_info() -> BuildInfo:
    """Version, tier, toolkit, architectures and compiler of this build."""
    return BuildInfo(**_C.build_info())


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    kernel: str = "auto",
    accumulate: str = "fp32",
    verify: bool = False,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    device: str | None = None,
    **planned: Any,
) -> Explanation:
    """Which kernel `attention` would run for the same arguments, and why every other one not.

    Args:
        device: None for the device of q, k and v as it is now; "cpu"; "cuda" or "cuda:1" for a GPU
            present; "sm_89", say, for a GPU that need not be there (the choice of a tile then
            takes it for a common one of its kind: sm_80 for an A100 of 108 SMs, sm_86 for an A40
            of 84, sm_89 for an RTX 4090 of 128, sm_90 for an H100 of 132, sm_100 for a B200 of
            148, sm_120 for an RTX 5090 of 170). Only shapes, strides, dtypes and addresses matter,
            so tensors on torch's "meta" device serve as well.

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention`, for a call that is wrong on any
            device. A call that merely no kernel takes is explained instead.
    """
    refuse_planned(**planned)
    lib = array_library(q, k, v)
    request = make_request(lib, q, k, v, causal, window, softmax_scale, softcap, layout, accumulate)
    options = make_options(lib, request, q, bias, mask, alibi_slopes, sinks, dropout_p, rng_state)
    if out is not None:
        check_result_type(lib, request, q, out)
    if device is None:
        kind, index, _, _ = lib.place(q, k, v)
        device = "cpu" if kind == CPU else f"cuda:{index}"
    where, name = parse_device(device)
    if where[0] == CUDA:
        from . import jit

        # The answer depends on it.
        jit.available(where[1] if _is_present(where) else None)
    verdicts = _C.explain(describe(lib, request, q, k, v, options, out, None), *where, kernel)
    by_key = {variant.key: variant for variant in _variants()}
    call = [DTYPES[request.dtype]]
    call += [f"{n} {tuple(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v))]
    call += ["causal"] * causal + [f"window {window}"] * (window is not None)
    call += [f"softcap {softcap}"] * bool(softcap)
    call += [f"accumulate {accumulate}"] * (accumulate != "fp32")
    call += [f"{n} {tuple(x.shape)}" for n, x in options.arrays().items() if n != "rng_state"]
    call += [f"dropout_p {dropout_p}"] * bool(dropout_p)
    return Explanation(
        ", ".join(call),
        name,
        tuple(Verdict(by_key[key], chosen, reason) for key, chosen, reason in verdicts),
    )


def _is_present(where: tuple[int, int, int]) -> bool:
    """Is this a GPU that can be used?"""
    kind, index, capability = where
    return kind == CUDA and not capability and not _C.device_info(CUDA, index)[1]


def parse_device(device: str) -> tuple[tuple[int, int, int], str]:
    """What `_C.explain` asks about a device, and its name.

    "cpu"; "cuda" or "cuda:1": kind, ordinal and 0, for a GPU present; "sm_89": kind, 0 and the
    compute capability. Raises ValueError for anything else.
    """
    if device == "cpu":
        return (CPU, 0, 0), "cpu"
    if match := re.fullmatch(r"sm_?(\d{2,3})a?", device):
        return (CUDA, 0, int(match[1])), f"sm_{match[1]}"
    if match := re.fullmatch(r"cuda(?::(\d+))?", device):
        index = int(match[1] or 0)
        capability, _ = _C.device_info(CUDA, index)
        return (CUDA, index, 0), device + (f" (sm_{capability})" * (capability > 0))
    raise ValueError(f'device must be "cpu", "cuda", "cuda:N" or "sm_89"-like, got {device!r}')
