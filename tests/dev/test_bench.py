"""`python -m dev.bench`: its statistics, implementations, checks, file, tables and figures."""

import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import cases
import cutlass_attn
import numpy as np
import pytest
from cutlass_attn import _C
from cutlass_attn.tools import console
from cutlass_attn.tools.experiment import environment, report, runner, stats, timing
from cutlass_attn.tools.experiment import judge as accuracy
from cutlass_attn.tools.experiment.problems import (
    OPTIONS,
    Inputs,
    Problem,
    Shape,
    parse_shape,
)

from dev.bench import command, impls, results
from dev.bench.grids import GRIDS

torch = cases.torch

CPU = ["--device", "cpu", "--rounds", "5", "--dtype", "fp16"]
TINY = [*CPU, "--shape", "1,2,1,40,40,64"]


@pytest.fixture
def peers(monkeypatch):
    """peers(name, **attributes) makes a module importable in place of the library of that name."""

    def install(name, **attributes):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for peer in impls._PEERS:  # whatever this machine has is not what is tested
        monkeypatch.setitem(sys.modules, peer.module.partition(".")[0], None)
    return install


def run(*arguments):
    """The exit status of the command."""
    return console.run(command.bench, "python -m dev.bench", arguments)


def bench(capsys, *arguments):
    """The JSON document of a run, and its exit status."""
    status = run(*arguments, "--json", "-")
    return json.loads(capsys.readouterr().out), status


def inputs_of(*sizes, causal=False, dtype="float16"):
    return Problem(Shape(*sizes, causal=causal), dtype).inputs("cpu", 0)


# Shapes


def test_grids():
    forward = GRIDS["forward"].shapes
    assert len(forward) == len(set(forward)) == 18
    assert {(s.head_dim, s.heads_q) for s in forward} == {(64, 32), (128, 16), (256, 8)}
    assert {(s.batch, s.seqlen_q) for s in forward} == {(16, 1024), (4, 4096), (1, 16384)}
    assert sum(s.causal for s in forward) == 9
    assert GRIDS["reference"].shapes[0] == Shape(2, 8, 8, 512, 512, 64)


def test_flops_and_bytes():
    assert Shape(2, 8, 8, 512, 512, 64).flops == 4 * 2 * 8 * 512**2 * 64
    assert Shape(2, 8, 8, 512, 512, 64, causal=True).flops == 4 * 2 * 8 * 512**2 * 64 / 2
    assert Shape(16, 32, 8, 1, 8192, 128).kv_bytes(2) == 16 * 128 * 2 * 2 * 8 * 8192


@pytest.mark.parametrize(("sq", "sk"), [(300, 300), (200, 500), (500, 200)])
def test_causal_flops_count_visible_keys(sq, sk):
    visible = np.tri(sq, sk, sk - sq).sum()
    flops = Shape(1, 1, 1, sq, sk, 8, causal=True).flops
    assert flops == pytest.approx(4 * 8 * visible, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "a shape is b,hq,hkv,sq,sk,d, 6 numbers, got '1,2,3'"),
        ("1,2,2,0,64,64", "sq of the shape .* must be 1 or more, got '0'"),
        ("1,2,2,x,64,64", "sq of the shape .* must be 1 or more, got 'x'"),
        ("1,3,2,64,64,64", "hkv of the shape .* must divide hq, got 2 and 3"),
    ],
)
def test_wrong_shapes(text, message):
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


# Implementations


