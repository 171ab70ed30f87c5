"""The command `cutlass-attn`: what an installation is, if its kernels are right, and how fast."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import _C
from .._build.facts import ACCUMULATE, DTYPES
from ..devices import CUDA
from ..variants import build_info, variants
from .check import Problem, Report, Row, run_check
from .console import SHORT_DTYPES, make_console, parse_dtypes, progress_bar
from .experiment.environment import default_device, environment, why_no_gpu
from .experiment.impls import discover, select
from .experiment.problems import GRIDS, SHAPE_FORM, Grid, parse_shape
from .experiment.report import Report as BenchReport
from .experiment.report import checkout_commit, default_path, load
from .experiment.runner import MIN_ROUNDS, Plan, describe_method, run_bench
from .experiment.table import print_report
from .ladder import COMPARISONS, EARLIER_GPU, EMULATED_SHAPE, Ladder, run_ladder
from .profile import command as profile_command
from .tune import command as tune_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = _parser().parse_args(argv)
    if args.command == "info":
        return _info(make_console())
    run = {
        "bench": _bench,
        "check": _check,
        "profile": profile_command.run,
        "tune": tune_command.run,
        "warmup": _warmup,
    }[args.command]
    try:
        return run(args)
    except (OSError, ValueError) as error:  # a file that cannot be read or written, too
        print(f"cutlass-attn {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cutlass-attn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, build, devices and kernels")

    check = commands.add_parser(
        "check",
        help="compare every compiled kernel that can run here with fp64",
        description="Compares every compiled kernel that can run here, and PyTorch's, with fp64 on "
        "random inputs; those compiled at first use only if --kernel names them. Exit status 1 if "
        "one of this library's kernels fails.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Problem()
    small = "None: {}, with --ladder and no GPU {}"
    check.add_argument("--batch", type=_size, help=small.format(default.batch, EMULATED_SHAPE[0]))
    check.add_argument("--heads", type=_size, help=small.format(default.heads, EMULATED_SHAPE[1]))
    check.add_argument("--heads-kv", type=_size, help="key/value heads; None: as many as --heads")
    length = small.format(default.seqlen_q, EMULATED_SHAPE[2])
    check.add_argument("--seqlen", type=_size, help=f"query length; {length}")
    check.add_argument("--seqlen-k", type=_size, help="key length; None: as --seqlen")
    check.add_argument("--head-dim", type=_size, default=default.head_dim)
    check.add_argument(
        "--dtype",
        type=lambda name: SHORT_DTYPES.get(name, name),
        choices=DTYPES,
        default=default.dtype,
    )
    check.add_argument("--causal", action="store_true")
    check.add_argument(
        "--accumulate",
        choices=ACCUMULATE,
        default=default.accumulate,
        help="what the kernels add products up in: docs/accumulation.md",
    )
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
    check.add_argument(
        "--ladder",
        action="store_true",
        help="one variant of each kernel, from the plainest to the fastest, and what each gains",
    )
    check.add_argument(
        "--plot", metavar="FOLDER", help="also draw the ladder: ladder.png and ladder.svg there"
    )
    _add_bench(commands)
    profile_command.add_parser(commands)
    tune_command.add_parser(commands)

    warmup = commands.add_parser(
        "warmup",
        help="compile kernels that the build left out, ahead of the calls that want them",
        description="Compiles kernels that the build left out, about 20 s each, and keeps them on "
        "disk, so that no call waits for the compiler. `cutlass-attn info` lists them. Exit status "
        "1 if NVRTC is missing or refuses one, or if there is no such GPU.",
    )
    warmup.add_argument(
        "kernels",
        nargs="+",
        metavar="KERNEL",
        help="a variant such as sm80/f16/d96/64x64x4, or a kernel such as sm80 for all of its own",
    )
    warmup.add_argument(
        "--device",
        default="cuda",
        help='"cuda" (default) or "cuda:N"; "sm_89", say, for a GPU that is not here',
    )
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time the kernels beside PyTorch's and other libraries'",
        description="Times this library's kernels, PyTorch's backends and every other attention "
        "library that can be imported, in interleaved rounds on the same random inputs, and writes "
        "the result as JSON. Exit status 1 if one of this library's kernels fails or is wrong.",
    )
    bench.add_argument(
        "--grid", choices=GRIDS, help="a named set of shapes; forward by default, small on a CPU"
    )
    bench.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar=SHAPE_FORM.upper(),
        help="one shape instead of a grid; may be repeated",
    )
    bench.add_argument("--causal", choices=["both", "yes", "no"], default="both")
    bench.add_argument("--dtype", default="fp16,bf16", help="of fp16, bf16, fp32 (fp16,bf16)")
    bench.add_argument(
        "--kernel",
        action="append",
        default=[],
        help="also time this kernel or variant of ours, such as sm80; may be repeated",
    )
    bench.add_argument(
        "--impl",
        action="append",
        default=[],
        help="only this one, such as torch:flash, torch, cutlass_attn or xformers; may be repeated",
    )
    bench.add_argument("--baseline", default="torch:flash", help="of the ratios (torch:flash)")
    bench.add_argument("--device", help='"cpu", "cuda" (default) or "cuda:N"')
    bench.add_argument(
        "--timing",
        choices=["events", "graph"],
        help="on a GPU: events with a cold L2, or in a CUDA graph, warm; by default the grid's own",
    )
    bench.add_argument("--rounds", type=int, default=7, help=f"{MIN_ROUNDS} or more (7)")
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument(
        "--json",
        metavar="FILE",
        help="where to write the result, - is stdout; by default <device>-<grid>.json, in a "
        "checkout of the sources in benchmarks/results",
    )
    bench.add_argument("--commit", help="for the record; by default that of the checkout")
    bench.add_argument("--plot", metavar="FILE", help="measure nothing, draw this result instead")
    bench.add_argument(
        "--out", metavar="FOLDER", default=".", help="where --plot writes its PNG and SVG files"
    )


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _info(console: Console) -> int:
    from .. import jit

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
        "NVRTC": jit.available() or "compiles kernels at first use",
    }
    for name, fact in facts.items():
        console.print(f"{name:<14} {fact}", highlight=False, markup=False)
    table = Table("kernel", "device", "dtype", "head dim", "tile", "tier", "here", box=None)
    for v in variants():
        here = "compiled" if v.compiled else "left out"
        if v.key in jit.units():
            here = "at first use"
        if v.compiled and not v.automatic:
            here += ", by name only"
        head_dim = str(v.head_dim or "any")
        table.add_row(v.kernel, v.device, v.dtype, head_dim, v.tile or "-", v.tier, here)
    console.print()
    console.print(table)
    return 0


def _gpu() -> str:
    info = _C.device_info(CUDA, 0)
    return info["unavailable"] or f"sm_{info['compute_capability']}"


def _torch_version() -> str:
    try:
        import torch
    except ImportError:
        return "not installed"
    return str(torch.__version__)


def _check(args: argparse.Namespace) -> int:
    # A JSON document on stdout must be alone there.
    console = make_console(stderr=args.json == "-")
    if args.ladder and args.kernel:
        raise ValueError("--ladder and --kernel exclude each other")
    if args.ladder and args.accumulate != "fp32":
        raise ValueError(
            f"--ladder and --accumulate {args.accumulate} exclude each other: rungs add up in fp32"
        )
    if args.plot and not args.ladder:
        raise ValueError("--plot is for --ladder; `cutlass-attn bench --plot` draws benchmarks")
    draw_ladder = _plotting().draw_ladder if args.plot else None
    problem = _problem(args)
    ladder = None
    with progress_bar() as show:
        if args.ladder:
            ladder = run_ladder(problem, show)
            report = ladder.report
        else:
            report = run_check(problem, args.kernel, show)
    _print_report(console, report, ladder)
    if args.json:
        document = (ladder or report).as_json()
        text = json.dumps(_without_nan(document), indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    if ladder and draw_ladder:
        for path in draw_ladder(ladder, Path(args.plot)):
            console.print(f"written to {path}", highlight=False, markup=False)
    return 0 if report.ok else 1


def _problem(args: argparse.Namespace) -> Problem:
    """What `check` is asked for; of a ladder on the CPU less than the reference shape."""
    device = args.device or default_device()
    problem = Problem(
        head_dim=args.head_dim,
        dtype=args.dtype,
        causal=args.causal,
        accumulate=args.accumulate,
        device=device,
        inputs=args.inputs,
        seed=args.seed,
    )
    shape = problem.batch, problem.heads, problem.seqlen_q
    if args.ladder and device == "cpu":
        shape = EMULATED_SHAPE
    batch, heads, seqlen = (
        given or size for given, size in zip((args.batch, args.heads, args.seqlen), shape)
    )
    return replace(
        problem,
        batch=batch,
        heads=heads,
        heads_kv=args.heads_kv or heads,
        seqlen_q=seqlen,
        seqlen_k=args.seqlen_k or seqlen,
    )


def _print_report(console: Console, report: Report, ladder: Ladder | None = None) -> None:
    problem = report.problem
    fp16 = problem.dtype == "float16"
    headings = ["kernel", "inputs", "max error", "mean"]
    headings += ["RMS", "RMS allowed"] if ladder is None else []
    headings += ["verdict"] + ["allclose 1e-3"] * fp16 + ["p50 us", "speed-up"]
    headings += ["over rung before"] if ladder else []
    table = Table(*headings, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(*_cells(row, problem, fp16, ladder))
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
    if ladder:
        _print_comparisons(console, ladder)


def _print_comparisons(console: Console, ladder: Ladder) -> None:
    """What an earlier effort had or hoped for, as ratios: its GPU was another one."""
    if ladder.is_emulated:
        console.print("Emulated on the CPU: their times would mean nothing, so they have none.")
    table = Table("speed", f"earlier effort, {EARLIER_GPU}", "here", box=None)
    table.columns[2].justify = "right"
    for comparison in COMPARISONS:
        here = ladder.here(comparison)
        ratio = "-" if here is None else f"{here:.2f}"
        table.add_row(str(comparison), comparison.earlier_text, ratio)
    console.print(
        f"\nSteps of an earlier effort, as ratios because they are of another GPU ({EARLIER_GPU}, "
        "fp16, B=2 H=8 S=512 D=64), beside those above:"
    )
    console.print(table)


def _cells(row: Row, problem: Problem, fp16: bool, ladder: Ladder | None) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None or not row.inputs else format(value, form)

    errors = [row.max, row.mean] + [row.rms, row.rms_allowed] * (ladder is None)
    cells = [row.name, f"{row.inputs}/{problem.inputs}", *(number(x, ".2e") for x in errors)]
    cells.append("[green]pass[/]" if row.ok else "[red]FAIL[/]")
    if fp16:
        cells.append({True: "yes", False: "[red]no[/]", None: "-"}[row.allclose])
    cells += [number(row.p50_us, ".1f"), number(row.speedup, ".2f")]
    return cells + ([number(ladder.step(row), ".2f")] if ladder else [])


def _without_nan(value: object) -> object:
    """JSON has no NaN; null stands for it."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bench(args: argparse.Namespace) -> int:
    if args.plot:
        return _plot(args)
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ValueError("torch is not installed; pip install 'cutlass_attn[torch]'") from None
    device = args.device or "cuda"
    if device != "cpu" and (lack := why_no_gpu(device)):
        raise ValueError(f"{lack}; `cutlass-attn bench --device cpu` times the CPU kernel")
    grid = _grid(args, device)
    impls, absent = discover(args.kernel, torch_auto=grid.host_time and device != "cpu")
    chosen = select(impls, absent, args.impl)
    if args.baseline not in (names := [impl.name for impl in impls]):
        raise ValueError(f"--baseline must be one of {', '.join(names)}, got {args.baseline!r}")
    plan = Plan(grid, parse_dtypes(args.dtype), chosen, device, args.rounds, args.seed)
    report = BenchReport(
        grid.name,
        args.baseline,
        environment(device),
        describe_method(plan),
        versions={impl.name: impl.version for impl in plan.impls if impl.version},
        absent={} if args.impl else absent,  # else none of them was asked for
        commit=args.commit or checkout_commit(),
    )
    to_stdout = args.json == "-"
    named = report.environment["device"] if device != "cpu" else "cpu"
    path = Path(args.json) if args.json else default_path(named, grid.name)

    def save(report: BenchReport) -> None:  # after each shape: a run that is cut short keeps them
        if not to_stdout:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(report.dumps())

    with progress_bar() as show:
        run_bench(plan, report, show, save)
    console = make_console(stderr=to_stdout)
    print_report(console, report)
    if to_stdout:
        print(report.dumps(), end="")
    else:
        console.print(f"written to {path}", highlight=False, markup=False)
    return 0 if report.ok else 1


