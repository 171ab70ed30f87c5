"""`cutlass-attn tune`: which tiles are tried, what rejects one, and how a search resumes."""

import itertools
import json
from types import SimpleNamespace

import pytest
from cutlass_attn import _C, jit, tuning, variants
from cutlass_attn._build.files import locked
from cutlass_attn.tools import cli, tune
from cutlass_attn.tools.experiment.problems import Shape
from cutlass_attn.tools.tune import tiles
from cutlass_attn.tools.tune_rules import Task, blocks_per_sm

SHAPE = Shape(4, 16, 16, 4096, 4096, 128)
AXES = {"m": [16, 32, 63, 64, 96, 128, 256], "n": [32, 48, 64, 256], "warps": [2, 4, 6, 8]}
BASE = "128x64x4"  # what runs on smem_228 at head dim 128


def task_of(head_dim=128, device="cuda"):
    on = device, "sm_90", "smem_228", 132
    return Task("sm80", "float16", head_dim, head_dim, (SHAPE,), "both", *on)


# --- The space ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", sorted(jit.tile_space()))
def test_the_tiles_of_each_kernel_are_in_its_space(kernel):
    rows = [row for row in variants() if row.kernel == kernel and row.tile and row.tier != "tuned"]
    assert rows
    axes = jit.tile_space()[kernel]["axes"]
    for row in rows:
        assert row.tile in tiles(row.kernel, row.head_dim, row.head_dim_v, axes), row.key


def test_the_space_has_what_the_source_takes():
    space = tiles("sm80", 64, 64, AXES)
    assert {"64x64x4", "96x32x6"} <= set(space)
    assert "96x32x4" not in space  # 24 rows a warp
    assert "64x48x4" not in space  # the loop takes 32 keys at a time
    assert not any(tile.startswith("63") for tile in space)
    assert not any("c" in tile for tile in space)  # without columns there are none
    sharing = {**AXES, "columns": [2, 4]}
    assert "32x32x2c4" in tiles("sm80", 512, 512, sharing)
    # Columns of Q that stay in registers lie where V is copied later: 16 KB, V has 8.
    assert not any("c2" in tile for tile in tiles("sm80", 256, 256, {**sharing, "n": [16]}))


def test_a_tile_that_surely_spills_is_not_compiled():
    # 32 rows a warp: 256 registers for O alone.
    d128 = {"kernel": "sm80", "head_dim": 128, "head_dim_v": 128}
    assert _C.check_tile(kernel="sm80", head_dim=256, head_dim_v=256, tile="64x64x2") == ("", True)
    assert _C.check_tile(**d128, tile="128x64x4") == ("", False)
    assert "256x32x4" not in tiles("sm80", 128, 128, AXES)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "tile", "reason"),
    [
        ("sm80", 64, "96x64x4", "queries must be a multiple of 16 for each warp"),
        ("sm80", 64, "64x48x4", "keys must be a multiple of 32"),
        ("sm80", 128, "128x24x4", "keys must be a multiple of 16"),
        ("sm80", 256, "32x64x2c4", "keys must be 8 for each warp that shares rows"),
        ("sm80", 64, "1024x32x64", "a block has at most 1024 threads"),
        ("sm80", 64, "48x32x3", "threads must copy 8 rows of a tile at once"),
        ("sm80", 128, "256x128x8", "needs 131072 bytes of shared memory"),
        ("sm80/int8_qk", 64, "64x96x4", "keys must be 32 or a multiple of 64"),
        ("sm80/int8", 64, "64x128x4", "keys must be 64"),
        ("sm80", 64, "64x64x0", "a tile is such as 64x64x4"),
        ("sm80", 64, "64x1073741824x4", "a tile is such as 64x64x4"),
        ("sm80", 72, "64x64x4", "no variant is of sm80 at head dim 72"),
    ],
)
def test_why_a_kernel_cannot_have_a_tile(kernel, head_dim, tile, reason):
    found, spills = _C.check_tile(kernel=kernel, head_dim=head_dim, head_dim_v=head_dim, tile=tile)
    assert reason in found and not spills


def test_tiles_of_other_kernels_are_not_judged():
    assert _C.check_tile(kernel="sm90", head_dim=128, head_dim_v=128, tile="1x1x1") == ("", False)


def test_blocks_are_counted_as_dispatch_does():
    decode = Shape(2, 32, 8, 1, 512, 128)
    assert blocks_per_sm(decode, 64, 8) == 2  # four heads share a tile
    assert blocks_per_sm(Shape(2, 32, 8, 64, 512, 128), 64, 8) == 8
    assert blocks_per_sm(Shape(1, 2048, 1, 1, 512, 128), 64, 8) == 256  # too many to share one


# --- A tile ---------------------------------------------------------------------------------------


@pytest.fixture
def compiles(monkeypatch):
    """NVRTC that takes every tile, without a word."""
    monkeypatch.setattr(jit, "compile_anew", lambda key, arch: (b"", ""))


