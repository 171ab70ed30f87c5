"""`python -m dev.bench --grid decode`, `paged` and `varlen`: the calls for serving."""

import json
import sys
from dataclasses import replace

import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn.compat import flash_mla
from cutlass_attn.tools import console
from cutlass_attn.tools.experiment import report
from cutlass_attn.tools.experiment.judge import Yardstick
from cutlass_attn.tools.experiment.problems import OPS, Problem, Shape

from dev.bench import command, impls
from dev.bench.grids import GRIDS, grid_for

CPU = ["--device", "cpu", "--rounds", "5", "--impl", "cutlass_attn"]
PACKED = Problem(Shape(5, 4, 2, 200, 200, 64, causal=True), op="varlen")
PAGED = Problem(Shape(3, 4, 2, 1, 50, 64), op="paged", page=16)


def run(*arguments):
    """The exit status of the command."""
    return console.run(command.bench, "python -m dev.bench", arguments)


def bench(capsys, *arguments):
    status = run(*CPU, *arguments, "--json", "-")
    return json.loads(capsys.readouterr().out)["rows"], status


def prepared(name, inputs):
    found, _ = impls.discover(op=inputs.problem.op)
    return next(impl for impl in found if impl.name == name).prepare(inputs)


def result_of(bound):
    return bound.to_bhsd(bound.run())


def test_grids():
    assert {grid.op for grid in GRIDS.values()} == set(OPS)
    sizes = [(shape.batch, shape.seqlen_k) for shape in GRIDS["decode"].shapes]
    assert sizes == [(16, 8192), (1, 32768), (64, 2048), (8, 1024), (1, 1024), (32, 4096)]
    pages = {problem.page for problem in GRIDS["paged"].problems}
    assert pages == {16, 1, 256}
    for problem in GRIDS["varlen"].problems:
        lengths = [sequence.seqlen_q for sequence in problem.sequences]
        assert len(lengths) == 16 and min(lengths) >= 128 and max(lengths) <= 8192
        assert len(set(lengths)) > 10
    for grid in GRIDS.values():
        names = {impl.name for impl in impls.discover(grid.kernels, op=grid.op)[0]}
        assert grid.baseline in names
        has_pages = grid.op in ("paged", "latent")
        assert all((problem.page is not None) == has_pages for problem in grid.problems)


@pytest.mark.parametrize(
    ("grid", "others"),
    [
        ("decode", {"cutlass_attn:fp8_cache"}),
        ("paged", {"cutlass_attn:contiguous", "cutlass_attn:fp8_cache"}),
        ("latent", {"cutlass_attn:ds_mla"}),
        ("varlen", {"cutlass_attn:dense"}),
    ],
)
def test_every_row_is_judged_and_timed(capsys, grid, others):
    rows, status = bench(capsys, "--grid", grid, "--baseline", "cutlass_attn:auto")
    assert status == 0
    problems = grid_for(grid, "cpu").problems
    names = {"cutlass_attn:auto"} | others
    assert len(rows) == len(problems) * len(names)
    assert {row["requested"] for row in rows} == names
    for row in rows:
        assert (row["op"], row["status"]) == (grid, "ok")
        assert 0 < row["rms_error"] <= row["rms_allowed"] and row["us"] > 0
        assert ("page" in row) == (grid in ("paged", "latent")) and ("gbps" in row) == (
            grid != "varlen"
        )
        read = report.Row(**row)
        assert read.problem in problems
        assert row["tflops"] == pytest.approx(read.problem.flops / row["us"] / 1e6, rel=1e-3)
        assert row["speedup"]["over"] == "cutlass_attn:auto"


def test_the_rate_of_packed_sequences_counts_what_each_sees():
    flops = sum(4 * 4 * 64 * np.tri(n.seqlen_q).sum() for n in PACKED.sequences)
    assert PACKED.flops == pytest.approx(flops, rel=0.02)
    assert PACKED.sequences == replace(PACKED, dtype="bfloat16").sequences


def test_pages_hold_the_same_keys_in_another_order():
    inputs = PAGED.inputs("cpu", 0)
    pages = inputs.paged.k[inputs.paged.block_table.long()].flatten(1, 2)
    assert torch.equal(pages[:, :50], inputs.bshd[1]) and pages.shape[1] == 64
    table = inputs.paged.block_table.flatten()
    assert not torch.equal(table, table.sort().values)


