"""The command `cutlass-attn tune`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from ... import tuning
from ..._build.facts import MAX_DECODE_QUERIES
from ..console import (
    SIZE,
    causal_option,
    command,
    json_option,
    make_console,
    ncu_option,
    progress_bar,
    say,
    seed_option,
    shapes_option,
    with_masks,
)
from ..document import document, write
from ..experiment.problems import SHORT_DTYPES, Shape
from .proposers import PROPOSERS, make_proposer


@command(
    "cutlass-attn tune --head-dim 96 --rounds 60\n"
    "cutlass-attn tune --device model --part 'RTX 4090' --dry-run",
    "no tile passes, or NVRTC is missing",
)
@click.option("--kernel", default="sm80", help="A kernel with tiles to choose.")
@click.option("--dtype", default="fp16", help="fp16 or bf16.")
@click.option("--head-dim", type=SIZE, default=64, help="One that the kernel has.")
@shapes_option
@causal_option
@click.option("--device", help='"cuda" or "cuda:N"; "model" is no GPU (a usable GPU).')
@click.option("--part", default="L4", help='Of the model: "L4" or "RTX 4090".')
@click.option("--proposer", type=click.Choice([*PROPOSERS, "command"]), default="evolutionary")
@click.option(
    "--command",
    "program",
    metavar="PROGRAM",
    help="The proposer `command`: gets what is known as JSON on stdin, answers a tile as JSON.",
)
@click.option("--rounds", type=int, default=30, help="Tiles to try.")
@seed_option
@ncu_option
@click.option(
    "--state", metavar="FOLDER", help="Of the state and the report (tune-<kernel>-<dims>-...)."
)
@click.option("--file", help=f"The tuning file to write (${tuning.VARIABLE}, or the user's).")
@click.option("--dry-run", is_flag=True, help="Write no tuning file.")
@json_option
def tune(**given: Any) -> int:
    """Look for a faster tile of a kernel.

    Tries tiles of a kernel for some shapes, by default 4x4096 queries and keys. Each must fit the
    device, compile, not spill, be right on five inputs and pass the gates, and is then timed
    against the best so far. The best goes to the user's tuning file, which dispatch reads. Without
    a GPU they are ranked by a model of Ada instead, and nothing is written. A run that is
    interrupted goes on where it stopped. Needs NVRTC, see docs/jit.md.
    """
    return _run(SimpleNamespace(**given))


def _shapes(args: SimpleNamespace) -> tuple[Shape, ...]:
    heads = max(1, 2048 // args.head_dim)
    given = args.shapes
    if wrong := [shape for shape in given if shape.head_dim != args.head_dim]:
        raise ValueError(f"--shape has head dim {wrong[0].head_dim}, --head-dim is {args.head_dim}")
    base = given or [Shape(4, heads, heads, 4096, 4096, args.head_dim)]
    if len({shape.has_few_queries for shape in base}) > 1:
        raise ValueError(
            f"--shape has calls of {MAX_DECODE_QUERIES} queries or fewer and others, whose tiles "
            "are chosen apart: tune them one after the other"
        )
    return with_masks(base, args.causal)


def _run(args: SimpleNamespace) -> int:
    from ... import jit
    from ..._variants import variants
    from ..experiment.environment import why_no_gpu
    from . import report, static
    from .evaluate import Evaluator, Processes
    from .search import rule_for, rules_in_force, rules_with, search, with_rules
    from .space import Limits, Space, Task, parse_tile
    from .state import held, open_state

    shapes = _shapes(args)
    proposer = make_proposer(args.proposer, args.seed, args.program)
    if args.rounds < 1:
        raise ValueError(f"--rounds must be 1 or more, got {args.rounds}")
    device = args.device or "cuda"
    lack = "asked for" if device == "model" else why_no_gpu(device)
    if lack and args.device not in (None, "model"):
        raise ValueError(f"{lack}; --device model ranks tiles without a GPU")
    there: Limits = static.part_limits(args.part) if lack else _limits_of(device)
    dtype = SHORT_DTYPES.get(args.dtype, args.dtype)
    if dtype not in ("float16", "bfloat16"):
        raise ValueError(f"--dtype must be fp16 or bf16, got {args.dtype!r}")
    kernels = jit.tile_space()
    rows = [
        v for v in variants()
        if (v.kernel, v.dtype, v.head_dim) == (args.kernel, dtype, args.head_dim)
    ]  # fmt: skip
    if args.kernel not in kernels or not rows:
        dims = sorted({v.head_dim for v in variants() if v.kernel in kernels})
        raise ValueError(
            f"kernel {args.kernel!r} has no tiles to choose at head dim {args.head_dim}; allowed: "
            f"{', '.join(kernels) or 'none in this build'} at {', '.join(map(str, dims))}"
        )
    if reason := jit.available():
        print(f"cutlass-attn tune: {reason}", file=sys.stderr)
        return 1
    task = Task(args.kernel, dtype, args.head_dim, rows[0].head_dim_v, shapes, there)
    space = Space(task, kernels[args.kernel]["axes"])
    rules = rules_in_force(task)
    runs_now = parse_tile(rule_for(rules, shapes[0], there.num_sms).tile)
    file = None if lack or args.dry_run else _file_to_write(args)

    name = f"tune-{args.kernel}-{args.dtype}-{task.dims}-{args.part if lack else there.arch}"
    folder = Path(args.state or name.replace("/", "-").replace(" ", ""))
    machine = _machine(device, args.part if lack else "")
    identity = {
        "task": task.as_json(),
        "axes": space.axes,
        "proposer": [args.proposer, args.program],
        "seed": args.seed,
        **machine,
    }
    console = make_console(stderr=args.json_file == "-")
    with held(folder):
        state = open_state(folder / "state.json", identity)
        if state.tried:
            say(console, f"going on after {len(state.tried)} tiles of {state.path}")
        evaluator = Evaluator(space, None if lack else device, Processes(space, folder), args.ncu)
        try:
            with progress_bar() as show:
                outcome = search(evaluator, proposer, state, runs_now, args.rounds, show)
        except KeyboardInterrupt:
            outcome = None
        where = f"the model of an {args.part}, no measurement: {lack}" if lack else device
        notes = [f"{task.kernel} {task.dtype} {task.dims} on {where}"]
        notes.append(", ".join(f"{name} {value}" for name, value in machine.items() if value))
        first = state.tried[0].candidate if state.tried else runs_now
        notes.append(f"started with {first}" + f"; now {runs_now} runs" * (first != runs_now))
        notes += [f"shape: {shape}" for shape in shapes]
        if not lack and evaluator.without_counters:
            notes.append(f"gates by machine code alone: {evaluator.without_counters}")
        notes.append(f"stopped: {outcome.reason if outcome else 'interrupted'}")
        notes += [f"bad answer: {text}" for text in outcome.bad_answers] if outcome else []
        steps = [step for step, _ in evaluator.steps]
        for path in report.write(state, f"Tiles of {task.kernel}, {task.dims}", notes, steps):
            notes.append(f"written: {path}")
    for note in notes:
        say(console, note)
    if args.json_file:
        tried = [entry.as_json() for entry in state.tried]
        right = outcome is not None and outcome.best is not None
        write(document("tune", right, tried, identity=identity, notes=notes), args.json_file)
    if outcome is None:
        say(console, "interrupted: the same command goes on where it stopped")
        return 130
    if outcome.best is None:
        return 1
    best = outcome.best.candidate
    say(console, f"best: {best}, {outcome.best.score:.3f} times the speed of {first}")
    if best == runs_now:
        say(console, "no tuning file is written: it runs already")
    elif file is None:
        say(
            console, f"no tuning file is written: {'nothing was measured' if lack else 'a dry run'}"
        )
    else:
        changed = rules_with(task, best, rules)
        tuning.update(file, lambda present: with_rules(present, changed))
        say(console, f"dispatch takes it from the next start on: {file}")
    return 0


def _file_to_write(args: SimpleNamespace) -> Path:
    """The tuning file. Raises ValueError or OSError if it cannot be written: before the search."""
    file = Path(args.file) if args.file else tuning.path()
    if file is None:
        raise ValueError("there is no home directory: name a file with --file")
    tuning.check_writable(file)
    return file


def _machine(device: str, part: str) -> dict[str, str]:
    """What scores depend on beside the task: on a GPU, or on the model of a part."""
    from ... import jit
    from ..experiment.environment import environment

    facts = environment("cpu" if part else device)
    return {
        "GPU": f"model of an {part}" if part else str(facts["device"]),
        "driver": str(facts.get("driver_version", "")),
        "cutlass_attn": str(facts["build"]["version"]),
        "CUDA": str(facts["build"]["cuda"]),
        "headers": jit.digest()[:16],
    }


def _limits_of(device: str) -> Any:
    import torch

    from .space import limits

    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}"
    smem = int(properties.shared_memory_per_multiprocessor)
    return limits(arch, int(properties.multi_processor_count), smem)
