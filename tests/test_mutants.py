"""tests/mutants without a compiler: its bugs can be planted, its model says what it did."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "mutants"))

# isort: split
import post_mortem
import run_mutants
import seldom

UNITS = [
    "sm80",
    "terms",
    "int8",
    "limit",
    "latent",
    "serving",
    "scalar",
    "wmma",
    "backward",
    "sm90",
    "post_mortem",
]


def test_no_unit_is_left_out():
    text = (run_mutants.HERE / "mutants.toml").read_text(encoding="utf-8")
    assert set(run_mutants.tomllib.loads(text)) == set(UNITS)


@pytest.mark.parametrize("unit", UNITS)
def test_the_text_of_each_bug_is_once_in_its_header(unit):
    """ctest plants those of the kernels, nothing those of the post-mortem."""
    mutants = run_mutants.load(unit, "")
    programs, texts = run_mutants.pack(mutants)  # an error if it is not
    assert sum(len(program.mutants) for program in programs) == len(mutants) > 1
    for program in programs:
        planted = [mutant for mutant in program.mutants if mutant.file]
        for file, text in program.headers(texts).items():
            assert text != texts[file]
            chosen = {int(number) for number in re.findall(r"planted_bug == (\d+)", text)}
            of_file = [m for m in planted if m.file == file]
            assert chosen == {m.number for m in of_file if m.kind != "text"}
            assert all(m.replace in text for m in of_file)


def test_a_text_that_is_gone_is_an_error():
    mutant = run_mutants.Mutant(1, "gone", file="wmma/forward.hpp", find="no such text")
    with pytest.raises(run_mutants.MutantError, match="is 0 times in wmma/forward"):
        run_mutants.pack([mutant])


def test_a_bug_may_be_inside_another():
    text = "wait(); sync(); more(a < b);"
    bugs = [
        run_mutants.Mutant(1, "no sync", "statement", find="sync();", replace=""),
        run_mutants.Mutant(2, "no wait", "statement", find="wait(); sync();", replace="sync();"),
        run_mutants.Mutant(3, "one", "expression", after="more(", find="a < b", replace="a"),
        run_mutants.Mutant(4, "other", "expression", after="more(", find="a < b", replace="b"),
    ]
    edits = [(*bug.span(text), bug) for bug in bugs]
    assert "".join(run_mutants.edited(text, 0, len(text), edits).split()) == (
        "if(planted_bug==2){sync();}else{wait();if(planted_bug==1){}else{sync();}}"
        "more((planted_bug==3?(a):((planted_bug==4?(b):(a<b)))));"
    )


def test_suspects_are_numbered_and_have_causes():
    first, *found = post_mortem.suspects("")
    assert first.name == "no bug" and first.number == 0
    assert [m.number for m in found] == list(range(1, len(found) + 1))
    assert len({m.name for m in found}) == len(found)
    causes = {"shape", "order", "pointer", "leading dimension", "race"}  # the five suspects
    assert causes < {m.cause for m in found} and all(m.cause for m in found)
    _, *seldom_ones = post_mortem.suspects("seldom")
    assert len(seldom_ones) == sum(m.cause == "seldom" for m in found) > 10
    run_mutants.pack([first, *found])


@pytest.fixture
def model(monkeypatch):
    """The model of seldom.py, of another size."""
    for name, size in {"HEADS": 2, "S": 128, "D": 32, "TILES": 2, "WARPS": 8}.items():
        monkeypatch.setattr(seldom, name, size)
    return seldom.Attention(0)


def test_a_fault_of_a_tile_is_what_attention_with_it_computes(model):
    """Warp 3 of head 1 has the scores of the tile before, at one tile of keys."""
    head, tile, warp = 1, 1, 3
    rows = slice(warp * seldom.WARP, (warp + 1) * seldom.WARP)
    others = np.roll(model.weights, 1, axis=1)
    weights = model.weights[head].copy()
    weights[tile, rows] = others[head, tile, rows]
    o = np.einsum("tqk,tkd->qd", weights, model.v[head]) / weights.sum((0, 2))[:, None]
    errors = np.abs(o - model.o[head])[rows]
    assert errors.max() > 0.01

    found = model.tile_faults(others, model.v)
    assert len(found) == seldom.HEADS * seldom.TILES * seldom.WARPS
    at = (head * seldom.TILES + tile) * seldom.WARPS + warp
    np.testing.assert_allclose(found[at], [errors.max(), errors.sum()], rtol=1e-4)
    assert model.tile_faults(model.weights, model.v).max() < 1e-3  # without a fault


def test_a_fault_of_the_output_is_in_its_rows_and_columns(model):
    other = model.o.copy()
    other[1, 16:32, :16] += 0.5  # of the second of 8 warps, the first of 2 halves of the columns
    found = model.output_faults(other, seldom.WARP, seldom.WARP)
    assert len(found) == seldom.HEADS * seldom.WARPS * seldom.D // seldom.WARP
    at = (1 * seldom.WARPS + 1) * 2
    np.testing.assert_allclose(found[at], [0.5, 0.5 * 16 * 16], rtol=1e-5)
    assert not np.delete(found, at, axis=0).any()


def test_the_table_has_a_row_for_each_fault_and_count(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["seldom.py", "--draws", "20"])
    seldom.main()
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len({(what, times) for what, times, *_ in cells}) == len(rows) == 9 * 6
    assert all(fits.endswith(" %") for *_, fits in cells)