def test_latents():
    problem = Problem(Shape(2, 5, 1, 1, 100, 576), op="latent", page=16)
    assert problem.flops == 2 * 2 * 5 * 100 * (576 + 512)
    assert problem.kv_bytes(2) == 2 * 100 * 1152
    inputs = problem.inputs("cpu", 0)
    assert inputs.paged.v.data_ptr() == inputs.paged.k.data_ptr()
    for name, right in (("auto", inputs), ("ds_mla", inputs.rounded_to_tokens)):
        bound = prepared(f"cutlass_attn:{name}", inputs)
        assert Yardstick(right).judge(result_of(bound)).ok
    assert not Yardstick(inputs).judge(result_of(bound)).ok


def test_flash_mla_is_called_as_it_wants_to_be(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)
    monkeypatch.setattr(impls.importlib.util, "find_spec", lambda name: name)
    inputs = Problem(Shape(2, 5, 1, 2, 100, 576, causal=True), op="latent", page=16).inputs(
        "cpu", 0
    )
    assert Yardstick(inputs).judge(result_of(prepared("flash_mla", inputs))).ok


def test_a_cache_in_fp8_is_judged_by_what_it_holds():
    inputs = PAGED.inputs("cpu", 0)
    bound = prepared("cutlass_attn:fp8_cache", inputs)
    out = result_of(bound)
    assert bound.quantize == "fp8_cache"
    assert Yardstick(inputs.rounded_to_fp8).judge(out).ok
    assert not Yardstick(inputs).judge(out).ok  # rounding moves it more than 16 bits do
    for x, stored in ((inputs.k, inputs.rounded_to_fp8.k), (inputs.v, inputs.rounded_to_fp8.v)):
        # Three bits of a mantissa; steps of 1/512 of a scale below the least normal number.
        assert ((stored - x).abs() <= x.abs() / 16 + x.abs().max() / 448 / 1024).all()


def test_the_rate_of_a_cache_in_fp8_counts_its_bytes(capsys):
    rows, _ = bench(capsys, "--grid", "decode", "--impl", "cutlass_attn")
    for row in rows:
        in_fp8 = row["requested"] == "cutlass_attn:fp8_cache"
        element_size = 1 if in_fp8 else 2
        elements = 2 * row["batch"] * row["heads_kv"] * row["seqlen_k"] * row["head_dim"]
        assert row["gbps"] == pytest.approx(elements * element_size / row["us"] / 1e3, rel=1e-3)


@pytest.mark.parametrize("problem", [PAGED, PACKED])
def test_a_wrong_element_of_any_sequence_fails(problem):
    """In what is compared: the first of the first heads, the last of the last ones."""
    inputs = problem.inputs("cpu", 0)
    out = result_of(prepared("cutlass_attn:auto", inputs))
    yardstick = Yardstick(inputs)
    assert yardstick.judge(out).ok
    starts = inputs.cu_seqlens.tolist()
    for sequence in range(problem.shape.batch):
        wrong = out.clone()
        if problem.op == "varlen":
            wrong[0, -1, starts[sequence + 1] - 1, -1] += 0.5
        else:
            wrong[sequence, -1, -1, -1] += 0.5
        assert not yardstick.judge(wrong).ok


@pytest.mark.parametrize("kernel", ["cpu/int8_qk", "cpu/int8", "cpu/int8_fp8"])
def test_packed_sequences_in_8_bits_are_judged_by_their_own_rounding(kernel):
    inputs = PACKED.inputs("cpu", 0)
    (impl,) = impls.ours([kernel], "varlen")
    bound = impl.prepare(inputs)
    assert Yardstick(inputs, quantize=bound.quantize).judge(result_of(bound)).ok


def test_all_of_packed_sequences_is_compared():
    inputs = PACKED.inputs("cpu", 0)
    q, k, v = (x[0] for x in inputs.bshd)
    ends = inputs.cu_seqlens
    out, lse = cutlass_attn.attention_varlen(q, k, v, ends, ends, causal=True, return_lse=True)
    out, lse = out[None].transpose(1, 2), lse[None]
    yardstick = Yardstick(inputs, whole=True)
    assert yardstick.judge(out, lse).ok and yardstick.allclose(out)
    lse[0, 1, 40] += 0.1
    assert "log-sum-exp is off by up to 0.1" in yardstick.judge(out, lse).reason
    out[0, 1, 40, 3] += 0.5
    assert not yardstick.judge(out).ok and not yardstick.allclose(out)


