"""`cutlass_attn.tools.grids.accumulation`: errors of emulated kernels, its file and its figure."""

import json
from pathlib import Path

import cutlass_attn
import pytest
from cutlass_attn import testing
from cutlass_attn.tools.grids import accumulation

pytest.importorskip("torch", reason="its inputs are torch tensors")
needs_simt = pytest.mark.skipif(
    not cutlass_attn.build_info().simt, reason="on a CPU it runs the simt kernels"
)


def run(path, *arguments):
    return accumulation.main(["--device", "cpu", "--json", str(path), *arguments])


def factor_of(row):
    in_fp16 = row["accumulate"] in ("fp16", "fp16_qk")
    return testing.RMS_FACTOR_FP16_QK if in_fp16 else testing.RMS_FACTOR


@needs_simt
def test_a_row_per_size_and_kind_of_sums(capsys, tmp_path):
    assert run(tmp_path / "a.json", "--seqlens", "64,100") == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert "fp16_pv" in capsys.readouterr().out
    rows = result["rows"]
    sizes = [(row["head_dim"], row["seqlen"], row["accumulate"]) for row in rows]
    assert sizes == [(64, n, sums) for n in (64, 100) for sums in accumulation.SUMS]
    for row in rows:
        assert row["ok"] and 0 < row["rms_error"] <= row["rms_allowed"] < row["max_error"] < 4e-3
        assert row["rms_allowed"] == pytest.approx(factor_of(row) * row["rms_yardstick"])
        assert row["us"] is None and row["time_ratio"] is None  # of an emulated kernel
        name = "sm80-simt" if row["accumulate"] == "fp32" else f"sm80/{row['accumulate']}-simt"
        assert row["kernel"].startswith(f"{name}/f16/d64/")


@needs_simt
def test_what_no_kernel_takes_is_a_failure(capsys, tmp_path):
    """Emulated are kernels of head dim 64 alone."""
    assert run(tmp_path / "a.json", "--seqlens", "16", "--head-dims", "128") == 1
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [True, False, False, False]
    assert "up to 64, got 128" in rows[1]["reason"]


def test_reasons_are_printed_as_they_are(capsys, monkeypatch, tmp_path):
    """rich takes text in brackets for markup."""
    reason = "pip install 'cutlass_attn[jit]' [/opt]"
    row = {
        **dict.fromkeys(("max_error", "rms_error", "rms_allowed", "us", "time_ratio")),
        "head_dim": 64,
        "seqlen": 16,
        "accumulate": "fp16",
        "kernel": "-",
        "ok": False,
        "reason": reason,
    }
    monkeypatch.setattr(accumulation, "measure", lambda *_: [row])
    monkeypatch.setenv("COLUMNS", "200")
    assert run(tmp_path / "a.json", "--figure", str(tmp_path / "a.png")) == 1
    assert reason in capsys.readouterr().out


def test_the_file_of_the_h200_is_by_the_rule_of_today():
    path = Path(__file__).parents[1] / "benchmarks/results/nvidia-h200-accumulation.json"
    if not path.is_file():
        pytest.skip("a source distribution has no results")
    for row in json.loads(path.read_text())["rows"]:
        assert row["rms_allowed"] == pytest.approx(factor_of(row) * row["rms_yardstick"])
        assert row["ok"] == (row["rms_error"] <= row["rms_allowed"])


@needs_simt
def test_a_wrong_result_is_a_failure(capsys, monkeypatch, tmp_path):
    judge = testing.judge
    monkeypatch.setattr(
        "cutlass_attn.tools.experiment.judge.judge", lambda out, *more: judge(out * 1.02, *more)
    )
    assert run(tmp_path / "a.json", "--seqlens", "40") == 1


def test_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    row = {"max_error": 1e-3, "rms_error": 1e-4, "time_ratio": 0.6}
    rows = [
        {**row, "head_dim": d, "seqlen": n, "accumulate": sums}
        for d in (64, 128)
        for n in (128, 512)
        for sums in accumulation.SUMS
    ]
    result = {"environment": {"device": "a GPU"}, "rows": rows}
    path = accumulation.draw(result, tmp_path / "folder" / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG")
