"""Runs problems x implementations and makes judged and timed rows, for check, bench and tune.

First every implementation is judged. Then all are timed in rounds; each round runs all of them, in
an order of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from ...testing import Accuracy
from .impls import Bound, Impl, Unsupported, describe_error
from .judge import Yardstick
from .problems import Problem
from .report import FAILED, MOST_WAITED, OK, UNSUPPORTED, WRONG, Report, Row, rounded
from .stats import round_order
from .timing import (
    Sampler,
    Timer,
    core_times,
    mean_host_us,
    median_us,
    sm_clock_mhz,
    timer_for,
    waited,
)

MIN_ROUNDS = 5
HOST_CALLS = 10_000  # over all rounds
# Emulating a GPU kernel on the CPU is slow. After this time the remaining inputs are left out, and
# the table says so.
EMULATION_SECONDS = 30.0
# The time of an implementation in a round, and the least and most calls.
_ROUND_US, _MIN_SAMPLES, _MAX_SAMPLES = 50e3, 3, 20
_SLOW_US = 200e3  # implementations slower than this run once a round
# Largest allowed difference of two results in 16 bits, relative to values beyond 1.
_TOLERANCE = 2e-2

# (what, done, total)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """What to judge, and to time in `rounds` rounds: none, or MIN_ROUNDS or more."""

    problems: Sequence[Problem]
    impls: Sequence[Impl]
    device: str  # "cpu", "cuda" or "cuda:N"
    rounds: int = 7
    timing: str = "events"  # on a GPU, or "graph"
    host_time: bool = False  # also the time that a call takes on the host
    inputs: int = 1  # random inputs that each is judged on
    whole: bool = False  # all of each result is compared with fp64, not both ends
    seed: int = 0
    # What judges results: made from inputs, accumulator, `whole` and 8-bit mode.
    yardstick: Callable[..., Any] = Yardstick


class _DeviceLost(Exception):
    """A kernel left the CUDA context unusable: nothing can be measured in this process any more."""


@dataclass
class _Entrant:
    row: Row
    bound: Bound
    sample: Sampler
    samples: int
    round_times: list[float]
    host_times: list[float]


def describe_method(plan: Plan) -> dict[str, Any]:
    """How the plan is measured, for the record."""
    return {
        "timing": timer_for(plan.timing, plan.device).name,
        "rounds": plan.rounds,
        "order": "Williams design",
        "host_calls": HOST_CALLS if _times_host(plan) else 0,
        "inputs": f"standard normal, seed {plan.seed}",
        "num_inputs": plan.inputs,
    }


def run(
    plan: Plan,
    report: Report,
    progress: Progress,
    finished: Callable[[Report], None] = lambda report: None,
) -> None:
    """Measures everything into `report`; `finished` is called after each problem.

    An implementation that raises gets a row with the reason. If a kernel leaves the GPU unusable,
    `report.aborted` says so and the rest is not measured.

    Raises ValueError for rounds that are fewer than MIN_ROUNDS, and for a problem that cannot be
    set up.
    """
    if plan.rounds and plan.rounds < MIN_ROUNDS:
        raise ValueError(f"rounds must be {MIN_ROUNDS} or more, got {plan.rounds}")
    steps = len(plan.impls) * (plan.inputs + plan.rounds)
    total = len(plan.problems) * steps
    with _on_device(plan.device):
        timer = timer_for(plan.timing, plan.device)(plan.device)
        for position, problem in enumerate(plan.problems):
            done = position * steps

            def step(what: str, by: int, title: str = str(problem), done: int = done) -> None:
                progress(f"{title}: {what}", done + by, total)

            try:
                _run_problem(plan, report, timer, problem, step)
            except _DeviceLost as error:
                report.aborted = str(error)
                break
            finally:
                finished(report)
    progress("done", total, total)


def _on_device(device: str) -> Any:
    if device == "cpu":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


def _times_host(plan: Plan) -> bool:
    return plan.host_time and plan.device != "cpu"


def _run_problem(
    plan: Plan,
    report: Report,
    timer: Timer,
    problem: Problem,
    step: Callable[[str, int], None],
) -> None:
    rows: list[Row] = []
    try:
        judges = _Judges(plan, problem, lambda: step("fp64 reference", 0))
        entrants = []
        for i, impl in enumerate(plan.impls):
            row = _new_row(problem, impl, timer)
            rows.append(row)
            try:
                bound = _judge(plan, impl, judges, row, partial(step, impl.name), i * plan.inputs)
                if plan.rounds and not bound.is_emulated:
                    entrants.append(_enter(bound, timer, row))
            except Exception as error:  # other libraries raise anything
                _give_up(row, error, plan.device)
        begun = len(plan.impls) * plan.inputs
        before = core_times() if plan.device == "cpu" else {}
        for round_ in range(plan.rounds):
            for i, place in enumerate(round_order(len(entrants), round_)):
                entrant = entrants[place]
                step(entrant.row.requested, begun + round_ * len(plan.impls) + i)
                if entrant.row.status == FAILED:
                    continue
                try:
                    _run_round(plan, entrant)
                except Exception as error:
                    _give_up(entrant.row, error, plan.device)
        for entrant in entrants:
            _finish(plan, entrant)
        part = waited(before, core_times()) or 0.0
        report.waited = rounded(max(report.waited, part))
        if part <= MOST_WAITED:  # else they would say what else the machine runs
            report.fill_speedups(rows)
    finally:
        report.rows += rows


def _new_row(problem: Problem, impl: Impl, timer: Timer) -> Row:
    shape = problem.shape
    return Row(
        op=problem.op,
        impl=impl.name,
        requested=impl.name,
        dtype=problem.dtype,
        option=problem.option,
        page=problem.page,
        timing=timer.name,
        **asdict(shape),
    )


class _Judges:
    """A problem's inputs, and what their results should be."""

    def __init__(self, plan: Plan, problem: Problem, show: Callable[[], None]) -> None:
        self.inputs = [problem.inputs(plan.device, plan.seed + i) for i in range(plan.inputs)]
        self._first: dict[int, Any] = {}  # results of an option, by input
        self._is_random = problem.option == "dropout"

        @cache
        def yardstick(i: int, accumulate: str, quantize: str | None = None) -> Any:
            show()
            return plan.yardstick(self.inputs[i], accumulate, plan.whole, quantize)

        self._yardstick = yardstick
        if problem.option == "none" and plan.impls:
            yardstick(0, "fp32")  # before anything is shown to run

    def add(self, row: Row, i: int, out: Any, lse: Any) -> None:
        """Judges the result of input i, and adds the verdict to the row."""
        if row.op == "backward":
            # The yardstick does not support options: compare the first gradient with that of the
            # first implementation.
            if row.option == "none":
                _add(row, self._yardstick(i, row.accumulate).judge(out))
            else:
                self._compare(row, i, out[0])
            return
        if row.option != "none":
            self._compare(row, i, out)
            return
        yardstick = self._yardstick(i, row.accumulate, row.quantize)
        found = yardstick.judge(out, lse)
        close = yardstick.allclose(out)
        if close is not None:
            row.allclose = close and row.allclose is not False
        _add(row, found)

    def _compare(self, row: Row, i: int, out: Any) -> None:
        """Compares with the first implementation's result, as the yardstick supports no options."""
        row.inputs += 1
        first = self._first.setdefault(i, out)
        if first is out or self._is_random:
            return
        size = first.float().abs().clamp(min=1)
        row.difference = rounded(float(((out.float() - first.float()).abs() / size).max()))
        if not row.difference <= _TOLERANCE:
            row.status, row.reason = WRONG, f"differs by {row.difference:.2g} from the first"


