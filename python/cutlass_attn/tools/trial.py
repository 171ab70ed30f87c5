"""`python -m cutlass_attn.tools.trial`: times variants, in a process of its own for `tune`."""

from __future__ import annotations

import sys
from typing import Any

import click

from .console import DTYPE, causal_option, command, run, shapes_option, with_masks
from .experiment.environment import environment
from .experiment.impls import OURS, ours
from .experiment.problems import Problem
from .experiment.report import Report
from .experiment.runner import Plan, describe_method
from .experiment.runner import run as measure


@command("python -m cutlass_attn.tools.trial --shape 4,16,16,4096,4096,128 --kernel sm80")
@shapes_option
@causal_option
@click.option("--dtype", type=DTYPE, default="fp16")
@click.option(
    "--kernel", "kernels", multiple=True, required=True, help="The first is the baseline."
)
@click.option("--device", default="cuda")
@click.option("--timing", type=click.Choice(["events", "graph"]), default="events")
def trial(shapes: Any, causal: str, dtype: str, kernels: Any, device: str, timing: str) -> int:
    """Time variants against the first of them, and print the result as JSON."""
    problems = [Problem(shape, dtype) for shape in with_masks(shapes, causal)]
    plan = Plan(problems, ours(kernels), device, timing=timing)
    baseline = f"{OURS}:{kernels[0]}"
    report = Report("trial", baseline, environment(device), describe_method(plan), command="trial")
    measure(plan, report, lambda *_: None)
    print(report.dumps(), end="")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(run(trial, "python -m cutlass_attn.tools.trial"))
