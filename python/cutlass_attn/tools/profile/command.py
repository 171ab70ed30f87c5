"""The command `cutlass-attn profile`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ... import tuning
from ..._build.tuned_toml import Failing, Tuning, device_class
from ..console import make_console, parse_dtypes, progress_bar
from ..experiment.problems import SHAPE_FORM, parse_shape
from ..gates.thresholds import FAIL, PASS
from ..sass.disassemble import ToolNotFound
from .measure import Report, run_profile


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="judge the GPU kernels by their gates: Nsight Compute, or the machine code",
        description="Runs every GPU variant once under Nsight Compute and judges tensor-pipe "
        "utilisation, DRAM throughput, bank conflicts, warps active, registers, shared and local "
        "memory by the thresholds of its class. Without a GPU, Nsight Compute or the right to read "
        "counters it judges the machine code alone, and says so. Exit status 1 if a gate fails.",
    )
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        help="only this kernel or variant, such as sm80; may be repeated (all compiled ones)",
    )
    parser.add_argument("--dtype", default="fp16,bf16", help="of fp16, bf16, fp32 (fp16,bf16)")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar=SHAPE_FORM.upper(),
        help="instead of 4x4096 and a decode call of the variant's head dim; of a kernel, the "
        "variants of the smallest head dim that takes it; may be repeated",
    )
    parser.add_argument(
        "--device",
        default="cuda",
        help='"cuda" (default) or "cuda:N"; "sm_89", say, for the machine code alone',
    )
    parser.add_argument(
        "--mark",
        action="store_true",
        help="note in the tuning file which variants fail here: others are then preferred",
    )
    parser.add_argument("--ncu", metavar="PROGRAM", help="Nsight Compute, if it is not on PATH")
    parser.add_argument("--json", metavar="FILE", help="also write the result there; - is stdout")


def run(args: argparse.Namespace) -> int:
    shapes = [parse_shape(text) for text in args.shape]
    dtypes = parse_dtypes(args.dtype)
    try:
        with progress_bar() as show:
            report = run_profile(args.kernel, dtypes, shapes, args.device, args.ncu, show)
    except ToolNotFound as error:
        print(f"cutlass-attn profile: {error}", file=sys.stderr)
        return 1
    _print(make_console(stderr=args.json == "-"), report)
    if args.json:
        text = json.dumps(report.as_json(), indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.mark:
        _mark(report)
    if report.interrupted:
        print("cutlass-attn profile: interrupted, not all were measured", file=sys.stderr)
        return 130
    return 0 if report.ok else 1


def _mark(report: Report) -> None:
    """Writes the marks of the variants profiled; those of others stay. ValueError if none can."""
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
        if not row.reason and row.shape and row.shape.op == "forward"
    }
    marks = [Failing(where, key, reason) for key, reason in report.failing().items()]

    def merged(now: Tuning) -> Tuning:
        kept = [x for x in now.failing if x.device_class != where or x.key not in profiled]
        return Tuning(now.rules, kept + marks)

    tuning.update(file, merged)
    print(f"{len(marks)} of {len(profiled)} marked for {where} in {file}", file=sys.stderr)


def _print(out: Console, report: Report) -> None:
    def say(text: str) -> None:
        out.print(text, highlight=False, markup=False)

    if report.static_only:
        say(f"The machine code alone, {report.device}: {report.static_only}")
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
    say(f"{len(report.rows)} profiled, {failed} with a gate that fails")
