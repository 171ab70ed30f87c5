"""What becomes of a benchmark's result: its file, read back, and its figures."""

import sys
from pathlib import Path

import pytest
from cutlass_attn.tools import cli
from cutlass_attn.tools.experiment import report
from cutlass_attn.tools.experiment.grids import GRIDS


def example():
    """A result with two lengths and masks, one implementation wrong and one that ran in part."""
    result = report.Report(
        "forward", "torch:flash", {"device": "X", "torch": "2"}, {"timing": "events_cold_l2"}
    )
    names = {"cutlass_attn:auto": 300, "torch:flash": 250, "torch:math": 20, "flash_attn": 400}
    for shape in GRIDS["forward"].shapes:
        rows = []
        for name, rate in names.items():
            sizes = {field: getattr(shape, field) for field in shape.__dataclass_fields__}
            row = report.Row("forward", name, name, "bfloat16", **sizes)
            if name != "torch:math" or shape.seqlen_q < 5000:
                us = shape.flops / rate / 1e6
                row.set_times([us * x for x in (0.99, 1.0, 1.01, 1.0, 1.0)], us)
            if name == "flash_attn":
                row.status = "wrong"
            rows.append(row)
        result.fill_speedups(rows)
        result.rows += rows
    return result


def test_a_report_is_read_back(tmp_path):
    written = example()
    (tmp_path / "a.json").write_text(written.dumps())
    assert report.load(tmp_path / "a.json") == written


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', "3"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="is not a result of `cutlass-attn bench`"):
        report.load(tmp_path / "a.json")


def test_other_schemas_are_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="has schema 99; this version reads 1 and 2"):
        report.load(tmp_path / "a.json")


def test_plot_files(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    (tmp_path / "h.json").write_text(example().dumps())
    contents = []
    for folder in ("one", "two"):
        command = ["bench", "--plot", str(tmp_path / "h.json"), "--out", str(tmp_path / folder)]
        assert cli.main(command) == 0
        files = [Path(line) for line in capsys.readouterr().out.split()]
        contents.append({file.name: file.read_bytes() for file in files})
    one, two = contents
    stems = ("h-rate-bfloat16", "h-speedup")
    assert set(one) == {stem + suffix for stem in stems for suffix in (".png", ".svg")}
    assert one == two  # byte for byte
    for name, content in one.items():
        assert 5_000 < len(content) < 1_000_000
        assert content.startswith(b"\x89PNG" if name.endswith(".png") else b"<?xml")
        assert b"<dc:date>" not in content


def test_what_the_figures_show():
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    from cutlass_attn.tools.experiment import plot

    result = example()
    rows = [row for row in result.rows if row.us is not None and row.status == "ok"]
    figures = dict(plot._figures(result, rows))
    rate, speedup = figures["rate-bfloat16"], figures["speedup"]
    titles = [axis.get_title() for axis in rate.axes]
    assert titles[0] == "D = 64, 32 heads" and titles[-1] == "D = 256, 8 heads, causal"
    labels = [text.get_text() for text in rate.legends[0].get_texts()]
    assert labels == ["cutlass_attn", "torch:flash", "torch:math"]  # not the wrong one
    line = rate.axes[0].get_lines()[0]
    assert line.get_xdata().tolist() == [1024, 4096, 16384]
    assert line.get_ydata() == pytest.approx([300] * 3, rel=1e-3)
    values = [text.get_text() for text in speedup.axes[0].texts]
    assert values == ["1.20"] * 7 + ["0.08*"] * 7  # math did not run at the last length


def test_no_rate_is_cut_off():
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    from cutlass_attn.tools.experiment import plot

    result = example()
    rows = [row for row in result.rows if row.us is not None and row.status == "ok"]
    for row in rows:
        row.tflops *= row.head_dim  # the last panels have the highest rates
    for axis in dict(plot._figures(result, rows))["rate-bfloat16"].axes:
        rates = [rate for line in axis.get_lines() for rate in line.get_ydata()]
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(rates)


def test_plot_without_matplotlib(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "cutlass_attn.tools.experiment.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", "x.json"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_plot_needs_times(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    empty = report.Report("small", "torch:flash", {}, {})
    (tmp_path / "a.json").write_text(empty.dumps())
    assert cli.main(["bench", "--plot", str(tmp_path / "a.json"), "--out", str(tmp_path)]) == 2
    assert "no row with a time" in capsys.readouterr().err
