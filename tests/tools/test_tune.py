"""The tuner: who proposes, in which order tiles are rejected, and how a run goes on."""

import io
import json
import math
import sys
from dataclasses import asdict, replace

import pytest
from cutlass_attn import jit, variants
from cutlass_attn._build import tuned_toml as tuning_file
from cutlass_attn.tools.experiment.problems import Shape
from cutlass_attn.tools.gates.ncu import NcuError, NcuUnavailable
from cutlass_attn.tools.profile import measure as profile
from cutlass_attn.tools.sass import issue_slots
from cutlass_attn.tools.sass.tiles import tile_of
from cutlass_attn.tools.tune import report, search, static, worker
from cutlass_attn.tools.tune.evaluate import Evaluator, Processes
from cutlass_attn.tools.tune.proposers import (
    Command,
    Context,
    Evolutionary,
    Exhaustive,
    ProposalError,
    Random,
    Tried,
    parse_answer,
)
from cutlass_attn.tools.tune.space import (
    Candidate,
    Space,
    Task,
    blocks_per_sm,
    limits,
    parse_tile,
    registers_needed,
)
from cutlass_attn.tools.tune.state import held, open_state

SHAPE = Shape(4, 16, 16, 4096, 4096, 128)
ADA = limits("sm_89", 58, 100 * 1024, "L4")
AXES = {
    "m": [16, 32, 48, 64, 80, 96, 128, 192, 256],
    "n": [16, 32, 48, 64, 96, 128, 192, 256],
    "warps": [1, 2, 3, 4, 6, 8],
    "columns": [1, 2],
}
START = Candidate(64, 64, 4)
FIRST = Tried(START, "time", score=1.0)


def space_of(head_dim=128):
    return Space(Task("sm80", "float16", head_dim, head_dim, (SHAPE,), ADA), AXES)


@pytest.mark.parametrize("kernel", sorted(jit.tile_space()))
def test_the_tiles_of_each_kernel_are_in_its_space(kernel):
    rows = [row for row in variants() if row.kernel == kernel and row.tile]
    assert rows
    for row in rows:
        dims = (row.head_dim, row.head_dim_v)
        space = Space(
            Task(kernel, row.dtype, *dims, (SHAPE,), ADA), jit.tile_space()[kernel]["axes"]
        )
        assert space.why_not(parse_tile(row.tile)) == ""


def landscape(candidate):
    """Smooth, with one top at 128x32x4; every tile has a score."""
    wide = abs(math.log2(candidate.m / 128)) + abs(math.log2(candidate.n / 32))
    return 2.0 / (1 + wide + abs(math.log2(candidate.warps / 4)) + 2 * (candidate.columns - 1))


def explore(proposer, rounds, space=None):
    """The best score after so many rounds from START, and all that was tried."""
    space = space or space_of()
    tried = [Tried(START, "time", score=landscape(START))]
    for _ in range(rounds):
        candidate = proposer.propose(Context(space, tried))
        if candidate is None:
            break
        tried.append(Tried(candidate, "time", score=landscape(candidate)))
    return max(entry.score for entry in tried), [entry.candidate for entry in tried]


# --- Space and proposers --------------------------------------------------------------------------


def test_the_space_has_what_the_source_can_be_compiled_for():
    space = space_of(64)
    assert START in space.candidates and Candidate(96, 32, 6) in space.candidates
    assert Candidate(96, 32, 4) not in space.candidates  # 24 rows a warp
    assert Candidate(64, 48, 4) not in space.candidates  # the loop takes 32 keys at a time
    assert "m is 63, allowed: 16, 32" in space.why_not(Candidate(63, 64, 4))
    assert not any(space.why_not(candidate) for candidate in space.candidates)


def test_tiles_are_read_and_written_alike():
    for text in ("128x64x4", "32x32x2c4"):
        assert str(parse_tile(text)) == text
    for text in ("128x64", "64x64x0", "064x64x4", "64x64x4c1", "64x64x4c0", "64x64x10000"):
        with pytest.raises(ValueError, match='like "128x64x4"'):
            parse_tile(text)
        assert tile_of(f"sm80/f16/d64/{text}", "") is None
    assert tile_of("sm80/f16/d0/64x64x4", "") is None


