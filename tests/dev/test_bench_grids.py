"""`python -m dev.bench --grid`: what options cost, and what fp16 accumulation does to results."""

import json
from functools import partial
from pathlib import Path

import cutlass_attn
import pytest
from cutlass_attn import _C, testing
from cutlass_attn.tools import console
from cutlass_attn.tools.experiment.problems import OPTIONS, Problem, Shape

from dev.bench import command, impls, results
from dev.bench.gradients import BackwardPass
from dev.bench.grids import GRIDS, grid_for

torch = pytest.importorskip("torch", reason="it measures torch tensors")
needs_simt = pytest.mark.skipif(
    cutlass_attn.build_info().simt != "all", reason="on a CPU it runs the simt kernels"
)
CPU = ["--device", "cpu", "--rounds", "5", "--dtype", "fp16", "--causal", "no"]
FORWARD_OPTIONS = [name for name in OPTIONS if name != "bias_grad"]
ALL = [word for name in FORWARD_OPTIONS for word in ("--option", name)]


def test_a_cpu_has_grids_of_its_own():
    assert grid_for(None, "cpu") is GRIDS["small"] and grid_for(None, "cuda") is GRIDS["forward"]
    assert grid_for("options", "cpu") is GRIDS["options-cpu"]
    assert grid_for("options", "cuda") is GRIDS["options"]


