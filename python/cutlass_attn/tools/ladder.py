"""`cutlass-attn check --ladder`: the kernels from the plainest to the fastest, and each one's gain.

A check (check.py) of one variant of each kernel, in the order of the ladder, and of PyTorch's
attention: first with the backend of its own choice, then with each backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from .._explain import explain
from .._explanation import Explanation
from .._variants import variants
from .check import run_all
from .experiment.impls import TORCH_BACKENDS, ours
from .experiment.problems import Problem, Shape
from .experiment.report import Report
from .experiment.runner import Progress

# The shape of a ladder with emulated kernels.
EMULATED_SHAPE = Shape(1, 2, 2, 128, 128, 64)


_WITH_MORE_OPTIONS = ("general", "varlen", "paged", "wide")
# The reason why a kernel that could run is not chosen (`why_preferred`, dispatch.cpp).
_PASSED_OVER = re.compile(r"could run; \S+ is preferred (for|where) ")


def rungs(explained: Callable[..., Explanation]) -> list[str]:
    """A variant of each kernel of the ladder that can run a call, the plainest first.

    `variants()` is in order of preference, from the top of the ladder down. Kernels with more
    options are not rungs, nor are kernels for calls of another size.

    Args:
        explained: `explain` of the call; takes the keyword `kernel`.
    """
    automatic = explained()
    others = {x.variant.kernel for x in automatic if _PASSED_OVER.match(x.reason)}
    found = []
    for kernel in reversed(list(dict.fromkeys(variant.kernel for variant in variants()))):
        if kernel in others or any(name in kernel for name in _WITH_MORE_OPTIONS):
            continue
        chosen = explained(kernel=kernel).chosen
        if chosen is not None:
            found.append(chosen.key)
    best = automatic.chosen
    return found[: found.index(best.key) + 1] if best and best.key in found else found


def run_ladder(
    problem: Problem, progress: Progress, *, device: str, inputs: int, seed: int
) -> Report:
    """Checks and times the rungs and PyTorch's attention; `progress` and errors: run_check()."""
    given = problem.inputs(device, 0)
    found = rungs(partial(explain, given.q, given.k, given.v, causal=problem.shape.causal))
    if not found:
        raise ValueError("no kernel can run this; cutlass_attn.explain says why")
    backends = ("auto", *TORCH_BACKENDS)
    # Timed in a CUDA graph: events around a short kernel would include the launch.
    report = run_all(problem, ours(found), backends, progress, device, inputs, seed, "graph")
    report.grid = "ladder"
    fill_steps(report)
    return report


def fill_steps(report: Report) -> None:
    """Fills in how many times as fast each rung is as the one before, if both have a time."""
    rows = [row for row in report.rows if row.ours]
    for before, row in pairwise(rows):
        if before.us and row.us:
            row.over_rung_before = before.us / row.us


def is_emulated(report: Report) -> bool:
    return any("-simt/" in row.impl for row in report.rows if row.ours)
