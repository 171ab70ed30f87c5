"""The command `python -m dev.figures`."""

from __future__ import annotations

from pathlib import Path

import click
from cutlass_attn.tools.console import command

from ..bench.results import load
from .draw import draw


@command("python -m dev.figures benchmarks/results/nvidia-h200-forward.json --out docs/figures")
@click.argument("file")
@click.option("--out", metavar="FOLDER", default=".", help="Where to write PNG and SVG files.")
def figures(file: str, out: str) -> int:
    """Draw a result of `python -m dev.bench` or of `cutlass-attn check --ladder`."""
    try:
        report = load(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    if report.busy:
        raise ValueError(f"{file}: {report.busy}")
    for path in draw(report, Path(file).stem, Path(out)):
        print(path)
    return 0
