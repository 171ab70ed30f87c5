"""What is tuned, and what may be tried for it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..._build.facts import DTYPE_KEYS
from ..._build.tuned_toml import device_class
from ..._build.variant_key import TILE
from ..experiment.problems import Shape
from ..sass.tiles import Tile, tile_of

AXES = ("m", "n", "warps", "columns")

# Registers of a thread for addresses, bounds and the softmax state of its rows.
_OVERHEAD = 24


@dataclass(frozen=True, order=True)
class Candidate:
    """A tile: m queries, n keys, warps along M and, as columns, along N."""

    m: int
    n: int
    warps: int
    columns: int = 1

    def __str__(self) -> str:
        text = f"{self.m}x{self.n}x{self.warps}"
        return text if self.columns == 1 else f"{text}c{self.columns}"


def parse_tile(text: str) -> Candidate:
    """Reads "128x64x4" or "32x32x2c4". Raises ValueError."""
    match = re.fullmatch(TILE, text)
    if match is None:
        raise ValueError(f'a tile is like "128x64x4" or "32x32x2c4", got {text!r}')
    m, n, warps, columns = (int(x or 1) for x in match.groups())
    return Candidate(m, n, warps, columns)


@dataclass(frozen=True)
class Limits:
    """What a device has; `part` is the GPU of the static model, where there is none."""

    arch: str
    device_class: str  # of tuned.toml
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    part: str = ""


def blocks_per_sm(shape: Shape, m: int, num_sms: int) -> float:
    """Thread blocks an SM with tiles of m rows, as dispatch counts them for `min_blocks_per_sm`."""
    heads = shape.heads_q // shape.heads_kv
    if shape.seqlen_q >= m or heads > 1024:
        heads = 1
    tiles = -(-shape.seqlen_q * heads // m)
    return shape.batch * shape.heads_q // heads * tiles / num_sms


def limits(arch: str, num_sms: int, smem_per_sm: int, part: str = "") -> Limits:
    """Of a GPU with so much shared memory an SM, in bytes; a block may have 1 KB less."""
    return Limits(arch, device_class(smem_per_sm), num_sms, smem_per_sm - 1024, smem_per_sm, part)


@dataclass(frozen=True)
class Task:
    """What is tuned: a kernel at a dtype and head dims, for some shapes on a device."""

    kernel: str
    dtype: str  # "float16" or "bfloat16"
    head_dim: int
    head_dim_v: int
    shapes: tuple[Shape, ...]
    limits: Limits

    @property
    def is_decode(self) -> bool:
        return self.shapes[0].has_few_queries

    @property
    def dims(self) -> str:
        """As in a key and in tuned.toml."""
        v = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        return f"d{self.head_dim}{v}"

    def key(self, candidate: Candidate) -> str:
        return f"{self.kernel}/{DTYPE_KEYS[self.dtype]}/{self.dims}/{candidate}"

    @property
    def score(self) -> str:
        """The one that tiles are judged with."""
        return "general" if self.kernel.endswith("general") else "identity"

    def tile(self, candidate: Candidate) -> Tile:
        """The tile as its code is made."""
        tile = tile_of(self.key(candidate), self.score)
        assert tile
        return tile

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "dims": self.dims}


class Space:
    """All tiles of a kernel that its source can be compiled for."""

    def __init__(self, task: Task, axes: Mapping[str, Sequence[int]]) -> None:
        self.task = task
        # A kernel's type may have no columns: its warps do not share rows.
        self.axes = {name: tuple(axes.get(name, (1,))) for name in AXES}

    def why_not(self, candidate: Candidate) -> str:
        """Why a tile is not in the space; empty if it is."""
        for name, value in asdict(candidate).items():
            if value not in self.axes[name]:
                allowed = ", ".join(map(str, self.axes[name]))
                return f"{name} is {value}, allowed: {allowed}"
        return self.task.tile(candidate).why_not()

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        combinations = itertools.product(*(self.axes[name] for name in AXES))
        made = (Candidate(*values) for values in combinations)
        return tuple(candidate for candidate in made if not self.why_not(candidate))


def registers_needed(tile: Tile) -> int:
    """The least that a thread needs: O, the scores in flight, Q where it stays, and addresses."""
    columns = tile.head_dim_v // tile.columns
    output = tile.rows * columns // 8 * 4
    if tile.columns > 1:
        return output + tile.rows * 4 + tile.steps_in_registers * tile.rows * 4 + _OVERHEAD
    if tile.is_pipelined:
        scores, queries = tile.rows * tile.key_block * 8, tile.rows * tile.head_dim // 16 * 4
    else:
        scores, queries = tile.rows * tile.n // 8 * 4, 0
    if tile.in_fp16(qk=1, pv=0):
        scores //= 2
    return output + scores + queries + _OVERHEAD


def why_no_room(tile: Tile, limits: Limits) -> str:
    """What of a device a tile takes too much of, by its sizes alone; empty if it fits."""
    if tile.smem_bytes > limits.smem_per_block:
        return f"shared memory {tile.smem_bytes} bytes, a block has {limits.smem_per_block}"
    needed, there = registers_needed(tile), tile.register_limit()
    if needed > there:
        return f"at least {needed} registers a thread, {there} are there"
    return ""
