"""Makes rules that use a tile for the tuned calls, and change as few other calls as lists can."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from .._build.facts import DTYPE_KEYS, MIN_TILES_PER_SM
from .._build.tuned_toml import Rule
from .experiment.problems import Shape


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
        """The rule that dispatch uses for a shape."""
        return next((rule for rule in rules if self._has_blocks(rule, shape)), rules[-1])

    def rules_with(self, tile: str, rules: list[Rule]) -> list[Rule]:
        """The rules in force, with a new one that dispatch uses for each tuned shape.

        Tiles of which no tuned shape has enough blocks stay before it, for larger calls. If every
        tuned shape has enough blocks of the new tile, other tiles of fewer rows, and the one for
        all other calls, stay behind it; else it is the last one.
        """
        new = replace(rules[0], tile=tile)
        before = list(takewhile(lambda rule: not any(self._enough(rule)), rules))
        after = [x for x in rules[len(before) :] if x.rows < new.rows] + rules[-1:]
        merged = [*before, new, *(after if all(self._enough(new)) else ())]
        return [next(equal) for _, equal in groupby(merged, key=lambda rule: rule.tile)]

    def _enough(self, rule: Rule) -> list[bool]:
        """Whether each tuned shape has enough blocks of the tile."""
        return [self._has_blocks(rule, shape) for shape in self.shapes]

    def _has_blocks(self, rule: Rule, shape: Shape) -> bool:
        return blocks_per_sm(shape, rule.rows, self.num_sms) >= MIN_TILES_PER_SM


def blocks_per_sm(shape: Shape, m: int, num_sms: int) -> float:
    """Thread blocks per SM with tiles of m rows, as dispatch counts them."""
    heads = shape.heads_q // shape.heads_kv
    if shape.seqlen_q >= m or heads > 1024:
        heads = 1
    tiles = -(-shape.seqlen_q * heads // m)
    return shape.batch * shape.heads_q // heads * tiles / num_sms