def fake_varlen_attn(q, k, v, ends, ends_k, longest_q, longest_k, *, enable_gqa=False,
                     window_size=(-1, -1), seqused_k=None, block_table=None):  # fmt: skip
    assert enable_gqa == (q.shape[1] != k.shape[-2])
    if block_table is None:
        assert longest_q == longest_k == int(ends.diff().max()) and seqused_k is None
    else:
        assert ends_k is None and (longest_q, longest_k) == (1, 50)
    causal = window_size == (-1, 0)
    more = {"seqused_k": seqused_k, "block_table": block_table}
    return cutlass_attn.attention_varlen(q, k, v, ends, ends_k, causal=causal, **more)


def older_varlen_attn(q, k, v, ends, ends_k, longest_q, longest_k, is_causal=False):
    return cutlass_attn.attention_varlen(q, k, v, ends, ends_k, causal=is_causal)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """torch's function takes CUDA tensors alone; stand-ins take these for some."""
    monkeypatch.setattr(impls, "_is_cuda", lambda x: True)


@pytest.mark.parametrize("problem", [PAGED, PACKED])
def test_torch_is_called_with_the_same_sequences(monkeypatch, as_on_a_gpu, problem):
    monkeypatch.setattr(impls, "_torch_varlen", lambda: fake_varlen_attn)
    inputs = problem.inputs("cpu", 0)
    assert Yardstick(inputs).judge(result_of(prepared("torch:varlen", inputs))).ok


def test_an_older_torch_is_called_by_its_own_keywords(monkeypatch, as_on_a_gpu):
    monkeypatch.setattr(impls, "_torch_varlen", lambda: older_varlen_attn)
    inputs = PACKED.inputs("cpu", 0)
    assert Yardstick(inputs).judge(result_of(prepared("torch:varlen", inputs))).ok
    with pytest.raises(impls.Unsupported, match="this version takes no pages"):
        prepared("torch:varlen", PAGED.inputs("cpu", 0))


def test_where_torch_has_no_such_function_the_report_says_so(monkeypatch):
    monkeypatch.setattr(impls, "_torch_varlen", lambda: None)
    found, absent = impls.discover(op="varlen")
    assert [impl.name for impl in found] == ["cutlass_attn:auto", "cutlass_attn:dense"]
    assert absent == {"torch:varlen": "this torch has no torch.nn.attention.varlen"}


@pytest.mark.parametrize("problem", [PACKED, PAGED])
def test_options_reach_the_calls_that_have_them(problem):
    inputs = replace(problem, option="softcap").inputs("cpu", 0)
    plain = result_of(prepared("cutlass_attn:auto", problem.inputs("cpu", 0)))
    assert not torch.equal(result_of(prepared("cutlass_attn:auto", inputs)), plain)


def test_options_that_a_call_lacks_are_not_left_out():
    inputs = replace(PAGED, option="bias").inputs("cpu", 0)
    with pytest.raises(impls.Unsupported, match="attention_decode has no bias"):
        prepared("cutlass_attn:auto", inputs)


def test_a_kernel_by_name_that_cannot_run_is_unsupported(capsys):
    rows, status = bench(capsys, "--grid", "decode", "--dtype", "fp16", "--kernel", "sm80/decode",
                         "--baseline", "cutlass_attn:auto")  # fmt: skip
    assert status == 0
    refused = [row for row in rows if row["requested"] == "cutlass_attn:sm80/decode"]
    assert {row["status"] for row in refused} == {"unsupported"}
    assert "CUDA" in refused[0]["reason"]


def test_table(capsys, tmp_path):
    file = tmp_path / "paged.json"
    assert run(*CPU, "--grid", "paged", "--dtype", "fp16", "--json", str(file)) == 0
    text = capsys.readouterr().out
    assert "D=64 H=4:2 3x1:300, pages of 16" in text and "TB/s" in text
