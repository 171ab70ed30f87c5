"""The table of speed in README.md is what benchmarks/results/ has."""

import re
from pathlib import Path

import pytest
from cutlass_attn.tools.experiment import report
from cutlass_attn.tools.experiment.stats import geometric_mean

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="an sdist has no results")
OTHERS = ("torch:cudnn", "torch:flash", "flash_attn_interface", "flash_attn.cute")
BF16, FP16 = "bfloat16", "float16"
# By the title of a row: file, dtype, head dim or None for all.
ROWS = {
    "forward": ("hopper-peers", BF16, None),
    "forward, few tiles: short or few heads": ("few", BF16, None),
    "forward, medium, head dim 64": ("medium", BF16, 64),
    "backward, head dim 64": ("backward", BF16, 64),
    "backward, head dim 128": ("backward", BF16, 128),
    "backward, head dim 256": ("backward", BF16, 256),
    "backward with dropout": ("backward-dropout", BF16, None),
    "decoding, head dim 128": ("decode", FP16, 128),
    "decoding, head dim 64": ("decode", FP16, 64),
    "forward, mma.sync kernels alone": ("forward", BF16, None),
}


def ratios(name, dtype, head_dim, other, option="none"):
    """Speed of cutlass_attn:auto over `other`, of each shape, by rounds."""
    times = {}
    for row in report.load(RESULTS / f"nvidia-h200-{name}.json").rows:
        if row.dtype == dtype and head_dim in (None, row.head_dim) and row.status == report.OK:
            times.setdefault((row.shape, row.option), {})[row.requested] = row.rounds_us
    return [
        geometric_mean([a / b for a, b in zip(by[other], by["cutlass_attn:auto"], strict=True)])
        for (_shape, found), by in times.items()
        if {other, "cutlass_attn:auto"} <= set(by) and found == option
    ]


def cell(of_shapes):
    if not of_shapes:
        return ""
    numbers = geometric_mean(of_shapes), min(of_shapes), max(of_shapes)
    mean, low, high = (f"{x:.2f}" for x in numbers)
    return mean if len(of_shapes) == 1 else f"{mean} ({low}\N{EN DASH}{high})"


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(rf"^\| ({re.escape(name)} \(\d+\) \|.*)\|$", readme, re.MULTILINE)
    title, *cells = (text.strip() for text in line.split("|"))
    file, dtype, head_dim = ROWS[name]
    option = "dropout" if file == "backward-dropout" else "none"
    shapes = [ratios(file, dtype, head_dim, other, option) for other in OTHERS]
    assert title == f"{name} ({len(shapes[0])})"
    assert [text.replace("*", "") for text in cells] == [cell(of_shapes) for of_shapes in shapes]
    for text in cells:  # losses are bold, and nothing else
        for bold, number in re.findall(r"(\*\*)?(\d\.\d\d)", text):
            assert bool(bold) == (float(number) < 1)
