"""The C++ that the tests of kernels compile is what graphs are written as."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import seeded


def test_the_text_is_current():
    path = Path(__file__).parents[1] / "cpp" / "simt" / "score_mods.inc"
    assert path.read_text(encoding="utf-8") == seeded.text(), "run tests/mods/seeded.py"