def rows_of(arguments, speedup):
    names = [x for flag, x in itertools.pairwise(arguments) if flag == "--kernel"]
    return [
        {"requested": f"cutlass_attn:{name}", "speedup": {"value": ratio}}
        for name, ratio in zip(names, (1, speedup))
    ]


def test_a_tile_is_timed_beside_the_other(compiles, monkeypatch):
    asked = []

    def run(task, names, command, arguments):
        asked.append((names, command, arguments))
        return [*rows_of(arguments, 1.5), *rows_of(arguments, 1.5**3)], ""

    monkeypatch.setattr(tune, "run", run)
    assert tune.evaluate(task_of(), "32x64x2", BASE) == {"speedup": pytest.approx(1.5**2)}
    ((names, command, arguments),) = asked
    assert (set(names), command) == ({"32x64x2", BASE}, "trial")
    assert arguments[arguments.index("--kernel") + 1] == f"sm80/f16/d128/{BASE}"  # the baseline
    assert arguments[arguments.index("--shape") + 1] == "4,16,16,4096,4096,128"
    assert arguments[arguments.index("--timing") + 1] == "events"


def test_what_rejects_a_tile(compiles, monkeypatch):
    monkeypatch.setattr(tune, "run", lambda *_: ([], "wrong: nan at (0, 0)"))
    assert tune.evaluate(task_of(), "32x64x2", BASE) == {
        "rejected": "time",
        "reason": "wrong: nan at (0, 0)",
    }
    log = "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads"
    monkeypatch.setattr(jit, "compile_anew", lambda *_: (b"", log))
    monkeypatch.setattr(tune, "run", lambda *_: pytest.fail("timed all the same"))
    assert tune.evaluate(task_of(), "32x64x2", BASE)["rejected"] == "spills"

    def refuse(*_):
        raise jit.CompileError("NVRTC refuses it:\n  unit.cu(3): error: no\nunit.cu(4): error: x")

    monkeypatch.setattr(jit, "compile_anew", refuse)
    assert tune.evaluate(task_of(), "32x64x2", BASE) == {
        "rejected": "compile",
        "reason": "unit.cu(3): error: no",
    }


