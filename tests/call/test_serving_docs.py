"""The examples of docs/serving.md run, one behind the other."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples use torch")
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_examples():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["out"].shape == (3, 1, 8, 64)
    assert names["lse"].isfinite().all()