def sdpa(q, k, v, causal=False):
    """Attention of (B, H, S, D) tensors for the stand-ins of other libraries."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )


def flash_attn_func(q, k, v, causal=False):
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2)


class FakeFlashInfer:
    def __init__(self, workspace, layout):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(self, q_starts, k_starts, heads_q, heads_kv, head_dim, *, causal, q_data_type):
        self.q_starts, self.k_starts, self.causal = q_starts.tolist(), k_starts.tolist(), causal
        self.expected = (heads_q, heads_kv, head_dim, q_data_type)

    def run(self, q, k, v):
        assert self.expected == (q.shape[1], k.shape[1], q.shape[2], q.dtype)
        outs = []
        for i in range(len(self.q_starts) - 1):
            rows = slice(self.q_starts[i], self.q_starts[i + 1])
            keys = slice(self.k_starts[i], self.k_starts[i + 1])
            outs.append(flash_attn_func(q[None, rows], k[None, keys], v[None, keys], self.causal))
        return torch.cat(outs).flatten(0, 1)


class FakeMask:
    pass


def fake_xformers(q, k, v, attn_bias):
    grouped = q.dim() == 5
    q, k, v = (x.flatten(2, 3) if grouped else x for x in (q, k, v))
    out = flash_attn_func(q, k, v, isinstance(attn_bias, FakeMask))
    return out.unflatten(2, (-1, 2)) if grouped else out


def install_all(peers):
    peers("flash_attn", flash_attn_func=flash_attn_func, __version__="2.8")
    peers("flash_attn_interface", flash_attn_func=lambda *x, **y: (flash_attn_func(*x, **y), None))
    peers("flash_attn.cute", flash_attn_func=flash_attn_func, __version__="4.0")
    peers("xformers", __version__="0.0.33")
    peers("xformers.ops", memory_efficient_attention=fake_xformers, LowerTriangularMask=FakeMask)
    peers("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=FakeFlashInfer)
    peers(
        "sageattention",
        sageattn=lambda q, k, v, tensor_layout, is_causal: sdpa(q, k, v, is_causal),
    )


@pytest.fixture
def eager_flex(monkeypatch):
    """FlexAttention on the CPU, not compiled."""
    monkeypatch.setattr(impls, "_is_cuda", lambda x: True)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("sizes", [(2, 4, 4, 40, 40, 64), (2, 4, 2, 40, 40, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_library_computes_the_same(peers, eager_flex, sizes, causal):
    install_all(peers)
    found, absent = impls.discover()
    assert absent == {}
    versions = {impl.name: impl.version for impl in found}
    assert versions["flash_attn"] == "2.8" and versions["xformers"] == "0.0.33"
    inputs = inputs_of(*sizes, causal=causal)
    yardstick = accuracy.Yardstick(inputs)
    for impl in found:
        if impl.name in ("torch:cudnn", "torch:efficient"):
            continue  # for GPUs
        call = impl.prepare(inputs)
        with call.context():
            verdict = yardstick.judge(call.to_bhsd(call.run()))
        assert verdict.ok, (impl.name, verdict)


@pytest.mark.parametrize("option", sorted(OPTIONS.keys() - {"none", "dropout"}))
@pytest.mark.parametrize("sizes", [(3, 4, 4, 72, 72, 64), (2, 4, 2, 40, 100, 64)])
def test_every_library_gets_the_same_option(eager_flex, option, sizes):
    """FlexAttention's functions, PyTorch's mask and ours agree, and what is visible is counted."""
    problem = Problem(Shape(*sizes), "float32", option)
    inputs = problem.inputs("cpu", 0)
    mask = inputs.keywords.ours.get("mask")
    if option in ("padding", "documents"):
        visible = mask.float().mean().item()
        assert problem.flops == pytest.approx(visible * problem.shape.flops, rel=1e-6)
        assert visible < 0.7
    found = {impl.name: impl for impl in impls.discover()[0]}
    expected = found["cutlass_attn:auto"].prepare(inputs).run()
    for name in ("torch:flex", "torch:math"):
        if name == "torch:math" and inputs.keywords.torch is None:
            continue
        torch.testing.assert_close(found[name].prepare(inputs).run(), expected)


def test_flex_says_what_it_is_timed_without(peers):
    flex = {impl.name: impl for impl in impls.discover()[0]}["torch:flex"]
    with pytest.raises(impls.Unsupported, match="is timed on CUDA tensors alone"):
        flex.prepare(inputs_of(1, 1, 1, 40, 40, 64))


def test_flex_has_no_dropout(peers, eager_flex):
    flex = {impl.name: impl for impl in impls.discover()[0]}["torch:flex"]
    with pytest.raises(impls.Unsupported, match="has no dropout"):
        flex.prepare(Problem(Shape(1, 1, 1, 40, 40, 64), option="dropout").inputs("cpu", 0))


def test_what_cannot_be_imported_is_named(peers, monkeypatch):
    peers("flash_attn")  # too old a version
    real = impls.importlib.import_module

    def import_module(name, package=None):
        if name == "flashinfer":
            raise OSError("libcudart.so.99: cannot open shared object file")
        if name == "xformers.ops":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real(name, package)

    monkeypatch.setattr(impls.importlib, "import_module", import_module)
    found, absent = impls.discover()
    assert [impl.name for impl in found] == [
        "cutlass_attn:auto",
        *(f"torch:{name}" for name in ("flash", "cudnn", "efficient", "math", "flex")),
    ]
    assert absent["flash_attn"] == "flash_attn has no flash_attn_func"
    assert absent["flash_attn.cute"] == "not installed"
    assert absent["flashinfer"].startswith("OSError: libcudart.so.99")
    assert absent["xformers"] == "ModuleNotFoundError: No module named 'triton'"


def test_selection(peers):
    found, absent = impls.discover(["cpu"])
    assert [x.name for x in impls.select(found, absent, ["cutlass_attn", "torch:math"])] == [
        "cutlass_attn:auto",
        "cutlass_attn:cpu",
        "torch:math",
    ]
    assert impls.select(found, absent, []) == found
    with pytest.raises(ValueError, match=r"no implementation 'torch:flesh' here; there are cutl"):
        impls.select(found, absent, ["torch:flesh"])
    with pytest.raises(ValueError, match="'xformers' is absent: not installed"):
        impls.select(found, absent, ["xformers"])


def test_a_kernel_has_to_exist():
    with pytest.raises(ValueError, match="there is no kernel 'sm81'"):
        impls.discover(["sm81"])


def test_math_is_not_run_out_of_memory(monkeypatch):
    monkeypatch.setattr(impls.impls, "_memory", lambda device: 4e9)
    found = {impl.name: impl for impl in impls.discover()[0]}
    meta = torch.empty(1, device="meta", dtype=torch.float16)
    shape = Shape(1, 32, 32, 4096, 4096, 64)
    tensors = [meta.expand(1, 32, 4096, 64)] * 3
    with pytest.raises(impls.Unsupported, match=r"scores would take 6 GB, .* device's 4 GB"):
        found["torch:math"].prepare(Inputs(Problem(shape), *tensors))


def test_only_a_refusal_by_torch_counts_as_unsupported(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError(message)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    prepare = next(x.prepare for x in impls.discover()[0] if x.name == "torch:cudnn")
    message = "No available kernel. Aborting execution."
    with pytest.raises(impls.Unsupported, match="No available kernel"):
        prepare(inputs_of(1, 1, 1, 8, 8, 64))
    message = "CUDA out of memory"
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        prepare(inputs_of(1, 1, 1, 8, 8, 64))


# The check of results


@pytest.mark.parametrize(
    "sizes", [(2, 4, 2, 70, 90, 64), (1, 2, 2, 90, 30, 64), (3, 8, 2, 1, 200, 64)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_right_results_pass(sizes, causal):
    inputs = inputs_of(*sizes, causal=causal, dtype="bfloat16")
    out = cutlass_attn.attention(inputs.q, inputs.k, inputs.v, causal=causal)
    assert accuracy.Yardstick(inputs).judge(out).ok


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ((0, 0, 0, 0), 9.0),
        ((-1, -1, -1, -1), 9.0),
        ((1, 2, 50, 3), math.nan),  # outside of what is compared
    ],
)
def test_wrong_results_fail(where, value):
    inputs = inputs_of(3, 4, 4, 100, 100, 64)
    out = cutlass_attn.attention(inputs.q, inputs.k, inputs.v)
    yardstick = accuracy.Yardstick(inputs)
    assert yardstick.judge(out).ok
    out[where] = value
    assert not yardstick.judge(out).ok


def test_another_causal_alignment_fails():
    inputs = inputs_of(1, 2, 2, 64, 96, 64, causal=True)
    assert not accuracy.Yardstick(inputs).judge(sdpa(inputs.q, inputs.k, inputs.v, True)).ok


def test_a_result_of_another_shape_is_an_error():
    inputs = inputs_of(1, 2, 2, 64, 64, 64)
    with pytest.raises(ValueError, match=r"has shape \(1, 64, 2, 64\), not \(1, 2, 64, 64\)"):
        accuracy.Yardstick(inputs).judge(inputs.q.transpose(1, 2))


# A whole run

ROW_KEYS = {
    *("op", "impl", "requested", "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k"),
    *("head_dim", "causal", "us", "tflops", "timing", "rounds_us", "samples", "speedup"),
    *(
        "option",
        "accumulate",
        "quantize",
        "inputs",
        "max_error",
        "mean_error",
        "rms_error",
        "rms_allowed",
    ),
    *("rms_yardstick", "sm_clock", "status", "reason"),
}


def test_times_of_a_busy_machine_are_not_compared(capsys, monkeypatch, tmp_path):
    """On one, this library's kernel was once drawn at 246 times the speed of torch:math."""
    parts = iter([0.1, 0.5])  # of the first shape, of the second
    monkeypatch.setattr(runner, "waited", lambda *_: next(parts))
    shapes = ["--shape", "1,1,1,40,40,64", "--shape", "1,1,1,40,80,64", "--causal", "no"]
    asked = [*CPU, *shapes, "--json", str(tmp_path / "a.json")]
    assert run(*asked) == 0
    line = "The machine is busy: threads waited for a core 50% of the time."
    assert line in " ".join(capsys.readouterr().out.split())
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["waited"] == 0.5
    timed = [row for row in document["rows"] if row["us"]]
    assert {row["seqlen_k"] for row in timed} == {40, 80}
    assert all((row["speedup"] is None) == (row["seqlen_k"] == 80) for row in timed)


