"""Issue-slot model of the mma.sync kernels' main loop on Ada, read off the machine code.

What a warp executes for one tile of keys that all its queries see, and the time of that on each
unit; for a backward kernel: one step of its loop, both roles together, of which a scheduler has one
warp each. docs/notes/ada.md has the model and its sources.

The tile's path is the cycle through the loop with the products, exponentials and copies that follow
from the tile's sizes, and the fewest instructions: a mask test makes it longer, and updating the
row max takes further exponentials or products (loops.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .loops import KINDS, MEMORY, Instruction, hot_path, read_blocks
from .serving_tiles import LatentTile
from .tiles import BackwardTile, Tile

SCHEDULERS = 4  # per SM; each has a quarter of its units
MUFU_CLOCKS = 32 // 4
ALU_CLOCKS = 32 // 16  # integers, compares, conversions: half as many lanes as for FP32
HMMA_FLOP = 2 * 16 * 8 * 16
IMMA_FLOP = 2 * 16 * 8 * 32  # int8 or e4m3


@dataclass(frozen=True)
class Part:
    """A GPU by its vendor's data."""

    name: str
    sms: int
    boost_ghz: float
    tflops: float  # dense, float16 products accumulated in float32
    tflops_fp16: float  # accumulated in float16
    tops_int8: float
    gb_per_s: float  # of its memory

    @property
    def imma_clocks(self) -> int:
        """Clocks of a scheduler's tensor core for one m16n8k32 product of int8, or of e4m3 with
        float16 accumulation."""
        return self._clocks(self.tops_int8, IMMA_FLOP)

    @property
    def hmma_clocks(self) -> int:
        """Clocks of a scheduler's tensor core for one m16n8k16 product."""
        return self._clocks(self.tflops)

    @property
    def hmma_clocks_fp16(self) -> int:
        """Clocks of one m16n8k16 product with float16 accumulation."""
        return self._clocks(self.tflops_fp16)

    def _clocks(self, tflops: float, flop: int = HMMA_FLOP) -> int:
        return round(flop * SCHEDULERS * self.sms * self.boost_ghz / (1000 * tflops))


PARTS = (
    Part("L4", 58, 2.04, 121.0, 121.0, 242.0, 300.0),
    Part("RTX 4090", 128, 2.52, 165.2, 330.3, 660.6, 1008.0),
    Part("RTX 5090", 170, 2.407, 209.5, 419.0, 838.0, 1792.0),
)


def smem_clocks(instruction: Instruction) -> int:
    """Clocks of the SM's shared memory, at 128 bytes per clock and without conflicts."""
    width = instruction.name.split(".")[-1]
    if instruction.kind == "LDSM":  # number of 8x8 matrices
        return int(width) if width.isdigit() else 1
    if instruction.kind in MEMORY:  # bits per thread
        return int(width) // 32 if width in ("64", "128") else 1
    return 0


def per_tile(tile: Tile) -> dict[str, int]:
    """The work of a warp for a tile that all its queries see, however it is compiled."""
    keys = tile.n // tile.columns
    # A row of int8 K is as long as one with half as many elements; its scales are one more copy.
    # 8-bit V has half as many rows.
    dims = (
        tile.head_dim // 2 if tile.is_int8 else tile.head_dim,
        tile.head_dim_v // 2 if tile.is_8_bit_v else tile.head_dim_v,
    )
    in_16_bits = tile.head_dim * (not tile.is_int8) + tile.head_dim_v * (not tile.is_8_bit_v)
    in_int8 = tile.head_dim * tile.is_int8 + tile.head_dim_v * tile.is_int8_v
    in_e4m3 = tile.head_dim_v * tile.is_fp8_v
    return {
        "HMMA": tile.rows * in_16_bits // 16 * keys // 8,
        "IMMA": tile.rows * in_int8 // 32 * keys // 8,
        "QMMA": tile.rows * in_e4m3 // 8 * keys // 32,
        # The reciprocal of each row's largest weight, or of the row sum.
        "MUFU": tile.rows * (16 * keys // 32 + 2 * tile.is_8_bit_v),
        "LDGSTS": sum(-(-tile.n * dim // 8 // tile.threads) for dim in dims) + tile.is_int8,
    }


def model(path: list[Instruction]) -> dict[str, Any]:
    """Counts by kind, and clocks per unit of a scheduler, for one warp and tile."""
    counts = Counter(i.kind for i in path)
    clocks = {
        "issue": len(path),
        "MUFU": MUFU_CLOCKS * counts["MUFU"],
        "ALU": ALU_CLOCKS * (counts["pack"] + counts["other"]),
        "shared": SCHEDULERS * sum(map(smem_clocks, path)),
    }
    in_8_bits = counts["IMMA"] + counts["QMMA"]
    products = counts["HMMA"] + in_8_bits
    alone = clocks["issue"] - products - counts["MUFU"] + clocks["MUFU"]
    in_fp16 = sum(i.name == "HMMA.16816.F16" for i in path)
    parts = {}
    for part in PARTS:
        tensor = part.hmma_clocks * (counts["HMMA"] - in_fp16) + part.hmma_clocks_fp16 * in_fp16
        tensor += part.imma_clocks * in_8_bits
        unit, most = max([("tensor", tensor), *clocks.items()], key=lambda item: item[1])
        parts[part.name] = {
            "tensor": tensor,
            "tensor_per": {unit: round(tensor / n, 2) for unit, n in clocks.items()},
            "bound": unit,
            "utilisation": round(tensor / most, 3),
            "tflops": round(
                part.tflops * part.hmma_clocks * (counts["HMMA"] + 2 * in_8_bits) / most, 1
            ),
            "without_overlap": round(tensor / (tensor + alone), 3),
        }
    return {"counts": {kind: counts[kind] for kind in KINDS}, "clocks": clocks, "parts": parts}


def model_of(graph: str, tile: Tile | BackwardTile | LatentTile) -> dict[str, Any]:
    """The model of a kernel's code, from its control flow. Raises SassError if there is no loop
    that does what the tile asks for.
    """
    blocks = read_blocks(graph)
    ways = [per_tile(tile)] if isinstance(tile, Tile) else tile.step()
    turns = tile.turns if isinstance(tile, LatentTile) else 1
    return model([i for way in ways for i in hot_path(blocks, way, turns)])