def _grid(args: argparse.Namespace, device: str) -> Grid:
    """The shapes to time. Raises ValueError for --grid beside --shape, a wrong or no shape."""
    if args.shape and args.grid:
        raise ValueError("--grid and --shape exclude each other")
    if args.shape:
        shapes = tuple(
            replace(shape, causal=causal)
            for shape in map(parse_shape, args.shape)
            # To one query a causal mask shows every key.
            for causal in ((False, True) if shape.seqlen_q > 1 else (False,))
        )
        grid = Grid("shapes", shapes)
    else:
        grid = GRIDS[args.grid or ("small" if device == "cpu" else "forward")]
    wanted = {"both": (False, True), "no": (False,), "yes": (True,)}[args.causal]
    shapes = tuple(shape for shape in grid.shapes if shape.causal in wanted)
    if not shapes:
        raise ValueError(f"--causal {args.causal} leaves no shape of the {grid.name} grid")
    return replace(grid, shapes=shapes, timing=args.timing or grid.timing)


def _warmup(args: argparse.Namespace) -> int:
    from .. import jit

    try:
        jit.warmup(args.kernels, device=args.device)
    except RuntimeError as error:
        print(f"cutlass-attn warmup: {error}", file=sys.stderr)
        return 1
    count = len(jit.left_out(args.kernels))
    if count:
        kernels = "1 kernel" if count == 1 else f"{count} kernels"
        print(f"{kernels} ready for {args.device}, kept in {jit.cache.folder()}")
    else:
        print("nothing to do: this build compiled them all")
    return 0


def _plotting() -> ModuleType:
    """The module that draws. Raises ValueError without matplotlib."""
    try:
        return importlib.import_module(".experiment.plot", __package__)
    except ImportError:
        raise ValueError("--plot needs matplotlib; pip install 'cutlass_attn[bench]'") from None


def _plot(args: argparse.Namespace) -> int:
    draw = _plotting().draw
    try:
        report = load(args.plot)
    except OSError as error:
        raise ValueError(f"--plot {args.plot}: {error.strerror}") from None
    for path in draw(report, Path(args.plot).stem, Path(args.out)):
        print(path)
    return 0
