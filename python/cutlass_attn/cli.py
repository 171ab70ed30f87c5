"""The command `cutlass-attn`: what this installation is, and whether its kernels are right."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import _C
from ._call import CUDA, DTYPES
from .check import Problem, Report, Row, default_device, run_check
from .info import build_info, variants

_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = _parser().parse_args(argv)
    if args.command == "info":
        return _info(_console())
    return _check(args)


def _console(stderr: bool = False) -> Console:
    """Wide enough for the tables: a wrapped line can be read, a shortened number cannot."""
    console = Console(stderr=stderr)
    console.width = max(console.width, 140)
    return console


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cutlass-attn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, build, devices and kernels")

    check = commands.add_parser(
        "check",
        help="compare every kernel that can run here with fp64",
        description="Compares every kernel that can run here, and PyTorch's, with fp64 on random "
        "inputs. Exit status 1 if one of this library's kernels fails.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Problem()
    check.add_argument("--batch", type=_size, default=default.batch)
    check.add_argument("--heads", type=_size, default=default.heads)
    check.add_argument("--heads-kv", type=_size, help="key/value heads; None: as many as --heads")
    check.add_argument("--seqlen", type=_size, default=default.seqlen_q, help="query length")
    check.add_argument("--seqlen-k", type=_size, help="key length; None: as --seqlen")
    check.add_argument("--head-dim", type=_size, default=default.head_dim)
    check.add_argument(
        "--dtype", type=lambda name: _SHORT.get(name, name), choices=DTYPES, default=default.dtype
    )
    check.add_argument("--causal", action="store_true")
    check.add_argument("--device", help='"cpu", "cuda" or "cuda:N"; None: a usable GPU, else CPU')
    check.add_argument(
        "--kernel",
        action="append",
        default=[],
        help="only this kernel or variant, such as sm80 or scalar/tiled; may be repeated",
    )
    check.add_argument("--inputs", type=_size, default=default.inputs, help="random inputs")
    check.add_argument("--seed", type=int, default=default.seed)
    check.add_argument("--json", metavar="FILE", help="also write the result there; - is stdout")
    return parser


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _info(console: Console) -> int:
    build = build_info()
    facts = {
        "cutlass_attn": f"{build.version}, tier {build.tier}",
        "CUDA toolkit": build.cuda or "none: CPU-only build",
        "architectures": build.architectures or "-",
        "CUTLASS": build.cutlass or "-",
        "compiler": build.compiler,
        "simt": "GPU kernels also compiled for the CPU" if build.simt else "off",
        "GPU": _gpu(),
        "torch": _torch_version(),
    }
    for name, fact in facts.items():
        console.print(f"{name:<14} {fact}", highlight=False, markup=False)
    table = Table("kernel", "device", "dtype", "head dim", "tile", "tier", "here", box=None)
    for v in variants():
        here = "compiled" if v.compiled else "left out"
        if v.compiled and not v.automatic:
            here += ", by name only"
        head_dim = str(v.head_dim or "any")
        table.add_row(v.kernel, v.device, v.dtype, head_dim, v.tile or "-", v.tier, here)
    console.print()
    console.print(table)
    return 0


def _gpu() -> str:
    capability, unavailable = _C.device_info(CUDA, 0)
    return unavailable or f"sm_{capability}"


def _torch_version() -> str:
    try:
        import torch
    except ImportError:
        return "not installed"
    return str(torch.__version__)


def _check(args: argparse.Namespace) -> int:
    # A JSON document on stdout must be alone there.
    console = _console(stderr=args.json == "-")
    problem = Problem(
        batch=args.batch,
        heads=args.heads,
        heads_kv=args.heads_kv or args.heads,
        seqlen_q=args.seqlen,
        seqlen_k=args.seqlen_k or args.seqlen,
        head_dim=args.head_dim,
        dtype=args.dtype,
        causal=args.causal,
        device=args.device or default_device(),
        inputs=args.inputs,
        seed=args.seed,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("")

            def show(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            report = run_check(problem, args.kernel, show)
    except ValueError as error:
        print(f"cutlass-attn check: {error}", file=sys.stderr)
        return 2
    _print_report(console, report)
    if args.json:
        text = json.dumps(_without_nan(report.as_json()), indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    return 0 if report.ok else 1


def _print_report(console: Console, report: Report) -> None:
    problem = report.problem
    fp16 = problem.dtype == "float16"
    headings = ["kernel", "inputs", "max error", "mean", "RMS", "RMS allowed", "verdict"]
    headings += ["allclose 1e-3"] * fp16 + ["p50 us", "speed-up"]
    table = Table(*headings, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(*_cells(row, problem, fp16))
    console.print(f"{problem}, against fp64", highlight=False, markup=False)
    console.print(table)
    for row in report.rows:
        if not row.ok:
            console.print(f"{row.name}: {row.reason}", highlight=False, markup=False)
    if any(row.speedup for row in report.rows):
        console.print("The speed-up is over scalar/minimal.")
    if any(0 < row.inputs < problem.inputs and row.ok for row in report.rows):
        console.print("Emulated kernels stop at the first input that ends after 30 s.")
    if not any(row.ours for row in report.rows):
        console.print("No kernel can run this; cutlass_attn.explain says why.")


def _cells(row: Row, problem: Problem, fp16: bool) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None or not row.inputs else format(value, form)

    cells = [row.name, f"{row.inputs}/{problem.inputs}"]
    cells += [number(x, ".2e") for x in (row.max, row.mean, row.rms, row.rms_allowed)]
    cells.append("[green]pass[/]" if row.ok else "[red]FAIL[/]")
    if fp16:
        cells.append({True: "yes", False: "[red]no[/]", None: "-"}[row.allclose])
    return [*cells, number(row.p50_us, ".1f"), number(row.speedup, ".2f")]


def _without_nan(value: object) -> object:
    """JSON has no NaN; null stands for it."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