@pytest.mark.parametrize("proposer", [Exhaustive(), Random(3), Evolutionary(3)])
def test_proposals_repeat_with_the_seed_and_repeat_no_tile(proposer):
    _, first = explore(proposer, 30)
    assert explore(proposer, 30)[1] == first
    assert len(set(first)) == 31
    space = space_of()
    assert set(first) <= {START, *space.candidates}


def test_other_seeds_propose_others():
    assert explore(Random(0), 10)[1] != explore(Random(1), 10)[1]
    assert explore(Evolutionary(0), 10)[1] != explore(Evolutionary(1), 10)[1]


@pytest.mark.parametrize("proposer", [Exhaustive(), Random(), Evolutionary()])
def test_a_space_comes_to_its_end(proposer):
    space = Space(space_of().task, {"m": [64, 128], "n": [64], "warps": [4], "columns": [1]})
    assert set(explore(proposer, 9, space)[1]) == {START, Candidate(128, 64, 4)}


def test_evolution_is_better_than_chance():
    """On average over 20 seeds, and it keeps what is best."""
    rounds, seeds = 25, range(20)
    evolved = [explore(Evolutionary(seed), rounds)[0] for seed in seeds]
    drawn = [explore(Random(seed), rounds)[0] for seed in seeds]
    assert sum(evolved) > 1.1 * sum(drawn)
    tried = [Tried(START, "time", score=1.0), Tried(Candidate(16, 16, 1), "spills", "64 bytes")]
    tried.append(Tried(Candidate(128, 64, 4), "time", score=1.5))
    context = Context(space_of(), tried)
    assert context.elites(1) == [Candidate(128, 64, 4)]
    assert context.elites(9) == [Candidate(128, 64, 4), START]


# --- A program as a proposer ----------------------------------------------------------------------


def program(tmp_path, body):
    path = tmp_path / "proposer.py"
    path.write_text(f"import json, sys\ncontext = json.load(sys.stdin)\n{body}\n")
    return Command(f"{sys.executable} {path}")


def test_a_program_gets_what_is_known_and_answers_a_tile(tmp_path):
    proposer = program(
        tmp_path,
        "assert context['task']['limits']['smem_per_block'] == 99 * 1024\n"
        "assert context['incumbent'] == '64x64x4'\n"
        "assert context['task']['axes']['columns'] == [1, 2]\n"
        "assert context['tried'][0]['score'] == 1.0 and context['refused'] == ['too big']\n"
        "assert context['insights'] == [{'tile': '64x64x4', 'registers': 220}]\n"
        "print(json.dumps({'m': 128, 'n': 32, 'warps': 4}))",
    )
    tried = [Tried(START, "time", score=1.0, figures={"registers": 220})]
    context = Context(space_of(), tried, ("too big",))
    assert proposer.propose(context) == Candidate(128, 32, 4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('128x64x4')", "no JSON: .* got '128x64x4"),
        ("print('[1]')", "an answer is an object"),
        ("print(json.dumps({'m': 128, 'n': '64'}))", "n, warps must be a whole number above 0"),
        ("print(json.dumps({'tile': '128'}))", "a tile is like"),
        ("print(json.dumps({'tile': '100x64x4'}))", "100x64x4 is not in the space: m is 100"),
        ("print(json.dumps({'tile': '64x64x4'}))", "64x64x4 was tried already"),
        ("sys.exit('no idea')", "ended with status 1: no idea"),
    ],
)
def test_a_bad_answer_is_refused(tmp_path, body, message):
    context = Context(space_of(), [FIRST])
    with pytest.raises(ProposalError, match=message):
        program(tmp_path, body).propose(context)


def test_a_program_that_is_not_there_and_the_end():
    with pytest.raises(ProposalError, match="/nowhere/program"):
        Command("/nowhere/program").propose(Context(space_of(), [FIRST]))
    assert parse_answer("null") is None


# --- Evaluation -----------------------------------------------------------------------------------


class StubWorker:
    """Answers jobs as worker.py does; `answers` has those that differ."""

    def __init__(self, **answers):
        self.answers, self.jobs = answers, []

    def __call__(self, job, tiles):
        self.jobs.append(job["job"])
        usual = {
            "compile": {"registers": 200, "stack": 0, "spill_stores": 0, "spill_loads": 0},
            "check": {},
            "gates": {"figures": {"tensor_pipe": 55.0}, "failed": []},
            "time": {"speedup": 1.25, "by_shape": {}},
        }
        return dict(self.answers.get(job["job"], usual[job["job"]]))


