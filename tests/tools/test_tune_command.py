"""The command `cutlass-attn tune`."""

import json

import pytest
import test_tune
from cutlass_attn import jit, tuning
from cutlass_attn.tools import cli
from cutlass_attn.tools.tune import command, evaluate
from cutlass_attn.tools.tune.space import Candidate, limits
from test_tune import StubWorker

AXES = {**test_tune.AXES, "columns": [1]}


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """A worker that compiles and measures nothing, in a build with tiles to choose."""
    made = StubWorker(compile=ANSWER)
    monkeypatch.setattr(evaluate, "Processes", lambda *_: made)
    monkeypatch.setattr(jit, "available", lambda: "")
    monkeypatch.setattr(jit, "tile_space", lambda: {"sm80": {"axes": AXES}})
    monkeypatch.setattr(jit, "digest", lambda: "0123456789abcdef")
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tuned.toml"))
    return made


@pytest.fixture
def on_a_gpu(stub, monkeypatch):
    monkeypatch.setattr("cutlass_attn.tools.experiment.environment.why_no_gpu", lambda device: "")
    monkeypatch.setattr(command, "_limits_of", lambda device: limits("sm_90", 132, 228 * 1024))
    machine = {"GPU": "NVIDIA X", "driver": "1.2", "cutlass_attn": "0", "headers": "01"}
    monkeypatch.setattr(command, "_machine", lambda *_: machine)
    return machine


ANSWER = {
    "registers": 200,
    "stack": 0,
    "spill_stores": 0,
    "spill_loads": 0,
    "model": test_tune.model(2048, 700, 0.8),
}


def test_help_names_the_proposers(capsys):
    assert cli.main(["tune", "--help"]) == 0
    text = capsys.readouterr().out
    assert "evolutionary" in text and "--command" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--proposer", "command"], "--command PROGRAM goes with"),
        (["--command", "true"], "--command PROGRAM goes with"),
        (["--rounds", "0"], "--rounds must be 1 or more"),
        (["--shape", "1,1,1,64,64,128"], "--shape has head dim 128, --head-dim is 64"),
        (["--device", "model", "--part", "H200"], "the static model knows L4, RTX 4090"),
        (["--device", "model", "--dtype", "fp32"], "--dtype must be fp16 or bf16"),
        (["--head-dim", "0"], "Invalid value for '--head-dim': 0 is not in the range x>=1"),
        (
            [arg for sq in (16, 17) for arg in ("--shape", f"1,1,1,{sq},64,64")],
            "--shape has calls of 16 queries or fewer and others",
        ),
        (["--device", "model", "--kernel", "cpu"], "kernel 'cpu' has no tiles to choose"),
        (["--device", "model", "--head-dim", "80"], "at head dim 80; allowed: "),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def tuning_command(tmp_path, *arguments):
    return ["tune", "--rounds", "3", "--state", str(tmp_path / "run"), *arguments]


def test_without_a_gpu_it_ranks_and_writes_nothing(stub, tmp_path, capsys):
    arguments = tuning_command(tmp_path, "--device", "model")
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "the model of an L4, no measurement" in text and "nothing was measured" in text
    assert "headers 0123456789abcdef" in text
    assert "headers 0123456789abcdef" in (tmp_path / "run" / "report.md").read_text()
    assert not (tmp_path / "tuned.toml").exists()
    assert cli.main([*arguments, "--rounds", "4"]) == 0
    assert "going on after 4 tiles" in capsys.readouterr().out


def test_what_is_found_is_written_and_runs_from_then_on(on_a_gpu, tmp_path, monkeypatch, capsys):
    arguments = tuning_command(tmp_path, "--device", "cuda", "--head-dim", "128")
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "GPU NVIDIA X, driver 1.2" in text and "started with 128x64x4\n" in text
    rules = tuning.read(tmp_path / "tuned.toml").rules
    tiles = [rule.tile for rule in rules]
    best = next(tile for tile in tiles if tile not in ("128x64x4", "64x64x4"))
    assert f"best: {best}, " in text and "times the speed of 128x64x4" in text

    # The next process reads the file: scores stay relative to the first tile.
    from cutlass_attn.tools.tune import search

    monkeypatch.setattr(search, "rules_in_force", lambda task: rules)
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert f"started with 128x64x4; now {best} runs" in text
    assert "times the speed of 128x64x4" in text and "it runs already" in text
    assert tuning.read(tmp_path / "tuned.toml").rules == rules


@pytest.mark.parametrize("changed", ["GPU", "driver", "cutlass_attn", "headers"])
def test_a_run_is_not_continued_elsewhere(on_a_gpu, changed, tmp_path, capsys):
    arguments = tuning_command(tmp_path, "--device", "cuda", "--dry-run")
    assert cli.main(arguments) == 0
    on_a_gpu[changed] = "another"
    assert cli.main(arguments) == 2
    assert f"is of another run ({changed} differ)" in capsys.readouterr().err


def test_what_scores_depend_on(monkeypatch):
    facts = {"device": "NVIDIA X", "driver_version": "1.2", "build": {"version": "0", "cuda": "13"}}
    monkeypatch.setattr(
        "cutlass_attn.tools.experiment.environment.environment", lambda device: facts
    )
    monkeypatch.setattr(jit, "digest", lambda: "a" * 64)
    machine = command._machine("cuda", "")
    assert machine == {
        "GPU": "NVIDIA X",
        "driver": "1.2",
        "cutlass_attn": "0",
        "CUDA": "13",
        "headers": "a" * 16,
    }


def test_the_tuning_file_is_looked_at_before_the_search(on_a_gpu, stub, tmp_path, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text("[smem_9]")
    for file, message in ((bad, "device class is 'smem_9'"), (bad / "tuned.toml", "bad.toml")):
        assert cli.main(tuning_command(tmp_path, "--device", "cuda", "--file", str(file))) == 2
        error = capsys.readouterr().err
        assert error.startswith("cutlass-attn tune: ") and message in error
    assert not stub.jobs


def test_an_interruption_says_how_to_go_on(stub, tmp_path, monkeypatch, capsys):
    arguments = tuning_command(tmp_path, "--device", "model")

    def interrupted(job, tiles):
        if tiles[0] != Candidate(128, 64, 4):
            raise KeyboardInterrupt
        return StubWorker.__call__(stub, job, tiles)

    monkeypatch.setattr(evaluate, "Processes", lambda *_: interrupted)
    assert cli.main(arguments) == 130
    text = capsys.readouterr().out
    assert text.endswith("interrupted: the same command goes on where it stopped\n")
    assert "stopped: interrupted" in (tmp_path / "run" / "report.md").read_text()
    assert len(json.loads((tmp_path / "run" / "state.json").read_text())["tried"]) == 1
    monkeypatch.setattr(evaluate, "Processes", lambda *_: stub)
    assert cli.main(arguments) == 0
    assert "going on after 1 tiles" in capsys.readouterr().out


def test_a_result_that_cannot_be_written_is_no_traceback(tmp_path, capsys):
    path = tmp_path / "file" / "result.json"
    (tmp_path / "file").touch()
    small = ["--seqlen", "16", "--heads", "1", "--batch", "1", "--inputs", "1", "--device", "cpu"]
    assert cli.main(["check", "--kernel", "cpu", *small, "--json", str(path)]) == 2
    error = capsys.readouterr().err
    assert "cutlass-attn check: " in error and str(path) in error