def test_few_tiles_are_no_more_than_an_h200_has_sms():
    tiles = [s.batch * s.heads_q * -(-s.seqlen_q // 64) for s in GRIDS["few"].shapes]
    assert tiles and max(tiles) <= 132


def test_medium_calls_have_one_to_four_tiles_for_each_of_them():
    shapes = GRIDS["medium"].shapes
    tiles = [s.batch * s.heads_q * -(-s.seqlen_q // 64) for s in shapes]
    assert len(shapes) == 36 and min(tiles) > 132 and max(tiles) <= 4 * 132


def run(*arguments):
    """The exit status of the command."""
    return console.run(command.bench, "python -m dev.bench", arguments)


def bench(capsys, *arguments):
    status = run(*CPU, *arguments, "--json", "-")
    return json.loads(capsys.readouterr().out)["rows"], status


def test_options_are_timed_and_compared(capsys):
    rows, status = bench(
        capsys, "--shape", "2,4,4,32,48,64", *ALL, "--impl", "cutlass_attn", "--impl", "torch:flash"
    )
    assert status == 0
    ours = [row for row in rows if row["impl"] == "cutlass_attn:cpu/f16"]
    assert [row["option"] for row in ours] == FORWARD_OPTIONS
    assert all(row["us"] > 0 and row["seqlen_k"] == 48 for row in ours)
    flash = {row["option"]: row for row in rows if row["requested"] == "torch:flash"}
    assert flash["none"]["rms_error"] > 0
    assert {name for name, row in flash.items() if row["status"] == "unsupported"} == {
        "softcap",
        "alibi",
    } | {name for name, row in flash.items() if "not" in row["reason"]}
    compared = {name for name, row in flash.items() if row.get("difference") is not None}
    assert compared <= {"bias", "mask", "padding", "documents"}
    assert flash["softcap"]["reason"] == "has no softcap"


def test_another_result_of_an_option_is_wrong(capsys, monkeypatch):
    """As if PyTorch's backend computed another function."""
    attention = impls.impls.torch_attention
    monkeypatch.setattr(impls.impls, "torch_attention", lambda *x, **y: attention(*x, **y) + 0.5)
    rows, status = bench(
        capsys, *("--shape", "1,2,2,64,64,64", "--option", "bias", "--impl", "torch:math"),
        *("--impl", "cutlass_attn"),
    )  # fmt: skip
    assert status == 0  # a peer's fault is not ours
    math = next(row for row in rows if row["requested"] == "torch:math")
    assert math["status"] == "wrong" and "differs by 0.5 from the first" in math["reason"]


@needs_simt
def test_a_row_per_size_and_kind_of_sums(capsys):
    rows, status = bench(capsys, "--grid", "accumulation")
    assert status == 0
    kinds = ["fp32", "fp32", "fp16_qk", "fp16_pv", "fp16"]
    sizes = [(row["seqlen_k"], row["accumulate"]) for row in rows]
    assert sizes == [(seqlen, kind) for seqlen in (128, 512) for kind in kinds]
    for row in rows:
        if row["requested"] == "cutlass_attn:auto":
            continue
        in_fp16 = row["accumulate"] in ("fp16", "fp16_qk")
        factor = testing.RMS_FACTOR_FP16_QK if in_fp16 else testing.RMS_FACTOR
        assert 0 < row["rms_error"] <= row["rms_allowed"] < row["max_error"] < 4e-3
        assert row["rms_allowed"] == pytest.approx(factor * row["rms_yardstick"], rel=1e-3)
        assert row["us"] is None and row["speedup"] is None  # of an emulated kernel
        name = "sm80-simt" if row["accumulate"] == "fp32" else f"sm80/{row['accumulate']}-simt"
        assert row["impl"].startswith(f"cutlass_attn:{name}/f16/d64/")


@needs_simt
def test_a_wrong_emulated_result_is_a_failure(capsys, monkeypatch):
    forward = _C.forward
    monkeypatch.setattr(_C, "forward", lambda *call, **more: forward(*call, **more) * 1.02)
    arguments = ["--shape", "1,1,1,40,40,64", "--impl", "cutlass_attn:sm80/fp16-simt"]
    rows, status = bench(capsys, *arguments, "--kernel", "sm80/fp16-simt", "--baseline",
                         "cutlass_attn:auto")  # fmt: skip
    assert status == 1 and rows[0]["status"] == "wrong"


@needs_simt
def test_backward_passes_of_kernels_by_name(capsys):
    """Judged as whole passes are; and why one that does not take the call is left out."""
    names = ("sm90/backward_wgmma-simt", "sm80/backward_dropout-simt")
    wanted = ["--impl", "cutlass_attn"]
    for name in names:
        wanted += ["--kernel", name, "--impl", f"cutlass_attn:{name}"]
    rows, status = bench(capsys, "--grid", "backward", "--causal", "yes", *wanted)
    assert status == 0
    plain, wgmma, dropout = (row for row in rows)
    assert plain["status"] == wgmma["status"] == "ok" and wgmma["us"] is None
    assert wgmma["impl"] == f"cutlass_attn:{names[0]}"
    assert 0 < wgmma["rms_error"] <= wgmma["rms_allowed"] < 1e-2
    assert dropout["status"] == "unsupported" and "dropout" in dropout["reason"]


def test_backward_passes_with_terms(capsys):
    rows, status = bench(
        *(capsys, "--grid", "backward-terms", "--impl", "cutlass_attn", "--impl", "torch:math")
    )
    assert status == 0
    times = {(row["option"], row["requested"]): row["us"] for row in rows if row["status"] == "ok"}
    assert {option for option, impl in times if impl == "cutlass_attn:auto"} == set(
        GRIDS["backward-terms"].options
    )
    assert times["bias_grad", "torch:math"] > 0


def test_the_gradient_of_a_bias_is_part_of_the_pass():
    problem = Problem(Shape(2, 2, 2, 40, 40, 64), "float16", "bias_grad", "backward")
    inputs = problem.inputs("cpu", 0)
    (bias,) = inputs.keywords.learned
    run = BackwardPass.of(partial(cutlass_attn.attention, **inputs.keywords.ours), inputs)
    seen = []
    bias.register_hook(seen.append)
    assert len(run()) == 3
    assert seen[0].shape == bias.shape


def test_reasons_are_printed_as_they_are(capsys, monkeypatch, tmp_path):
    """rich takes text in brackets for markup."""
    reason = "pip install 'cutlass_attn[jit]' [/opt]"

    def prepare(kernel, inputs):
        raise impls.Unsupported(reason)

    monkeypatch.setattr(impls, "_prepare_ours", prepare)
    monkeypatch.chdir(tmp_path)
    assert run(*CPU, "--shape", "1,1,1,8,8,64", "--impl", "cutlass_attn") == 0
    assert reason in capsys.readouterr().out


def test_grids_name_kernels_that_there_are():
    known = {variant.kernel for variant in cutlass_attn.variants()}
    for grid in GRIDS.values():
        assert set(grid.options) <= set(OPTIONS)
        if cutlass_attn.build_info().cuda:
            assert set(grid.kernels) <= known


def test_results_of_earlier_versions_are_read():
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    files = [folder / f"nvidia-h200-{name}.json" for name in ("forward", "reference")]
    if not all(file.is_file() for file in files):
        pytest.skip("a source distribution has no results")
    for file in files:
        result = results.load(file)
        assert result.rows[0].us and isinstance(result.rows[0].problem, Problem)
