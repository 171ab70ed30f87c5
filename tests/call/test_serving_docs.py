"""The examples of docs/serving.md run, one behind the other; and those of examples/."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples use torch")
ROOT = Path(__file__).parents[2]


def test_examples_of_the_page():
    page = ROOT / "docs" / "serving.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    assert names["out"].shape == (3, 1, 8, 64)
    assert names["lse"].isfinite().all()


def test_a_shared_prefix_changes_nothing():
    example = runpy.run_path(str(ROOT / "examples" / "05_shared_prefix.py"))
    assert example["main"]() < 1e-3
