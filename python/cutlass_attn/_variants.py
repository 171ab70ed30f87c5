"""The kernel variants of this build, and the build's version and toolkits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from . import _C
from ._build.facts import ACCUMULATE, DTYPES, QUANTIZE


@dataclass(frozen=True)
class Variant:
    """One kernel instance: a kernel for a dtype, a head dim and a tile."""

    key: str  # unique: kernel, dtype and, where compiled in, head dim and tile
    kernel: str
    op: str  # "forward" or "backward"
    device: str  # "cuda" or "cpu"
    arch: str  # compiled for: "80" and later, or "90a", Hopper only; emulated kernels too; "": CPU
    dtype: str  # "float16", "bfloat16", "float32" or "float64"
    head_dim: int  # 0: any up to 576
    head_dim_v: int  # of V and the output; 0: any up to 576
    head_dim_multiple: int  # accepts multiples of this up to head_dim; 0: only head_dim itself
    max_rows: int  # queries times query heads of a KV head; 0: any number
    tile: str  # queries x keys x warps [c warps that share rows]; "": the kernel has no tiles
    accumulate: str  # accumulator: "fp32", "fp16", "fp16_qk" or "fp16_pv"
    quantize: str | None  # products in 8 bits: None, "qk", "int8" or "fp8"
    options: tuple[str, ...]  # supported options, of those that not every kernel supports
    needs: tuple[str, ...]  # options that a call must use for this variant to run
    tier: str  # "core", "full", or "tuned": from the user's tuning file
    compiled: bool  # False: left out of this build
    automatic: bool  # False: runs only when asked for by name


@dataclass(frozen=True)
class BuildInfo:
    """Version, tier, CUDA toolkit, architectures and compiler of a build."""

    version: str
    tier: str
    cuda: str  # toolkit's version; empty for a CPU-only build
    architectures: str
    cutlass: str
    compiler: str
    simt: str  # GPU kernels compiled for the CPU as well: "all", "scalar" or "none"


@cache
def _variants() -> tuple[Variant, ...]:
    rows: list[dict[str, Any]] = [dict(row) for row in _C.variants()]
    return tuple(
        Variant(
            **{
                **row,
                "dtype": DTYPES[row["dtype"]],
                "accumulate": ACCUMULATE[row["accumulate"]],
                "quantize": QUANTIZE[row["quantize"]],
            }
        )
        for row in rows
    )


def variants(op: Literal["forward", "backward"] | None = "forward") -> list[Variant]:
    """Every variant of every kernel in order of preference, in this build or compiled at first use.

    Args:
        op: "forward", "backward", or None for both.

    Raises:
        ValueError: another `op`.
    """
    if op not in ("forward", "backward", None):
        raise ValueError(f'op is {op!r}, allowed: "forward", "backward" or None')
    return [variant for variant in _variants() if op in (variant.op, None)]


@cache
def by_key() -> dict[str, Variant]:
    """Every variant, forward and backward, by its key."""
    return {variant.key: variant for variant in _variants()}


def accumulate_of(kernel: str) -> str:
    """The accumulator of a kernel, or of the variant with this key; "fp32" for other names."""
    named = (v.accumulate for v in _variants() if kernel in (v.kernel, v.key))
    return next(named, "fp32")


def quantize_of(kernel: str) -> str | None:
    """The 8-bit mode of a kernel, or of the variant with this key; None for other names."""
    named = (v.quantize for v in _variants() if kernel in (v.kernel, v.key))
    return next(named, None)


def build_info() -> BuildInfo:
    """Version, tier, CUDA toolkit, architectures and compiler of this build."""
    return BuildInfo(**_C.build_info())


def kept_bytes(device_index: int = 0) -> int:
    """Bytes of a GPU that the library keeps for its calls, outside torch's allocator.

    At most 18 MB, until the process ends, however many streams there were: counters for the first
    256 streams, and workspaces of 4 MB for the first four that need one. Other calls take their
    memory from torch.

    device_index: the GPU's CUDA ordinal. The result is 0 where no call has used it.
    """
    return _C.kept_bytes(device_index)
