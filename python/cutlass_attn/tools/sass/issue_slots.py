"""Issue-slot model of the mma.sync kernels' main loop on Ada, read off the machine code.

What a warp executes for one tile of keys which all its queries see, and what that takes of each
unit. docs/notes/ada.md has the model and its sources.

The tile's path is the way around the loop with the products, exponentials and copies that the
tile's sizes ask for, and the fewest instructions: a mask's test makes it longer, a reference that
is raised takes further exponentials or products (hot_path.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .loops import KINDS, MEMORY, Instruction, hot_path, read_blocks
from .tiles import Tile

SCHEDULERS = 4  # of an SM, each with a quarter of its units
MUFU_CLOCKS = 32 // 4
ALU_CLOCKS = 32 // 16  # integers, compares, conversions: half as many lanes as for FP32
HMMA_FLOP = 2 * 16 * 8 * 16


@dataclass(frozen=True)
class Part:
    """A GPU as its maker describes it."""

    name: str
    sms: int
    boost_ghz: float
    tflops: float  # dense, float16 products added up in float32
    tflops_fp16: float  # and in float16

    @property
    def hmma_clocks(self) -> int:
        """Clocks of a scheduler's tensor core for one m16n8k16 product."""
        return self._clocks(self.tflops)

    @property
    def hmma_clocks_fp16(self) -> int:
        """The same for one that is added up in float16."""
        return self._clocks(self.tflops_fp16)

    def _clocks(self, tflops: float) -> int:
        return round(HMMA_FLOP * SCHEDULERS * self.sms * self.boost_ghz / (1000 * tflops))


PARTS = (Part("L4", 58, 2.04, 121.0, 121.0), Part("RTX 4090", 128, 2.52, 165.2, 330.3))


def smem_clocks(instruction: Instruction) -> int:
    """Clocks of the SM's shared memory, at 128 bytes each and without conflicts."""
    width = instruction.name.split(".")[-1]
    if instruction.kind == "LDSM":  # as many 8x8 matrices
        return int(width) if width.isdigit() else 1
    if instruction.kind in MEMORY:  # bits of each thread
        return int(width) // 32 if width in ("64", "128") else 1
    return 0


def per_tile(tile: Tile) -> dict[str, int]:
    """What a warp has to do for a tile that all its queries see, however it is compiled."""
    keys = tile.n // tile.columns
    dims = (tile.head_dim, tile.head_dim_v)
    return {
        "HMMA": tile.rows * sum(dims) // 16 * keys // 8,
        "MUFU": tile.rows * 16 * keys // 32,
        "LDGSTS": sum(-(-tile.n * dim // 8 // tile.threads) for dim in dims),
    }


def model(path: list[Instruction]) -> dict[str, Any]:
    """Counts by kind, and clocks of a scheduler per unit for one warp and tile."""
    counts = Counter(i.kind for i in path)
    clocks = {
        "issue": len(path),
        "MUFU": MUFU_CLOCKS * counts["MUFU"],
        "ALU": ALU_CLOCKS * (counts["pack"] + counts["other"]),
        "shared": SCHEDULERS * sum(map(smem_clocks, path)),
    }
    alone = clocks["issue"] - counts["HMMA"] - counts["MUFU"] + clocks["MUFU"]
    in_fp16 = sum(i.name == "HMMA.16816.F16" for i in path)
    parts = {}
    for part in PARTS:
        tensor = part.hmma_clocks * (counts["HMMA"] - in_fp16) + part.hmma_clocks_fp16 * in_fp16
        unit, most = max([("tensor", tensor), *clocks.items()], key=lambda item: item[1])
        parts[part.name] = {
            "tensor": tensor,
            "tensor_per": {unit: round(tensor / n, 2) for unit, n in clocks.items()},
            "bound": unit,
            "utilisation": round(tensor / most, 3),
            "tflops": round(part.tflops * part.hmma_clocks * counts["HMMA"] / most, 1),
            "without_overlap": round(tensor / (tensor + alone), 3),
        }
    return {"counts": {kind: counts[kind] for kind in KINDS}, "clocks": clocks, "parts": parts}


def model_of(listing: str, tile: Tile) -> dict[str, Any]:
    """The model of a kernel's code. Raises SassError if its main loop is not found."""
    return model(hot_path(read_blocks(listing), per_tile(tile)))
