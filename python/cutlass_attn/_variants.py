"""The kernel variants of this build, and the build's version and toolkits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from . import _C
from ._build.facts import ACCUMULATE, DTYPES, QUANTIZE


@dataclass(frozen=True)
class Variant:
    """One kernel instance: a kernel for a dtype, a head dim and a tile.

    Attributes:
        key: unique: kernel, dtype and, where compiled in, head dim and tile.
        kernel: the kernel's name, such as "sm80".
        op: "forward" or "backward".
        device: "cuda" or "cpu".
        arch: what it is compiled for: "80" and later, or "90a", Hopper only; of emulated kernels
            too; "" for CPU kernels.
        dtype: "float16", "bfloat16", "float32" or "float64".
        head_dim: of Q and K; 0: any up to 576.
        head_dim_v: of V and the output; 0: any up to 576.
        head_dim_multiple: accepts multiples of this up to `head_dim`; 0: only `head_dim` itself.
        max_rows: the largest number of queries times query heads of a KV head; 0: any number.
        tile: queries x keys x warps, then "c" and the warps that share rows, if any; "": the kernel
            has no tiles.
        accumulate: accumulator: "fp32", "fp16", "fp16_qk" or "fp16_pv".
        quantize: products in 8 bits: None, "qk", "int8" or "fp8".
        options: supported options, of those that not every kernel supports.
        needs: options that a call must use for this variant to run.
        tier: "core", "full", or "tuned": from the user's tuning file.
        compiled: False: left out of this build.
        automatic: False: runs only when asked for by name.
    """

    key: str
    kernel: str
    op: str
    device: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    head_dim_multiple: int
    max_rows: int
    tile: str
    accumulate: str
    quantize: str | None
    options: tuple[str, ...]
    needs: tuple[str, ...]
    tier: str
    compiled: bool
    automatic: bool


@dataclass(frozen=True)
class BuildInfo:
    """Version, tier, CUDA toolkit, architectures and compiler of a build.

    Attributes:
        version: the library's version.
        tier: "core" or "full": which variants are compiled ahead.
        cuda: the toolkit's version; empty for a CPU-only build.
        architectures: compute capabilities that kernels are compiled for.
        cutlass: CUTLASS's version.
        compiler: the C++ compiler's name and version.
        simt: GPU kernels compiled for the CPU as well: "all", "scalar" or "none".
    """

    version: str
    tier: str
    cuda: str
    architectures: str
    cutlass: str
    compiler: str
    simt: str


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

    Args:
        device_index: the GPU's CUDA ordinal.

    Returns:
        The number of bytes; 0 where no call has used the GPU.
    """
    return _C.kept_bytes(device_index)
