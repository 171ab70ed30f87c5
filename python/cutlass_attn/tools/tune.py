"""`cutlass-attn tune`: tries every tile of a kernel; docs/tuning.md has the details."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import _C, jit, tuning
from .._build.facts import MAX_DECODE_QUERIES
from .._build.files import locked, replace_file
from .._build.tuned_toml import Rule, Tuning, device_class
from .._variants import variants
from . import console as terminal
from .document import document, write
from .experiment.environment import environment, why_no_gpu
from .experiment.problems import Shape
from .experiment.stats import geometric_mean
from .tune_rules import Task


@terminal.command(
    "cutlass-attn tune --head-dim 128 --shape 8,32,8,2048,2048,128 --causal yes",
    "no tile is right",
)
@click.option("--kernel", default="sm80", help="A kernel with tiles to choose.")
@click.option("--dtype", type=terminal.DTYPE, default="fp16", help="fp16 or bf16.")
@click.option("--head-dim", type=terminal.SIZE, default=64, help="One that the kernel has.")
@terminal.shapes_option
@terminal.causal_option
@click.option("--device", default="cuda", help='"cuda" or "cuda:N".')
@click.option("--dry-run", is_flag=True, help="Write no tuning file.")
@terminal.json_option
def tune(*, device: str, dry_run: bool, json_file: str | None, **what: Any) -> int:
    """Find the fastest tile of a kernel for some shapes.

    Compiles every tile, rejects those that spill registers, and times the others against the tile
    that runs now; by default for 4x4096 queries and keys. Writes the fastest correct tile to
    $CUTLASS_ATTN_TUNING or the user's tuning file, which dispatch reads. To resume an interrupted
    search, repeat the command in the same folder. Needs a GPU and NVRTC.
    """
    task = task_of(device=device, **what)
    dims, decode = (task.head_dim, task.head_dim_v), task.shapes[0].has_few_queries
    rules = tuning.rules_in_force(task.device_class, task.kernel, dims, decode)
    runs_now = task.rule_for(rules, task.shapes[0]).tile
    if (target := tuning.path()) is None:
        raise ValueError(f"there is no home directory: name a file in ${tuning.VARIABLE}")
    if not dry_run:
        tuning.check_writable(target)
    # Times depend on these: a search on another machine or for other shapes has another file.
    facts = environment(device)
    machine = {name: facts.get(name) for name in ("device", "driver_version", "build")}
    identity = {"task": asdict(task), "headers": jit.digest(), **machine}
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    path = Path(f"tune-{task.key(digest)}.json".replace("/", "-"))
    console = terminal.make_console(stderr=json_file == "-")
    try:
        with locked(path.with_suffix(".lock"), wait=False):
            base, tried = search(task, runs_now, path)
    except BlockingIOError:
        raise ValueError(f"another process has {path}") from None
    except KeyboardInterrupt:
        terminal.say(console, f"interrupted; repeat the command to resume from {path}")
        return 130
    timed = sorted((x for x in tried if "speedup" in x), key=lambda x: -x["speedup"])
    for entry in timed[:10]:
        terminal.say(console, f"{entry['tile']:<12} {entry['speedup']:.3f} times as fast as {base}")
    for stage, count in Counter(x["rejected"] for x in tried if "rejected" in x).items():
        terminal.say(console, f"{count} of {len(tried)} tiles rejected: {stage}")
    faster = [x["tile"] for x in timed if x["speedup"] > 1]
    best = next((tile for tile in [*faster, base] if is_right(task, tile)), None)
    if json_file:
        found: Any = {"identity": identity, "base": base, "best": best}
        write(document("tune", best is not None, tried, **found), json_file)
    if best is None:
        return 1
    result = "it runs already" if best == runs_now else "a dry run" if dry_run else ""
    if not result:
        rules = task.rules_with(best, rules)
        tuning.update(target, lambda now: tuning.with_rules(now, rules))
        result = f"written to {target}; programs use it from their next start on"
    terminal.say(console, f"best: {best}; {result}")
    return 0


def task_of(
    kernel: str, dtype: str, head_dim: int, shapes: tuple[Shape, ...], causal: str, device: str
) -> Task:
    """The task of these arguments. Raises ValueError if it cannot be tuned here."""
    rows = [v for v in variants() if v.kernel in jit.tile_space() and v.dtype != "float32"]
    chosen = [v for v in rows if (v.kernel, v.dtype, v.head_dim) == (kernel, dtype, head_dim)]
    if not rows:
        raise ValueError("this build has no GPU kernel with tiles to choose")
    if not chosen:
        raise ValueError(
            f"kernel {kernel!r} has no tiles to choose for {dtype} at head dim {head_dim}; allowed:"
            f" {', '.join(dict.fromkeys(v.kernel for v in rows))} at "
            f"{', '.join(map(str, sorted({v.head_dim for v in rows})))}"
        )
    if wrong := [shape for shape in shapes if shape.head_dim != head_dim]:
        raise ValueError(f"--shape has head dim {wrong[0].head_dim}, --head-dim is {head_dim}")
    if len({shape.has_few_queries for shape in shapes}) > 1:
        raise ValueError(
            f"--shape has calls of at most {MAX_DECODE_QUERIES} queries and of more; their tiles "
            "are chosen separately: tune them one after the other"
        )
    if lack := why_no_gpu(device) or jit.available():
        raise ValueError(lack)
    import torch

    gpu = torch.cuda.get_device_properties(device)
    heads = max(1, 2048 // head_dim)
    shapes = shapes or (Shape(4, heads, heads, 4096, 4096, head_dim),)
    on = device_class(int(gpu.shared_memory_per_multiprocessor)), int(gpu.multi_processor_count)
    what = kernel, dtype, head_dim, chosen[0].head_dim_v, shapes, causal
    return Task(*what, device, f"sm_{gpu.major}{gpu.minor}", *on)


def search(task: Task, base: str, path: Path) -> tuple[str, list[dict[str, Any]]]:
    """Tries all tiles; results in the file are not repeated. Returns the tile that ran before,
    which others are compared with, and the results."""
    found: dict[str, Any] = {"base": base, "task": asdict(task), "tried": []}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    base, tried = found["base"], found["tried"]
    known = {base, *(entry["tile"] for entry in tried)}
    axes = jit.tile_space()[task.kernel]["axes"]
    space = tiles(task.kernel, task.head_dim, task.head_dim_v, axes)
    left = [tile for tile in space if tile not in known]
    with terminal.progress_bar() as show:
        for done, tile in enumerate(left):
            show(tile, done, len(left))
            tried.append({"tile": tile, **evaluate(task, tile, base)})
            replace_file(path, json.dumps(found, indent=1).encode())
    return base, tried


def tiles(
    kernel: str, head_dim: int, head_dim_v: int, axes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Those of kernels/space.toml that the kernel can have and that do not certainly spill.

    Args:
        axes: the kernel's entry of space.toml; its warps share no rows if it has no "columns".
    """
    found = []
    for m, n, warps, columns in itertools.product(
        *(axes.get(name, (1,)) for name in ("m", "n", "warps", "columns"))
    ):
        tile = f"{m}x{n}x{warps}" + f"c{columns}" * (columns > 1)
        why_not, spills = _C.check_tile(
            kernel=kernel, head_dim=head_dim, head_dim_v=head_dim_v, tile=tile
        )
        if not why_not and not spills:
            found.append(tile)
    return found


