"""The file of a benchmark's result, read back."""

from dataclasses import asdict

import pytest
from cutlass_attn.tools.experiment import report

from dev.bench import results
from dev.bench.grids import GRIDS


def example():
    """A result of one problem: a baseline, a faster kernel, and one that is wrong."""
    result = report.Report("forward", "torch:flash", {"device": "X"}, {"timing": "events_cold_l2"})
    shape = GRIDS["forward"].shapes[0]
    for name, us in {"cutlass_attn:auto": 30.0, "torch:flash": 40.0, "flash_attn": 20.0}.items():
        row = report.Row("forward", name, name, "bfloat16", **asdict(shape))
        row.set_times([us * x for x in (0.99, 1.0, 1.01, 1.0, 1.0)], us)
        row.status = "wrong" if name == "flash_attn" else "ok"
        result.rows.append(row)
    result.fill_speedups(result.rows)
    return result


def test_a_report_is_read_back(tmp_path):
    written = example()
    (tmp_path / "a.json").write_text(written.dumps())
    assert results.load(tmp_path / "a.json") == written


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', "3"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a result of `python -m dev\.bench`"):
        results.load(tmp_path / "a.json")


def test_other_schemas_are_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="has schema 99; this version reads 1 and 2"):
        results.load(tmp_path / "a.json")
