"""python -m dev.context_times on two processes of a CPU, and its picture."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.run")

from dev import context_times  # noqa: E402
from dev.context_times import Passes, compare  # noqa: E402

ROOT = Path(__file__).parent.parent.parent


def test_report(tmp_path):
    file = tmp_path / "times.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "dev.context_times"]
    subprocess.run(
        [*command, "--case", "64,4,2,16", "--rounds", "1", "--out", str(file)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=120,
    )
    report = json.loads(file.read_text())
    assert report["device"] == "cpu" and report["ranks"] == 2
    names = [(row["scheme"], row["pass"]) for row in report["rows"]]
    passes = ("forward", "forward and backward")
    assert names[:6] == [(scheme, x) for scheme in ("gather", "ring", "ulysses") for x in passes]
    for row in report["rows"]:
        assert row["efficiency"] == pytest.approx(row["one_gpu_ms"] / 2 / row["ms"], rel=0.2)
        assert 0 < row["host_ms"] <= row["ms"]


@pytest.mark.parametrize("of_gradients", [False, True])
def test_wrong_results_are_refused(of_gradients):
    def passes(wrong):
        leaf = torch.ones(4, requires_grad=True)

        def both():
            leaf.grad = torch.full((4,), 2.0 + (wrong and of_gradients))

        out = torch.full((4,), 3.0 + (wrong and not of_gradients))
        return Passes(lambda: out, both, [leaf])

    plan = SimpleNamespace(shard=lambda x, dim: x)
    compare("gather", passes(False), passes(False), plan)
    with pytest.raises(AssertionError, match="gather, of q" if of_gradients else "gather, out"):
        compare("gather", passes(True), passes(False), plan)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    drawn = []
    for names in (["nccl", "cutlass_attn"], ["cutlass_attn", "nccl"]):
        kernels = [[0.0, 5.0, 7, names[0]], [5.0, 90.5, 7, names[1]], [95.5, 3.0, 7, "elementwise"]]
        trace.write_text(json.dumps({"gather": kernels, "ring": kernels}))
        assert context_times.main(["--draw", str(trace), "--out", str(picture)]) == 0
        drawn.append(picture.read_bytes())
    assert all(x.startswith(b"\x89PNG") for x in drawn) and drawn[0] != drawn[1]
