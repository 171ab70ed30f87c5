"""What this build of the library holds: its kernels' variants, and what it was made of."""

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
    arch: str  # of its code: "80", or "90a" for Hopper alone; of CPU kernels the GPU's, or empty
    dtype: str  # "float16", "bfloat16", "float32" or "float64"
    head_dim: int  # 0: any up to 576
    head_dim_v: int  # of V and the output; 0: any up to 576
    head_dim_multiple: int  # takes multiples up to these head dims; 0: them alone
    max_rows: int  # queries times query heads of a KV head; 0: any number
    tile: str  # queries x keys x warps [c warps that share rows]; empty where there is none
    accumulate: str  # what it adds products up in: "fp32", "fp16", "fp16_qk" or "fp16_pv"
    quantize: str | None  # what it multiplies in 8 bits: None, "qk", "int8" or "fp8"
    options: tuple[str, ...]  # what it implements of the options that a kernel may lack
    needs: tuple[str, ...]  # what of these a call has to ask for
    tier: str  # "core", "full", or "tuned": of the user's tuning file
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


def accumulate_of(kernel: str) -> str:
    """What a kernel, or the variant with this key, adds products up in; "fp32" for other names."""
    named = (v.accumulate for v in _variants() if kernel in (v.kernel, v.key))
    return next(named, "fp32")


def quantize_of(kernel: str) -> str | None:
    """What a kernel, or the variant with this key, multiplies in 8 bits; None for other names."""
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
