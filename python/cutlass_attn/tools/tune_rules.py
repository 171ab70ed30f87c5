"""Makes rules that use a tile for the tuned calls, and leave other calls unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .._build.facts import DTYPE_KEYS
from .._build.tuned_toml import Rule
from .experiment.problems import Shape

_MANY = 2.0  # calls with this many times the tuned blocks keep their tile
_ROUNDING = 1e-6  # of blocks per SM: dispatch counts them in fp32


@dataclass(frozen=True)
class Task:
    """A kernel at a dtype and head dims, to be tuned for some shapes on a GPU."""

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
        """The head dims as in keys and in tuned.toml."""
        v = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        return f"d{self.head_dim}{v}"

    def key(self, tile: str) -> str:
        return f"{self.kernel}/{DTYPE_KEYS[self.dtype]}/{self.dims}/{tile}"

    def rule_for(self, rules: list[Rule], shape: Shape) -> Rule:
        """The rule that dispatch uses for a shape. Each rule counts blocks with its own tile."""
        return next(
            rule
            for rule in rules
            if rule.min_blocks_per_sm <= self._blocks(rule, shape) * (1 + _ROUNDING)
        )

    def rules_with(self, tile: str, rules: list[Rule]) -> list[Rule]:
        """The rules in force, with a new rule that is the first to hold for each tuned shape.

        Calls with fewer blocks per SM than every tuned shape, counted with the new tile, keep their
        rule. So do calls with twice as many blocks as the largest tuned shape, counted with the
        tile that ran for it.
        """
        new = replace(rules[0], tile=tile)
        before = []
        for rule in rules:
            most = max(self._blocks(rule, shape) for shape in self.shapes) * (1 + _ROUNDING)
            if rule.min_blocks_per_sm > most:
                before.append(rule)
                continue
            before.append(replace(rule, min_blocks_per_sm=math.ceil(1000 * _MANY * most) / 1000))
            break  # calls with this many blocks stop at this rule
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
            kept.pop()  # this rule holds wherever the last one does
        kept.append(rule)
        if not rule.min_blocks_per_sm:
            break
    return kept