def evaluate(task: Task, tile: str, base: str) -> dict[str, Any]:
    """The "speedup" over tile `base`, a mean over all shapes; or "rejected" and the "reason"."""
    try:
        _, log = jit.compile_anew(task.key(tile), task.arch)
    except jit.CompileError as error:
        errors = [line.strip() for line in str(error).splitlines() if "error" in line]
        return {"rejected": "compile", "reason": (errors or [str(error)])[0]}
    if spilled := spills(log):
        return {"rejected": "spills", "reason": spilled}
    before, new = task.key(base), task.key(tile)
    is_short = max(shape.flops for shape in task.shapes) < 5e9  # launches would dominate events
    arguments = ["--kernel", before, "--kernel", new, "--causal", task.causal]
    arguments += ["--timing", "graph" if is_short else "events"]
    for shape in task.shapes:
        arguments += ["--shape", ",".join(map(str, list(asdict(shape).values())[:6]))]
    rows, reason = run(task, [tile, base], "trial", arguments)
    ratios = [
        row["speedup"]["value"]
        for row in rows
        if row["requested"].endswith(f":{new}") and row["speedup"]
    ]
    if reason or not ratios:
        return {"rejected": "time", "reason": reason}
    return {"speedup": geometric_mean(ratios)}


def is_right(task: Task, tile: str) -> bool:
    """Whether a tile is right on five inputs, causal and not, of two tiles and a ragged end."""
    sizes = "--batch 1 --heads 4 --heads-kv 2 --seqlen 333 --seqlen-k 401 --inputs 5"
    call = f"--kernel {task.key(tile)} --head-dim {task.head_dim} {sizes}"
    calls = call.split(), f"{call} --causal".split()
    return not any(run(task, [tile], "check", arguments)[1] for arguments in calls)


def run(
    task: Task, names: list[str], command: str, arguments: list[str]
) -> tuple[list[dict[str, Any]], str]:
    """Runs "check" or "trial" in a process with these tiles as variants.

    Returns its rows and its error.
    """
    where = task.device_class, task.kernel, task.dims
    rules = [Rule(*where, name) for name in names]
    module = {"check": ["cutlass_attn", "check", "--json", "-"]}.get(
        command, ["cutlass_attn.tools.trial"]
    )
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(Tuning(rules).dumps())
        file.flush()
        env = {**os.environ, tuning.VARIABLE: file.name}
        program = [sys.executable, "-m", *module, "--device", task.device, "--dtype", task.dtype]
        program += arguments
        how: Any = {"capture_output": True, "text": True, "timeout": 600.0, "env": env}
        try:
            done = subprocess.run(program, **how)
        except subprocess.TimeoutExpired as error:
            return [], f"no end in {error.timeout:.0f} s"
    if done.returncode not in (0, 1) or not done.stdout:
        return [], f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"
    rows = json.loads(done.stdout)["rows"]
    wrong = [f"{row['status']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    return rows, "; ".join(dict.fromkeys(wrong))


def spills(log: str) -> str:
    """The stack and the spilled registers in the output of ptxas -v; empty if there are none."""
    found = re.findall(r"[1-9]\d* bytes (?:stack frame|spill stores|spill loads)", log)
    return ", ".join(dict.fromkeys(found))