@pytest.mark.parametrize(
    ("tile", "answers", "stage", "reason", "jobs"),
    [
        ("63x64x4", {}, "space", "m is 63", []),
        ("256x256x8", {}, "space", "shared memory", []),
        ("256x32x4", {}, "resources", "at least", []),
        ("128x32x4", {"compile": {"error": "error: no"}}, "compile", "error: no", ["compile"]),
        (
            "128x32x4",
            {"compile": {"registers": 255, "stack": 64, "spill_stores": 8}},
            "spills",
            "64 bytes of stack, 8 bytes of spill_stores",
            ["compile"],
        ),
        ("128x32x4", {"check": {"error": "nan"}}, "correctness", "nan", ["compile", "check"]),
        (
            "128x32x4",
            {"gates": {"figures": {}, "failed": ["tensor-pipe 30 %"]}},
            "gates",
            "tensor-pipe 30 %",
            ["compile", "check", "gates"],
        ),
        (
            "128x32x4",
            {"time": {"error": "lost"}},
            "time",
            "lost",
            ["compile", "check", "gates", "time"],
        ),
    ],
)
def test_what_is_cheap_is_asked_first(tile, answers, stage, reason, jobs):
    stub = StubWorker(**answers)
    entry = Evaluator(space_of(), "cuda", stub).evaluate(parse_tile(tile), FIRST)
    assert (entry.stage, entry.score) == (stage, None)
    assert reason in entry.reason
    assert stub.jobs == jobs


def test_a_tile_that_passes_is_scored_against_the_incumbent():
    stub = StubWorker()
    best = replace(FIRST, score=1.2)
    entry = Evaluator(space_of(), "cuda", stub).evaluate(Candidate(128, 32, 4), best)
    assert entry.score == pytest.approx(1.2 * 1.25) and not entry.reason
    assert entry.figures["gates"] == {"tensor_pipe": 55.0}


def test_the_first_tile_may_fail_what_rejects_others():
    """It is what runs: the search is for a better one."""
    stub = StubWorker(
        compile={"registers": 255, "stack": 8, "spill_stores": 0},
        gates={"figures": {"tensor_pipe": 29.0}, "failed": ["tensor pipe 29 %"]},
    )
    entry = Evaluator(space_of(), "cuda", stub).evaluate(START)
    assert entry.score and not entry.reason
    assert entry.figures["fails"] == "8 bytes of stack; tensor pipe 29 %"


def test_without_counters_the_machine_code_is_judged():
    stub = StubWorker(gates={"unavailable": "no ncu"})
    evaluator = Evaluator(space_of(), "cuda", stub)
    assert evaluator.evaluate(Candidate(128, 32, 4), FIRST).score
    assert evaluator.without_counters == "no ncu"
    evaluator.evaluate(Candidate(64, 32, 4), FIRST)
    assert stub.jobs.count("gates") == 1  # it is not asked again


def test_a_tile_that_cannot_be_measured_is_rejected_alone():
    stub = StubWorker(gates={"error": "no answer in 600 s"})
    evaluator = Evaluator(space_of(), "cuda", stub)
    entry = evaluator.evaluate(Candidate(128, 32, 4), FIRST)
    assert (entry.stage, entry.reason) == ("gates", "not measured: no answer in 600 s")
    assert not evaluator.without_counters
    stub.answers.clear()
    other = evaluator.evaluate(Candidate(64, 32, 4), FIRST)
    assert other.score and other.figures["gates"] == {"tensor_pipe": 55.0}


@pytest.mark.parametrize(
    ("raised", "answer"),
    [
        (NcuUnavailable("no ncu"), {"unavailable": "no ncu"}),
        (NcuError("timed out"), {"error": "NcuError: timed out"}),
        (None, {"error": "the kernel failed"}),
    ],
)
def test_what_nsight_compute_lacks_is_told_from_what_a_tile_does(
    raised, answer, monkeypatch, capsys
):
    def rows(*_):
        if raised:
            raise raised
        return [profile.Row("sm80/f16/d128/64x64x4", SHAPE, reason="the kernel failed")]

    monkeypatch.setattr(profile, "measured_rows", rows)
    job = {"job": "gates", "key": "sm80/f16/d128/64x64x4", "device": "cuda"}
    text = json.dumps({**job, "shapes": [asdict(SHAPE)]})
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    worker.main()
    assert json.loads(capsys.readouterr().out) == answer


