"""`cutlass-attn tune`: looks for a better tile of a kernel, and has dispatch take it.

The loop is EvoEngineer's (arXiv 2510.03760) with a population of one: a proposer names a tile, the
evaluation takes it as far as it gets, and the fastest that passes everything is the incumbent.
docs/tuning.md describes it for users.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ... import _C
from ..._build.facts import DTYPE_KEYS
from ..._build.tuned_toml import DEVICE_CLASSES, Rule, Tuning
from ..._variants import variants
from ..experiment.problems import Shape
from .evaluate import Evaluator
from .proposers import Context, ProposalError, Proposer, Tried
from .space import Candidate, Task, blocks_per_sm, parse_tile
from .state import State

_MAX_BAD_ANSWERS = 3
_MANY = 2.0  # times the blocks that were tuned: too many to conclude anything
_ROUNDING = 1e-6  # of blocks per SM: dispatch counts them in fp32

# (what, rounds done, rounds)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    best: Tried | None
    reason: str  # why it stopped
    bad_answers: tuple[str, ...] = ()  # of a proposer


def search(
    evaluator: Evaluator,
    proposer: Proposer,
    state: State,
    start: Candidate,
    rounds: int,
    show: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Tries so many tiles beside the first, those of the state included; each is noted in it.

    `start` is what runs now. Of a state that goes on it need not be the first, to which all scores
    are relative: it is tried next then, unless it has been.
    """
    begun = clock() - state.seconds

    def attempt(candidate: Candidate) -> None:
        done = len(state.tried)
        entry = evaluator.evaluate(
            candidate, state.best, lambda step: show(f"{candidate}: {step}", done, rounds + 1)
        )
        state.add(replace(entry, seconds=round(clock() - begun, 1)))

    if start not in [entry.candidate for entry in state.tried]:
        attempt(start)
    if state.best is None:
        first = state.tried[0]
        text = f"{first.candidate}, the first, fails at {first.stage}: {first.reason}"
        return Outcome(None, text)
    bad: list[str] = []
    while len(state.tried) <= rounds:
        context = Context(evaluator.space, state.tried, tuple(bad))
        try:
            candidate = proposer.propose(context)
        except ProposalError as error:
            bad.append(str(error))
            if len(bad) >= _MAX_BAD_ANSWERS:
                return Outcome(state.best, f"{len(bad)} answers were bad", tuple(bad))
            continue
        if candidate is None:
            return Outcome(state.best, "the proposer has no other tile", tuple(bad))
        attempt(candidate)
    return Outcome(state.best, f"{rounds} rounds are done", tuple(bad))


def rules_in_force(task: Task) -> list[Rule]:
    """Those for the task's kernel, head dims and kind of call on its class of GPUs, in order.

    The last one has no condition. Without any rule the first of the task's variants is what runs.
    """
    wanted = task.kernel, task.head_dim, task.head_dim_v
    device_class = task.limits.device_class
    known = [
        Rule(
            device_class,
            rule["kernel"],
            task.dims,
            rule["tile"],
            round(rule["min_blocks_per_sm"], 6),
            decode=rule["decode"],
        )
        for rule in _C.tile_rules()
        if (rule["kernel"], rule["head_dim"], rule["head_dim_v"]) == wanted
        and rule["smem_kb"] == DEVICE_CLASSES[device_class]
    ]
    found = [rule for rule in known if rule.decode == task.is_decode]
    if not found:  # decoding goes by the rules of all calls then
        found = [replace(rule, decode=task.is_decode) for rule in known if not rule.decode]
    if found and not found[-1].min_blocks_per_sm:
        return found
    # Where none holds, dispatch takes the first of all.
    rows = (row for row in variants() if (row.kernel, row.head_dim, row.head_dim_v) == wanted)
    tile = found[0].tile if found else next(rows).tile
    return [*found, Rule(device_class, task.kernel, task.dims, tile, decode=task.is_decode)]


def rule_for(rules: list[Rule], shape: Shape, num_sms: int) -> Rule:
    """The one that dispatch follows for a call; each counts the call's blocks with its own tile."""
    return next(
        rule
        for rule in rules
        if rule.min_blocks_per_sm <= _blocks(rule, shape, num_sms) * (1 + _ROUNDING)
    )


def _blocks(rule: Rule, shape: Shape, num_sms: int) -> float:
    return blocks_per_sm(shape, parse_tile(rule.tile).m, num_sms)


def rules_with(task: Task, best: Candidate, rules: list[Rule]) -> list[Rule]:
    """The rules in force, and one for the tile found that is the first to hold in each tuned shape.

    A call with fewer blocks per SM than each of them, counted with the tile found, keeps its rule;
    so does one with twice as many as any of them, counted with the tile that ran for the largest.
    """
    new = replace(rules[0], tile=str(best))

    def counts(rule: Rule) -> list[float]:
        return [_blocks(rule, shape, task.limits.num_sms) for shape in task.shapes]

    before = []
    for rule in rules:
        most = max(counts(rule)) * (1 + _ROUNDING)
        if rule.min_blocks_per_sm > most:
            before.append(rule)
            continue
        before.append(replace(rule, min_blocks_per_sm=math.ceil(1000 * _MANY * most) / 1000))
        break  # a call with so many blocks got no further
    least = math.floor(1000 * min(counts(new)) * (1 - _ROUNDING)) / 1000
    return _without_idle([*before, replace(new, min_blocks_per_sm=least), *rules])


def _without_idle(rules: list[Rule]) -> list[Rule]:
    """The rules without those that change nothing."""
    kept: list[Rule] = []
    for rule in rules:
        m = parse_tile(rule.tile).m
        if any(
            parse_tile(other.tile).m == m and other.min_blocks_per_sm <= rule.min_blocks_per_sm
            for other in kept
        ):
            continue  # whenever it holds, the other one does before it
        if kept and kept[-1].tile == rule.tile:
            kept.pop()  # this one holds where that one does
        kept.append(rule)
        if not rule.min_blocks_per_sm:
            break
    return kept


def with_rules(tuning: Tuning, rules: list[Rule]) -> Tuning:
    """A user's tuning with its rules for the same kernel, head dims and class replaced.

    Marks of tiles that are no variants without a rule go with their rules.
    """
    where = rules[0].where
    kept = [rule for rule in tuning.rules if rule.where != where] + rules
    keys = {variant.key for variant in variants() if variant.tier != "tuned"}
    for rule in kept:
        keys |= {f"{rule.kernel}/{key}/{rule.head_dims}/{rule.tile}" for key in DTYPE_KEYS.values()}
    return Tuning(kept, [mark for mark in tuning.failing if mark.key in keys])
