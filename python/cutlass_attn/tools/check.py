"""`cutlass-attn check`: compares all kernels that can run here, and PyTorch's, with fp64."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from .._explain import explain
from .._variants import variants
from .experiment.environment import environment
from .experiment.impls import OURS, TORCH_BACKENDS, Impl, ours, torchs
from .experiment.problems import Problem, Shape
from .experiment.report import OK, Report
from .experiment.runner import MIN_ROUNDS, Plan, Progress, describe_method, run

# Speed-ups are relative to the plainest kernel.
_PLAINEST = "scalar/minimal"
# Two of the largest tiles, ragged at the end, with GQA; an emulated kernel needs a second or two.
# FULL_SHAPE is the shape of the times in the documentation.
SHAPE, INPUTS = Shape(1, 4, 2, 195, 195, 64), 2
FULL_SHAPE, FULL_INPUTS = Shape(2, 8, 8, 512, 512, 64), 5


def run_check(
    problem: Problem,
    progress: Progress,
    *,
    device: str = "cpu",
    kernels: Iterable[str] = (),
    accumulate: str = "fp32",
    inputs: int = INPUTS,
    seed: int = 0,
) -> Report:
    """Compares kernels with fp64 and times them: those in `kernels`, which must all run, or by
    default all that can run, and PyTorch's backends.

    Raises ValueError for an invalid problem, such as heads that do not divide, and for an unknown
    kernel.
    """
    if accumulate != "fp32" and problem.dtype != "float16":
        raise ValueError(f"{accumulate} accumulation is for float16, not {problem.dtype}")
    able = _that_can(problem, device, accumulate)
    names = list(kernels) or able
    others = [] if kernels else TORCH_BACKENDS
    return run_all(problem, ours(names), others, progress, device, inputs, seed)


def run_all(
    problem: Problem,
    impls: list[Impl],
    backends: Iterable[str],
    progress: Progress,
    device: str,
    inputs: int,
    seed: int,
    timing: str = "events",
) -> Report:
    """A report on these implementations and on the PyTorch backends that can run."""
    impls = [*impls, *(torchs(backends) if importlib.util.find_spec("torch") else [])]
    baseline = next((x.name for x in impls if x.name.startswith(f"{OURS}:{_PLAINEST}/")), "")
    plan = Plan([problem], impls, device, MIN_ROUNDS, timing, inputs=inputs, seed=seed, whole=True)
    report = Report(
        str(problem),
        baseline,
        environment(device),
        describe_method(plan),
        command="check",
    )
    run(plan, report, progress)
    report.rows = [row for row in report.rows if row.ours or row.status == OK]
    return report


def _that_can(problem: Problem, device: str, accumulate: str) -> list[str]:
    """The candidates that accept the problem. Raises ValueError for an invalid problem."""
    sample = problem.inputs(device, 0)
    found = []
    for name in candidates(accumulate, problem.dtype):
        options: dict[str, Any] = {
            "causal": problem.shape.causal,
            "kernel": name,
            "accumulate": accumulate,
        }
        chosen = explain(sample.q, sample.k, sample.v, **options).chosen
        if chosen is not None:
            found.append(chosen.key)
    return found


def candidates(accumulate: str, dtype: str) -> list[str]:
    """Keys of compiled variants, and names of kernels without a compiled variant for this dtype:
    such a kernel compiles its best variant at first use."""
    there = [
        v
        for v in variants()
        if (v.accumulate, v.dtype, v.quantize) == (accumulate, dtype, None) and not v.needs
    ]
    in_build = {variant.kernel for variant in there if variant.compiled}
    names = (variant.key if variant.compiled else variant.kernel for variant in there)
    return [name for name in dict.fromkeys(names) if name not in in_build]