def test_sums_in_fp16_take_fewer_registers():
    task = space_of().task
    half = replace(task, kernel="sm80/fp16_qk")
    tile = Candidate(128, 128, 4)
    assert half.tile(tile).accumulate == "fp16_qk"
    assert registers_needed(half.tile(tile)) == registers_needed(task.tile(tile)) - 64


def test_blocks_are_counted_as_dispatch_does():
    decode = Shape(2, 32, 8, 1, 512, 128)
    assert blocks_per_sm(decode, 64, 8) == 2  # four heads share a tile
    assert blocks_per_sm(replace(decode, seqlen_q=64), 64, 8) == 8
    assert blocks_per_sm(Shape(1, 2048, 1, 1, 512, 128), 64, 8) == 256  # too many to share one


def model(tensor, others, alone):
    """What issue_slots.model() says, for an L4."""
    parts = {part.name: {"tensor": tensor, "without_overlap": alone} for part in issue_slots.PARTS}
    return {"parts": parts, "clocks": {"issue": others}}


def test_without_a_gpu_the_model_ranks():
    answer = {"registers": 200, "stack": 0, "model": model(2048, 700, 0.8)}
    stub = StubWorker(compile=answer)
    evaluator = Evaluator(space_of(), None, stub)
    first = evaluator.evaluate(START)
    assert (first.stage, first.score) == ("model", 1.0)
    stub.answers["compile"] = {**answer, "model": model(4096, 1400, 0.8)}
    other = evaluator.evaluate(Candidate(128, 32, 4), first)
    # Half the keys and twice the rows in twice the time, but two blocks on an SM instead of one.
    assert 0.55 < other.score < 0.65
    stub.answers["compile"] = {**answer, "model": {"error": "2 loops"}}
    assert "2 loops" in evaluator.evaluate(Candidate(64, 32, 4), first).reason
    assert set(stub.jobs) == {"compile"}


def test_the_model_of_a_call():
    """64x64x4 at head dim 128 on an L4, a tile of 64 rows on each SM: 2568 in docs/notes/ada.md."""
    task = space_of().task
    tile, one = task.tile(START), Shape(1, 58, 58, 64, 64, 128)
    us = static.predicted_us(model(2048, 1280, 0.7975), tile, 220, one, ADA)
    assert us * 2.04e3 == pytest.approx(2568, rel=0.01)
    assert static.blocks_on_an_sm(task.tile(Candidate(128, 32, 4)), 255, ADA) == 2
    assert static.part_limits("L4").num_sms == 58
    with pytest.raises(ValueError, match="L4, RTX 4090"):
        static.part_limits("H200")


