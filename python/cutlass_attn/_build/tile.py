"""What follows from the tile of an mma.sync kernel: kernels/sm80/config.hpp in numbers.

It is stated a second time here because it judges what a compiler made of the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..variant_key import parse

# The loop's body is compiled for tiles that need the mask's test and for those that do not; that
# of the general score once, for all. (Where Q stays in registers its loop is another one, over the
# key blocks of all tiles.)
BODIES, BODIES_GENERAL = 2, 1
# A copy of keys for whole tiles and for others; one of queries for tiles of several heads as well.
COPIES, COPIES_Q = 2, 3

REGISTERS = 65536  # of an SM
MAX_SMEM = 99 * 1024  # of a block on Ada: an SM has 100 KB, and a block takes 1 KB beyond its own

# Beside the buffers of Q, K and V: TileCoord, TileRange, NearMask and Dropout.
_COORDINATES = 112


@dataclass(frozen=True)
class Tile:
    """What a kernel's machine code depends on."""

    head_dim: int
    head_dim_v: int
    m: int
    n: int
    warps: int
    columns: int
    score: str
    accumulate: str = "fp32"

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
        return self.columns == 1 and self.rows * (self.head_dim // 16) * 4 <= 32

    @property
    def key_block(self) -> int:
        """Keys that go through softmax together: key_block() of sm80/config.hpp, in units of 16."""
        is_short = not self.is_pipelined or self.n % 64 or self.score == "softcap"
        return 1 if is_short else 2

    @property
    def steps_in_registers(self) -> int:
        """Steps of 16 columns of Q that stay in registers: q_steps_kept() of sm80/config.hpp."""
        budget = 144 if self.score == "general" else 160
        steps = (budget - self.rows * (self.head_dim_v // self.columns // 8) * 4) // (self.rows * 4)
        return min(steps, self.head_dim // 16)

    def in_fp16(self, qk: int, pv: int) -> int:
        """How many of so many products of Q K^T and of P V are added up in fp16."""
        return qk * (self.accumulate in ("fp16", "fp16_qk")) + pv * (
            self.accumulate in ("fp16", "fp16_pv")
        )

    def counts(self) -> dict[str, int]:
        """Instructions of one thread's code.

        m16n8k16 products: Q K^T has n/8 of them per 16 of head_dim, P V head_dim_v/8 per 16 keys,
        for every 16 rows of a warp. ldmatrix.x4 brings 16x16 elements; Q and K come plain, V
        transposed. cp.async brings 8 elements. Outside the bodies are the first copies.
        """
        bodies = BODIES_GENERAL if self.score == "general" else BODIES
        blocks, dims, dims_v = self.n // 16, self.head_dim // 16, self.head_dim_v // 16
        load_q, load_k, load_v = (
            -(-rows * d // 8 // self.threads)
            for rows, d in (
                (self.m, self.head_dim),
                (self.n, self.head_dim),
                (self.n, self.head_dim_v),
            )
        )
        copies = COPIES_Q * load_q + COPIES * (load_k + bodies * (load_k + load_v))
        if self.columns > 1:
            # A warp has a share of the keys for Q K^T, and one of V's columns; it reads P as well.
            keys, dims_v = self.n // self.columns, dims_v // self.columns
            kept = self.steps_in_registers
            body = dims * keys // 16 + self.rows * (dims - kept + blocks)
            return {
                "HMMA": bodies * self.rows * (dims * keys // 8 + 2 * dims_v * blocks),
                "HMMA.F16": 0,
                "LDSM": bodies * body + self.rows * kept,
                "LDSM.T": bodies * blocks * dims_v,
                "LDGSTS": copies,
            }
        if self.is_pipelined and self.score == "general":
            # Q once; Q K^T of the first key block, and in the loop of one; there P V of one.
            # Before the loop the copies of two tiles of K begin.
            products = (
                self.rows * 4 * self.key_block * dims,
                self.rows * 2 * self.key_block * dims_v,
            )
            return {
                "HMMA": sum(products),
                "HMMA.F16": 0,
                "LDSM": self.rows * dims + 2 * self.key_block * dims,
                "LDSM.T": self.key_block * dims_v,
                "LDGSTS": copies + COPIES * load_k + COPIES * load_v,
            }
        if self.is_pipelined:
            # Q once; the first key block's Q K^T and the last one's P V, of which the loop has read
            # the first 16 columns; in the body for any tile Q K^T of each key block once more, for
            # those whose row max has to be updated.
            qk, pv = (bodies + 1) * blocks + self.key_block, bodies * blocks + self.key_block
            products = self.rows * 2 * qk * dims, self.rows * 2 * pv * dims_v
            return {
                "HMMA": sum(products),
                "HMMA.F16": self.in_fp16(*products),
                "LDSM": self.rows * dims + qk * dims,
                "LDSM.T": pv * dims_v - 1,
                "LDGSTS": copies + COPIES * load_v,
            }
        each = bodies * blocks * self.rows * 2
        products = each * dims, each * dims_v
        return {
            "HMMA": sum(products),
            "HMMA.F16": self.in_fp16(*products),
            "LDSM": bodies * (blocks + self.rows) * dims,
            "LDSM.T": bodies * blocks * dims_v,
            "LDGSTS": copies,
        }

    def register_limit(self) -> int:
        """Registers a thread may use: kMinBlocksPerSm of sm80/config.hpp on an SM."""
        small = self.rows == 1 and max(self.head_dim, self.head_dim_v) <= 64
        blocks = 1 if self.columns > 1 else 3 if small else 2
        return min(REGISTERS // (self.threads * blocks) // 8 * 8, 255)

    @property
    def smem_bytes(self) -> int:
        """Of a block: SharedStorage of sm80/config.hpp."""
        q = 2 * self.m * self.head_dim
        k, v = 2 * self.n * self.head_dim, 2 * self.n * self.head_dim_v
        if self.columns == 1:
            stages = 2 if self.is_pipelined else 1
            return q + stages * (k + v) + _aligned(_COORDINATES)
        kept = replace(self, score="general").steps_in_registers
        moved = kept // 4 * self.m * 128
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


def tile_of(key: str, score: str) -> Tile | None:
    """The tile of a variant's key, such as sm80/f16/d64/128x64x4; None for other kernels."""
    parts = parse(key)
    if parts is None or not parts.tile or parts.dtype == "f32":
        return None
    family, _, kind = parts.kernel.partition("/")
    if family != "sm80" or kind not in ("", "general", "fp16", "fp16_qk", "fp16_pv"):
        return None
    accumulate = kind if kind.startswith("fp16") else "fp32"
    return Tile(parts.head_dim, parts.head_dim_v, **parts.tile, score=score, accumulate=accumulate)
