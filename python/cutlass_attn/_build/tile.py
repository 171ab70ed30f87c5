"""The tile of an mma.sync kernel: the assertions of kernels/sm80/config.hpp in Python.

They are repeated here so that a tile of the user's tuning file is checked without a compiler.
dev/sass/tiles.py compares compiled kernels with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .variant_key import parse

REGISTERS = 65536  # of an SM
MAX_SMEM = 99 * 1024  # of a block on Ada: an SM has 100 KB, and a block takes 1 KB beyond its own

# Beside the buffers of Q, K and V: TileCoord, TileRange, TileMask and Dropout; with pages, four
# addresses, and one for each key.
_COORDINATES, _COORDINATES_PAGED, _ROW = 120, 168, 8
# With Q and K in int8 two floats a row, two addresses, and scales of two tiles of keys, or of twice
# as many of 64; with V in 8 bits scales of one tile, those of its values among them.
_ADDRESSES, _START, _SCALES, _SCALES_INT8_V, _SCALES_FP8_V = 16, 64, 16, 192, 32
# Kernels of sm80/forward.hpp, with what they accumulate in; those that look rows up in pages.
FORWARD = {
    "": "fp32",
    "split_keys": "fp32",
    "dropout": "fp32",
    "general": "fp32",
    "varlen": "fp32",
    "paged": "fp32",
    "paged_general": "fp32",
    "fp16": "fp16",
    "fp16_qk": "fp16_qk",
    "fp16_pv": "fp16_pv",
    "int8_qk": "fp32",
    "int8_qk_general": "fp32",
    "int8": "fp32",
    "int8_general": "fp32",
    "int8_fp8": "fp32",
    "int8_fp8_general": "fp32",
}
_INT8_V, _FP8_V = ("int8", "int8_general"), ("int8_fp8", "int8_fp8_general")
_INT8 = ("int8_qk", "int8_qk_general", *_INT8_V, *_FP8_V)
_PAGED = ("paged", "paged_general")
# Registers for O and the steps of Q that stay with it: kRegisters of sm80/config.hpp, by the score.
_BUDGET, _BUDGET_GENERAL = 160, 144


@dataclass(frozen=True)
class TileShape:
    """Queries, keys and warps of a block, at some head dims."""

    head_dim: int
    head_dim_v: int
    m: int
    n: int
    warps: int
    columns: int
    is_paged: bool = False
    is_int8: bool = False  # Q K^T
    is_int8_v: bool = False  # and P V
    is_fp8_v: bool = False  # or that in e4m3

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.columns

    @property
    def rows(self) -> int:
        """m16 blocks of a warp."""
        return self.m // (16 * self.warps)

    @property
    def is_pipelined(self) -> bool:
        """Q stays in registers: kKeepsQ of sm80/config.hpp."""
        if self.is_int8:
            return self.q_and_o <= 128 and not self.is_8_bit_v
        return self.columns == 1 and self.rows * (self.head_dim // 16) * 4 <= 32

    @property
    def is_8_bit_v(self) -> bool:
        """P V in 8 bits, whichever."""
        return self.is_int8_v or self.is_fp8_v

    @property
    def has_two_8_bit_tiles(self) -> bool:
        """With P V in 8 bits K and V have two buffers each: kHasTwo8BitTiles of sm80/config.hpp."""
        return self.is_8_bit_v and self.n * (self.head_dim + self.head_dim_v) <= 16 * 1024

    @property
    def min_blocks(self) -> int:
        """Blocks an SM has registers for: kMinBlocksPerSm of sm80/config.hpp."""
        if self.columns > 1:
            return 1
        is_small = self.rows == 1 and max(self.head_dim, self.head_dim_v) <= 64
        is_small_in_int8 = self.is_int8 and self.is_pipelined and self.q_and_o <= 80
        is_small_in_int8 &= self.rows == 1 or self.n == 128
        return 3 if (is_small and not self.is_paged) or is_small_in_int8 else 2

    @property
    def q_and_o(self) -> int:
        """Registers of both, of Q in int8."""
        return self.rows * (self.head_dim // 32 * 4 + self.head_dim_v // 2)

    def steps_kept(self, is_general: bool) -> int:
        """Steps of 16 columns of Q that stay in registers: q_steps_kept() of sm80/config.hpp."""
        budget = _BUDGET_GENERAL if is_general else _BUDGET
        steps = (budget - self.rows * (self.head_dim_v // self.columns // 8) * 4) // (self.rows * 4)
        return min(steps, self.head_dim // 16)

    @property
    def spills_surely(self) -> bool:
        """Whether O, the scores in flight where Q is in shared memory, and what a thread needs for
        addresses and row maxima are more registers than it may have."""
        needed = self.rows * self.head_dim_v // self.columns // 2 + 24
        if self.columns == 1 and not self.is_pipelined:
            needed += self.rows * self.n // 4  # if they are in fp16; twice as many in fp32
        return needed > min(255, REGISTERS // (self.threads * self.min_blocks))

    @property
    def smem_bytes(self) -> int:
        """Of a block: SharedStorage of sm80/config.hpp."""
        q = 2 * self.m * self.head_dim
        k, v = 2 * self.n * self.head_dim, 2 * self.n * self.head_dim_v
        if self.is_int8:
            k, q8, o = k // 2, q // 2, 2 * self.m * self.head_dim_v
            v //= 2 if self.is_8_bit_v else 1
            tiles = max(v, q - q8, o - k - q8) + k + q8
            if self.is_pipelined:
                tiles = k + v + max(q, k + v, o - k - v)
            elif self.has_two_8_bit_tiles:
                tiles = k + v + q8 + max(k + v, q - q8, o - k - v - q8)
            scales = 2 * max(1, self.n // 64) * _SCALES
            if self.is_8_bit_v:
                of_tile = _SCALES_INT8_V if self.is_int8_v else _SCALES_FP8_V
                scales = of_tile * (2 if self.has_two_8_bit_tiles else 1)
            return tiles + _aligned(scales + _START + _ADDRESSES + 8 * self.m + _COORDINATES)
        if self.columns == 1:
            stages = 2 if self.is_pipelined else 1
            coordinates = _COORDINATES_PAGED + _ROW * self.n if self.is_paged else _COORDINATES
            return q + stages * (k + v) + _aligned(coordinates)
        moved = self.steps_kept(is_general=True) // 4 * self.m * 128
        p = 2 * self.m * self.n
        exchange = 4 * self.warps * self.columns
        return k + v + q - moved + p + _aligned(exchange + _COORDINATES)

    def why_not(self) -> str:
        """What does not hold of sm80/config.hpp's and tile/tile_copy.hpp's assertions, or on Ada.

        Empty if all do.
        """
        dims = f"{self.head_dim}, {self.head_dim_v}"
        step, step_v = (32, 32) if self.columns == 1 else (64, 64 * self.columns)
        if self.head_dim % step or self.head_dim_v % step_v:
            return f"head dims {dims} are no multiples of {step} and {step_v}"
        if self.m % (16 * self.warps):
            return f"{self.m} queries are no multiple of 16 for each of {self.warps} warps"
        if self.is_8_bit_v and self.n != 64:
            return f"{self.n} keys are not 64, which a scale of rounded weights covers"
        if self.is_int8 and self.n != 32 and self.n % 64:
            return f"{self.n} keys are not 32 or a multiple of 64, which share scales"
        if self.n % 16 or (self.columns == 1 and self.is_pipelined and self.n % 32):
            return f"{self.n} keys are no multiple of {32 if self.is_pipelined else 16}"
        if self.columns > 1 and self.n != 8 * self.columns:
            return f"{self.n} keys are not 8 for each of {self.columns} warps that share rows"
        if self.threads > 1024:
            return f"{self.threads} threads, a block has at most 1024"
        vectors = 4 if self.head_dim % 64 and self.head_dim_v % 64 else 8  # of a row, side by side
        if self.threads % (8 * vectors):
            return f"{self.threads} threads do not copy 8 rows at once, {8 * vectors} do"
        if self.smem_bytes > MAX_SMEM:
            return f"shared memory {self.smem_bytes} bytes, a block may have {MAX_SMEM}"
        if self.columns > 1 and self.m * self.head_dim_v > self.n * (
            self.head_dim + self.head_dim_v
        ):
            return f"O of {self.m} queries does not fit where {self.n} keys were"
        return ""


def _aligned(size: int) -> int:
    return -(-size // 128) * 128


def shape_of(key: str) -> TileShape | None:
    """The tile of a variant's key, such as sm80/f16/d64/128x64x4; None for other kernels."""
    parts = parse(key)
    if parts is None or not parts.tile or parts.dtype == "f32":
        return None
    family, _, kind = parts.kernel.partition("/")
    if family not in ("sm80", "sm89") or kind not in FORWARD:
        return None
    return TileShape(
        parts.head_dim,
        parts.head_dim_v,
        **parts.tile,
        is_paged=kind in _PAGED,
        is_int8=kind in _INT8,
        is_int8_v=kind in _INT8_V,
        is_fp8_v=kind in _FP8_V,
    )


def tiles(family: str, axes: Mapping[str, Sequence[int]]) -> list[str]:
    """Those of kernels/space.toml that the kernel's source takes and that need not spill.

    Args:
        family: a variant's key without the tile, such as sm80/f16/d64.
        axes: the kernel's entry of space.toml; its warps share no rows if it has no "columns".
    """
    found = []
    values = (axes.get(name, (1,)) for name in ("m", "n", "warps", "columns"))
    for m, n, warps, columns in itertools.product(*values):
        tile = f"{m}x{n}x{warps}" + f"c{columns}" * (columns > 1)
        shape = shape_of(f"{family}/{tile}")
        if shape and not shape.why_not() and not shape.spills_surely:
            found.append(tile)
    return found