def test_what_ptxas_says_is_read():
    log = (
        "ptxas warning : Value of threads per SM is out of range\n"
        "ptxas info    : Compiling entry function 'identity' for 'sm_89'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    found = worker.parse_log(log)
    assert found.pop("warnings") == ["ptxas warning : Value of threads per SM is out of range"]
    assert found == {"registers": 255, "stack": 16, "spill_stores": 8, "spill_loads": 12}
    assert worker.first_error("NVRTC cannot\nx.hpp(3): error: no\n") == "x.hpp(3): error: no"


def test_a_job_that_breaks_its_process_is_an_answer(tmp_path):
    run = Processes(space_of(), tmp_path)
    assert "KeyError" in run({"job": "no such"}, [START])["error"]
    assert (
        "ValueError" in run({"job": "compile", "key": "warp/9", "arch": "sm_89"}, [START])["error"]
    )
    rules = tuning_file.parse((tmp_path / "candidates.toml").read_text()).rules
    assert [rule.tile for rule in rules] == ["64x64x4"]


# --- The loop, its state and its report -----------------------------------------------------------


class StubEvaluator:
    """Scores by the landscape; stops the run at a tile, as Ctrl-C does."""

    def __init__(self, stop_after=None):
        self.space, self.left = space_of(), stop_after

    def evaluate(self, candidate, incumbent, show):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left = None if self.left is None else self.left - 1
        if candidate.columns > 1:
            return Tried(candidate, "compile", "error: no")
        return Tried(candidate, "time", score=landscape(candidate))


def run(path, evaluator, rounds=12, proposer=None):
    state = open_state(path / "state.json", {"seed": 5})
    outcome = search.search(
        evaluator, proposer or Evolutionary(5), state, START, rounds, lambda *_: None
    )
    return state, outcome


def test_a_run_goes_on_where_it_was_interrupted(tmp_path):
    whole, outcome = run(tmp_path / "whole", StubEvaluator())
    assert outcome.reason == "12 rounds are done" and len(whole.tried) == 13
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", StubEvaluator(stop_after=4))
    assert len(json.loads((tmp_path / "cut" / "state.json").read_text())["tried"]) == 4
    resumed, _ = run(tmp_path / "cut", StubEvaluator())
    assert [e.candidate for e in resumed.tried] == [e.candidate for e in whole.tried]
    assert resumed.best.candidate == whole.best.candidate
    assert run(tmp_path / "cut", StubEvaluator(stop_after=0))[0].tried == resumed.tried  # all done


def test_what_runs_now_is_tried_where_a_state_goes_on(tmp_path):
    """The tuning file may have changed meanwhile: the best is compared with what runs now."""
    run(tmp_path, StubEvaluator(), rounds=2)
    state = open_state(tmp_path / "state.json", {"seed": 5})
    now = Candidate(128, 32, 4)
    assert now not in [entry.candidate for entry in state.tried]
    outcome = search.search(StubEvaluator(), Evolutionary(5), state, now, 2, lambda *_: None)
    assert [entry.candidate for entry in state.tried][::3] == [START, now]
    assert outcome.best.candidate == now


def test_two_runs_do_not_share_a_folder(tmp_path):
    text = r"another run works in .*choose another --state"
    with held(tmp_path), pytest.raises(ValueError, match=text), held(tmp_path):
        pytest.fail("held twice")
    with held(tmp_path):
        pass


def test_a_state_of_another_run_is_refused(tmp_path):
    run(tmp_path, StubEvaluator(), rounds=1)
    with pytest.raises(ValueError, match=r"of another run \(seed differ\)"):
        open_state(tmp_path / "state.json", {"seed": 6})
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(ValueError, match="is no state of the tuner"):
        open_state(tmp_path / "state.json", {"seed": 5})


def test_bad_answers_end_a_run(tmp_path):
    state, outcome = run(tmp_path, StubEvaluator(), proposer=program(tmp_path, "print('?')"))
    assert len(state.tried) == 1 and len(outcome.bad_answers) == 3
    assert outcome.reason == "3 answers were bad" and outcome.best.candidate == START


def test_the_report(tmp_path):
    state, _ = run(tmp_path, StubEvaluator(), rounds=20)
    steps = ["compile", "time"]
    text = report.markdown(state, "Tiles of sm80, d128", ["on a GPU"], steps)
    best = state.best
    assert f"best: {best.candidate}, {best.score:.3f} times" in text
    assert "| compile | " in text and "error: no" in text
    assert all(f"| {entry.candidate} |" in text for entry in state.tried)
    curve = report.best_so_far(state.tried)
    assert [score for _, score in curve] == sorted({score for _, score in curve})
    pytest.importorskip("matplotlib")
    paths = report.write(state, "Tiles", [], steps)
    assert [path.name for path in paths] == ["report.md", "report.svg"]
    assert "best so far" in paths[0].read_text()


# --- The compiler ---------------------------------------------------------------------------------


def test_nvrtc_compiles_a_tile_that_is_no_row(tmp_path):
    """One kernel, about 20 s: that the sizes hold, that ptxas reports, and the loop is found."""
    if reason := jit.available():
        pytest.skip(reason)
    tile = Candidate(32, 32, 2)
    answer = Processes(space_of(), tmp_path)(
        {
            "job": "compile",
            "key": "sm80/f16/d128/32x32x2",
            "arch": "sm_89",
            "model": "identity",
        },
        [tile],
    )
    assert "error" not in answer
    assert 64 < answer["registers"] <= 255 and answer["spill_stores"] == 0
    work = issue_slots.per_tile(space_of().task.tile(tile))
    assert {kind: answer["model"]["counts"][kind] for kind in work} == work
