"""`cutlass-attn check --ladder`: the kernels from the plainest to the fastest, and what each gains.

It is a check like any other (check.py), of one variant of every kernel, in another order and with
PyTorch's attention beside them, whose own choice of a backend comes first.
"""

from __future__ import annotations

from itertools import pairwise

from ..explain import explain
from ..variants import variants
from .check import run_all
from .experiment.impls import TORCH_BACKENDS, ours
from .experiment.problems import Problem, Shape
from .experiment.report import Report
from .experiment.runner import Progress

# Of a ladder whose kernels are emulated.
EMULATED_SHAPE = Shape(1, 2, 2, 128, 128, 64)


def rungs(problem: Problem, device: str) -> list[str]:
    """The ladder's kernels that can run the problem, the plainest first: a variant of each.

    `variants()` has them in order of preference: from the top of the ladder to its foot. A kernel
    with more options is no rung of its own.
    """
    inputs = problem.inputs(device, 0)
    found = []
    for kernel in reversed(list(dict.fromkeys(variant.kernel for variant in variants()))):
        if "/general" in kernel:
            continue
        causal = problem.shape.causal
        chosen = explain(inputs.q, inputs.k, inputs.v, causal=causal, kernel=kernel).chosen
        if chosen is not None:
            found.append(chosen.key)
    # One that dispatch passes over, as the problem has too few tiles for it, is no step up.
    best = explain(inputs.q, inputs.k, inputs.v, causal=problem.shape.causal).chosen
    keys = [key for key in found if best is not None and key == best.key]
    return found[: found.index(keys[0]) + 1] if keys else found


def run_ladder(
    problem: Problem, progress: Progress, *, device: str, inputs: int, seed: int
) -> Report:
    """Checks and times the rungs and PyTorch's attention; `progress` and errors: run_check()."""
    found = rungs(problem, device)
    if not found:
        raise ValueError("no kernel can run this; cutlass_attn.explain says why")
    backends = ("auto", *TORCH_BACKENDS)
    # In a CUDA graph: what a launch takes shows in events around a short kernel.
    report = run_all(problem, ours(found), backends, progress, device, inputs, seed, "graph")
    report.grid = "ladder"
    fill_steps(report)
    return report


def fill_steps(report: Report) -> None:
    """How many times as fast each rung is as the one before, where both have a time."""
    rows = [row for row in report.rows if row.ours]
    for before, row in pairwise(rows):
        if before.us and row.us:
            row.over_rung_before = before.us / row.us


def is_emulated(report: Report) -> bool:
    return any("-simt/" in row.impl for row in report.rows if row.ours)
