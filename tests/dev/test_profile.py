"""dev.gates and `python -m dev.profile`, on machine code and figures made by hand."""

import json
import stat
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import cases
import pytest
import torch
from cutlass_attn import _C, jit, variants
from cutlass_attn._build.variant_key import PREFIXES, key_of, symbol_of
from cutlass_attn.tools import console
from cutlass_attn.tools.experiment.problems import Shape

from dev.gates import ncu
from dev.gates.thresholds import FAIL, PASS, SHOWN, UNKNOWN, load_gates
from dev.profile import measure as profile
from dev.profile.command import profile as the_command
from dev.sass import disassemble as sass
from dev.sass.serving_tiles import code_of
from dev.sass.tiles import Tile, tile_of

KEY = "sm80/f16/d64/128x64x4"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
HMMA = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"

CSV = f'''==PROF== Connected to process 4711
made by a program
==PROF== Profiling "kernel": 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4711
"ID","Kernel Name","{CONFLICTS}","{WAVEFRONTS}","{HMMA}","launch__registers"
"","","","","%","register/thread"
"0","void kernel(Params)","1,024","65,536","55.5","n/a"
'''

RESOURCES = """
Fatbin elf code:
 Function identity:
  REG:251 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:856 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function softcap:
  REG:255 STACK:8 SHARED:16 LOCAL:0 CONSTANT[0]:856 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

LISTING = """
		Function : identity
	.headerflags	@"EF_CUDA_SM89"
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0010*/                   LDSM.16.MT88.4 R8, [R2] ;
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   EXIT ;
		Function : softcap
        /*0000*/                   STL.64 [R1], R4 ;
        /*0010*/                   LDL.64 R4, [R1] ;
        /*0020*/                   EXIT ;
