"""Error and time of fp16 accumulation beside fp32, by head dim and length.

    python -m cutlass_attn.tools.grids.accumulation [--device cuda] [--json FILE] [--figure FILE]

For each head dim and length the same standard normal inputs go through the kernels of every kind of
sums; their results are compared with fp64 at both ends (experiment/judge.py), and on a GPU they are
timed in interleaved rounds. Writes JSON, and a figure if matplotlib is there. On a CPU the emulated
kernels run, at small sizes and without a time. docs/accumulation.md is about what it shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..._build.facts import ACCUMULATE
from ...attention import attention
from ...explain import explain
from ...variants import variants
from ..console import make_console, progress_bar
from ..experiment.environment import default_device, environment
from ..experiment.impls import Inputs, refusal
from ..experiment.judge import Yardstick
from ..experiment.problems import Shape
from ..experiment.report import default_path
from ..experiment.runner import random_inputs
from ..experiment.timing import ColdEvents, interleaved_us

SUMS = ACCUMULATE
ROUNDS, SAMPLES = 7, 20
# On a GPU, so that every length fills it alike.
TOKENS, HEADS = 16384, 16


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement; exit status 1 if a kernel fails the rule of cutlass_attn.testing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help='"cpu", "cuda" or "cuda:N"; by default a usable GPU')
    parser.add_argument("--head-dims", help="64,128,256 by default, 64 on a CPU")
    parser.add_argument("--seqlens", help="128,512,2048,8192 by default, 128,512 on a CPU")
    parser.add_argument("--json", type=Path, help="by default <device>-accumulation.json")
    parser.add_argument("--figure", type=Path, help="by default the JSON's name with .png")
    args = parser.parse_args(argv)
    device = args.device or default_device()
    on_cpu = device == "cpu"
    head_dims = _numbers(args.head_dims or ("64" if on_cpu else "64,128,256"))
    seqlens = _numbers(args.seqlens or ("128,512" if on_cpu else "128,512,2048,8192"))

    with progress_bar() as show:
        rows = measure(device, head_dims, seqlens, show)
    facts = environment(device)
    result = {"environment": facts, "method": _method(device), "rows": rows}
    named = "cpu" if on_cpu else str(facts["device"])
    path = args.json or default_path(named, "accumulation")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    written = [path]
    try:
        written.append(draw(result, args.figure or path.with_suffix(".png")))
    except ImportError:
        print("no figure: it needs matplotlib, pip install 'cutlass_attn[bench]'", file=sys.stderr)

    console = make_console()
    table = Table("D", "keys", "sums", "kernel", "max error", "RMS", "RMS allowed", "ok", box=None)
    for name in ("us", "time / fp32"):
        table.add_column(name, justify="right")
    for row in rows:
        errors = ("-" if row[x] is None else f"{row[x]:.2e}" for x in _ERRORS)
        times = ("-" if row[x] is None else f"{row[x]:.2f}" for x in ("us", "time_ratio"))
        verdict = "pass" if row["ok"] else escape(row["reason"])
        sizes = (str(row["head_dim"]), str(row["seqlen"]))
        table.add_row(*sizes, row["accumulate"], row["kernel"], *errors, verdict, *times)
    console.print(table)
    for file in written:
        console.print(f"written to {file}", highlight=False, markup=False)
    return 0 if all(row["ok"] for row in rows) else 1


_ERRORS = ("max_error", "rms_error", "rms_allowed")


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def _method(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"kernels": "emulated on the CPU"}
    return {"timing": ColdEvents.name, "rounds": ROUNDS, "samples": SAMPLES}


def measure(
    device: str, head_dims: Sequence[int], seqlens: Sequence[int], show: Callable[..., None]
) -> list[dict[str, Any]]:
    """A row per head dim, length and kind of sums; `show(what, done, total)` before each step."""
    rows: list[dict[str, Any]] = []
    total = len(head_dims) * len(seqlens)
    for head_dim in head_dims:
        for seqlen in seqlens:
            show(f"D = {head_dim}, {seqlen} keys", len(rows) // len(SUMS), total)
            batch, heads = (1, 1) if device == "cpu" else (max(1, TOKENS // seqlen), HEADS)
            shape = Shape(batch, heads, heads, seqlen, seqlen, head_dim, causal=False)
            rows += _measure_one(random_inputs(shape, "float16", device, seed=0), device)
    show("done", total, total)
    return rows


def _measure_one(inputs: Inputs, device: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    runs: dict[str, Callable[[], Any]] = {}
    q, k, v = inputs.q, inputs.k, inputs.v
    for sums in SUMS:
        row: dict[str, Any] = {
            "head_dim": inputs.shape.head_dim,
            "seqlen": inputs.shape.seqlen_k,
            "accumulate": sums,
            "kernel": "-",
            **dict.fromkeys((*_ERRORS, "rms_yardstick", "us", "time_ratio")),
        }
        rows.append(row)
        kernel = _kernel(sums, device)
        explanation = explain(q, k, v, kernel=kernel, accumulate=sums)
        if explanation.chosen is None:
            row |= {"ok": False, "reason": refusal(explanation, kernel)}
            continue
        key = explanation.chosen.key

        runs[sums] = partial(attention, q, k, v, kernel=key, accumulate=sums)
        found = Yardstick(inputs, sums).judge(runs[sums]())
        row |= {"kernel": key, "ok": found.ok, "reason": found.reason}
        row |= {"max_error": found.max, "rms_error": found.rms, "rms_allowed": found.rms_allowed}
        row["rms_yardstick"] = found.rms_yardstick
    if device != "cpu":
        times = _times(runs, device)
        for row in rows:
            mine, base = times.get(row["accumulate"]), times.get("fp32")
            if mine:
                row["us"] = statistics.median(mine)
            if mine and base:
                row["time_ratio"] = statistics.median(a / b for a, b in zip(mine, base))
    return rows


def _kernel(sums: str, device: str) -> str:
    """The name to ask for: on a CPU that of the emulated mma.sync kernel."""
    if device != "cpu":
        return "auto"
    fits = (v.kernel for v in variants() if v.accumulate == sums and v.kernel.startswith("sm80"))
    return next((name for name in fits if name.endswith("-simt")), "auto")


def _times(runs: dict[str, Callable[[], Any]], device: str) -> dict[str, list[float]]:
    """Microseconds of each round, by kind of sums."""
    import torch

    with torch.cuda.device(device):
        timer = ColdEvents(device)
        samplers = {sums: timer.sampler(run) for sums, run in runs.items()}
        return interleaved_us(samplers, ROUNDS, SAMPLES)


_STYLES = {
    "fp32": ("#000000", "s"),
    "fp16_qk": ("#0072B2", "o"),
    "fp16_pv": ("#E69F00", "^"),
    "fp16": ("#D55E00", "D"),
}


def draw(result: dict[str, Any], path: Path) -> Path:
    """A column per head dim: errors against the length, and below the time as a part of fp32's.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["max_error"] is not None]
    head_dims = sorted({row["head_dim"] for row in rows})
    timed = any(row["time_ratio"] for row in rows)
    height = 6.0 if timed else 3.5
    figure = Figure(figsize=(max(6.0, 3.6 * len(head_dims)), height), layout="constrained")
    panels = figure.subplots(1 + timed, max(1, len(head_dims)), squeeze=False, sharey="row")
    for column, head_dim in enumerate(head_dims):
        for sums, (color, marker) in _STYLES.items():
            mine = [r for r in rows if (r["head_dim"], r["accumulate"]) == (head_dim, sums)]
            lengths = [row["seqlen"] for row in mine]
            style = {"color": color, "marker": marker, "markersize": 4}
            top = panels[0][column]
            top.plot(lengths, [row["rms_error"] for row in mine], **style, label=f"{sums}, RMS")
            top.plot(lengths, [row["max_error"] for row in mine], "--", **style, label="largest")
            if timed:
                ratios = [row["time_ratio"] for row in mine]
                panels[1][column].plot(lengths, ratios, **style)
        panels[0][column].set_title(f"D = {head_dim}", fontsize=10)
        panels[0][column].set_yscale("log")
        for row_of_panels in panels:
            row_of_panels[column].set_xscale("log", base=2)
        panels[-1][column].set_xlabel("keys")
    panels[0][0].set_ylabel("error against fp64")
    if timed:
        panels[1][0].set_ylabel("time / fp32")
        panels[1][0].set_ylim(bottom=0)
    if head_dims:
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"fp16 accumulation: {result['environment']['device']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    sys.exit(main())
