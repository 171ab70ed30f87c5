"""The user's tuning file: what is read, what is refused, and what dispatch makes of it."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cutlass_attn import jit, tuning
from cutlass_attn._build import tuned_toml as tuning_file
from cutlass_attn._build.tuned_toml import Failing, Rule, Tuning, TuningError

FILE = """# mine
[smem_228."sm80"]
d128 = [
  "96x32x6",
  "64x64x4",
]

[smem_228."sm80".decode]
d128 = ["64x32x4"]

[failing.smem_100]
"sm80/f16/d64/128x64x4" = "tensor-pipe utilisation 31 %"
"""

EXPLAIN = """
import sys, numpy, cutlass_attn
k = numpy.empty((4, 16, 4096, int(sys.argv[1])), numpy.float16)
q = k[:, :, : int(sys.argv[3])]
verdicts = cutlass_attn.explain(q, k, k, kernel="sm80", device=sys.argv[2])
print(verdicts.chosen.key if verdicts.chosen else "none")
print(verdicts.table())
"""


def explain(tmp_path, text, head_dim, device, queries=4096):
    """(key, whole explanation, warnings) of a new process with such a tuning file."""
    path = tmp_path / "tuned.toml"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", EXPLAIN, str(head_dim), device, str(queries)],
        env={**os.environ, tuning.VARIABLE: str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    key, _, rest = done.stdout.partition("\n")
    return key, rest, done.stderr


def needs_nvrtc():
    if reason := jit.available():
        pytest.skip(reason)


def test_a_file_is_read_with_its_lines_and_written_again():
    read = tuning_file.parse(FILE)
    where = ("smem_228", "sm80", "d128")
    assert read.rules == [
        Rule(*where, "96x32x6", 4),
        Rule(*where, "64x64x4", 5),
        Rule(*where, "64x32x4", 9, decode=True),
    ]
    mark = Failing("smem_100", "sm80/f16/d64/128x64x4", "tensor-pipe utilisation 31 %", 12)
    assert read.failing == [mark]
    again = tuning_file.parse(read.dumps())
    assert [(r.where, r.tile, r.decode) for r in again.rules] == [
        (r.where, r.tile, r.decode) for r in read.rules
    ]
    assert again.failing[0].reason == mark.reason


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("smem_228", "smem_200", r"line 2: device class is 'smem_200'; allowed: smem_100"),
        ("failing.smem_100", "failing.smem_1", r"line 11: device class is 'smem_1'; allowed"),
        ('"96x32x6"', "96", "line 3: .*d128 must be a list of tiles"),
        # As files were before they listed tiles alone.
        (
            '"96x32x6"',
            '{ tile = "96x32x6", min_blocks_per_sm = 1.5 }',
            r'line 3: .*d128 must be a list of tiles such as \["128x64x4", "64x64x4"\]',
        ),
        ('["64x32x4"]', "[]", r'line 9: .*"sm80".decode\] d128 must be a list of tiles'),
        ("d128", "head128", "line 3: .*head dims are like d64"),
        ("d128", "d0128", "line 3: .*head dims are like d64"),
        ("d128", "d0", "line 3: .*head dims are like d64"),
        ("d128 = [", "d128 = ", r"not TOML: .*line \d"),
        ('["64x32x4"]', '"64x32x4"', r'line 9: .*"sm80".decode\] d128 must be a list of tiles'),
        (".decode]", ".prefill]", r'\[smem_228."sm80"\] prefill: head dims are like d64'),
        ('"tensor-pipe utilisation 31 %"', "31", "line 12: .*the reason must be a text"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(old, new, message):
    assert old in FILE
    with pytest.raises(TuningError, match=message):
        tuning_file.parse(FILE.replace(old, new, 1))


def test_dispatch_takes_the_tiles_of_the_file(tmp_path):
    needs_nvrtc()
    key, text, warnings = explain(tmp_path, FILE, 128, "sm_90")
    assert key == "sm80/f16/d128/96x32x6" and not warnings
    assert "sm80/bf16/d128/96x32x6" in text  # for every dtype
    # Calls of at most 16 queries go by a table of their own.
    assert explain(tmp_path, FILE, 128, "sm_90", 17)[0] == "sm80/f16/d128/64x64x4"
    key, text, _ = explain(tmp_path, FILE, 128, "sm_90", 16)
    assert key == "sm80/f16/d128/64x32x4"
    assert "tile 64x32x4 is preferred for decoding with 0.485 blocks an SM" in text
    # On another class of GPUs it is there, and the rules of the build are in force.
    key, text, _ = explain(tmp_path, FILE, 128, "sm_89")
    assert key == "sm80/f16/d128/128x32x4" and "sm80/f16/d128/96x32x6" in text


def test_dispatch_prefers_tiles_that_pass(tmp_path):
    needs_nvrtc()
    key, text, warnings = explain(tmp_path, FILE, 64, "sm_89")
    assert key == "sm80/f16/d64/64x64x4" and not warnings
    assert "fails a gate that 64x64x4 does not: tensor-pipe utilisation 31 %" in text
    assert explain(tmp_path, FILE, 64, "sm_90")[0] == "sm80/f16/d64/128x128x4"
    tiles = ("128x64x4", "128x128x4", "64x128x4", "64x64x4")
    marks = "".join(f'"sm80/f16/d64/{tile}" = "slow"\n' for tile in tiles)
    key, _, _ = explain(tmp_path, f"[failing.smem_100]\n{marks}", 64, "sm_89")
    assert key.startswith("sm80/f16/d64/")  # rather than a scalar kernel


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"96x32x6"',
            '"96x32x4"',
            r'line 4: .*d128: tile is "96x32x4", allowed for sm80 at head dim 128:.*'
            r"; a new one: 96x32x4: queries must be a multiple of 16 for each warp",
        ),
        ('"96x32x6"', '"96x32x0"', r'line 4: .*d128: tile is "96x32x0", allowed for sm80 at head'),
        ("d128", "d9999", "line 4: .*no variant is of sm80 at head dim 9999"),
        ("d128", "d80", "line 4: .*no variant is of sm80 at head dim 80"),
        ('"sm80/f16/d64/128x64x4"', '"sm80/f16"', 'line 12: key is "sm80/f16", allowed'),
        ('"96x32x6"', "96", "line 3: .*must be a list of tiles"),
    ],
)
def test_what_dispatch_refuses_is_a_warning_with_its_line(tmp_path, old, new, message):
    _, _, warnings = explain(tmp_path, FILE.replace(old, new, 1), 32, "sm_90")
    assert "this has no effect" in warnings
    assert re.search(message, warnings), warnings


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv(tuning.VARIABLE, "/somewhere/mine.toml")
    assert str(tuning.path()) == "/somewhere/mine.toml"
    with pytest.warns(UserWarning, match="which is no file"):
        tuning.load()
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert tuning.path() is None
    monkeypatch.delenv(tuning.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    assert str(tuning.path()) == "/config/cutlass_attn/tuned.toml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(tuning.path()) == "/home/someone/.config/cutlass_attn/tuned.toml"


def test_a_home_that_cannot_be_read_is_silent(monkeypatch):
    """Warnings may be errors (`python -W error`), and the import loads the file."""

    def refuse(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning.load()
    monkeypatch.setenv(tuning.VARIABLE, "/home/other/tuned.toml")
    with pytest.warns(UserWarning, match="Permission denied: '/home/other/tuned.toml'"):
        tuning.load()


def test_added_tiles_have_a_source():
    if not jit.tile_space():
        pytest.skip("this build has no tiles to choose")
    source = jit.unit_of(jit.TREE, "sm80/bf16/d64/96x32x6")
    assert "Forward<cutlass::bfloat16_t, TileShape<64, 64, 96, 32, 6, 1>>" in source
    assert "CA_KERNEL_ENTRY(cutlass_attn_sm80_bf16_d64_96x32x6, identity," in source
    assert "{" not in source.partition("using ")[2].partition("CA_KERNEL")[0]
    core = jit.core_unit_of(jit.TREE, "sm80/bf16/d64/96x32x6")
    assert (jit.scores_of(source)[:2], len(jit.scores_of(source))) == (jit.scores_of(core), 8)
    with pytest.raises(ValueError, match="tiles can be chosen of sm80"):
        jit.unit_of(jit.TREE, "scalar/minimal/f16")


COMMENTED = """# mine
[smem_228."sm80"]  # an H100
# found by hand
d64 = ["64x64x4"]  # as good as any
d128 = ["128x64x4"]

