"""Expected instruction counts, registers and shared memory of the kernels of decoding and of latent
attention, by their tile."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_attn._build.variant_key import parse

from .tiles import BODIES, COPIES_Q, REGISTERS, Tile, aligned, tile_of


@dataclass(frozen=True)
class DecodeTile:
    """Tile of sm80/decode.hpp: warps take tiles of n keys in turn, each for all m rows."""

    head_dim: int
    head_dim_v: int
    m: int
    n: int
    warps: int
    is_fp8: bool = False  # K and V in 8 bits

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stages(self) -> int:
        return 3 if self.head_dim + self.head_dim_v <= 256 else 2

    @property
    def packed(self) -> int:
        """Columns of K and V that are one element to a copy and to ldmatrix."""
        return 2 if self.is_fp8 else 1

    @property
    def keeps_q(self) -> bool:
        return self.head_dim <= 128

    def counts(self) -> dict[str, int]:
        """Instructions of one thread's code, as in Tile, for a warp with one m16 block of rows.

        The general score has two bodies as well: a branch skips its mask.
        """
        dims, dims_v = self.head_dim // 16, self.head_dim_v // 16
        # Rows in chunks of 64 columns, which 8 threads share.
        load_q = -(-self.m // (self.threads // 8)) * (self.head_dim // 64)
        load_kv = self.n * (self.head_dim + self.head_dim_v) // 8 // 32 // self.packed
        of_q = 0 if self.is_fp8 else (1 if self.keeps_q else BODIES) * dims  # otherwise by LDS
        policies = 1 if self.is_fp8 else 2  # L2 policies; a copy has one of them
        return {
            "HMMA": BODIES * (2 * dims + 2 * dims_v),
            "HMMA.F16": 0,
            "LDSM": BODIES * dims // self.packed + of_q,
            "LDSM.T": BODIES * dims_v // self.packed,
            "LDGSTS": COPIES_Q * load_q + self.stages * load_kv * policies,
        }

    def register_limit(self) -> int:
        blocks = 1 if self.warps > 4 else 2
        return min(REGISTERS // (self.threads * blocks) // 8 * 8, 255)

    @property
    def smem_bytes(self) -> int:
        """Bytes of a block: Shared of sm80/decode.hpp."""
        stage = 2 * self.n * (self.head_dim + self.head_dim_v) // self.packed
        result = (
            4 * self.m * (self.head_dim_v + 8) + 8 * self.m
        )  # per warp, in the memory of the stages
        rows = 16 * self.n  # row addresses of a warp's tile
        q = 128 if self.keeps_q else 2 * self.m * self.head_dim
        ticket = 128  # 4 bytes, aligned
        warp = -(-max(self.stages * stage, result) // 128) * 128
        return self.warps * (warp + rows) + q + ticket


@dataclass(frozen=True)
class TokenFormat:
    """A layout of core/token_format.hpp."""

    bytes: int  # of a token
    longer: int  # columns of V in bf16
    group: int  # columns of a scale


TOKEN_FORMATS = {"ds_mla": TokenFormat(656, 0, 128), "ds_mla_v4": TokenFormat(584, 64, 64)}


@dataclass(frozen=True)
class LatentTile:
    """Tile of sm80/latent.hpp: `columns` warps divide the columns of K, `warps` the rows."""

    head_dim: int
    head_dim_v: int
    m: int
    n: int
    warps: int
    columns: int
    tokens: TokenFormat | None = None  # of a cache in 8 bits

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.columns

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of a warp's slice, and of its tail if there is one."""
        columns = self.head_dim_v, self.head_dim - self.head_dim_v
        return tuple(n // self.columns for n in columns if n)

    @property
    def token_bytes(self) -> int:
        """Bytes of a key in the cache."""
        return self.tokens.bytes if self.tokens else 2 * self.head_dim

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile that is computed."""
        tail = 0 if len(self.parts) > 1 else 128
        return self.columns * (2 * self.n * sum(self.parts) + tail)

    @property
    def stage(self) -> int:
        """Bytes of a buffer that copies go to: TokenStage of latent/tokens.hpp."""
        if self.tokens is None:
            return self.tile_bytes
        slice_, *tail = self.parts
        more = self.columns * 2 * tail[0] if tail else self.tokens.longer
        scales = 4 * self.columns * slice_ // self.tokens.group
        return self.n * (self.columns * slice_ + more + scales)

    @property
    def sums(self) -> int:
        """Bytes of a buffer of partial sums."""
        return 4 * self.m * self.n * self.columns

    @property
    def stages(self) -> int:
        converted = self.tile_bytes if self.tokens else 0
        return ((99 << 10) - 2 * self.sums - 2048 - converted) // self.stage

    @property
    def bytes_in_flight(self) -> int:
        """Of the cache, for a block whose other tile is computed."""
        return (self.stages - 1) * self.n * self.token_bytes

    def _copies(self, of_last_warp: bool) -> int:
        """cp.async of 16 bytes of a warp for its rows of a tile."""
        slice_, *tail = self.parts
        if self.tokens is None:
            rows = [2 * columns for columns in self.parts]
        else:
            longer = [self.tokens.longer] if of_last_warp and self.tokens.longer else []
            rows = [slice_, *(2 * columns for columns in tail), *longer]
        return sum(-(-self.n // self.warps // (32 // (bytes_ // 16))) for bytes_ in rows)

    @property
    def turns(self) -> int:
        """Turns of the loop that converts a warp's rows of a tile, 256 numbers at a time."""
        return self._conversions // self._unrolled if self.tokens else 1

    @property
    def _conversions(self) -> int:
        return self.n // self.warps * self.parts[0] // 256

    @property
    def _unrolled(self) -> int:
        return 1 if self.n // self.warps < 32 else 8

    def step(self) -> list[dict[str, int]]:
        """Instructions of a warp whose columns are all in e4m3, if in 8 bits, for a tile that all
        its queries see; of the loop that converts, one turn."""
        blocks, slice_ = self.n // 16, self.parts[0]
        every = {
            "HMMA": 2 * blocks * (sum(self.parts) + slice_) // 16,
            "MUFU": self.n // 2,
            "LDGSTS": self._copies(of_last_warp=False),
        }
        if self.tokens:  # P in 16 bits, and of two numbers one instruction each way
            every["pack"] = self.n // 4 + 8 * self._unrolled
        return [every]

    def counts(self) -> dict[str, int]:
        """Instructions of one thread's code, as in Tile. Q K^T is outside of the bodies."""
        blocks, (slice_, *_) = self.n // 16, self.parts
        return {
            "HMMA": 2 * blocks * (sum(self.parts) // 16 + BODIES * slice_ // 16),
            "HMMA.F16": 0,
            "LDSM": blocks * sum(self.parts) // 16,
            "LDSM.T": BODIES * blocks * slice_ // 16,
            "LDGSTS": self.stages * self._copies(True),
        }

    def register_limit(self) -> int:
        blocks = 1 if self.warps > 1 else 2
        return min(REGISTERS // (self.threads * blocks) // 8 * 8, 255)

    @property
    def smem_bytes(self) -> int:
        """Bytes of a block: Shared of sm80/latent.hpp."""
        rows = 8 * self.n * self.columns
        present = 4 * self.columns * self.stages * self.warps
        block = 144 + 8  # BlockInfo, and the ticket before it
        tiles = self.stages * self.stage
        if self.tokens:
            tiles = aligned(tiles) + self.tile_bytes
        return aligned(tiles + 2 * self.sums + rows + present + block)


def latent_tile_of(key: str) -> LatentTile | None:
    """The tile of a variant of sm80/latent and its kin; None for other kernels."""
    parts = parse(key)
    if parts is None or not parts.kernel.startswith("sm80/latent"):
        return None
    token = parts.kernel.removeprefix("sm80/latent").removeprefix("_64").removeprefix("_")
    tokens = TOKEN_FORMATS.get(token)
    return LatentTile(parts.head_dim, parts.head_dim_v, **parts.tile, tokens=tokens)


def code_of(key: str, score: str) -> Tile | DecodeTile | LatentTile | None:
    """What is known of a variant's machine code; None: nothing."""
    parts = parse(key)
    family = "" if parts is None else parts.kernel.partition("/")[2]
    if parts is not None and family in ("decode", "decode_fp8"):
        tile = {name: parts.tile[name] for name in ("m", "n", "warps")}
        return DecodeTile(parts.head_dim, parts.head_dim_v, **tile, is_fp8=family == "decode_fp8")
    return latent_tile_of(key) or tile_of(key, score)
