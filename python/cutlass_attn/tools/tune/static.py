"""A time without a GPU: the issue-slot model of docs/notes/ada.md, applied to a whole call.

A bound for comparisons between tiles, no measurement: latencies, barriers, bank conflicts, L2 and
DRAM are not in it.
"""

from __future__ import annotations

from typing import Any

from ..experiment.problems import Shape
from ..sass.issue_slots import PARTS, SCHEDULERS, Part
from ..sass.tiles import REGISTERS, Tile
from .space import Limits, limits

SMEM_PER_SM = 100 * 1024  # of Ada
_MAX_WARPS = 48  # of an SM of Ada


def part_limits(name: str) -> Limits:
    """Of a GPU that the model knows. Raises ValueError for another name."""
    part = _part(name)
    return limits("sm_89", part.sms, SMEM_PER_SM, name)


def _part(name: str) -> Part:
    for part in PARTS:
        if part.name == name:
            return part
    raise ValueError(f"the static model knows {', '.join(p.name for p in PARTS)}, got {name!r}")


def blocks_on_an_sm(tile: Tile, registers: int, limits: Limits) -> int:
    """By shared memory, registers (given out by 8 a thread) and warps."""
    by_smem = limits.smem_per_sm // (tile.smem_bytes + 1024)
    by_registers = REGISTERS // (tile.threads * -(-registers // 8) * 8)
    return max(1, min(by_smem, by_registers, _MAX_WARPS * 32 // tile.threads))


def predicted_us(
    model: dict[str, Any], tile: Tile, registers: int, shape: Shape, limits: Limits
) -> float:
    """Microseconds of the main loops on the SM with most blocks.

    A scheduler's warps are limited by the busiest unit, or by what a warp does one after the
    other, over as many warps as it has.
    """
    part = _part(limits.part)
    tensor = model["parts"][part.name]["tensor"]
    alone = tensor / model["parts"][part.name]["without_overlap"]
    busiest = max(tensor, *model["clocks"].values())
    blocks = shape.batch * shape.heads_q * -(-shape.seqlen_q // tile.m)
    on_sm = -(-blocks // part.sms)
    in_flight = min(on_sm, blocks_on_an_sm(tile, registers, limits))
    of_scheduler = 32 * SCHEDULERS  # threads of an SM for one warp of each
    resident = max(1, in_flight * tile.threads / of_scheduler)
    per_tile = max(busiest, alone / resident)
    pairs = shape.flops / (4.0 * shape.batch * shape.heads_q * shape.head_dim)
    tiles = pairs / shape.seqlen_q / tile.n  # of keys that a query sees, on average
    warps = -(-on_sm * tile.threads // of_scheduler)
    return warps * tiles * per_tile / (part.boost_ghz * 1e3)
