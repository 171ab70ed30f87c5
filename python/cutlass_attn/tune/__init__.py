"""`cutlass-attn tune`: looks for a better tile of a kernel, and has dispatch take it.

The loop is EvoEngineer's (arXiv 2510.03760) with a population of one: a proposer names a tile, the
evaluation takes it as far as it gets, and the fastest that passes everything is the incumbent.
docs/tuning.md describes it for users.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import _C
from ..info import variants
from ..tuning_file import DEVICE_CLASSES, Rule, Tuning
from .evaluate import Evaluator
from .proposers import Context, ProposalError, Proposer, Tried
from .space import Candidate, Task, blocks_per_sm
from .state import State

PROPOSAL = "proposal"
_MAX_BAD_ANSWERS = 3

# (what, rounds done, rounds)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    best: Tried | None
    reason: str  # why it stopped
    bad_answers: tuple[str, ...] = ()  # of a proposer


def tune(
    evaluator: Evaluator,
    proposer: Proposer,
    state: State,
    start: Candidate,
    rounds: int,
    show: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Tries so many tiles beside `start`, those of the state included; each is noted in it."""
    begun = clock() - state.seconds
    for entry in state.tried:
        evaluator.remember(entry)

    def attempt(candidate: Candidate) -> None:
        done = len(state.tried)
        best = state.best
        incumbent, score = (best.candidate, best.score or 1.0) if best else (candidate, 1.0)
        entry = evaluator.evaluate(
            candidate, incumbent, score, lambda step: show(f"{candidate}: {step}", done, rounds + 1)
        )
        state.add(replace(entry, seconds=round(clock() - begun, 1)))

    if not state.tried:
        attempt(start)
    if state.best is None:
        first = state.tried[0]
        return Outcome(None, f"{start}, which runs now, fails at {first.stage}: {first.reason}")
    bad: list[str] = []
    while len(state.tried) <= rounds:
        context = Context(evaluator.space, state.tried, state.best.candidate, tuple(bad))
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
    """Those for the task's kernel and head dims on its class of GPUs, the first to hold first."""
    found = []
    for smem_kb, kernel, qk, v, tile, least in _C.tile_rules():
        if (kernel, qk, v) != (task.kernel, task.head_dim, task.head_dim_v):
            continue
        if smem_kb == DEVICE_CLASSES[task.limits.device_class]:
            found.append(Rule(task.limits.device_class, kernel, task.dims, tile, round(least, 6)))
    return found


def rules_with(task: Task, best: Candidate, rules: list[Rule]) -> list[Rule]:
    """The rules with the tile found put in where its shapes are.

    Calls with more blocks per SM than were tuned, for which another rule holds, and calls
    with fewer keep theirs. Without any rule the first of the task's variants is what runs.
    """
    blocks = [blocks_per_sm(shape, best.m, task.limits.num_sms) for shape in task.shapes]
    least, most = round(min(blocks), 3), max(blocks)
    if not rules:
        first = next(
            v for v in variants()
            if (v.kernel, v.head_dim, v.head_dim_v) == (task.kernel, task.head_dim, task.head_dim_v)
        )  # fmt: skip
        rules = [Rule(task.limits.device_class, task.kernel, task.dims, first.tile)]
    before = [rule for rule in rules if rule.min_blocks_per_sm > most]
    after = [rule for rule in rules if rule.min_blocks_per_sm < least]
    found = replace(rules[0], tile=str(best), min_blocks_per_sm=least)
    if all(rule.tile == str(best) for rule in after):  # nothing else is left for fewer tiles
        return [*before, replace(found, min_blocks_per_sm=0.0)]
    return [*before, found, *after]


def with_rules(tuning: Tuning, rules: list[Rule]) -> Tuning:
    """A user's tuning with its rules for the same kernel, head dims and class replaced."""
    where = rules[0].where
    return Tuning([rule for rule in tuning.rules if rule.where != where] + rules, tuning.failing)
