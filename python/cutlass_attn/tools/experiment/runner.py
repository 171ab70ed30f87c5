"""Times implementations against each other: every round calls all of them, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from .environment import nvidia_smi
from .impls import Call, Impl, Inputs, Unsupported, describe_error
from .judge import Yardstick
from .problems import Grid, Shape
from .report import FAILED, UNSUPPORTED, WRONG, Report, Row, rounded
from .timing import Sampler, Timer, mean_host_us, median_us, timer_for

MIN_ROUNDS = 5
HOST_CALLS = 10_000  # over all rounds
# A round calls an implementation for about so long, but at least and at most so many times.
_ROUND_US, _MIN_SAMPLES, _MAX_SAMPLES = 50e3, 3, 20
_SLOW_US = 200e3  # from here on one call a round has to do

# (what, done, total)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """What to time. A `device` is "cpu", "cuda" or "cuda:N"; at least MIN_ROUNDS rounds."""

    grid: Grid
    dtypes: Sequence[str]  # "float16", "bfloat16", "float32"
    impls: Sequence[Impl]
    device: str
    rounds: int = 7
    seed: int = 0


class _DeviceLost(Exception):
    """A kernel left the CUDA context unusable: nothing can be measured in this process any more."""


@dataclass
class _Entrant:
    row: Row
    call: Call
    sample: Sampler
    samples: int
    round_times: list[float]
    host_times: list[float]


def describe_method(plan: Plan) -> dict[str, Any]:
    """How the plan is measured, for the record."""
    return {
        "timing": timer_for(plan.grid.timing, plan.device).name,
        "rounds": plan.rounds,
        "host_calls": HOST_CALLS if _times_host(plan) else 0,
        "inputs": f"standard normal, seed {plan.seed}",
    }


def run_bench(
    plan: Plan, report: Report, progress: Progress, finished: Callable[[Report], None]
) -> None:
    """Measures everything into `report`; `finished` is called after each shape.

    An implementation that raises gets a row with the reason. If a kernel leaves the GPU unusable,
    `report.aborted` says so and the rest is not measured.

    Raises ValueError for fewer than MIN_ROUNDS rounds.
    """
    if plan.rounds < MIN_ROUNDS:
        raise ValueError(f"rounds must be {MIN_ROUNDS} or more, got {plan.rounds}")
    problems = [(shape, dtype) for dtype in plan.dtypes for shape in plan.grid.shapes]
    steps = len(plan.impls) * (1 + plan.rounds)
    with _on_device(plan.device):
        timer = timer_for(plan.grid.timing, plan.device)(plan.device)
        for position, (shape, dtype) in enumerate(problems):
            done = position * steps

            def step(what: str, by: int, title: str = f"{dtype} {shape}", done: int = done) -> None:
                progress(f"{title}: {what}", done + by, len(problems) * steps)

            try:
                _run_shape(plan, report, timer, shape, dtype, step)
            except _DeviceLost as error:
                report.aborted = str(error)
                break
            finally:
                finished(report)
    progress("done", len(problems) * steps, len(problems) * steps)


def _on_device(device: str) -> Any:
    if device == "cpu":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


def _times_host(plan: Plan) -> bool:
    return plan.grid.host_time and plan.device != "cpu"


def _run_shape(
    plan: Plan,
    report: Report,
    timer: Timer,
    shape: Shape,
    dtype: str,
    step: Callable[[str, int], None],
) -> None:
    rows: list[Row] = []
    try:
        inputs = random_inputs(shape, dtype, plan.device, plan.seed)
        yardstick = Yardstick(inputs)
        entrants = []
        for i, impl in enumerate(plan.impls):
            step(impl.name, i)
            row = _new_row(shape, dtype, impl, timer)
            rows.append(row)
            try:
                entrants.append(_enter(impl, inputs, yardstick, timer, row))
            except Exception as error:  # other libraries raise anything
                _give_up(row, error, plan.device)
        for round_ in range(plan.rounds):
            # Another one starts each round: none always runs after the same other one.
            first = round_ % max(1, len(entrants))
            for i, entrant in enumerate(entrants[first:] + entrants[:first]):
                step(entrant.row.requested, (1 + round_) * len(plan.impls) + i)
                if entrant.row.status == FAILED:
                    continue
                try:
                    _run_round(plan, entrant)
                except Exception as error:
                    _give_up(entrant.row, error, plan.device)
        sm_clock = "" if plan.device == "cpu" else nvidia_smi(plan.device).get("clocks.sm", "")
        for entrant in entrants:
            _finish(entrant, sm_clock)
        report.fill_speedups(rows)
    finally:
        report.rows += rows


def random_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Standard normal q, k and v, the same for the same seed on the same device."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    q_shape = (shape.batch, shape.heads_q, shape.seqlen_q, shape.head_dim)
    kv_shape = (shape.batch, shape.heads_kv, shape.seqlen_k, shape.head_dim)
    kind = getattr(torch, dtype)
    q, k, v = (
        torch.randn(size, generator=generator, device=device).to(kind)
        for size in (q_shape, kv_shape, kv_shape)
    )
    return Inputs(shape, q, k, v)


def _new_row(shape: Shape, dtype: str, impl: Impl, timer: Timer) -> Row:
    sizes = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    return Row(
        op=shape.op, impl=impl.name, requested=impl.name, dtype=dtype, **sizes, timing=timer.name
    )


def _enter(impl: Impl, inputs: Inputs, yardstick: Yardstick, timer: Timer, row: Row) -> _Entrant:
    """Runs an implementation for the first times: is it right, and how often does a round fit?"""
    call = impl.prepare(inputs)
    row.impl = call.name
    with call.context():
        if call.accumulate != "fp32":
            yardstick = Yardstick(inputs, call.accumulate)
        accuracy = yardstick.judge(call.to_bhsd(call.run()))
        if math.isfinite(accuracy.rms):  # JSON has no NaN
            row.rms_error = rounded(accuracy.rms)
            row.rms_allowed = rounded(accuracy.rms_allowed)
        if not accuracy.ok:
            row.status, row.reason = WRONG, accuracy.reason
        sample = timer.sampler(call.run)
        estimate = median_us(sample(_MIN_SAMPLES))
    least = _MIN_SAMPLES if estimate < _SLOW_US else 1
    row.samples = max(least, min(_MAX_SAMPLES, int(_ROUND_US / estimate)))
    return _Entrant(row, call, sample, row.samples, [], [])


def _run_round(plan: Plan, entrant: _Entrant) -> None:
    with entrant.call.context():
        entrant.round_times.append(median_us(entrant.sample(entrant.samples)))
        if _times_host(plan):
            calls = -(-HOST_CALLS // plan.rounds)
            entrant.host_times.append(mean_host_us(entrant.call.run, calls))


def _finish(entrant: _Entrant, sm_clock: str) -> None:
    if entrant.row.status == FAILED:
        return
    entrant.row.set_times(entrant.round_times, median_us(entrant.round_times))
    entrant.row.sm_clock = sm_clock
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
            f"{row.impl} left the GPU unusable on {row.dtype} {row.shape}: {describe_error(lost)}; "
            "run again without it"
        ) from error
    torch.cuda.empty_cache()  # if it ran out of memory, the next one need not
