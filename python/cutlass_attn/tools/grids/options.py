"""What options cost: ALiBi, a bias, a mask, dropout and softcap, beside PyTorch's backends.

    python -m cutlass_attn.tools.grids.options [--device cuda] [--shapes B,HQ,... ...] [--json FILE]

For each shape and option this library's choice of kernel and those backends of PyTorch that take
the call run in interleaved rounds, in fp16; results without dropout are compared. docs/options.md
is about what it shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ...attention import attention
from ...explain import explain
from ..console import make_console, progress_bar
from ..experiment.environment import default_device, environment
from ..experiment.impls import is_refusal, torch_attention, torch_backend
from ..experiment.problems import SHAPE_FORM, Shape, parse_shape
from ..experiment.report import default_path
from ..experiment.runner import random_inputs
from ..experiment.timing import interleaved_us, median_us, timer_for

ROUNDS, SAMPLES = 7, 10
GPU_SHAPES = ("4,32,32,4096,4096,64", "4,16,16,4096,4096,128", "2,8,8,2048,2048,256")
CPU_SHAPES = ("1,2,2,64,64,64",)
PEERS = ("flash", "efficient", "cudnn")
# Largest difference of two results in fp16; their values are of the order of 1 at most.
TOLERANCE = 2e-2

# Keywords of cutlass_attn.attention, and of PyTorch's; None: it has no such option.
Keywords = tuple[dict[str, Any], dict[str, Any] | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement; exit status 1 if a result differs from another implementation's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help='"cpu", "cuda" or "cuda:N"; by default a usable GPU')
    parser.add_argument("--shapes", nargs="+", help=f"each {SHAPE_FORM}", metavar="SHAPE")
    parser.add_argument("--json", type=Path, help="by default <device>-options.json")
    args = parser.parse_args(argv)
    device = args.device or default_device()
    defaults = CPU_SHAPES if device == "cpu" else GPU_SHAPES
    try:
        shapes = [parse_shape(text) for text in args.shapes or defaults]
    except ValueError as error:
        parser.error(str(error))

    with progress_bar() as show:
        rows = measure(device, shapes, show)
    facts = environment(device)
    method = {"timing": timer_for("events", device).name, "rounds": ROUNDS, "samples": SAMPLES}
    path = args.json or default_path("cpu" if device == "cpu" else str(facts["device"]), "options")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": facts, "method": method, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    console = make_console()
    table = Table("shape", "option", "implementation", box=None)
    for name in ("us", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        difference = "-" if row["difference"] is None else f"{row['difference']:.1e}"
        table.add_row(
            str(Shape(**row["shape"])), row["option"], row["impl"], f"{row['us']:.1f}", difference
        )
    console.print(table)
    console.print(f"written to {path}", highlight=False, markup=False)
    return 0 if all((row["difference"] or 0) <= TOLERANCE for row in rows) else 1


def options(shape: Shape, device: str) -> dict[str, Keywords]:
    """The options that are measured, by name."""
    import torch

    generator = torch.Generator(device).manual_seed(1)
    b, h, sq, sk = shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
    slopes = torch.rand(h, generator=generator, device=device)
    bias = torch.randn((1, h, sq, sk), generator=generator, device=device).half()
    mask = torch.rand((b, 1, sq, sk), generator=generator, device=device) < 0.9
    return {
        "none": ({}, {}),
        "none, sm80/general": ({"kernel": "sm80/general"}, None),
        "softcap": ({"softcap": 30.0}, None),
        "ALiBi": ({"alibi_slopes": slopes}, None),
        "ALiBi, causal": ({"alibi_slopes": slopes, "causal": True}, None),
        "bias": ({"bias": bias}, {"attn_mask": bias.expand(b, h, sq, sk)}),
        "mask": ({"mask": mask}, {"attn_mask": mask.expand(b, h, sq, sk)}),
        "dropout": ({"dropout_p": 0.1}, {"dropout_p": 0.1}),
    }


def measure(
    device: str, shapes: Sequence[Shape], show: Callable[[str, int, int], None]
) -> list[dict[str, Any]]:
    """A row per shape, option and implementation; `show(what, done, total)` before each step."""
    rows: list[dict[str, Any]] = []
    for i, shape in enumerate(shapes):
        chosen = options(shape, device)
        for j, (name, keywords) in enumerate(chosen.items()):
            show(f"{shape}: {name}", i * len(chosen) + j, len(shapes) * len(chosen))
            rows += _measure_one(shape, device, name, keywords)
    show("done", 1, 1)
    return rows


def _measure_one(shape: Shape, device: str, name: str, keywords: Keywords) -> list[dict[str, Any]]:
    ours, torchs = keywords
    inputs = random_inputs(shape, "float16", device, seed=0)
    q, k, v = inputs.q, inputs.k, inputs.v
    explanation = explain(q, k, v, **ours)
    if explanation.chosen is None:  # sm80/general is not there without a GPU
        return []
    calls: dict[str, Callable[[], Any]] = {
        f"cutlass_attn:{explanation.chosen.key}": partial(attention, q, k, v, **ours)
    }
    if torchs is not None:
        calls |= {f"torch:{peer}": partial(_run_torch, peer, q, k, v, torchs) for peer in PEERS}
    results = {}
    for impl, call in list(calls.items()):
        try:
            results[impl] = call()
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            del calls[impl]
    timer = timer_for("events", device)(device)
    samplers = {impl: timer.sampler(call) for impl, call in calls.items()}
    times = interleaved_us(samplers, ROUNDS, SAMPLES)
    first = next(iter(results.values()))
    rows = []
    for impl, result in results.items():
        compared = result is not first and name != "dropout"
        difference = float((result.float() - first.float()).abs().max()) if compared else None
        row = {"shape": asdict(shape), "option": name, "impl": impl}
        rows.append({**row, "us": median_us(times[impl]), "difference": difference})
    return rows


def _run_torch(backend: str, q: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Any:
    with torch_backend(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of why a backend does not take the call
        return torch_attention(q, k, v, causal=False, **keywords)


if __name__ == "__main__":
    sys.exit(main())
