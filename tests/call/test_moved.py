"""Modules that moved: their old names import, say where they are now, and cost nothing before."""

import importlib
import subprocess
import sys

import cutlass_attn
import pytest
from cutlass_attn._moved import MOVED

# What each old module had and its new one has.
NAMES = {
    "bench.accuracy": "Yardstick",
    "bench.shapes": "parse_shape",
    "check": "run_check",
    "cli": "main",
    "functional": "attention",
    "gates.hot_path": "hot_path",
    "gates.sass": "read_counts",
    "gates.tile": "tile_of",
    "info": "BuildInfo Explanation Variant Verdict accumulate_of build_info explain variants",
    "jit.tiles": "unit_of",
    "ladder": "run_ladder",
    "profile": "run_profile",
    "terminal": "make_console",
    "tune": "rules_with",
    "tune.proposers": "make_proposer",
    "tuning_file": "Tuning",
    "variant_key": "symbol_of",
}


@pytest.fixture
def as_if_new(monkeypatch):
    """Old names as they are in a process that has imported none of them."""
    for name in MOVED:
        monkeypatch.delitem(sys.modules, name, raising=False)
        parent, _, child = name.rpartition(".")
        for module in {sys.modules.get(parent), cutlass_attn} - {None}:
            monkeypatch.delitem(vars(module), child, raising=False)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_says_the_new_one(as_if_new, old):
    try:
        importlib.import_module(MOVED[old])
    except ModuleNotFoundError as error:
        assert error.name in ("torch", "matplotlib")
        pytest.skip(str(error))
    parent = old.rpartition(".")[0]
    if parent in MOVED:
        with pytest.warns(DeprecationWarning):
            importlib.import_module(parent)
    with pytest.warns(DeprecationWarning) as said:
        importlib.import_module(old)
    assert [str(warning.message) for warning in said] == [f"{old} is now {MOVED[old]}"]
    assert said[0].filename == __file__


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("old", "name"), [(old, name) for old, names in NAMES.items() for name in names.split()]
)
def test_what_it_has_is_that_of_the_new_one(as_if_new, old, name):
    module = importlib.import_module(f"cutlass_attn.{old}")
    new = importlib.import_module(MOVED[module.__name__])
    assert getattr(module, name) is getattr(new, name)
    with pytest.raises(AttributeError, match=f"module {new.__name__!r} has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # those beside the ones looked for
def test_the_ways_to_write_an_import(as_if_new):
    with pytest.warns(DeprecationWarning, match=r"cutlass_attn\.functional is now cutlass_attn$"):
        by_attribute = cutlass_attn.functional.attention
    assert by_attribute is cutlass_attn.attention
    with pytest.warns(DeprecationWarning, match=r"\.bench is now cutlass_attn\.tools\.experiment$"):
        from cutlass_attn.bench import impls
    with pytest.warns(DeprecationWarning, match=r"tune\.space is now .*\.tune\.space"):
        import cutlass_attn.tune.space as space
    assert impls.discover.__module__ == "cutlass_attn.tools.experiment.impls"
    assert space.Space.__module__ == "cutlass_attn.tools.tune.space"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cutlass_attn.bench.nothing")
    with pytest.raises(AttributeError):
        _ = cutlass_attn.nothing


def test_import_does_not_warn_and_leaves_the_instruments_alone():
    code = (
        "import sys, cutlass_attn; from cutlass_attn._moved import MOVED; "
        "print([name for name in sys.modules "
        "if name in MOVED or name.startswith('cutlass_attn.tools')])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
