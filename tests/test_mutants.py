"""tests/mutants without a compiler: its bugs can be planted, its model says what it did."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "mutants"))

# isort: split
import post_mortem
import run_mutants
import seldom

UNITS = ["sm80", "scalar", "wmma", "post_mortem"]


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
            assert all(m.edit() in text for m in planted if m.file == file)


def test_a_text_that_is_gone_is_an_error():
    mutant = run_mutants.Mutant(1, "gone", file="wmma/forward.hpp", find="no such text")
    with pytest.raises(run_mutants.MutantError, match="is 0 times in wmma/forward"):
        run_mutants.pack([mutant])


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


def test_the_model_says_what_the_post_mortem_rests_on(capsys, monkeypatch):
    """Medians of docs/wmma-post-mortem.md, and which faults look like the earlier result."""
    monkeypatch.setattr(sys, "argv", ["seldom.py", "--draws", "500"])
    seldom.main()
    _, _, *lines = capsys.readouterr().out.splitlines()
    rows = {}
    for line in lines:
        what, times, largest, mean, fits = (cell.strip() for cell in line.strip("|").split("|"))
        medians = (float(cell.split()[0]) for cell in (largest, mean))
        rows[what, int(times)] = (*medians, int(fits.split()[0]))
    for fault, times, largest, mean in [
        ("scores of the tile before", 1, 0.12, 5.3e-5),
        ("scores of the next query, all tiles", 5, 0.26, 4.9e-5),
        ("O's fragment is another warp's", 1, 0.26, 4.2e-5),
        ("O's fragment is the one beside it", 1, 0.32, 5.1e-5),
    ]:
        found = rows[fault, times]
        assert found[:2] == (pytest.approx(largest, abs=0.015), pytest.approx(mean, rel=0.04))
    assert rows["scores of the next query, all tiles", 5][2] > 80
    assert rows["O's fragment is another warp's", 1][2] > 60
    assert rows["scores of the tile before", 1][2] < 15
    assert all(
        fits == 0 for (what, times), (*_, fits) in rows.items() if times == 8 and "tile b" in what
    )
