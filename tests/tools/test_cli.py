"""The command: what it prints, what it writes, and its exit status."""

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys

import cases
import cutlass_attn
import pytest
import torch
from cutlass_attn import _C, explain
from cutlass_attn.tools import check, cli, ladder
from cutlass_attn.tools.experiment import environment, report, runner
from cutlass_attn.tools.experiment.problems import Shape

SMALL = [
    "check",
    "--batch",
    "1",
    "--heads",
    "2",
    "--seqlen",
    "40",
    "--inputs",
    "2",
    "--device",
    "cpu",
]


def test_info(capsys):
    assert cli.main(["info", "--all"]) == 0
    text = capsys.readouterr().out
    assert cutlass_attn.__version__ in text
    for variant in cutlass_attn.variants(None):
        assert variant.kernel in text


def test_info_fits_a_screen(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert cutlass_attn.__version__ in text and len(text.splitlines()) < 20
    compiled = sum(variant.compiled for variant in cutlass_attn.variants(None))
    assert f"{compiled} compiled" in text


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_check_passes(capsys, dtype):
    assert cli.main([*SMALL, "--dtype", dtype, "--causal", "--heads-kv", "1"]) == 0
    text = capsys.readouterr().out
    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[dtype]
    assert text.startswith(f"{dtype} D=64 H=2:1 1x40 causal on ")
    assert "pass" in text and "FAIL" not in text
    for variant in cutlass_attn.variants():
        can_run = variant.compiled and variant.device == "cpu" and variant.dtype == dtype
        is_wide = variant.kernel.startswith("sm90/wide")  # for head dims beyond 256
        fits = variant.head_dim == 0 or (variant.head_dim >= 64 and not is_wide)
        rows = variant.max_rows or 80  # 40 queries of two heads on one
        is_usual = variant.accumulate == "fp32" and not variant.quantize and not variant.needs
        takes = fits and is_usual and rows >= 80
        assert (variant.key in text) == (can_run and takes), variant.key


@pytest.mark.parametrize("accumulate", ["fp16", "fp16_qk", "fp16_pv"])
def test_check_of_sums_in_fp16(capsys, accumulate):
    if cutlass_attn.build_info().simt != "all":
        pytest.skip("this build has few simt kernels")
    assert cli.main([*SMALL, "--accumulate", accumulate]) == 0
    text = capsys.readouterr().out
    assert f", {accumulate} accumulation on " in text and "pass" in text and "FAIL" not in text
    assert f"sm80/{accumulate}-simt/f16/d64" in text
    assert "cpu/f16" not in text and "sm80-simt" not in text
    assert cli.main([*SMALL, "--accumulate", accumulate, "--dtype", "bf16"]) == 2
    assert "accumulation is for float16, not bfloat16" in capsys.readouterr().err


def test_check_on_a_busy_machine_compares_no_times(capsys, monkeypatch):
    monkeypatch.setattr(runner, "waited", lambda *_: 0.4)
    assert cli.main([*SMALL, "--kernel", "cpu", "--kernel", "scalar/minimal-simt"]) == 0
    text = capsys.readouterr().out
    assert "The machine is busy: threads waited for a core 40% of the time" in text
    assert "pass" in text and "speed-up is over" not in text


def test_check_as_json(capsys, tmp_path):
    file = tmp_path / "check.json"
    assert cli.main([*SMALL, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert (written["schema"], written["command"], written["ok"]) == (2, "check", True)
    rows = {row["impl"]: row for row in written["rows"]}
    row = rows["cutlass_attn:cpu/f16"]
    assert (row["seqlen_q"], row["status"], row["inputs"]) == (40, "ok", 2) and row["allclose"]
    assert row["us"] > 0 and len(row["rounds_us"]) == 5
    assert 0 < row["mean_error"] <= row["rms_error"] <= row["max_error"] < 1e-3
    assert row["rms_error"] <= row["rms_allowed"]
    assert written["environment"]["build"]["version"] == cutlass_attn.__version__
    assert any(name.startswith("torch:") for name in rows)
    emulated = [row for name, row in rows.items() if "-simt" in name]
    assert all(row["us"] is None and row["speedup"] is None for row in emulated)

    capsys.readouterr()
    assert cli.main([*SMALL, "--json", "-", "--kernel", "cpu"]) == 0
    written = json.loads(capsys.readouterr().out)  # nothing else is on stdout
    assert [row["impl"] for row in written["rows"]] == ["cutlass_attn:cpu/f16"]


@cases.needs_gpu
def test_check_on_a_gpu(capsys):
    """The reference shape, with times that can be compared."""
    assert cli.main(["check", "--device", "cuda", "--json", "-"]) == 0
    rows = {row["impl"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    vectorized, tiled, minimal = (
        rows[f"cutlass_attn:scalar/{name}"]
        for name in ("vectorized/f16/d64", "tiled/f16/d256", "minimal/f16")
    )
    assert "torch:flash" in rows
    assert any(name.startswith("cutlass_attn:sm80/f16/d64/") for name in rows)
    assert all(row["us"] > 0 for row in rows.values())
    assert minimal["speedup"]["value"] == 1
    assert vectorized["speedup"]["value"] > tiled["speedup"]["value"] > 1


def test_check_fails_on_one_wrong_element(capsys, monkeypatch):
    monkeypatch.setattr(_C, "forward", cases.wrong_kernel(offset=32))
    assert cli.main([*SMALL, "--kernel", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and "due, at (0, 0, 0, 0)" in text


def test_check_fails_on_a_crash(capsys, monkeypatch):
    def crash(*args):
        raise RuntimeError("kernel launch: an illegal memory access was encountered")

    monkeypatch.setattr(_C, "forward", crash)
    assert cli.main([*SMALL, "--kernel", "cpu"]) == 1
    assert (
        "cpu/f16: RuntimeError: kernel launch: an illegal memory access" in capsys.readouterr().out
    )


def test_check_says_when_emulation_was_cut_short(capsys, monkeypatch):
    if cutlass_attn.build_info().simt == "none":
        pytest.skip("this build has no simt kernels")
    monkeypatch.setattr(runner, "EMULATION_SECONDS", 0.0)
    assert cli.main([*SMALL, "--kernel", "scalar/minimal-simt"]) == 0
    text = capsys.readouterr().out
    assert "1/2" in text and "Emulated kernels stop at the first input" in text


@pytest.mark.skipif(not cases.no_gpu(), reason="a GPU is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_check_without_a_gpu_says_what_is_missing(capsys, device):
    assert cli.main(["check", "--device", device]) == 2
    error = capsys.readouterr().err
    lack = environment.why_no_gpu(device)
    assert lack and lack in error and "--device cpu" in error and error.count("\n") == 1


def test_check_fails_on_a_kernel_that_cannot_run(capsys):
    assert cli.main([*SMALL, "--kernel", "sm80"]) == 1
    assert "needs operands on a CUDA device" in capsys.readouterr().out
    assert cli.main([*SMALL, "--kernel", "sm81"]) == 2
    assert "there is no kernel 'sm81'" in capsys.readouterr().err


def test_check_rejects_impossible_problems(capsys):
    assert cli.main([*SMALL, "--heads", "3", "--heads-kv", "2"]) == 2
    assert "num_heads_q and num_heads_kv are 3 and 2" in capsys.readouterr().err
    assert cli.main([*SMALL, "--seqlen", "0"]) == 2
    assert "'--seqlen': 0 is not in the range x>=1" in capsys.readouterr().err


@pytest.mark.parametrize("heads_kv", ["3", "8"])
def test_check_of_one_kernel_rejects_them_as_well(capsys, heads_kv):
    assert cli.main([*SMALL, "--kernel", "cpu", "--heads", "4", "--heads-kv", heads_kv]) == 2
    assert f"num_heads_q and num_heads_kv are 4 and {heads_kv}" in capsys.readouterr().err
    assert cli.main([*SMALL, "--kernel", "cpu", "--seed", str(2**70)]) == 2
    assert "'--seed': 1180591620717411303424 is not in the range" in capsys.readouterr().err


def test_cache_with_a_limit_that_is_none(capsys, monkeypatch):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE_SIZE", "much")
    assert cli.main(["cache"]) == 1
    assert "cutlass-attn cache: CUTLASS_ATTN_CACHE_SIZE is 'much'" in capsys.readouterr().err


def test_check_without_torch():
    code = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None  # importing torch now fails
from cutlass_attn.tools import cli
raise SystemExit(cli.main({SMALL} + ["--json", "-"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [row["impl"] for row in json.loads(done.stdout)["rows"]]
    assert "cutlass_attn:cpu/f16" in names and not any(name.startswith("torch") for name in names)


@pytest.mark.parametrize("accumulate", ["fp32", "fp16_pv"])
def test_check_is_of_all_kernels(accumulate):
    """Compiled variants each, and the kernels that no variant of is compiled by name."""
    names = check.candidates(accumulate, "float16")
    asked = (accumulate, "float16")
    there = [
        v
        for v in cutlass_attn.variants()
        if (v.accumulate, v.dtype) == asked and not v.quantize and not v.needs
    ]
    keys = [v.key for v in there if v.compiled]
    others = {v.kernel for v in there} - {v.kernel for v in there if v.compiled}
    assert set(names) == {*keys, *others} and len(names) == len(keys) + len(others)


def test_module_is_the_command():
    command = [sys.executable, "-m", "cutlass_attn", *SMALL, "--kernel", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "cpu/f16" in done.stdout


# --- check --ladder -------------------------------------------------------------------------------

LADDER = ["check", "--ladder", "--device", "cpu", "--inputs", "1"]
FEW = ["--batch", "1", "--heads", "1", "--seqlen", "40"]


def test_ladder_on_the_cpu(capsys):
    assert cli.main([*LADDER, *FEW, "--json", "-"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)  # nothing else is on stdout
    simt = cutlass_attn.build_info().simt
    assert document["ok"] and document["grid"] == "ladder"
    ours = [row for row in document["rows"] if row["requested"].startswith("cutlass_attn:")]
    rungs = [row["impl"].removeprefix("cutlass_attn:").partition("/f16")[0] for row in ours]
    scalar = ["scalar/minimal-simt", "scalar/tiled-simt", "scalar/vectorized-simt"]
    if simt != "none":
        assert rungs[:3] == scalar and ("sm80-simt" in rungs) == (simt == "all")
        assert "Emulated on the CPU" in output.err
    assert rungs[-1] == "cpu"
    for row in document["rows"]:
        assert row["allclose"] and 0 < row["mean_error"] < row["max_error"] < 1e-3
        assert (row["us"] is None) == ("-simt/" in row["impl"]) and "over_rung_before" not in row
    assert document["rows"][len(rungs)]["impl"] == "torch:auto"


@pytest.mark.parametrize(
    ("gpu", "heads", "top"),
    [
        ("sm_89", 16, ["sm80"]),
        ("sm_90", 16, ["sm80", "sm90/split_keys"]),
        ("sm_90", 64, ["sm80", "sm90"]),
    ],
)
def test_ladder_leaves_out_kernels_for_other_sizes(gpu, heads, top):
    q = torch.empty(1, heads, 512, 64, device="meta", dtype=torch.float16)
    explained = functools.partial(explain, q, q, q, device=gpu)
    if explained().chosen is None:
        pytest.skip("this build has no GPU kernels")
    kernels = [key.split("/f16")[0] for key in ladder.rungs(explained)]
    assert kernels == [*kernels[: -len(top)], *top]
    assert all(name.startswith(("scalar/", "wmma")) for name in kernels[: -len(top)])


@pytest.fixture
def gpu_is_there(monkeypatch):
    """`--device cuda` passes the check that there is a GPU."""
    monkeypatch.setattr(cli, "why_no_gpu", lambda device: "")


@pytest.mark.usefixtures("gpu_is_there")
def test_ladder_is_smaller_where_it_is_emulated(monkeypatch):
    asked = []

    def stop(problem, progress, **more):
        asked.append(problem.shape)
        raise ValueError("stopped")

    monkeypatch.setattr(ladder, "run_ladder", stop)
    assert cli.main(LADDER) == cli.main([*LADDER, "--heads", "3"]) == 2
    assert cli.main(["check", "--ladder", "--device", "cuda"]) == 2
    assert asked == [
        Shape(1, 2, 2, 128, 128, 64),
        Shape(1, 3, 3, 128, 128, 64),
        Shape(2, 8, 8, 512, 512, 64),
    ]


def made_ladder(*_, **__):
    """A ladder as on a GPU."""
    times = {
        "cutlass_attn:scalar/minimal/f16": 3000.0,
        "cutlass_attn:scalar/tiled/f16/d256": 75.0,
        "cutlass_attn:scalar/vectorized/f16": 25.0,
        "cutlass_attn:sm80/f16/d64/64x64x4": 6.25,
        "torch:auto": 12.0,
    }
    shape = dataclasses.asdict(check.FULL_SHAPE)
    rows = [
        report.Row("forward", name, name, "float16", **shape, inputs=1, rounds_us=[us] * 5, us=us)
        for name, us in times.items()
    ]
    made = report.Report("ladder", next(iter(times)), {"device": "Some GPU"}, {}, command="check")
    made.rows = rows
    made.fill_speedups(rows)
    ladder.fill_steps(made)
    return made


@pytest.mark.usefixtures("gpu_is_there")
def test_ladder_steps(capsys, monkeypatch):
    monkeypatch.setattr(ladder, "run_ladder", made_ladder)
    assert cli.main(["check", "--ladder", "--device", "cuda"]) == 0
    text = capsys.readouterr().out
    assert [row.over_rung_before for row in made_ladder().rows] == [None, 40, 3, 4, None]
    assert "over rung before" in text and "480.00" in text and "Emulated" not in text


def test_ladder_rejects_what_it_does_not_do(capsys):
    assert cli.main([*LADDER, "--kernel", "cpu"]) == 2
    assert "--ladder and --kernel exclude each other" in capsys.readouterr().err
    assert cli.main([*LADDER, "--accumulate", "fp16"]) == 2
    assert "--ladder and --accumulate fp16 exclude each other" in capsys.readouterr().err


@cases.needs_gpu
def test_ladder_on_a_gpu(capsys):
    """Each rung is right and faster than the one before; the vectorized kernel twice as fast."""
    for _ in range(3):  # whoever else uses the GPU disturbs the times, and not three times running
        assert cli.main(["check", "--ladder", "--device", "cuda", "--json", "-"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        rows = [row for row in rows if row["requested"].startswith("cutlass_attn:")]
        names = [row["impl"].removeprefix("cutlass_attn:").partition("/f16")[0] for row in rows]
        assert {"scalar/minimal", "scalar/tiled", "scalar/vectorized", "sm80"} <= set(names)
        steps = [row.get("over_rung_before", math.inf) for row in rows]
        speedups = dict(zip(names, steps))
        if min(steps) > 1 and speedups["scalar/vectorized"] >= 2:
            return
    raise AssertionError(speedups)


# --- What all commands have -----------------------------------------------------------------------

COMMANDS = sorted(cli.cutlass_attn.commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(capsys, name):
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"  cutlass-attn {name}" in text or f"cutlass-attn {name} " in text
    assert "Example:\n" in text and "Exit status:\n" in text and "130  interrupted" in text
    assert "--json FILE" in text or name == "completion"


def test_every_command_is_listed(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in COMMANDS)
    assert cli.main(["no-such"]) == 2
    assert "No such command 'no-such'" in capsys.readouterr().err


def test_info_as_json(capsys):
    assert cli.main(["info", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["command"], document["ok"]) == (2, "info", True)
    assert [row["key"] for row in document["rows"]] == [v.key for v in cutlass_attn.variants(None)]


def test_a_result_that_cannot_be_written_is_no_traceback(tmp_path, capsys):
    path = tmp_path / "file" / "result.json"
    (tmp_path / "file").touch()
    assert cli.main([*SMALL, "--kernel", "cpu", "--json", str(path)]) == 2
    error = capsys.readouterr().err
    assert "cutlass-attn check: " in error and str(path) in error


@pytest.mark.parametrize("name", ["absent/result.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_check(tmp_path, capsys, name):
    assert cli.main([*SMALL, "--json", str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert not output.out and f"cutlass-attn check: --json {tmp_path}" in output.err
    assert not list(tmp_path.iterdir())


def run_without(names, code):
    """A program in which importing these modules fails."""
    program = f"import sys; sys.modules.update(dict.fromkeys({names})); {code}"
    environment = {**os.environ, "CUTLASS_ATTN_TUNING": ""}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("name", ["click", "rich", "tomlkit"])
def test_the_command_without_its_extra_says_what_to_install(name):
    code = "from cutlass_attn import __main__; "
    if name == "tomlkit":  # which is imported where a tuning file is written
        code += "from cutlass_attn.tools import cli; "
        code += "cli.main = lambda: __import__('tomlkit'); "
    done = run_without([name], code + "sys.exit(__main__.main())")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{name} is missing; pip install 'click>=8.1'" in done.stderr


def test_numpy_is_all_that_a_call_needs():
    names = ["click", "filelock", "pynvml", "rich", "tomlkit", "matplotlib", "torch", "cuda"]
    code = "import numpy as np, cutlass_attn as ca; from cutlass_attn import jit; "
    code += "q = np.ones((1, 1, 8, 64), np.float16); ca.attention(q, q, q, verify=True); "
    code += "print(ca.explain(q, q, q).chosen.key); jit.available()"
    done = run_without(names, code)
    assert (done.returncode, done.stdout) == (0, "cpu/f16\n"), done


def test_no_instrument_is_imported_with_the_package():
    names = {"cutlass_attn.tools"}
    code = f"import sys, cutlass_attn; assert not {names} & set(sys.modules)"
    environment = {**os.environ, "CUTLASS_ATTN_TUNING": ""}  # a tuning file asks for some of it
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_completion(capsys):
    """The shell's script, and what it asks the command for."""
    assert cli.main(["completion", "bash"]) == 0
    assert "_CUTLASS_ATTN_COMPLETE=bash_complete" in capsys.readouterr().out
    asked = {"COMP_WORDS": "cutlass-attn check --lad", "COMP_CWORD": "2"}
    program = "import sys; sys.argv[0] = 'cutlass-attn'; from cutlass_attn.tools import cli; "
    done = subprocess.run(
        [sys.executable, "-c", program + "cli.main()"],
        env={**os.environ, **asked, "_CUTLASS_ATTN_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split(",")[-1].strip() == "--ladder"


def test_an_interruption_has_a_status_of_its_own(monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run_check", stop)
    assert cli.main(SMALL) == 130


def test_the_default_check_is_of_two_tiles_and_a_ragged_end():
    shape = check.SHAPE
    for tile in {v.tile for v in cutlass_attn.variants() if v.tile}:
        m, n = (int(size) for size in tile.split("x")[:2])
        assert shape.seqlen_q > m and shape.seqlen_q % m, tile
        assert shape.seqlen_k > n and shape.seqlen_k % n, tile
