"""Rules of dispatch that run the tile found, and leave other calls theirs: docs/tuning.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .._build.facts import DTYPE_KEYS
from .._build.tuned_toml import Rule
from .experiment.problems import Shape

_MANY = 2.0  # times the blocks that were tuned: too many to conclude anything
_ROUNDING = 1e-6  # of blocks per SM: dispatch counts them in fp32


@dataclass(frozen=True)
class Task:
    """What is tuned: a kernel at a dtype and head dims, for some shapes on a GPU."""

    kernel: str
    dtype: str  # "float16" or "bfloat16"
    head_dim: int
    head_dim_v: int
    shapes: tuple[Shape, ...]
    causal: str  # "no", "yes" or "both"
    device: str
    arch: str  # such as "sm_90"
    device_class: str  # of tuned.toml
    num_sms: int

    @property
    def dims(self) -> str:
        """As in a key and in tuned.toml."""
        v = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        return f"d{self.head_dim}{v}"

    def key(self, tile: str) -> str:
        return f"{self.kernel}/{DTYPE_KEYS[self.dtype]}/{self.dims}/{tile}"

    def rule_for(self, rules: list[Rule], shape: Shape) -> Rule:
        """The one that dispatch follows; each counts the call's blocks with its own tile."""
        return next(
            rule
            for rule in rules
            if rule.min_blocks_per_sm <= self._blocks(rule, shape) * (1 + _ROUNDING)
        )

    def rules_with(self, tile: str, rules: list[Rule]) -> list[Rule]:
        """The rules in force, and one for a tile that is the first to hold in each tuned shape.

        A call with fewer blocks per SM than each of them, counted with the new tile, keeps its
        rule; so does one with twice as many as any of them, counted with the tile that ran for the
        largest.
        """
        new = replace(rules[0], tile=tile)
        before = []
        for rule in rules:
            most = max(self._blocks(rule, shape) for shape in self.shapes) * (1 + _ROUNDING)
            if rule.min_blocks_per_sm > most:
                before.append(rule)
                continue
            before.append(replace(rule, min_blocks_per_sm=math.ceil(1000 * _MANY * most) / 1000))
            break  # a call with so many blocks got no further
        least = min(self._blocks(new, shape) for shape in self.shapes) * (1 - _ROUNDING)
        found = replace(new, min_blocks_per_sm=math.floor(1000 * least) / 1000)
        return _without_idle([*before, found, *rules])

    def _blocks(self, rule: Rule, shape: Shape) -> float:
        return blocks_per_sm(shape, rule.rows, self.num_sms)


def blocks_per_sm(shape: Shape, m: int, num_sms: int) -> float:
    """Thread blocks per SM with tiles of m rows, as dispatch counts them for min_blocks_per_sm."""
    heads = shape.heads_q // shape.heads_kv
    if shape.seqlen_q >= m or heads > 1024:
        heads = 1
    tiles = -(-shape.seqlen_q * heads // m)
    return shape.batch * shape.heads_q // heads * tiles / num_sms


def _without_idle(rules: list[Rule]) -> list[Rule]:
    """The rules without those that change nothing."""
    kept: list[Rule] = []
    for rule in rules:
        holds_before = (x for x in kept if x.min_blocks_per_sm <= rule.min_blocks_per_sm)
        if any(other.rows == rule.rows for other in holds_before):
            continue
        if kept and kept[-1].tile == rule.tile:
            kept.pop()  # this one holds where that one does
        kept.append(rule)
        if not rule.min_blocks_per_sm:
            break
    return kept