"""


def main(arguments):
    return console.run(the_command, "python -m dev.profile", arguments)


def verdicts(kernel, head_dim, op, **figures):
    rows = load_gates().judge(kernel, head_dim, op, figures)
    return {row.gate.name: row.verdict for row in rows}


def test_a_class_is_judged_by_the_thresholds_of_the_call():
    forward = verdicts("sm80", 64, "forward", tensor_pipe=39.9, dram=5, local_memory=0)
    assert forward["tensor_pipe"] == FAIL
    assert forward["dram"] == SHOWN
    assert forward["local_memory"] == PASS
    assert forward["bank_conflicts"] == UNKNOWN
    assert verdicts("sm80", 64, "forward", tensor_pipe=40)["tensor_pipe"] == PASS
    assert verdicts("sm80", 32, "forward", tensor_pipe=20)["tensor_pipe"] == SHOWN
    decode = verdicts("sm80", 128, "decode", tensor_pipe=1, dram=59, registers=256)
    assert (decode["tensor_pipe"], decode["dram"], decode["registers"]) == (SHOWN, FAIL, FAIL)
    assert verdicts("scalar/minimal", 0, "forward", tensor_pipe=0, local_memory=9) == {
        **dict.fromkeys(load_gates().gates, UNKNOWN),
        "tensor_pipe": SHOWN,
        "local_memory": SHOWN,
    }
    assert set(verdicts("of another class", 64, "forward", registers=300).values()) == {
        UNKNOWN,
        SHOWN,
    }


def test_every_gpu_kernel_of_the_manifest_has_a_class():
    for kernel in {v.kernel for v in variants() if v.device == "cuda"}:
        assert verdicts(kernel, 64, "", registers=256)["registers"] == FAIL, kernel


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[class.often]", "unknown entry often"),
        ("[class.always]\nspeed = { most = 1 }", "no gate speed"),
        ("[class.always]\nregisters = { most = 1, least = 0 }", "either `most` or `least`"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(tmp_path, text, message):
    path = tmp_path / "gates.toml"
    gate = '[gate.registers]\nwhat = "registers"\nunit = ""\n'
    path.write_text(f'{gate}[[class]]\nkernels = ["sm80"]\n{text}\n')
    with pytest.raises(ValueError, match=message):
        load_gates(path)


def test_what_nsight_compute_prints_is_read():
    assert ncu.parse_csv(CSV) == [{CONFLICTS: 1024, WAVEFRONTS: 65536, HMMA: 55.5}]
    assert ncu.parse_csv("==ERROR== no kernel\n") == []


def test_metrics_are_those_that_the_gpu_has():
    gates = load_gates().gates
    known = {name.partition(".")[0] for name in (CONFLICTS, WAVEFRONTS, HMMA)}
    chosen = ncu.wanted(gates.values(), known)
    assert chosen["tensor_pipe"] == (HMMA,)
    assert set(chosen) == {"tensor_pipe", "bank_conflicts", "registers", "shared_memory"}
    (values,) = ncu.parse_csv(CSV)
    assert ncu.figures(gates, chosen, values) == {"tensor_pipe": 55.5, "bank_conflicts": 1.5625}
    assert ncu.figures(gates, chosen, {CONFLICTS: 0, WAVEFRONTS: 0})["bank_conflicts"] == 0
    older = ncu.wanted(gates.values(), known | {"sm__pipe_tensor_cycles_active"})
    assert older["tensor_pipe"] == gates["tensor_pipe"].ncu


def test_figures_of_machine_code():
    used = sass.parse_resources(RESOURCES)
    counts = {name: sass.count(code) for name, code in sass.parse_listings(LISTING)}
    assert counts["identity"] == {"LDSM": 1, "LDSM.T": 1, "HMMA": 1}
    assert sass.static_figures(used["identity"], counts["identity"], 49280) == {
        "registers": 251,
        "local_memory": 0,
        "shared_memory": 49280,
    }
    spilled = sass.static_figures(used["softcap"], counts["softcap"], 0)
    assert (spilled["local_memory"], spilled["shared_memory"]) == (8 + 2, 16)
    assert "shared_memory" not in sass.static_figures(used["softcap"], counts["softcap"], None)


def test_names_of_functions_tell_the_row():
    """Of every GPU variant there is; no two have one name."""
    there = [v for v in variants() if v.device == "cuda"]
    names = {f"{symbol_of(v.key, x)}__identity": v.key for v in there for x in PREFIXES}
    assert len(names) == len(there) * len(PREFIXES)
    kernels = list({v.kernel for v in there})
    for name, key in names.items():
        symbol, score = sass.identify(name)
        assert (key_of(symbol, kernels), score) == (key, "identity")


def test_other_functions_are_no_rows():
    assert sass.identify("_ZN12cutlass_attn12why_not__wmmaERKNS_7ProblemE") is None
    assert sass.identify("memset") is None
    assert key_of("cutlass_attn_sm80_f16_d64", ["sm80"]) == "sm80/f16/d64"
    assert key_of("cutlass_attn_sm80_general_f16_d64", ["sm80", "sm90"]) == ""


def test_code_of_every_kernel_is_judged(monkeypatch):
    """Shared memory, which is no part of the code, is not judged where no tile tells it."""
    stack = {
        "scalar/vectorized/f16/d64": 0,
        "scalar/tiled/f16/d256": 32,  # allowed
        "wmma/f16/d64/128x64x8": 16,
        "sm80/f16/d64/128x64x4": 0,
    }
    entries = {key: f"{symbol_of(key)}__identity" for key in stack}
    usage = "".join(
        f" Function {entries[key]}:\n  REG:128 STACK:{size} SHARED:0 LOCAL:0\n"
        for key, size in stack.items()
    )
    code = "".join(f"\t\tFunction : {entry}\n EXIT ;\n" for entry in entries.values())
    texts = {"-res-usage": usage, "-sass": code}
    monkeypatch.setattr(sass, "dump", lambda option, *_: texts[option])
    monkeypatch.setattr(profile, "_compiled_for", lambda: ["sm_89"])
    keys = list(stack)
    chosen = [replace(v, compiled=True) for key in keys for v in variants() if v.key == key]
    rows = profile.static_rows(chosen, "sm_89", lambda *_: None)
    assert [(row.kernel, row.reason) for row in rows] == [(key, "") for key in keys]
    assert [row.ok for row in rows] == [True, True, False, True]
    found = [{gate.gate.name: gate.verdict for gate in row.gates} for row in rows]
    assert [row["shared_memory"] for row in found] == [UNKNOWN, UNKNOWN, UNKNOWN, PASS]
    assert [row["local_memory"] for row in found] == [PASS, SHOWN, FAIL, PASS]


def test_hopper_has_machine_code_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(profile, "_compiled_for", list)
    monkeypatch.setattr(jit, "cubin", lambda key, arch: asked.append(arch) or b"")
    monkeypatch.setattr(profile, "read_cubin", lambda path, arch: asked.append(arch) or {})
    key = "sm90/split_keys/f16/d64/64x128x8"
    if key not in jit.units():
        pytest.skip("this build has no source of it")
    chosen = [v for v in variants() if v.key == key]
    assert profile.static_rows(chosen, "sm_90", lambda *_: None) == []
    assert asked == ["sm_90a"] * 2
    (row,) = profile.static_rows(chosen, "sm_89", lambda *_: None)
    assert "runs only on compute capability 9.0" in row.reason and not row.ok


@pytest.mark.parametrize(
    ("sizes", "smem"),
    [
        ((64, 64, 128, 64, 4, 1), 49280),
        ((64, 64, 64, 128, 4, 1), 73856),
        ((128, 128, 128, 64, 4, 1), 65664),
        ((256, 256, 64, 64, 4, 1), 98432),
        ((512, 512, 32, 32, 2, 4), 80128),
    ],
)
def test_shared_memory_follows_from_the_tile(sizes, smem):
    """The figures of docs/notes/ada.md, which are the compiler's."""
    tile = Tile(*sizes, score="identity")
    assert tile.smem_bytes == smem


