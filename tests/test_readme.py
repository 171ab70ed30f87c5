"""What README.md says of speed is what benchmarks/results/ and the lab notes have."""

import re
from pathlib import Path

import pytest
from cutlass_attn.tools.experiment.report import OK
from cutlass_attn.tools.experiment.stats import geometric_mean

from dev.bench import results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="an sdist has no results")
README = (ROOT / "README.md").read_text()
OTHERS = ("torch:cudnn", "torch:flash", "flash_attn_interface", "flash_attn.cute")
BF16, FP16 = "bfloat16", "float16"
# By the title of a row: file, dtype, head dim or None for all.
ROWS = {
    "forward": ("h200-hopper-peers", BF16, None),
    "forward, on an H100": ("h100-hopper-peers", BF16, None),
    "forward, short or few heads": ("h200-few", BF16, None),
    "forward, medium sizes, head dim 64": ("h200-medium", BF16, 64),
    "backward": ("h200-backward", BF16, None),
    "backward with dropout": ("h200-backward-dropout", BF16, None),
    "decoding": ("h200-decode", FP16, None),
    "forward, mma.sync kernels alone": ("h200-forward", BF16, None),
}


def ratios(name, dtype, head_dim, other, option="none", ours="cutlass_attn:auto"):
    """Speed of `ours` over `other`, of each shape, by rounds."""
    times = {}
    for row in results.load(RESULTS / f"nvidia-{name}.json").rows:
        if row.dtype == dtype and head_dim in (None, row.head_dim) and row.status == OK:
            times.setdefault((row.shape, row.option), {})[row.requested] = row.rounds_us
    return [
        geometric_mean([a / b for a, b in zip(by[other], by[ours], strict=True)])
        for (_shape, found), by in times.items()
        if {other, ours} <= set(by) and found == option
    ]


def cell(of_shapes):
    """The mean and the slowest shape."""
    return f"{geometric_mean(of_shapes):.2f} ({min(of_shapes):.2f})" if of_shapes else ""


def test_no_other_rows():
    _, _, table = README.partition("| shapes |")
    table, _, _ = table.partition("\n\n")
    assert re.findall(r"^\| (.*?) \(\d+\)", table, re.MULTILINE) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    (line,) = re.findall(rf"^\| ({re.escape(name)} \(\d+\) \|.*)\|$", README, re.MULTILINE)
    title, *cells = (text.strip() for text in line.split("|"))
    file, dtype, head_dim = ROWS[name]
    option = "dropout" if file.endswith("dropout") else "none"
    shapes = [ratios(file, dtype, head_dim, other, option) for other in OTHERS]
    counts = {len(of_shapes) for of_shapes in shapes if of_shapes}
    assert title == f"{name} ({counts.pop()})" and not counts
    assert [text.replace("*", "") for text in cells] == [cell(of_shapes) for of_shapes in shapes]
    for text in cells:  # losses are bold, and nothing else
        for bold, number in re.findall(r"(\*\*)?(\d\.\d\d)", text):
            assert bool(bold) == (float(number) < 1)


def test_fp8_cache():
    found = [
        ratio
        for dtype in (BF16, FP16)
        for ratio in ratios(
            "h200-decode", dtype, None, "cutlass_attn:auto", ours="cutlass_attn:fp8_cache"
        )
    ]
    assert f"an fp8 KV cache is {min(found):.2f} to {max(found):.2f} times as fast as" in " ".join(
        README.split()
    )