def test_document(capsys, peers):
    arguments = [*TINY, "--shape", "1,4,2,1,100,64", "--kernel", "sm80", "--commit", "abc"]
    document, status = bench(capsys, *arguments)
    assert status == 0
    assert (document["schema"], document["grid"], document["commit"]) == (2, "shapes", "abc")
    assert document["method"] == {
        "timing": "host_clock",
        "rounds": 5,
        "order": "Williams design",
        "host_calls": 0,
        "inputs": "standard normal, seed 0",
        "num_inputs": 1,
    }
    assert document["environment"]["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document["date"])
    assert document["absent"]["xformers"] == "not installed"

    rows = document["rows"]
    assert len(rows) == 3 * 7  # a shape of one query has no causal row
    for row in rows:
        has_bandwidth = row["seqlen_q"] == 1 and row["us"] is not None
        assert set(row) == ROW_KEYS | ({"gbps"} if has_bandwidth else set())
    assert {row["op"] for row in rows} == {"forward"}
    by_name = {(row["requested"], row["seqlen_q"], row["causal"]): row for row in rows}
    ours = by_name["cutlass_attn:auto", 40, True]
    assert ours["impl"] == "cutlass_attn:cpu/f16" and ours["status"] == "ok"
    assert ours["us"] == np.median(ours["rounds_us"]) > 0 and len(ours["rounds_us"]) == 5
    assert ours["tflops"] == pytest.approx(4 * 2 * 40 * 20 * 64 / ours["us"] / 1e6, rel=1e-3)
    flash = by_name["torch:flash", 40, True]
    ratio = stats.paired_ratio(flash["rounds_us"], ours["rounds_us"])
    assert ours["speedup"]["over"] == "torch:flash"
    assert ours["speedup"]["value"] == pytest.approx(ratio.value, rel=1e-3)
    assert 0 < ours["rms_error"] <= ours["rms_allowed"]
    decode = by_name["cutlass_attn:auto", 1, False]
    assert decode["gbps"] == pytest.approx(2 * 2 * 100 * 64 * 2 / decode["us"] / 1e3, 1e-3)
    refused = by_name["cutlass_attn:sm80", 40, False]
    assert (refused["status"], refused["us"]) == ("unsupported", None)
    assert "needs operands on a CUDA device" in refused["reason"]


def test_table(capsys, peers, tmp_path, monkeypatch):
    peers("flash_attn", flash_attn_func=lambda q, k, v, causal: 1.01 * flash_attn_func(q, k, v))
    peers("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=lambda *x: 1 / 0)
    monkeypatch.chdir(tmp_path)
    assert run(*TINY, "--causal", "no") == 0  # a peer's fault is not ours
    text = capsys.readouterr().out
    assert re.search(r"D=64 H=2:1 1x40 +cutlass_attn:cpu/f16 +[\d.]+ +[\d.e-]+ +[\d.]+ ", text)
    assert re.search(r"flash_attn .*wrong", text) and "flash_attn: wrong: " in text
    assert "flashinfer: failed: ZeroDivisionError: division by zero" in text
    assert re.search(r"^ *cutlass_attn:auto +float16 +[\d.]+ +[\d.]+ *$", text, re.MULTILINE)
    assert not re.search(r"^ *flash_attn +float16", text, re.MULTILINE)  # no mean of wrong rows
    assert "written to cpu-shapes.json" in text
    assert results.load("cpu-shapes.json").grid == "shapes"


def test_in_a_checkout_results_go_to_benchmarks(capsys, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "cutlass_attn"\n')
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    assert run(*TINY, "--impl", "cutlass_attn", "--causal", "yes") == 0
    assert (tmp_path / "benchmarks/results/cpu-shapes.json").is_file()
    name = results.default_path("NVIDIA H200", "forward").name
    assert name == "nvidia-h200-forward.json"


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    assert results.checkout_commit() == ""
    Path("pyproject.toml").write_text('name = "cutlass_attn"\n')
    assert results.checkout_commit() == ""
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    assert results.checkout_commit() == git("rev-parse", "HEAD")
    Path("pyproject.toml").write_text('name = "cutlass_attn"\n\n')
    assert results.checkout_commit() == git("rev-parse", "HEAD") + "-dirty"


def test_a_wrong_kernel_of_ours_fails_the_run(capsys, peers, monkeypatch):
    monkeypatch.setattr(_C, "forward", cases.wrong_kernel(offset=3000))
    document, status = bench(capsys, *TINY)
    assert status == 1
    ours = next(row for row in document["rows"] if row["requested"] == "cutlass_attn:auto")
    assert ours["status"] == "wrong" and "is due, at (0, 0, 0, 0)" in ours["reason"]


def test_a_result_of_nan_is_wrong_and_valid_json(capsys, peers):
    peers("flash_attn", flash_attn_func=lambda q, k, v, causal: q * math.nan)
    assert run(*TINY, "--json", "-") == 0
    text = capsys.readouterr().out
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    row = next(row for row in document["rows"] if row["requested"] == "flash_attn")
    assert row["status"] == "wrong" and row["rms_error"] is None and row["us"] > 0


def test_a_crash_in_a_late_round_is_reported(capsys, peers):
    calls = []

    def crash_later(q, k, v, causal):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("out of luck\nand more")
        return flash_attn_func(q, k, v, causal)

    peers("flash_attn", flash_attn_func=crash_later)
    document, _ = bench(capsys, *TINY, "--causal", "no")
    row = next(row for row in document["rows"] if row["requested"] == "flash_attn")
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: out of luck")
    assert row["us"] is None and row["speedup"] is None
    assert len(calls) == 7  # none after it failed


def test_a_lost_gpu_ends_the_run(monkeypatch):
    """What was measured is kept, and the rest is not tried on a context that is gone."""

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(runner, "_on_device", lambda device: runner.nullcontext())
    monkeypatch.setattr(timing.ColdEvents, "__init__", lambda self, device: None)
    inputs = Problem.inputs
    monkeypatch.setattr(Problem, "inputs", lambda self, device, seed: inputs(self, "cpu", seed))
    problems = [Problem(Shape(1, 1, 1, n, n, 64)) for n in (8, 9)]
    bad = impls.Impl("bad", lambda inputs: 1 / 0)
    plan = runner.Plan(problems, [bad, bad], "cuda", 5)
    result = report.Report("two", "bad", {}, {})
    saved = []
    runner.run(plan, result, lambda *x: None, lambda r: saved.append(len(r.rows)))
    assert saved == [1]
    assert result.aborted.startswith("bad left the GPU unusable on float16 D=64 H=1 1x8: Runtime")
    assert not result.ok


def test_rounds_have_orders_of_their_own():
    order = []

    def impl(name):
        def prepare(inputs):
            return impls.Bound(name, lambda: (order.append(name), inputs.q)[1])

        return impls.Impl(name, prepare)

    problems = [Problem(Shape(1, 1, 1, 1, 1, 64))]
    plan = runner.Plan(problems, [impl("a"), impl("b"), impl("c")], "cpu", 6)
    runner.run(plan, report.Report("", "a", {}, {}), lambda *x: None)
    changes = [x for x, before in zip(order, [None, *order]) if x != before]
    assert "".join(changes) == "abc" + "abcacbcabcbabcabac"


def test_few_rounds_are_refused(capsys):
    assert run(*TINY, "--rounds", "4") == 2
    assert "rounds must be 5 or more, got 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "small", "--shape", "1,1,1,8,8,64"], "--grid and --shape exclude each other"),
        (["--grid", "decode", "--causal", "yes"], "leaves no shape of the decode"),
        (["--shape", "1,1"], "a shape is b,hq,hkv,sq,sk,d"),
        (["--dtype", "fp16,fp8"], "--dtype must be of fp16, bf16, fp32, got 'fp8'"),
        (["--kernel", "sm81"], "there is no kernel 'sm81'"),
        (["--impl", "flash"], "there is no implementation 'flash' here"),
        (["--baseline", "flash"], "--baseline must be one of cutlass_attn:auto, torch:flash"),
        (["--device", "tpu"], 'device must be "cpu", "cuda" or "cuda:N", got \'tpu\''),
    ],
)
def test_errors(capsys, arguments, message):
    assert run(*CPU, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m dev.bench: ") and message in error


@pytest.mark.skipif(not cases.no_gpu(), reason="a GPU is there")
def test_without_a_gpu_it_says_what_is_missing(capsys):
    assert run() == 2
    error = capsys.readouterr().err
    lack = environment.why_no_gpu("cuda")
    assert lack and lack in error and "--device cpu" in error


def test_without_torch_it_says_so():
    code = "import sys; sys.modules['torch'] = None; from cutlass_attn.tools import console; "
    code += "from dev.bench.command import bench; arguments = ['--device', 'cpu']; "
    code += "raise SystemExit(console.run(bench, 'bench', arguments))"
    program = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    done = subprocess.run(program, capture_output=True, text=True, cwd=root)
    assert done.returncode == 2 and "pip install torch" in done.stderr


@cases.needs_gpu
@pytest.mark.parametrize("kind", ["events", "graph"])
def test_on_a_gpu(capsys, kind, peers):
    arguments = ["--shape", "2,8,8,512,512,64", "--dtype", "fp16", "--timing", kind]
    document, status = bench(capsys, *arguments, "--rounds", "5")
    assert status == 0
    name = {"events": "events_cold_l2", "graph": "cuda_graph_warm"}[kind]
    assert {row["timing"] for row in document["rows"]} == {name}
    timed = {row["requested"]: row for row in document["rows"] if not row["causal"]}
    assert {"cutlass_attn:auto", "torch:flash", "torch:math"} <= set(timed)
    q = torch.empty(2, 8, 512, 64, dtype=torch.float16, device="cuda")
    assert (
        timed["cutlass_attn:auto"]["impl"]
        == f"cutlass_attn:{cutlass_attn.explain(q, q, q).chosen.key}"
    )
    for row in (timed["cutlass_attn:auto"], timed["torch:flash"]):
        assert row["status"] == "ok" and 2 < row["us"] < 1000
        clock, unit = row["sm_clock"].split()
        assert 200 < int(clock) < 4000 and unit == "MHz"
    assert timed["torch:math"]["us"] > timed["torch:flash"]["us"]
    assert document["environment"]["compute_capability"]


@cases.needs_gpu
def test_host_time_on_a_gpu(capsys, peers, monkeypatch):
    monkeypatch.setattr(runner, "HOST_CALLS", 100)
    arguments = ["--grid", "reference", "--dtype", "fp16", "--causal", "no"]
    document, status = bench(capsys, *arguments, "--rounds", "5")
    assert status == 0
    rows = {row["requested"]: row for row in document["rows"]}
    assert 1 < rows["cutlass_attn:auto"]["host_us"] < 1000
    assert 1 < rows["torch:auto"]["host_us"] < 1000