[smem_228."sm80".decode]
d64 = ["64x128x4"]
"""


def test_comments_survive_an_update(tmp_path):
    """What is not changed stays as its author wrote it."""
    file = tmp_path / "tuned.toml"
    file.write_text(COMMENTED)
    new = Rule("smem_228", "sm80", "d128", "128x32x4")
    mark = Failing("smem_100", "sm80/f16/d64/64x64x4", "slow")

    def change(now):
        rules = [rule for rule in now.rules if rule.head_dims != "d128"]
        more = [Rule("smem_100", "sm80/general", "d64", "64x64x4", decode=True), new]
        return Tuning([*rules, *more], [mark])

    tuning.update(file, change)
    text = file.read_text()
    for comment in ("# mine", "# an H100", "# found by hand", "# as good as any"):
        assert comment in text
    found = tuning.read(file)
    tiles = {(r.device_class, r.kernel, r.head_dims, r.decode): r.tile for r in found.rules}
    assert tiles == {
        ("smem_228", "sm80", "d64", False): "64x64x4",
        ("smem_228", "sm80", "d64", True): "64x128x4",
        ("smem_228", "sm80", "d128", False): "128x32x4",
        ("smem_100", "sm80/general", "d64", True): "64x64x4",
    }
    assert [(x.key, x.reason) for x in found.failing] == [(mark.key, "slow")]

    tuning.update(file, lambda now: Tuning([r for r in now.rules if not r.decode]))
    found = tuning.read(file)
    assert {rule.head_dims for rule in found.rules} == {"d64", "d128"} and not found.failing
    assert "# found by hand" in file.read_text()
