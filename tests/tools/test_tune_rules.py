"""What the tuner found as rules of dispatch, and the user's file that keeps them."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cutlass_attn import _C, jit, tuning
from cutlass_attn._build import tuned_toml as tuning_file
from cutlass_attn._build.facts import MIN_TILES_PER_SM
from cutlass_attn._build.tuned_toml import Failing, Rule, Tuning, TuningError
from cutlass_attn.tools.experiment.problems import Shape
from cutlass_attn.tools.tune_rules import Task, blocks_per_sm

SMS = 132
FORWARD = Shape(4, 16, 16, 4096, 4096, 128)
SHAPES = {
    "one": (FORWARD,),
    "three lengths": tuple(Shape(2, 16, 16, n, n, 128) for n in (512, 1000, 2048)),
    "decode": (Shape(16, 32, 8, 1, 8192, 128), Shape(8, 32, 8, 16, 40, 128)),
    "heads that share tiles": (Shape(16, 32, 8, 17, 8192, 128), Shape(8, 32, 8, 40, 40, 128)),
    "less than a block an SM": (Shape(1, 1, 1, 64, 64, 128),),
    "very many": (Shape(999, 64, 64, 40961, 40961, 128),),
}
# What may run: calls of every size, some of which are packed.
CALLS = [
    Shape(batch, heads, heads_kv, seqlen, 4096, 128)
    for batch, (heads, heads_kv) in itertools.product((1, 4, 9, 64, 1024), ((16, 16), (32, 8)))
    for seqlen in (1, 17, 64, 100, 511, 512, 4096, 8192, 40961)
]


def task_of(shapes):
    return Task("sm80", "float16", 128, 128, shapes, "both", "cuda", "sm_90", "smem_228", SMS)


def rules_of(*tiles):
    return [Rule("smem_228", "sm80", "d128", tile) for tile in tiles]


LISTS = {
    "none": rules_of("128x64x4"),
    "shipped": rules_of("128x64x4", "64x64x4"),
    "three": rules_of("256x64x8", "128x64x4", "64x64x4"),
    "fewer rows first": rules_of("48x64x3", "128x64x4", "64x64x4"),
    "not in order": rules_of("16x64x1", "256x64x8", "64x64x4"),
}


def has_enough(shape, rule):
    """As dispatch.cpp counts, in its own precision."""
    return np.float32(blocks_per_sm(shape, rule.rows, SMS)) >= np.float32(MIN_TILES_PER_SM)


def tile_of(rules, shape):
    """What dispatch.cpp takes."""
    return next((rule.tile for rule in rules if has_enough(shape, rule)), rules[-1].tile)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("old", LISTS.values(), ids=LISTS)
def test_the_tile_found_runs_in_each_tuned_shape_and_other_calls_keep_theirs(old, shapes):
    task = task_of(shapes)
    for_larger = list(
        itertools.takewhile(lambda rule: not any(has_enough(s, rule) for s in shapes), old)
    )
    assert task.rule_for(old, shapes[0]).tile == tile_of(old, shapes[0])
    for m in (16, 32, 48, 64, 80, 96, 128, 160, 192, 256):
        (found,) = rules_of(f"{m}x96x1")
        new = task.rules_with(found.tile, old)
        tuning_file.parse(Tuning(new).dumps())
        assert [tile_of(new, shape) for shape in shapes] == [found.tile] * len(shapes)
        are_smaller_known = all(has_enough(shape, found) for shape in shapes)
        for call in CALLS:
            before, after = tile_of(old, call), tile_of(new, call)
            assert after in (before, found.tile)
            is_smaller = are_smaller_known and not has_enough(call, found)
            if is_smaller or any(has_enough(call, rule) for rule in for_larger):
                assert after == before


@pytest.mark.parametrize(
    ("found", "shapes", "rules"),
    [
        ("96x32x6", "one", ("96x32x6", "64x64x4")),
        ("48x32x3", "one", ("48x32x3", "64x64x4")),
        ("64x64x4", "one", ("64x64x4",)),
        ("32x64x2", "less than a block an SM", ("128x64x4", "64x64x4", "32x64x2")),
        ("128x64x4", "less than a block an SM", ("128x64x4", "64x64x4", "128x64x4")),
    ],
)
def test_where_the_tile_found_is_listed(found, shapes, rules):
    new = task_of(SHAPES[shapes]).rules_with(found, LISTS["shipped"])
    assert tuple(rule.tile for rule in new) == rules


def in_force(decode):
    return tuning.rules_in_force("smem_228", "sm80", (128, 128), decode)


def test_the_same_result_twice_changes_nothing():
    task, found = task_of((FORWARD,)), "96x32x6"
    once = task.rules_with(found, LISTS["shipped"])
    assert task.rules_with(found, once) == once
    # Nothing is left for other calls than what was found.
    only = rules_of("96x32x6")
    assert task.rules_with(found, only) == only


def test_decoding_is_tuned_apart(monkeypatch):
    """Its rules begin as those of all calls, which stay as they are."""
    decode = task_of(SHAPES["decode"][:1])
    sm80 = {"smem_kb": 228, "kernel": "sm80", "head_dim": 128, "head_dim_v": 128}
    table = [{**sm80, "tile": rule.tile, "decode": False} for rule in LISTS["shipped"]]
    monkeypatch.setattr(_C, "tile_rules", lambda: table)
    rules = in_force(decode=True)
    assert rules == [replace(rule, decode=True) for rule in LISTS["shipped"]]
    found = decode.rules_with("64x96x4", rules)
    assert all(rule.decode for rule in found)
    merged = tuning.with_rules(Tuning(list(LISTS["shipped"])), found)
    assert merged.rules == [*LISTS["shipped"], *found]
    # And from then on they are what is in force for decoding.
    own = {**sm80, "tile": "64x96x4", "decode": True}
    monkeypatch.setattr(_C, "tile_rules", lambda: [*table, own])
    assert [rule.tile for rule in in_force(decode=True)] == ["64x96x4"]
    assert in_force(decode=False) == LISTS["shipped"]


def test_rules_of_another_kernel_and_class_stay():
    other = Rule("smem_100", "sm80", "d128", "64x64x4")
    merged = tuning.with_rules(Tuning([*LISTS["none"], other]), LISTS["shipped"])
    assert merged.rules == [other, *LISTS["shipped"]]


def test_marks_go_with_the_rules_of_their_tiles():
    tuned = Rule("smem_228", "sm80", "d64", "96x32x6")
    gone = Failing("smem_228", "sm80/f16/d128/48x96x3", "slow")
    kept = [
        Failing("smem_228", "sm80/f16/d128/64x64x4", "slow"),  # of the manifest
        Failing("smem_228", "sm80/bf16/d64/96x32x6", "slow"),  # of a rule that stays
        Failing("smem_228", "sm80/f16/d128/80x96x5", "slow"),  # of a new one
    ]
    present = Tuning([*rules_of("48x96x3"), tuned], [gone, *kept])
    assert tuning.with_rules(present, rules_of("80x96x5")).failing == kept


# --- The file -------------------------------------------------------------------------------------


def add_rule(tile):
    def change(present):
        return Tuning([*present.rules, Rule("smem_228", "sm80", f"d{tile}", "64x64x4")])

    return change


def test_the_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    link, file = tmp_path / "tuned.toml", tmp_path / "real" / "mine.toml"
    link.symlink_to(file)
    tuning.update(link, add_rule(64))
    tuning.update(link, add_rule(128))
    assert link.is_symlink() and len(tuning.read(file).rules) == 2
    before = file.read_text()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        tuning.update(link, add_rule(32))
    assert file.read_text() == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["mine.toml", "mine.toml.lock"]


def test_what_several_processes_write_is_all_there(tmp_path):
    file = tmp_path / "new" / "tuned.toml"
    program = (
        "import sys; from pathlib import Path; from cutlass_attn import tuning\n"
        "from cutlass_attn._build.tuned_toml import Rule, Tuning\n"
        "for i in range(20):\n"
        "    rule = Rule('smem_228', 'sm80', f'd{int(sys.argv[2]) + i}', '64x64x4')\n"
        "    tuning.update(Path(sys.argv[1]), lambda now: Tuning([*now.rules, rule]))\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(file), str(first)])
        for first in (100, 200, 300)
    ]
    assert [run.wait(timeout=60) for run in runs] == [0, 0, 0]
    assert len(tuning.read(file).rules) == 60


def test_a_file_that_cannot_be_written_is_found_before(tmp_path):
    file = tmp_path / "new" / "tuned.toml"
    tuning.check_writable(file)
    assert not file.exists()
    file.write_text("no rules")
    with pytest.raises(TuningError, match="not TOML"):
        tuning.check_writable(file)
    assert file.read_text() == "no rules"
    with pytest.raises(OSError, match=r"tuned\.toml"):
        tuning.check_writable(file / "tuned.toml")


def test_a_folder_that_may_not_be_looked_into_is_a_warning(monkeypatch, tmp_path):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tuned.toml"))
    with pytest.warns(UserWarning, match=r"Permission denied: .*this has no effect"):
        tuning.load()
    monkeypatch.undo()


def test_a_new_tile_of_a_kernel_without_tiles_is_refused(monkeypatch):
    """It would be a variant without a source, and no kernel of the process could be compiled."""
    added, known = [], {"sm80": {"axes": {}}}
    monkeypatch.setattr(jit, "tile_space", lambda: known)
    monkeypatch.setattr(_C, "add_tile", lambda kernel, **_: added.append(kernel))

    def prefer(**_):
        if added != ["sm80"]:
            raise ValueError("tile is unknown")

    monkeypatch.setattr(_C, "prefer_tile", prefer)
    rule = Rule("smem_228", "sm80/fp16", "d64", "96x32x6", line=3)
    (message,) = tuning.apply(Tuning([rule]), "mine.toml")
    assert message == (
        'mine.toml, line 3: [smem_228."sm80/fp16"] d64: tile is unknown; '
        "a new one: tiles can be chosen of sm80"
    )
    assert not added
    assert not tuning.apply(Tuning([Rule("smem_228", "sm80", "d64", "96x32x6")]), "mine.toml")


def test_the_list_of_tiles_names_each(tmp_path):
    """32x32x2 is a part of 32x32x2c4."""
    program = (
        "from cutlass_attn import _C\n"
        "dims = dict(kernel='sm80', head_dim=512, head_dim_v=512)\n"
        "_C.add_tile(**dims, tile='32x32x2')\n"
        "rule = dict(smem_kb=228, decode=False)\n"
        "try: _C.prefer_tile(**dims, **rule, tile='1x1x1')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    tiles = done.stdout.partition("allowed for sm80 at head dim 512:")[2].split()
    assert {"32x32x2", "32x32x2c4"} <= set(tiles), done
