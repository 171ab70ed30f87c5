"""The command `cutlass-attn`: inspects an installation, checks its kernels and times them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from .. import _C, jit
from .._build.facts import ACCUMULATE
from .._variants import build_info, variants
from .._warmup import warmup as make_ready
from ..devices import CUDA
from ..jit import cache as jit_cache
from . import check as checks
from . import ladder as ladders
from .console import (
    DTYPE,
    DTYPES,
    SIZE,
    causal_option,
    command,
    json_option,
    make_console,
    progress_bar,
    say,
    seed_option,
    shapes_option,
    with_masks,
)
from .console import run as run_command
from .document import document, write
from .experiment.environment import default_device, environment, why_no_gpu
from .experiment.grids import GRIDS, Grid, grid_for
from .experiment.impls import discover, select
from .experiment.problems import OPTIONS, Problem, Shape
from .experiment.report import Report, checkout_commit, default_path
from .experiment.runner import MIN_ROUNDS, Plan, describe_method, run
from .experiment.table import print_check, print_report
from .explain_command import explain
from .tune import tune


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(cutlass_attn, "cutlass-attn", argv)


@click.group(context_settings={"max_content_width": 100})
@click.version_option(build_info().version)
def cutlass_attn() -> None:
    """Inspect this installation, check its kernels and time them."""


@command("cutlass-attn info\ncutlass-attn info --all")
@click.option("--all", "every", is_flag=True, help="Also list every variant of every kernel.")
@json_option
def info(every: bool, json_file: str | None) -> int:
    """Version, build, devices and kernels."""
    console = make_console(stderr=json_file == "-")
    build = build_info()
    capability = _C.device_info(CUDA, 0)
    facts = {
        "cutlass_attn": f"{build.version}, tier {build.tier}",
        "CUDA toolkit": build.cuda or "none: CPU-only build",
        "architectures": build.architectures or "-",
        "CUTLASS": build.cutlass or "-",
        "compiler": build.compiler,
        "simt": f"{build.simt} GPU kernels also compiled for the CPU",
        "GPU": capability["unavailable"] or f"sm_{capability['compute_capability']}",
        "torch": _torch_version(),
        "NVRTC": jit.available() or "compiles kernels at first use",
    }
    rows = []
    for v in variants(None):
        here = "compiled" if v.compiled else "left out"
        if v.key in jit.units():
            here = "compiled, some scores at first use" if v.compiled else "at first use"
        if v.compiled and not v.automatic:
            here += ", by name only"
        rows.append({**asdict(v), "here": here})
    counts = Counter(row["here"].partition(",")[0] for row in rows)
    facts["kernels"] = ", ".join(f"{number} {here}" for here, number in counts.items())
    for name, fact in facts.items():
        say(console, f"{name:<14} {fact}")
    if every:
        from rich.table import Table

        table = Table("kernel", "device", "dtype", "head dim", "tile", "tier", "here", box=None)
        for row in rows:
            size = str(row["head_dim"] or "any"), row["tile"] or "-"
            table.add_row(*(row[x] for x in ("kernel", "device", "dtype")), *size, row["tier"],
                          row["here"])  # fmt: skip
        console.print()
        console.print(table)
    say_what_is_missing(console)
    if json_file:
        write(document("info", True, rows, environment=environment("cpu"), facts=facts), json_file)
    return 0


def say_what_is_missing(console: Any) -> None:
    if lacking := jit.missing():
        say(console, f"NVRTC missing: {lacking}")


def _torch_version() -> str:
    try:
        import torch
    except ImportError:
        return "not installed"
    return str(torch.__version__)


@command(
    "cutlass-attn check --dtype bf16 --causal\n"
    "cutlass-attn check --full --kernel sm80 --json result.json",
    "one of this library's kernels is wrong, or one that was asked for cannot run",
)
@click.option("--full", is_flag=True, help="Use the large shape of GPUs for emulated kernels, too.")
@click.option(
    "--batch", type=SIZE, help="Default: that of a small shape on the CPU, of a large one on a GPU."
)
@click.option("--heads", type=SIZE, help="Query heads.")
@click.option(
    "--heads-kv", type=SIZE, help="Key and value heads; defaults to --heads if that is given."
)
@click.option("--seqlen", type=SIZE, help="Queries.")
@click.option("--seqlen-k", type=SIZE, help="Keys; defaults to --seqlen if that is given.")
@click.option("--head-dim", type=SIZE, default=64)
@click.option("--dtype", type=DTYPE, default="fp16")
@click.option("--causal", is_flag=True)
@click.option(
    "--accumulate",
    type=click.Choice(ACCUMULATE),
    default="fp32",
    help="Accumulator precision of the two products: docs/accumulation.md.",
)
@click.option("--device", help='"cpu", "cuda" or "cuda:N"; by default a usable GPU, else the CPU.')
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    help="Only this kernel or variant, such as sm80 or scalar/tiled; may be repeated.",
)
@click.option("--inputs", type=SIZE, help="How many random inputs each kernel is checked on.")
@seed_option
@json_option
@click.option(
    "--ladder",
    is_flag=True,
    help="One variant of each kernel, from the plainest to the fastest, and what each gains.",
)
def check(*, kernels: tuple[str, ...], json_file: str | None, ladder: bool, **given: Any) -> int:
    """Compare every compiled kernel that can run here with fp64.

    Also compares PyTorch's backends. Kernels compiled at first use run if --kernel names them.
    Without a GPU, kernels are emulated at a small shape that has two tiles and a ragged end.
    """
    console = make_console(stderr=json_file == "-")  # a JSON document on stdout is alone there
    if ladder and kernels:
        raise ValueError("--ladder and --kernel exclude each other")
    if ladder and given["accumulate"] != "fp32":
        raise ValueError(
            f"--ladder and --accumulate {given['accumulate']} exclude each other: rungs accumulate "
            "in fp32"
        )
    device = given["device"] or default_device()
    if device != "cpu" and (lack := why_no_gpu(device)):
        raise ValueError(f"{lack}; `cutlass-attn check --device cpu` emulates the GPU kernels")
    is_full = given["full"] or device != "cpu"
    shape = checks.FULL_SHAPE if is_full else checks.SHAPE
    if ladder and device == "cpu" and not given["full"]:
        shape = ladders.EMULATED_SHAPE
    problem = Problem(_shape_of(shape, given), given["dtype"])
    inputs = given["inputs"] or (checks.FULL_INPUTS if is_full else checks.INPUTS)
    asked: dict[str, Any] = {"device": device, "inputs": inputs, "seed": given["seed"]}
    with progress_bar() as show:
        if ladder:
            report = ladders.run_ladder(problem, show, **asked)
        else:
            accumulate = given["accumulate"]
            report = checks.run_check(
                problem, show, kernels=kernels, accumulate=accumulate, **asked
            )
    print_check(console, report)
    say_what_is_missing(console)
    if ladder and ladders.is_emulated(report):
        say(console, "Emulated on the CPU: their times would mean nothing, so they have none.")
    if json_file:
        write(report.as_json(), json_file)
    return 0 if report.ok else 1


def _shape_of(base: Shape, given: dict[str, Any]) -> Shape:
    """The shape asked for; sizes that are not given are those of `base`."""
    heads, seqlen = given["heads"] or base.heads_q, given["seqlen"] or base.seqlen_q
    return Shape(
        given["batch"] or base.batch,
        heads,
        given["heads_kv"] or (heads if given["heads"] else base.heads_kv),
        seqlen,
        given["seqlen_k"] or (seqlen if given["seqlen"] else base.seqlen_k),
        given["head_dim"],
        given["causal"],
    )


@command(
    "cutlass-attn bench --shape 4,32,8,4096,4096,128 --dtype bf16\n"
    "cutlass-attn bench --grid options",
    "one of this library's kernels fails or is wrong",
)
@click.option(
    "--grid",
    type=click.Choice([name for name in GRIDS if not name.endswith("-cpu")]),
    help="A named set of shapes; forward by default, small on a CPU. `decode`, `paged` and "
    "`varlen` are calls for serving, `few` leaves most of a GPU idle, `medium` fills it once or "
    "twice, `options` is what options cost, `accumulation` error and time of fp16 accumulation.",
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
    help="On a GPU: events with a cold L2, or in a CUDA graph, warm; by default the grid's own.",
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
        raise ValueError(f"{lack}; `cutlass-attn bench --device cpu` times the CPU kernel")
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
    )
    report = Report(
        grid.name,
        grid.baseline,
        environment(device),
        describe_method(plan),
        versions={impl.name: impl.version for impl in plan.impls if impl.version},
        absent={} if grid.impls else absent,  # else none of them was asked for
        commit=given["commit"] or checkout_commit(),
    )
    to_stdout = json_file == "-"
    named = report.environment["device"] if device != "cpu" else "cpu"
    path = Path(json_file) if json_file else default_path(named, grid.name)

    def save(report: Report) -> None:  # after each problem: a run that is cut short keeps them
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


@command(
    "cutlass-attn warmup sm80/f16/d96/64x64x4\ncutlass-attn warmup sm80 --device sm_89",
    "NVRTC is missing or refuses a kernel, or there is no such GPU",
)
@click.argument("kernels", nargs=-1, required=True, metavar="KERNEL...")
@click.option(
    "--device",
    default="cuda",
    help='"cuda" or "cuda:N"; for a GPU elsewhere its architecture, such as "sm_89".',
)
@json_option
def warmup(kernels: tuple[str, ...], device: str, json_file: str | None) -> int:
    """Compile kernels that are not in this build, before a call needs them.

    KERNEL is a variant such as sm80/f16/d96/64x64x4, or a kernel such as sm80, which stands for all
    its variants; `cutlass-attn info --all` lists both. A variant compiles in 2 to 20 s and is
    cached on disk, so that no call waits for the compiler.
    """
    console = make_console(stderr=json_file == "-")
    reason = ""
    try:
        with progress_bar() as show:
            make_ready(names=kernels, device=device, progress=show)
    except RuntimeError as error:
        print(f"cutlass-attn warmup: {error}", file=sys.stderr)
        reason = str(error)
    keys = jit.left_out(kernels)
    if json_file:
        rows = [{"kernel": key} for key in keys]
        write(document("warmup", not reason, rows, device=device, reason=reason), json_file)
    if reason:
        return 1
    count = "1 kernel" if len(keys) == 1 else f"{len(keys)} kernels"
    done = f"{count} ready for {device}, kept in {jit_cache.folder()}"
    say(console, done if keys else "nothing to do: this build compiled them all")
    return 0


@command("cutlass-attn cache\ncutlass-attn cache --clear", "the folder is refused")
@click.option("--clear", is_flag=True, help="Remove all compiled kernels.")
@json_option
def cache(clear: bool, json_file: str | None) -> int:
    """List or remove the kernels compiled at first use.

    The cache is $CUTLASS_ATTN_CACHE, else the folder cutlass_attn under $XDG_CACHE_HOME or
    ~/.cache. It holds at most $CUTLASS_ATTN_CACHE_SIZE (1G); the least recently used are removed.
    """
    console = make_console(stderr=json_file == "-")
    try:
        files = jit_cache.entries()
        removed = jit_cache.clear() if clear else 0
    except RuntimeError as error:
        print(f"cutlass-attn cache: {error}", file=sys.stderr)
        return 1
    rows = [asdict(file) for file in files]
    if json_file:
        where = str(jit_cache.folder())
        write(document("cache", True, rows, folder=where, removed=removed), json_file)
    if clear:
        say(console, f"{removed} removed from {jit_cache.folder()}")
        return 0
    from rich.table import Table

    table = Table("kernel", "for", "KB", "last used", box=None)
    for file in files:
        table.add_row(file.kernel, file.arch, f"{file.size / 1024:.0f}", file.used)
    console.print(table)
    total = sum(file.size for file in files) / 2**20
    limit = jit_cache.size_limit() / 2**20
    say(
        console,
        f"{len(files)} kernels, {total:.1f} of {limit:.0f} MB, in {jit_cache.folder()}",
    )
    return 0


@command('eval "$(cutlass-attn completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a shell completion script."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind
    print(kind(cutlass_attn, {}, "cutlass-attn", "_CUTLASS_ATTN_COMPLETE").source())
    return 0


for _command in (bench, cache, check, completion, explain, info, tune, warmup):
    cutlass_attn.add_command(_command)