@pytest.mark.parametrize(
    ("key", "smem"),
    [
        ("sm80/int8_qk/f16/d64/128x64x4", 29952),
        ("sm80/int8_qk/f16/d128/64x64x4", 49920),
        ("sm80/int8/f16/d64/128x64x4", 26240),
        ("sm80/int8/f16/d128/128x64x4", 50816),
        ("sm80/int8/f16/d256/64x64x4", 50176),
    ],
)
def test_shared_memory_in_8_bits(key, smem):
    """As the C++ compiler has it: kSmemBytes."""
    assert tile_of(key, "identity").smem_bytes == smem


@pytest.mark.parametrize(
    ("key", "smem"),
    [
        ("sm80/latent/bf16/d576v512/16x32x1c4", 91392),
        ("sm80/latent/f16/d512/16x32x1c4", 84224),
        ("sm80/latent_64/bf16/d576v512/64x16x4c2", 90752),
        ("sm80/latent_64/f16/d512/64x16x4c2", 83584),
        ("sm80/latent_ds_mla/bf16/d576v512/16x32x1c4", 96512),
        ("sm80/latent_64_ds_mla/f16/d576v512/64x16x4c2", 98432),
        ("sm80/latent_ds_mla_v4/bf16/d512/16x32x1c4", 89856),
        ("sm80/latent_64_ds_mla_v4/f16/d512/64x16x4c2", 92032),
    ],
)
def test_shared_memory_of_latent_attention(key, smem):
    """As the C++ compiler has it: kSmemBytes."""
    assert code_of(key, "identity").smem_bytes == smem


@pytest.mark.parametrize(("tile", "smem"), [("d64/128x64x4", 49920), ("d128/128x32x4", 49664)])
def test_two_blocks_with_pages_fit_an_sm_of_ada(tile, smem):
    shape = tile_of(f"sm80/paged/bf16/{tile}", "identity")
    assert shape.smem_bytes == smem and 2 * (smem + 1024) <= 100 * 1024


def test_keys_tell_the_tile():
    assert tile_of("sm80/general/bf16/d192v128/64x64x4", "general") == Tile(
        192, 128, 64, 64, 4, 1, score="general"
    )
    assert tile_of("sm80/f16/d512/32x32x2c4", "identity").columns == 4
    # Counted in code for sm_89: six key blocks of 16, where 64 and 128 keys are key blocks of 32.
    assert tile_of("sm80/f16/d96/64x96x4", "identity").counts() == {
        "HMMA": 384,
        "HMMA.F16": 0,
        "LDSM": 120,
        "LDSM.T": 77,
        "LDGSTS": 126,
    }
    assert tile_of("scalar/minimal/f16", "identity") is None


