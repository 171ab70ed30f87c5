"""The command `python -m dev.bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from cutlass_attn.tools.console import (
    DTYPES,
    causal_option,
    command,
    make_console,
    progress_bar,
    say,
    seed_option,
    shapes_option,
    with_masks,
)
from cutlass_attn.tools.experiment.environment import environment, why_no_gpu
from cutlass_attn.tools.experiment.problems import OPTIONS
from cutlass_attn.tools.experiment.report import Report
from cutlass_attn.tools.experiment.runner import MIN_ROUNDS, Plan, describe_method, run

from .grids import GRIDS, Grid, grid_for
from .impls import discover, select, yardstick
from .results import checkout_commit, default_path
from .table import print_report


@command(
    "python -m dev.bench --shape 4,32,8,4096,4096,128 --dtype bf16\n"
    "python -m dev.bench --grid options",
    "one of this library's kernels fails or is wrong",
)
@click.option(
    "--grid",
    type=click.Choice([name for name in GRIDS if not name.endswith("-cpu")]),
    help="A named set of shapes; forward by default, small on a CPU. `decode`, `paged`, "
    "`latent` and `varlen` are calls for serving, `few` leaves most of a GPU idle, `medium` fills "
    "it once or twice, `options` is what options cost, `accumulation` error and time of fp16 "
    "accumulation.",
)
@shapes_option
@causal_option
@click.option("--dtype", type=DTYPES, help="fp16, bf16, fp32, with commas between (fp16,bf16).")
@click.option(
    "--option",
    "options",
    type=click.Choice(list(OPTIONS)),
    multiple=True,
    help="An option of the calls, such as a mask; may be repeated (none).",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    help="Also time this kernel or variant of ours, such as sm80; may be repeated.",
)
@click.option(
    "--impl",
    "wanted",
    multiple=True,
    help="Only this one, such as torch:flash, torch, cutlass_attn or xformers; may be repeated.",
)
@click.option(
    "--baseline",
    help="Implementation that ratios are relative to (torch:flash, or the grid's own).",
)
@click.option("--device", default="cuda", help='"cpu", "cuda" or "cuda:N".')
@click.option(
    "--timing",
    type=click.Choice(["events", "graph"]),
    help="On a GPU: events with a cold L2, or in a CUDA graph, warm; by default as the grid says.",
)
@click.option("--rounds", type=int, default=7, help=f"{MIN_ROUNDS} or more.")
@seed_option
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Where to write the result, - is stdout; by default <device>-<grid>.json, in a checkout "
    "of the sources in benchmarks/results.",
)
@click.option("--commit", help="Commit to note in the result; by default that of the checkout.")
def bench(*, json_file: str | None, device: str, **given: Any) -> int:
    """Time the kernels against PyTorch's and those of other libraries.

    Runs every attention library that can be imported, in interleaved rounds on the same random
    inputs, and compares each result with fp64. Writes the times as JSON.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ValueError("torch is not installed; pip install torch") from None
    if device != "cpu" and (lack := why_no_gpu(device)):
        raise ValueError(f"{lack}; `python -m dev.bench --device cpu` times the CPU kernel")
    grid = _grid(device, given)
    impls, absent = discover(grid.kernels, grid.host_time and device != "cpu", grid.op)
    if grid.baseline not in (names := [impl.name for impl in impls]):
        raise ValueError(f"--baseline must be one of {', '.join(names)}, got {grid.baseline!r}")
    chosen = select(impls, absent, grid.impls)
    plan = Plan(
        grid.problems,
        chosen,
        device,
        given["rounds"],
        grid.timing,
        grid.host_time,
        seed=given["seed"],
        yardstick=yardstick,
    )
    report = Report(
        grid.name,
        grid.baseline,
        environment(device),
        describe_method(plan),
        versions={impl.name: impl.version for impl in plan.impls if impl.version},
        absent={} if grid.impls else absent,  # otherwise none of them was requested
        commit=given["commit"] or checkout_commit(),
    )
    to_stdout = json_file == "-"
    named = report.environment["device"] if device != "cpu" else "cpu"
    path = Path(json_file) if json_file else default_path(named, grid.name)

    # After each problem, so that an interrupted run keeps its results.
    def save(report: Report) -> None:
        if not to_stdout:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(report.dumps())

    with progress_bar() as show:
        run(plan, report, show, save)
    console = make_console(stderr=to_stdout)
    print_report(console, report)
    if to_stdout:
        print(report.dumps(), end="")
    else:
        say(console, f"written to {path}")
    return 0 if report.ok else 1


def _grid(device: str, given: dict[str, Any]) -> Grid:
    """The problems to time. Raises ValueError for --grid together with --shape, or no shape."""
    if given["shapes"] and given["grid"]:
        raise ValueError("--grid and --shape exclude each other")
    causal = given["causal"]
    if given["shapes"]:
        grid = Grid("shapes", with_masks(given["shapes"], causal))
    else:
        grid = grid_for(given["grid"], device)
    wanted = {"both": (False, True), "no": (False,), "yes": (True,)}[causal]
    shapes = tuple(shape for shape in grid.shapes if shape.causal in wanted)
    if not shapes:
        raise ValueError(f"--causal {causal} leaves no shape of the {grid.name} grid")
    return replace(
        grid,
        shapes=shapes,
        timing=given["timing"] or grid.timing,
        dtypes=given["dtype"] or grid.dtypes,
        options=given["options"] or grid.options,
        kernels=(*grid.kernels, *given["kernels"]),
        impls=given["wanted"] or grid.impls,
        baseline=given["baseline"] or grid.baseline,
    )
