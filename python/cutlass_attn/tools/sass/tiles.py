"""What the machine code of an mma.sync kernel has to be, by its tile and score."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..._build.tile import TileShape, shape_of
from ..._build.variant_key import parse

# The loop's body is compiled for tiles that need the mask's test and for those that do not; that
# of the general score once, for all. (Where Q stays in registers its loop is another one, over the
# key blocks of all tiles.)
BODIES, BODIES_GENERAL = 2, 1
# A copy of keys for whole tiles and for others; one of queries for tiles of several heads as well.
COPIES, COPIES_Q = 2, 3

REGISTERS = 65536  # of an SM


@dataclass(frozen=True)
class Tile(TileShape):
    """What a kernel's machine code depends on."""

    score: str
    accumulate: str = "fp32"

    @property
    def key_block(self) -> int:
        """Keys that go through softmax together: key_block() of sm80/config.hpp, in units of 16."""
        is_short = not self.is_pipelined or self.n % 64 or self.score == "softcap"
        return 1 if is_short else 2

    @property
    def steps_in_registers(self) -> int:
        """Steps of 16 columns of Q that stay in registers."""
        return self.steps_kept(self.score == "general")

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


def tile_of(key: str, score: str) -> Tile | None:
    """The tile of a variant's key, as it is compiled with a score; None for other kernels."""
    parts, shape = parse(key), shape_of(key)
    if parts is None or shape is None:
        return None
    kind = parts.kernel.partition("/")[2]
    accumulate = kind if kind.startswith("fp16") else "fp32"
    return Tile(**asdict(shape), score=score, accumulate=accumulate)