# --- The command, with a program in the place of Nsight Compute -----------------------------------


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Answers as Nsight Compute does; what it prints for a launch is in a file."""
    monkeypatch.setattr(_C, "device_info", lambda *_: {"compute_capability": 90, "unavailable": ""})
    monkeypatch.setattr(profile, "environment", lambda device: {"device": device})
    answer = tmp_path / "answer"
    answer.write_text(CSV)
    program = tmp_path / "ncu"
    names = "\\n".join(
        f"{name.partition('.')[0]}  Counter" for name in (CONFLICTS, WAVEFRONTS, HMMA)
    )
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "open(__file__ + '.log', 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"text = '{names}' if '--query-metrics' in sys.argv else open({str(answer)!r}).read()\n"
        "print(text)\nsys.exit('==ERROR==' in text)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program, answer


def test_a_variant_is_measured_and_judged(fake_ncu, capsys):
    program, _ = fake_ncu
    command = ["--ncu", str(program), "--kernel", KEY, "--json", "-"]
    assert main([*command, "--shape", "4,32,32,4096,4096,64"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert report["ok"] and report["static_only"] is None and row["kernel"] == KEY
    gates = {gate["gate"]: gate for gate in row["gates"]}
    assert gates["tensor_pipe"] == {
        "gate": "tensor_pipe",
        "unit": "%",
        "threshold": ">= 40",
        "measured": 55.5,
        "verdict": "pass",
    }
    assert gates["dram"]["verdict"] == "not measured"
    log = program.with_suffix(".log").read_text().splitlines()
    assert len(log) == 2
    assert "--clock-control none" in log[1] and CONFLICTS in log[1] and WAVEFRONTS in log[1]
    assert log[1].endswith(f"launch.py {KEY} float16 4,32,32,4096,4096,64 whole cuda")


def test_what_was_measured_before_an_interruption_is_kept(fake_ncu, monkeypatch, capsys):
    program, _ = fake_ncu
    command = ["--ncu", str(program), "--kernel", KEY, "--json", "-"]
    command += ["--shape", "4,32,32,4096,4096,64", "--shape", "2,32,32,4096,4096,64"]
    measure, calls = ncu.measure, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(ncu, "measure", interrupted)
    at = 2
    assert main(command) == 130
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["interrupted"] and not report["ok"] and "interrupted" in said.err
    (row,) = report["rows"]
    assert row["ok"] and row["kernel"] == KEY
    at, calls = 1, []
    with pytest.raises(KeyboardInterrupt):  # there is nothing to show
        profile.run_profile([KEY], ["float16"], [], "cuda", str(program), lambda *_: None)


def test_a_gate_that_fails_is_an_exit_status(fake_ncu, capsys):
    program, answer = fake_ncu
    answer.write_text(CSV.replace("55.5", "31"))
    assert main(["--ncu", str(program), "--kernel", KEY]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and ">= 40" in text and "31 %" in text


def named(verdicts):
    """explain() that says which variants run."""

    def explain(q, k, v, *, kernel, accumulate, quantize, device):
        chosen = next((x for x in variants() if x.key == kernel and verdicts(x, q)), None)
        return SimpleNamespace(chosen=chosen)

    return explain


def test_variants_of_a_kernel_run_the_shapes_that_they_fit(monkeypatch):
    """Up to their head dims; with larger ones they would be judged by what padding costs."""
    monkeypatch.setattr(profile, "explain", named(lambda v, q: q.shape[-1] <= v.head_dim))
    chosen = [v for v in variants() if v.kernel == "sm80" and v.dtype == "float16"]
    keys = [v.key for v in chosen]
    small, large = Shape(1, 4, 4, 1024, 1024, 64), Shape(1, 4, 4, 1024, 1024, 120)

    def run(shapes, fitting):
        calls = profile.fitting_calls(chosen, shapes, fitting, "sm_90")
        return [(v.key, shape) for v, shape in calls]

    found = run([small, large], keys)
    assert {key.split("/")[2] for key, shape in found if shape == small} == {"d64"}
    assert {key.split("/")[2] for key, shape in found if shape == large} == {"d128"}
    assert len(found) == sum("/d64/" in key or "/d128/" in key for key in keys)
    # A key in full runs in any case.
    other = next(key for key in keys if "/d32/" in key)
    assert (other, small) in run([small], [key for key in keys if key != other])
    with pytest.raises(ValueError, match="none of the variants asked for takes"):
        run([Shape(1, 4, 4, 64, 64, 600)], keys)
    assert len(run([Shape(1, 4, 4, 64, 64, 600)], [])) == len(keys)


def test_a_kernel_is_profiled_in_the_shapes_that_it_takes(fake_ncu, monkeypatch, capsys):
    monkeypatch.setattr(profile, "explain", named(lambda v, q: q.shape[-1] <= v.head_dim))
    program, _ = fake_ncu
    command = ["--ncu", str(program), "--kernel", "wmma", "--dtype", "fp16"]
    assert main([*command, "--shape", "1,4,4,1024,1024,128", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kernel"] for row in rows] == ["wmma/f16/d128/128x64x8"]
    assert main([*command, "--shape", "1,4,4,1024,1024,256"]) == 2
    assert "none of the variants asked for takes" in capsys.readouterr().err


def test_calls_are_asked_about_with_the_sums_of_the_kernel(monkeypatch):
    """Else no kernel with fp16 accumulation would be chosen for decoding."""
    asked = []

    def explain(q, k, v, *, kernel, accumulate, quantize, device):
        asked.append((kernel, accumulate))
        return SimpleNamespace(chosen=variant)

    variant = next(v for v in variants() if v.kernel == "sm80/fp16_pv")
    monkeypatch.setattr(profile, "explain", explain)
    few = [shape.has_few_queries for shape in profile.default_shapes(variant, "sm_90")]
    assert few == [False, True] and asked == [("sm80/fp16_pv", "fp16_pv")]


def test_reasons_are_printed_as_they_are(monkeypatch, capsys):
    """rich takes text in brackets for markup."""
    reason = "pip install 'cutlass_attn[jit]' [/opt]"
    row = profile.Row(KEY, None, reason=reason)
    monkeypatch.setattr(profile, "environment", lambda device: {})
    monkeypatch.setattr(profile, "static_rows", lambda chosen, arch, show: [row])
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--device", "sm_89", "--kernel", KEY]) == 1
    assert reason in capsys.readouterr().out


def test_variants_that_fail_are_marked_in_the_tuning_file(fake_ncu, monkeypatch, tmp_path, capsys):
    program, answer = fake_ncu
    file = tmp_path / "tuned.toml"
    other = '"sm80/f16/d64/64x64x4" = "slow"'
    file.write_text(f'[failing.smem_228]\n"{KEY}" = "slow"\n{other}\n')
    monkeypatch.setenv("CUTLASS_ATTN_TUNING", str(file))
    properties = SimpleNamespace(name="GPU", shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    command = ["--ncu", str(program), "--kernel", KEY, "--mark"]
    assert main(command) == 0
    assert other in file.read_text() and KEY not in file.read_text()
    answer.write_text(CSV.replace("55.5", "31"))
    assert main(command) == 1
    assert f'"{KEY}" = "tensor-pipe utilisation 31 %, >= 40 allowed"' in file.read_text()
    # A call with one query is judged by other gates: it leaves the mark.
    main([*command, "--shape", "16,32,8,1,8192,64"])
    assert f'"{KEY}" = "tensor-pipe' in file.read_text()
    assert other in file.read_text()
    monkeypatch.setattr(profile, "static_rows", lambda chosen, arch, show: [])
    assert main([*command, "--device", "sm_89"]) == 2
    assert "--mark is for measured figures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not", "run as root"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "LibraryNotLoaded"),
    ],
)
def test_a_launch_that_cannot_be_measured_says_why(fake_ncu, monkeypatch, capsys, said, message):
    program, answer = fake_ncu
    answer.write_text(said)
    monkeypatch.setattr(profile, "static_rows", lambda chosen, arch, show: [])
    assert main(["--ncu", str(program), "--kernel", KEY]) == 1
    assert message in capsys.readouterr().out


def test_without_nsight_compute_the_machine_code_is_judged(monkeypatch, capsys):
    monkeypatch.setattr(_C, "device_info", lambda *_: {"compute_capability": 90, "unavailable": ""})
    monkeypatch.setattr(profile, "environment", lambda device: {})
    monkeypatch.setattr(profile, "static_rows", lambda chosen, arch, show: [profile.Row(KEY, None)])
    assert main(["--ncu", "/nowhere/ncu", "--kernel", KEY]) == 0
    assert "The machine code alone" in (text := capsys.readouterr().out)
    assert "no Nsight Compute at /nowhere/ncu" in text


def test_machine_code_of_this_build():
    """dev/check_gates.py has them all; other architectures have no code in the library."""
    try:
        sass.cuobjdump()
    except sass.ToolNotFound as error:
        pytest.skip(str(error))
    kernel = next(v.kernel for v in variants() if v.key == KEY)
    if "sm_89" not in _C.build_info()["architectures"] or not any(
        key_of(symbol, [kernel]) == KEY
        for symbol, _ in sass.read_resources(profile.LIBRARY, "sm_89")
    ):
        pytest.skip("this build has no machine code of it for sm_89")
    report = profile.run_profile([KEY], ["float16"], [], "sm_89", None, lambda *_: None)
    assert {row.score for row in report.rows} == {"identity", "softcap"}
    assert report.ok and report.static_only
    registers, *_ = (gate for gate in report.rows[0].gates if gate.gate.name == "registers")
    assert 0 < registers.measured <= 255


def test_without_cuobjdump_the_command_says_so(monkeypatch, capsys):
    def fail(*args):
        raise sass.ToolNotFound("no cuobjdump")

    monkeypatch.setattr(profile, "static_rows", fail)
    assert main(["--device", "sm_89", "--kernel", KEY]) == 1
    assert "no cuobjdump" in capsys.readouterr().err


@cases.needs_gpu
def test_a_gpu_kernel_is_measured(tmp_path):
    try:
        ncu.known_metrics(ncu.find_ncu())
    except ncu.NcuError as error:
        pytest.skip(str(error))
    path = tmp_path / "profile.json"
    arguments = ["--kernel", KEY, "--shape", "1,4,4,1024,1024,64", "--json", str(path)]
    assert main(arguments) in (0, 1)
    (row,) = json.loads(path.read_text())["rows"]
    measured = {gate["gate"]: gate["measured"] for gate in row["gates"]}
    assert row["reason"] is None and None not in measured.values()
    assert 0 < measured["tensor_pipe"] <= 100 and 100 < measured["registers"] <= 255
    assert measured["shared_memory"] == tile_of(KEY, "identity").smem_bytes


def test_which_variants_and_shapes():
    keys = [v.key for v in profile.choose([], ["float16"])]
    assert all(v.compiled and v.device == "cuda" for v in profile.choose([], ["bfloat16"]))
    assert all("/f16" in key for key in keys)
    with pytest.raises(ValueError, match=r"no GPU kernel 'warp'; there are .*, sm80/decode, "):
        profile.choose(["warp"], ["float16"])
    variant = next(v for v in variants() if v.key == KEY)
    forward, *others = profile.default_shapes(variant, "sm_90")
    assert forward == Shape(4, 32, 32, 4096, 4096, 64) and not forward.has_few_queries
    if variant.compiled:  # few blocks run smaller tiles
        assert not others
        small = next(v for v in variants() if v.key == "sm80/f16/d64/64x128x4")
        shapes = profile.default_shapes(small, "sm_90")
        assert [shape.has_few_queries for shape in shapes] == [False, True]


@pytest.mark.parametrize(
    "arguments", [["--device", "cpu"], ["--shape", "1,2"], ["--dtype", "int8"]]
)
def test_wrong_arguments_are_refused(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.lstrip().startswith("python -m dev.profile: ")


def test_help_names_the_gates(capsys):
    assert main(["--help"]) == 0
    assert "tensor-pipe utilisation" in " ".join(capsys.readouterr().out.split())


def test_warnings_of_cuobjdump_are_dropped_and_errors_are_not(monkeypatch, capfd, tmp_path):
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        "#!/bin/sh\necho 'cuobjdump warning : no such function' >&2\n"
        "echo 'cuobjdump error   : no such file' >&2\necho listing\nexit $STATUS\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sass, "cuobjdump", lambda: str(tool))
    monkeypatch.setenv("STATUS", "0")
    assert sass.dump("-sass", tmp_path, "sm_89") == "listing\n"
    assert capfd.readouterr().err == "cuobjdump error   : no such file\n"
    monkeypatch.setenv("STATUS", "1")
    with pytest.raises(subprocess.CalledProcessError):
        sass.dump("-sass", tmp_path, "sm_89")