def test_what_ptxas_says_is_read():
    log = (
        "ptxas info    : Compiling entry function 'identity' for 'sm_89'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    assert tune.spills(log) == ""
    log += "    16 bytes stack frame, 8 bytes spill stores, 10 bytes spill loads\n"
    assert tune.spills(log) == "16 bytes stack frame, 8 bytes spill stores, 10 bytes spill loads"


def test_a_tile_is_a_variant_in_the_process_that_runs_it():
    key = "sm80/f16/d128/64x32x4"
    assert key not in [variant.key for variant in variants()]
    sizes = ["--batch", "1", "--heads", "1", "--seqlen", "8", "--head-dim", "128", "--inputs", "1"]
    task = task_of(device="cpu")
    rows, reason = tune.run(task, ["64x32x4", BASE], "check", ["--kernel", key, *sizes])
    assert [row["requested"] for row in rows] == [f"cutlass_attn:{key}"]
    assert "needs operands on a CUDA device" in reason
    rows, reason = tune.run(task, ["64x32x4"], "no-such", [])
    assert not rows and reason.startswith("exit status 2: ")


def test_nvrtc_compiles_a_tile_that_is_no_row():
    """One kernel, about 20 s, up to what needs a GPU."""
    if reason := jit.available():
        pytest.skip(reason)
    found = tune.evaluate(task_of(device="cpu"), "32x32x2", BASE)
    assert found["rejected"] == "time"
    assert found["reason"].startswith("unsupported: needs operands on a CUDA device")


# --- The search -----------------------------------------------------------------------------------


class Measured:
    """Speed-ups by tile in place of evaluate(); stops as Ctrl-C does after some."""

    def __init__(self):
        self.tried, self.stop_after, self.wrong = [], None, ()

    def __call__(self, task, tile, base):
        if len(self.tried) == self.stop_after:
            raise KeyboardInterrupt
        self.tried.append(tile)
        if tile.endswith("x8"):
            return {"rejected": "spills", "reason": "8 bytes spill stores"}
        return {"speedup": {"64x64x4": 1.25, "32x64x2": 1.5}.get(tile, 0.75)}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU with 132 SMs, in a build with tiles to choose, and what is measured on it."""
    made = Measured()
    properties = SimpleNamespace(
        major=9, minor=0, shared_memory_per_multiprocessor=228 * 1024, multi_processor_count=132
    )
    made.facts = {"device": "NVIDIA X", "driver_version": "1.2", "build": {"version": "0"}}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr(jit, "available", lambda: "")
    monkeypatch.setattr(jit, "tile_space", lambda: {"sm80": {"axes": AXES}})
    monkeypatch.setattr(jit, "digest", lambda: "0123456789abcdef")
    monkeypatch.setattr(tune, "why_no_gpu", lambda device: "")
    monkeypatch.setattr(tune, "environment", lambda device: made.facts)
    monkeypatch.setattr(tune, "evaluate", made)
    monkeypatch.setattr(tune, "is_right", lambda task, tile: tile not in made.wrong)
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tuned.toml"))
    monkeypatch.chdir(tmp_path)
    return made


COMMAND = ["tune", "--head-dim", "128"]


def test_every_tile_is_tried_and_the_fastest_is_written(gpu, tmp_path, capsys):
    assert cli.main([*COMMAND, "--json", "result.json"]) == 0
    text = capsys.readouterr().out
    assert sorted([*gpu.tried, BASE]) == sorted(tiles("sm80", 128, 128, AXES))
    lines = text.splitlines()
    assert lines[0] == f"32x64x2      1.500 times as fast as {BASE}"
    assert lines[1] == f"64x64x4      1.250 times as fast as {BASE}"
    assert "tiles rejected: spills" in text and "best: 32x64x2; written to" in text
    rules = tuning.read(tmp_path / "tuned.toml").rules
    assert "32x64x2" in [rule.tile for rule in rules]
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["command"], written["ok"]) == ("tune", True)
    assert (written["base"], written["best"]) == (BASE, "32x64x2")
    assert [row["tile"] for row in written["rows"]] == gpu.tried

    # The next process goes by the file. The results are still those beside the first tile.
    gpu.tried.clear()
    tuning_before = tuning.read(tmp_path / "tuned.toml").rules
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "rules_in_force", lambda *_: rules)
        assert cli.main(COMMAND) == 0
    text = capsys.readouterr().out
    assert not gpu.tried
    assert f"as fast as {BASE}" in text and "best: 32x64x2; it runs already" in text
    assert tuning.read(tmp_path / "tuned.toml").rules == tuning_before


def test_a_dry_run_writes_no_rules(gpu, tmp_path, capsys):
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    assert "best: 32x64x2; a dry run" in capsys.readouterr().out
    assert not (tmp_path / "tuned.toml").exists()


def test_a_fast_tile_that_is_wrong_is_passed_over(gpu, capsys):
    gpu.wrong = ("32x64x2",)
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    assert "best: 64x64x4; " in capsys.readouterr().out
    gpu.wrong = ("32x64x2", "64x64x4")
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    assert f"best: {BASE}; it runs already" in capsys.readouterr().out  # 0.75 is no gain
    gpu.wrong = ("32x64x2", "64x64x4", BASE)
    assert cli.main([*COMMAND, "--dry-run"]) == 1


def test_a_search_resumes(gpu, tmp_path, capsys):
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    whole, best = list(gpu.tried), capsys.readouterr().out
    (file,) = tmp_path.glob("tune-sm80-f16-d128-*.json")
    file.unlink()

    gpu.tried, gpu.stop_after = [], 3
    assert cli.main([*COMMAND, "--dry-run"]) == 130
    assert f"interrupted; repeat the command to resume from {file.name}" in capsys.readouterr().out
    assert [x["tile"] for x in json.loads(file.read_text())["tried"]] == gpu.tried == whole[:3]
    gpu.stop_after = None
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    assert (gpu.tried, capsys.readouterr().out) == (whole, best)


@pytest.mark.parametrize("changed", ["device", "driver_version", "build", "shape"])
def test_a_search_elsewhere_has_a_file_of_its_own(gpu, changed, tmp_path):
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    count = len(gpu.tried)
    other = ["--shape", "1,1,1,64,64,128"] if changed == "shape" else []
    gpu.facts = {**gpu.facts, changed: "another"}
    assert cli.main([*COMMAND, "--dry-run", *other]) == 0
    assert len(gpu.tried) == 2 * count and len(list(tmp_path.glob("tune-*.json"))) == 2


def test_two_searches_do_not_share_a_file(gpu, tmp_path, capsys):
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    (lock,) = tmp_path.glob("tune-*.lock")
    with locked(lock):
        assert cli.main([*COMMAND, "--dry-run"]) == 2
    assert "another process has tune-sm80-f16-d128-" in capsys.readouterr().err


def test_the_tuning_file_is_looked_at_before_the_search(gpu, tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text("[smem_9]")
    for file, message in ((bad, "device class is 'smem_9'"), (bad / "tuned.toml", "bad.toml")):
        monkeypatch.setenv(tuning.VARIABLE, str(file))
        assert cli.main(COMMAND) == 2
        error = capsys.readouterr().err
        assert error.startswith("cutlass-attn tune: ") and message in error
    assert not gpu.tried


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,1,1,64,64,128"], "--shape has head dim 128, --head-dim is 64"),
        (["--dtype", "fp32"], "no tiles to choose for float32 at head dim 64"),
        (["--head-dim", "0"], "Invalid value for '--head-dim': 0 is not in the range x>=1"),
        (
            [arg for sq in (16, 17) for arg in ("--shape", f"1,1,1,{sq},64,64")],
            "--shape has calls of at most 16 queries and of more",
        ),
        (["--kernel", "cpu"], "kernel 'cpu' has no tiles to choose"),
        (["--head-dim", "80"], "at head dim 80; allowed: sm80 at 32, "),
        (["--device", "cpu"], 'device must be "cpu", "cuda"'),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(jit, "tile_space", lambda: {"sm80": {"axes": AXES}})
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
