"""Expected instruction counts, registers and shared memory of mma.sync kernels, by their tile."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutlass_attn._build.variant_key import parse

REGISTERS = 65536  # of an SM

# Bytes of shared memory in addition to the buffers of Q, K and V: TileCoord, TileRange, TileMask
# and Dropout; with pages, four addresses, and one for each key.
_COORDINATES, _COORDINATES_PAGED, _ROW = 120, 168, 8
# With Q and K in int8 two floats a row, two addresses, and scales of two tiles of keys, or of twice
# as many of 64; with V in 8 bits scales of one tile, those of its values among them.
_ADDRESSES, _START, _SCALES, _SCALES_INT8_V, _SCALES_FP8_V = 16, 64, 16, 192, 32
# Kernels of sm80/forward.hpp, with what they accumulate in; those that look rows up in pages.
_FORWARD = {
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
# Registers for O and the steps of Q that stay with it, by the score: q_steps_kept() of
# sm80/tile_facts.hpp.
_BUDGET, _BUDGET_GENERAL = 160, 144

# The loop's body is compiled once for partial tiles and once for full tiles; for the general score
# once for all tiles. (If Q stays in registers, the general score has another loop, over the key
# blocks of all tiles.)
BODIES, BODIES_GENERAL = 2, 1
# Copies of keys: one for whole tiles, one for others. Copies of queries: also for tiles of several
# heads.
COPIES, COPIES_Q = 2, 3


def merge_copies(blocks: int) -> int:
    """cp.async of tile/merge_splits.hpp for so many m16n8 blocks of a thread: kAtOnce before the
    loop, and one for each block that it reads."""
    return 4 + blocks


@dataclass(frozen=True)
class Tile:
    """Queries, keys and warps of a block of sm80/forward.hpp, and what else determines its code."""

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
    splits_keys: bool = False
    accumulate: str = "fp32"
    score: str = field(kw_only=True)

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.columns

    @property
    def rows(self) -> int:
        """m16 blocks of a warp."""
        return self.m // (16 * self.warps)

    @property
    def is_pipelined(self) -> bool:
        """Q stays in registers: keeps_q() of sm80/tile_facts.hpp."""
        if self.is_int8:
            return self.q_and_o <= 128 and not self.is_8_bit_v
        return self.columns == 1 and self.rows * (self.head_dim // 16) * 4 <= 32

    @property
    def is_8_bit_v(self) -> bool:
        """P V in 8 bits, whichever."""
        return self.is_int8_v or self.is_fp8_v

    @property
    def has_two_8_bit_tiles(self) -> bool:
        """With P V in 8 bits K and V have two buffers each."""
        return self.is_8_bit_v and self.n * (self.head_dim + self.head_dim_v) <= 16 * 1024

    @property
    def min_blocks(self) -> int:
        """Blocks an SM has registers for: min_blocks_per_sm() of sm80/tile_facts.hpp."""
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
        """Steps of 16 columns of Q that stay in registers."""
        budget = _BUDGET_GENERAL if is_general else _BUDGET
        steps = (budget - self.rows * (self.head_dim_v // self.columns // 8) * 4) // (self.rows * 4)
        return min(steps, self.head_dim // 16)

    @property
    def smem_bytes(self) -> int:
        """Of a block: SharedStorage of sm80/config.hpp, sm80/quantized/config.hpp."""
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
            return tiles + aligned(scales + _START + _ADDRESSES + 8 * self.m + _COORDINATES)
        if self.columns == 1:
            stages = 2 if self.is_pipelined else 1
            coordinates = _COORDINATES_PAGED + _ROW * self.n if self.is_paged else _COORDINATES
            return q + stages * (k + v) + aligned(coordinates)
        moved = self.steps_kept(is_general=True) // 4 * self.m * 128
        p = 2 * self.m * self.n
        exchange = 4 * self.warps * self.columns
        return k + v + q - moved + p + aligned(exchange + _COORDINATES)

    @property
    def key_block(self) -> int:
        """Keys that go through softmax together: key_block() of sm80/config.hpp, in units of 16."""
        is_short = not self.is_pipelined or self.n % 64 or self.score not in ("identity", "general")
        is_short |= self.is_int8 and self.q_and_o > (64 if self.min_blocks == 3 else 96)
        return 1 if is_short else 2

    @property
    def key_blocks_fp8(self) -> int:
        """With P V in e4m3, key blocks of a tile: kKeyBlocks of tile/products.hpp."""
        return 2 if self.rows > 1 and (self.score == "identity" or not self.is_tight) else 1

    @property
    def is_tight(self) -> bool:
        """With P V in 8 bits: kIsTight of sm80/quantized/config.hpp."""
        return self.rows * (self.head_dim_v + self.n) >= 320

    @property
    def steps_in_registers(self) -> int:
        """k-steps of 16 columns of Q that stay in registers."""
        return self.steps_kept(self.score == "general")

    def in_fp16(self, qk: int, pv: int) -> int:
        """Number of these products of Q K^T and of P V that accumulate in fp16."""
        return qk * (self.accumulate in ("fp16", "fp16_qk")) + pv * (
            self.accumulate in ("fp16", "fp16_pv")
        )

    def counts(self) -> dict[str, int]:
        """Instructions of one thread's code.

        m16n8k16 products: Q K^T has n/8 per 16 of head_dim, P V head_dim_v/8 per 16 keys, for every
        16 rows of a warp. ldmatrix.x4 loads 16x16 elements; Q and K plain, V transposed. cp.async
        copies 8 elements. The first copies are outside the bodies.
        """
        if self.is_int8:
            return self._int8_counts()
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
        if self.splits_keys:
            copies += merge_copies(self.rows * self.head_dim_v // 8)
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
            # Q once; Q K^T of the first key block, and in the loop of one key block; in the loop
            # also P V of one, twice: if every key is seen, and if V of some keys is cleared. Both
            # begin with one load of V. Before the loop the copies of two tiles of K begin.
            products = (
                self.rows * 4 * self.key_block * dims,
                self.rows * 4 * self.key_block * dims_v,
            )
            return {
                "HMMA": sum(products),
                "HMMA.F16": 0,
                "LDSM": self.rows * dims + 2 * self.key_block * dims,
                "LDSM.T": 2 * self.key_block * dims_v - 1,
                "LDGSTS": copies + COPIES * (load_k + load_v),
            }
        if self.is_pipelined:
            # Q once; Q K^T of the first key block, and P V of the last one, of which the loop has
            # read the first 16 columns; in the body for any tile, Q K^T of each key block once
            # more, to update the row max.
            qk, pv = (bodies + 1) * blocks + self.key_block, bodies * blocks + self.key_block
            products = self.rows * 2 * qk * dims, self.rows * 2 * pv * dims_v
            return {
                "HMMA": sum(products),
                "HMMA.F16": self.in_fp16(*products),
                "LDSM": self.rows * dims + qk * dims,
                "LDSM.T": pv * dims_v - 1,
                "LDGSTS": copies + COPIES * load_v,
            }
        halves = bodies * blocks * self.rows * 2
        products = halves * dims, halves * dims_v
        return {
            "HMMA": sum(products),
            "HMMA.F16": self.in_fp16(*products),
            "LDSM": bodies * (blocks + self.rows) * dims,
            "LDSM.T": bodies * blocks * dims_v,
            "LDGSTS": copies,
        }

    def _int8_counts(self) -> dict[str, int]:
        """counts() with Q and K in int8: m16n8k32 products; two numbers are one element to ldmatrix
        and cp.async. Scales are a further copy per tile of K. Q is read twice to be rounded, and in
        a loop for its product with the shift, one row of a thread at a time. Nothing is converted:
        the general score does that itself.
        """
        bodies = BODIES_GENERAL if self.score == "general" else BODIES
        blocks, dims, dims_v = self.n // 16, self.head_dim // 32, self.head_dim_v // 16
        rows_v = self.n // 2 if self.is_8_bit_v else self.n
        load_q, load_k, load_v = (
            -(-rows * d // 8 // self.threads)
            for rows, d in (
                (self.m, self.head_dim),
                (self.n, self.head_dim // 2),
                (rows_v, self.head_dim_v),
            )
        )
        copies = COPIES_Q * load_q + COPIES * (load_k + bodies * (load_k + load_v)) + 1 + bodies
        load = 2 * self.rows * 2 * dims + 2 * self.rows
        if self.is_pipelined and self.score == "general":
            qk, pv, again = 2 * self.key_block, self.key_block, 0
            copies += COPIES * (load_k + load_v) + 1
        elif self.is_pipelined:
            qk, pv, again = (bodies + 1) * blocks, bodies * blocks, 1
            qk, pv = qk + self.key_block, pv + self.key_block
            copies += COPIES * load_v
        else:
            qk, pv, again = bodies * blocks, bodies * blocks, 0
        times = bodies  # number of times that Q is read from shared memory: once per tile
        if self.is_8_bit_v:
            # Steps of 32 keys, two per element; tiles of V are whole. If weights are too large, Q
            # K^T once more.
            pv, copies = pv // 2, copies - bodies * load_v
            if self.score != "general":
                qk, times = 2 * qk, 2 * times
        key_blocks = 1
        if self.is_int8_v and self.score != "general":
            key_blocks = 2 if self.rows > 1 and self.is_tight else 1
        if self.has_two_8_bit_tiles:
            # V is copied ahead like K, and tiles of both are whole.
            copies = COPIES_Q * load_q + (1 + bodies) * (load_k + load_v + 1)
        if self.is_fp8_v and self.score != "general":
            key_blocks = self.key_blocks_fp8
        reads = qk * dims
        if not self.is_pipelined:
            reads += times * key_blocks * self.rows * dims
            # With two key blocks of e4m3 the compiler keeps Q of one in a full tile.
            if self.is_fp8_v and key_blocks == 2 and self.score == "identity":
                reads -= self.rows * dims
        products = self.rows * 2 * pv * dims_v
        counts = {
            "HMMA": 0 if self.is_8_bit_v else products,
            "IMMA": self.rows * 2 * qk * dims + products * self.is_int8_v,
            "QMMA": products * self.is_fp8_v,
            "LDSM": load + reads,
            "LDSM.T": pv * dims_v - again,
            "LDGSTS": copies,
        }
        if self.score != "general":
            counts |= {"I2F": 0, "I2FP": 0, "F2I": 0}
        return counts

    def register_limit(self) -> int:
        """Registers a thread may use: min_blocks_per_sm() of sm80/config.hpp."""
        blocks = self.min_blocks
        if self.is_int8_v and blocks == 3 and self.score != "general":
            blocks = 4
        return min(REGISTERS // (self.threads * blocks) // 8 * 8, 255)


@dataclass(frozen=True)
class BackwardTile:
    """Tile of sm80/backward.hpp: n stationary keys, m queries per step of the loop."""

    head_dim: int
    m: int
    n: int
    warps: int

    @property
    def has_roles(self) -> bool:
        """Whether two warps share keys, with two of their four products each: kHasRoles."""
        return self.head_dim > 64

    @property
    def has_one_slice(self) -> bool:
        """Whether all queries of a step go through softmax at once, without an inner loop."""
        return self.m <= 32 or not self.has_roles

    def step(self) -> list[dict[str, int]]:
        """Instructions of a warp of each role for a step whose queries all see all keys."""
        threads, keys = 32 * self.warps, self.n * (2 if self.has_roles else 1) // self.warps
        product = self.m * keys * self.head_dim // 2048  # over the warp's keys
        every = {
            "HMMA": 2 * product + self.m * self.n * self.head_dim // self.warps // 2048,  # dQ
            "LDGSTS": 2 * self.m * self.head_dim // 8 // threads + 1,  # Q, dO, statistics
            "RED": self.m * self.head_dim // threads,
        }
        weights = self.m * keys // 32
        if self.has_roles:
            return [{**every, "MUFU": weights}, {**every, "MUFU": 0}]
        return [{**every, "HMMA": every["HMMA"] + 2 * product, "MUFU": weights}]


_BACKWARD = ("sm80/backward", "sm80/backward_dropout")


def backward_tile_of(key: str) -> BackwardTile | None:
    """The tile of a variant of sm80/backward or sm80/backward_dropout whose loop is one; None for
    other kernels.
    """
    parts = parse(key)
    if parts is None or parts.kernel not in _BACKWARD or not parts.tile:
        return None
    tile = {name: parts.tile[name] for name in ("m", "n", "warps")}
    shape = BackwardTile(parts.head_dim, **tile)
    return shape if shape.has_one_slice else None


def aligned(size: int) -> int:
    return -(-size // 128) * 128


def tile_of(key: str, score: str) -> Tile | None:
    """The tile in a variant's key, such as sm80/f16/d64/128x64x4, as compiled with a score; None
    for other kernels."""
    parts = parse(key)
    if parts is None or not parts.tile or parts.dtype == "f32":
        return None
    family, _, kind = parts.kernel.partition("/")
    if family not in ("sm80", "sm89") or kind not in _FORWARD:
        return None
    return Tile(
        parts.head_dim,
        parts.head_dim_v,
        **parts.tile,
        is_paged=kind in _PAGED,
        is_int8=kind in _INT8,
        is_int8_v=kind in _INT8_V,
        is_fp8_v=kind in _FP8_V,
        splits_keys=kind == "split_keys",
        accumulate=_FORWARD[kind],
        score=score,
    )