def _add(row: Row, found: Accuracy) -> None:
    """Takes one input's errors into account."""
    n, row.inputs = row.inputs, row.inputs + 1
    if math.isfinite(found.rms):
        row.max_error = rounded(max(row.max_error or 0.0, found.max))
        row.mean_error = rounded(((row.mean_error or 0.0) * n + found.mean) / row.inputs)
        row.rms_error = rounded(
            math.sqrt(((row.rms_error or 0.0) ** 2 * n + found.rms**2) / row.inputs)
        )
        row.rms_allowed = rounded(max(row.rms_allowed or 0.0, found.rms_allowed))
        row.rms_yardstick = rounded(max(row.rms_yardstick or 0.0, found.rms_yardstick))
    if not found.ok and row.status == OK:
        row.status, row.reason = WRONG, found.reason


def _judge(
    plan: Plan, impl: Impl, judges: _Judges, row: Row, show: Callable[[int], None], done: int
) -> Bound:
    """Runs an implementation on every input: is it right?"""
    started = time.perf_counter()
    first = None
    for i, inputs in enumerate(judges.inputs):
        show(done + i)
        bound = impl.prepare(inputs)
        first = first or bound
        row.impl, row.accumulate, row.quantize = bound.name, bound.accumulate, bound.quantize
        with bound.context():
            if plan.whole and bound.with_lse:
                out, lse = bound.with_lse()
            else:
                out, lse = bound.run(), None
            judges.add(row, i, bound.to_bhsd(out), lse)
        if bound.is_emulated and time.perf_counter() - started > EMULATION_SECONDS:
            break
    assert first is not None
    return first


def _enter(bound: Bound, timer: Timer, row: Row) -> _Entrant:
    """Gets a sampler of an implementation: how often does a round fit?"""
    with bound.context():
        sample = timer.sampler(bound.run)
        estimate = median_us(sample(_MIN_SAMPLES))
    least = _MIN_SAMPLES if estimate < _SLOW_US else 1
    row.samples = max(least, min(_MAX_SAMPLES, int(_ROUND_US / estimate)))
    return _Entrant(row, bound, sample, row.samples, [], [])


def _run_round(plan: Plan, entrant: _Entrant) -> None:
    with entrant.bound.context():
        entrant.round_times.append(median_us(entrant.sample(entrant.samples)))
        if _times_host(plan):
            calls = -(-HOST_CALLS // plan.rounds)
            entrant.host_times.append(mean_host_us(entrant.bound.run, calls))


def _finish(plan: Plan, entrant: _Entrant) -> None:
    if entrant.row.status == FAILED:
        return
    us = median_us(entrant.round_times)
    entrant.row.set_times(entrant.round_times, us)
    if plan.device != "cpu":
        with entrant.bound.context():
            entrant.row.sm_clock = f"{sm_clock_mhz(entrant.bound.run, us):.0f} MHz"
    if entrant.host_times:
        mean = sum(entrant.host_times) / len(entrant.host_times)
        entrant.row.host_us = rounded(mean)


def _give_up(row: Row, error: Exception, device: str) -> None:
    if isinstance(error, Unsupported):
        row.status, row.reason = UNSUPPORTED, str(error)
        return
    row.status, row.reason = FAILED, describe_error(error)
    if device == "cpu":
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        raise _DeviceLost(
            f"{row.impl} left the GPU unusable on {row.problem}: {describe_error(lost)}; "
            "run again without it"
        ) from error
    torch.cuda.empty_cache()  # if it ran out of memory, the next one need not
