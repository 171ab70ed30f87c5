"""The command `python -m dev.profile`."""

from __future__ import annotations

import sys

import click
from cutlass_attn import tuning
from cutlass_attn._build.tuned_toml import Failing, Tuning, device_class
from cutlass_attn.tools.console import (
    DTYPES,
    command,
    json_option,
    make_console,
    progress_bar,
    say,
    shapes_option,
)
from cutlass_attn.tools.document import write
from cutlass_attn.tools.experiment.problems import Shape
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..gates.thresholds import FAIL, PASS
from ..sass.disassemble import ToolNotFound
from .measure import Report, run_profile


@command(
    "python -m dev.profile --kernel sm80 --device sm_89",
    "a gate fails, or cuobjdump is missing",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    help="Only this kernel or variant, such as sm80; may be repeated (all compiled ones).",
)
@click.option("--dtype", "dtypes", type=DTYPES, default="fp16,bf16", help="Of fp16, bf16, fp32.")
@shapes_option
@click.option(
    "--device",
    default="cuda",
    help='"cuda" or "cuda:N"; or an architecture such as "sm_89", for machine code only.',
)
@click.option(
    "--mark",
    is_flag=True,
    help="Record failing variants in the tuning file: others are then preferred.",
)
@click.option("--ncu", metavar="PROGRAM", help="Nsight Compute, if not on PATH.")
@json_option
def profile(
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    shapes: tuple[Shape, ...],
    device: str,
    mark: bool,
    ncu: str | None,
    json_file: str | None,
) -> int:
    """Check GPU kernels against performance thresholds ("gates"), with Nsight Compute.

    Runs every GPU variant once under Nsight Compute, by default on 4x4096 queries and keys and on a
    decode call, and judges tensor-pipe utilisation, DRAM throughput, bank conflicts, warps active,
    registers, shared and local memory by the thresholds of its class. A kernel's --shape runs the
    variants of the smallest head dim that takes it. Without a GPU, Nsight Compute or the right to
    read counters, it judges only the machine code, and says so.
    """
    try:
        with progress_bar() as show:
            report = run_profile(kernels, dtypes, shapes, device, ncu, show)
    except ToolNotFound as error:
        print(f"python -m dev.profile: {error}", file=sys.stderr)
        return 1
    _print(make_console(stderr=json_file == "-"), report)
    if json_file:
        write(report.as_json(), json_file)
    if mark:
        _mark(report)
    if report.interrupted:
        print("python -m dev.profile: interrupted, not all were measured", file=sys.stderr)
        return 130
    return 0 if report.ok else 1


def _mark(report: Report) -> None:
    """Writes the marks of the profiled variants; marks of others stay. ValueError if none can."""
    if report.static_only:
        raise ValueError(f"--mark is for measured figures; {report.static_only}")
    if (file := tuning.path()) is None:
        raise ValueError(f"there is no home directory: name a file in ${tuning.VARIABLE}")
    import torch

    properties = torch.cuda.get_device_properties(report.device)
    where = device_class(int(properties.shared_memory_per_multiprocessor))
    # Calls with few queries mark nothing (Report.failing()), so they do not lift a mark either.
    profiled = {
        row.kernel
        for row in report.rows
        if not row.reason and row.shape and not row.shape.has_few_queries
    }
    marks = [Failing(where, key, reason) for key, reason in report.failing().items()]

    def merged(now: Tuning) -> Tuning:
        kept = [x for x in now.failing if x.device_class != where or x.key not in profiled]
        return Tuning(now.rules, kept + marks)

    tuning.update(file, merged)
    print(f"{len(marks)} of {len(profiled)} marked for {where} in {file}", file=sys.stderr)


def _print(out: Console, report: Report) -> None:
    if report.static_only:
        say(out, f"The machine code alone, {report.device}: {report.static_only}")
    table = Table("kernel", "call", "gate", "threshold", "measured", "verdict", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in report.rows:
        call = str(row.shape or row.score or "-")
        if row.reason:
            table.add_row(row.kernel, call, escape(row.reason), "", "", "[red]FAIL[/]")
        name = row.kernel
        for gate in row.gates:
            measured = "-" if gate.measured is None else f"{gate.measured:.4g}"
            table.add_row(
                name,
                call,
                gate.gate.what,
                str(gate.threshold or "-"),
                f"{measured} {gate.gate.unit}".rstrip(),
                {PASS: "[green]pass[/]", FAIL: "[red]FAIL[/]"}.get(gate.verdict, gate.verdict),
            )
            name = call = ""
    out.print(table)
    failed = sum(not row.ok for row in report.rows)
    say(out, f"{len(report.rows)} profiled, {failed} with a gate that fails")
