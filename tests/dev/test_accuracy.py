"""`python -m dev.accuracy`: what it prints and writes, and when it fails."""

import json

import numpy as np
import pytest
from cutlass_attn.tools import console

from dev.accuracy import inputs
from dev.accuracy.command import accuracy

SMALL = [
    "--device",
    "cpu",
    "--seqlen",
    "32",
    "--seqlen-k",
    "128",
    "--head-dim",
    "32",
    "--inputs",
    "random",
]


def main(arguments):
    return console.run(accuracy, "python -m dev.accuracy", arguments)


def test_table(capsys):
    assert main([*SMALL, "--inputs", "sink"]) == 0
    text = capsys.readouterr().out
    assert "32 queries, 128 keys, float16, on cpu" in text
    for word in ("random", "sink", "none", "qk", "sage2++", "predicted", "SageAttention 2++"):
        assert word in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_json(capsys, dtype):
    assert main([*SMALL, "--json", "-", "--dtype", dtype, "--mode", "qk"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["schema"], written["command"], written["ok"]) == (2, "accuracy", True)
    assert written["environment"]["numpy"] == np.__version__
    rows = {row["mode"]: row for row in written["rows"]}
    assert list(rows) == ["none", "qk", "sage2++"]
    assert rows["none"]["rms"] < 0.01 and rows["none"]["limit"] is None
    qk = rows["qk"]
    assert rows["none"]["rms"] < qk["rms"] <= qk["limit"] == 0.013
    assert qk["kernel"].startswith("cpu/int8_qk/")
    assert qk["rms"] <= qk["predicted"] < 1.5 * qk["rms"] + 0.002
    assert 0.999 < qk["cosine"] < 1 and qk["rms"] < qk["largest"]


def test_an_error_above_its_limit(monkeypatch, capsys):
    monkeypatch.setitem(inputs.LIMITS, "qk", (0.001, 0.001))
    assert main(SMALL) == 1
    assert "marked with * is above its limit" in capsys.readouterr().out


def test_refusals(capsys):
    assert main([*SMALL, "--dtype", "fp32"]) == 2
    assert "q, k and v are float32" in capsys.readouterr().err
    assert main([*SMALL, "--seqlen", "33"]) == 2
    assert "33 queries" in capsys.readouterr().err
