"""The command `cutlass-attn`: inspects an installation and checks its kernels."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
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
    SIZE,
    command,
    json_option,
    make_console,
    progress_bar,
    say,
    seed_option,
)
from .console import run as run_command
from .document import document, write
from .experiment.environment import default_device, environment, why_no_gpu
from .experiment.problems import Problem, Shape
from .experiment.table import print_check
from .explain_command import explain
from .tune import tune


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(cutlass_attn, "cutlass-attn", argv)


@click.group(context_settings={"max_content_width": 100})
@click.version_option(build_info().version)
def cutlass_attn() -> None:
    """Inspect this installation, check its kernels and tune them."""


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
    "cutlass-attn warmup sm80/f16/d96/64x64x4\ncutlass-attn warmup sm80 --device sm_89",
    "NVRTC is missing or refuses a kernel, or there is no such GPU",
)
@click.argument("kernels", nargs=-1, required=True, metavar="KERNEL...")
@click.option(
    "--device",
    default="cuda",
    help='"cuda" or "cuda:N"; for a GPU elsewhere "sm_89" or "RTX 4090".',
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


@command("cutlass-attn cache\ncutlass-attn cache --clear", "the folder, or its limit, is refused")
@click.option("--clear", is_flag=True, help="Remove all compiled kernels.")
@json_option
def cache(clear: bool, json_file: str | None) -> int:
    """List or remove the kernels compiled at first use.

    The cache is $CUTLASS_ATTN_CACHE, else the folder cutlass_attn under $XDG_CACHE_HOME or
    ~/.cache. It holds at most $CUTLASS_ATTN_CACHE_SIZE (1G); the least recently used are removed.
    """
    console = make_console(stderr=json_file == "-")
    try:
        limit = jit_cache.size_limit() / 2**20
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


for _command in (cache, check, completion, explain, info, tune, warmup):
    cutlass_attn.add_command(_command)
