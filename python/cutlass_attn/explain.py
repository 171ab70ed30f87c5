"""What this build of the library holds, and which of its kernels a call would run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from . import _C
from ._facts import ACCUMULATE, DTYPES
from .devices import CUDA, Device, parse_device
from .functional import Array, attention, find_torch


@dataclass(frozen=True)
class Variant:
    """One compiled, or compilable, kernel instance."""

    key: str  # unique: kernel, dtype and, where compiled in, head dim and tile
    kernel: str
    device: str  # "cuda" or "cpu"
    arch: str  # of its code: "80", or "90a" for Hopper alone; of CPU kernels the GPU's, or empty
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
    return tuple(
        Variant(
            **{**row, "dtype": DTYPES[row["dtype"]], "accumulate": ACCUMULATE[row["accumulate"]]}
        )
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
    q: Array, k: Array, v: Array, *, device: str | None = None, **options: Any
) -> Explanation:
    """Which kernel `attention` would run for the same arguments, and why every other one not.

    Args:
        q, k, v, options: as of `attention`.
        device: None for the device of q, k and v as it is now; "cpu"; "cuda" or "cuda:1" for a GPU
            present; "sm_89", say, for a GPU that need not be there (the choice of a tile then
            takes it for a common one of its kind: sm_80 for an A100 of 108 SMs, sm_86 for an A40
            of 84, sm_89 for an RTX 4090 of 128, sm_90 for an H100 of 132, sm_100 for a B200 of
            148, sm_120 for an RTX 5090 of 170). Only shapes, strides, dtypes and addresses matter,
            so tensors on torch's "meta" device serve as well.

    Raises:
        TypeError, ValueError: as `attention`, for a call that is wrong on any device. A call that
            merely no kernel takes is explained instead.
    """
    find_torch()
    where, name = parse_device(str(getattr(q, "device", "cpu")) if device is None else device)
    if where.kind == CUDA:
        from . import jit

        # The answer depends on it.
        jit.available(where.ordinal if _is_present(where) else None)
    verdicts = _C.explain(q, k, v, options, device=where)
    call = _C.describe(q, k, v, options)
    by_key = {variant.key: variant for variant in _variants()}
    return Explanation(
        ", ".join([call.dtype, *_words(q=q, k=k, v=v, **options)]),
        name,
        tuple(Verdict(by_key[x.key], x.chosen, x.reason) for x in verdicts),
    )


# What help() and inspect show: the signature of `attention`, and `device`.
_SIGNATURE = inspect.signature(attention)
explain.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *_SIGNATURE.parameters.values(),
        inspect.signature(explain).parameters["device"],
    ],
    return_annotation="Explanation",
)
# Of no say in what a kernel has to do, or in the reasons that are given anyway.
_NOT_NAMED = {"return_lse", "out", "kernel", "verify", "rng_state"}


def _words(**arguments: Any) -> Iterator[str]:
    """What a call asks for: shapes, and options that are not what they are by default."""
    for name, parameter in _SIGNATURE.parameters.items():
        value = arguments.get(name, parameter.default)
        if name in _NOT_NAMED:
            continue
        if shape := getattr(value, "shape", ()):
            yield f"{name} {tuple(shape)}"
        elif value != parameter.default:
            yield name if value is True else f"{name} {value}"


def _is_present(where: Device) -> bool:
    """Is this a GPU that can be used?"""
    return not where.compute_capability and not _C.device_info(CUDA, where.ordinal)["unavailable"]
