"""`python -m dev.figures`: what is drawn of a result, and what is refused."""

from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")

from cutlass_attn.tools import console
from cutlass_attn.tools.experiment import report
from cutlass_attn.tools.experiment.problems import Shape

from dev.bench.grids import GRIDS
from dev.figures import draw
from dev.figures.command import figures


def main(file, folder):
    return console.run(figures, "python -m dev.figures", [str(file), "--out", str(folder)])


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


def test_files(capsys, tmp_path):
    (tmp_path / "h.json").write_text(example().dumps())
    contents = []
    for folder in ("one", "two"):
        assert main(tmp_path / "h.json", tmp_path / folder) == 0
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
    result = example()
    rows = [row for row in result.rows if row.us is not None and row.status == "ok"]
    drawn = dict(draw._figures(result, rows))
    rate, speedup = drawn["rate-bfloat16"], drawn["speedup"]
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
    result = example()
    rows = [row for row in result.rows if row.us is not None and row.status == "ok"]
    for row in rows:
        row.tflops *= row.head_dim  # the last panels have the highest rates
    for axis in dict(draw._figures(result, rows))["rate-bfloat16"].axes:
        rates = [rate for line in axis.get_lines() for rate in line.get_ydata()]
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(rates)


def test_a_figure_needs_times(capsys, tmp_path):
    empty = report.Report("small", "torch:flash", {}, {})
    (tmp_path / "a.json").write_text(empty.dumps())
    assert main(tmp_path / "a.json", tmp_path) == 2
    assert "no row with a time" in capsys.readouterr().err


def test_each_shape_and_page_size_has_a_speedup_of_its_own():
    """By time: an fp8 cache, of half the bytes at less than twice the rate in bytes, is faster."""
    names = {"contiguous": 1.0, "auto": 0.9, "fp8_cache": 1.6}  # speed over the first
    baseline = "cutlass_attn:contiguous"
    result = report.Report(
        "paged", baseline, {"device": "X", "torch": "2"}, {"timing": "host_clock"}
    )
    for problem in GRIDS["paged"].problems:
        if problem.dtype == "float16":
            rows = []
            for name, speed in names.items():
                name = f"cutlass_attn:{name}"
                sizes = asdict(problem.shape)
                row = report.Row(problem.op, name, name, "float16", **sizes, page=problem.page)
                us = problem.shape.kv_bytes(2) / 1e6 / speed / (1 + problem.page / 1e3)
                row.set_times([us] * 5, us)
                rows.append(row)
            result.fill_speedups(rows)
            result.rows += rows
    axes = dict(draw._figures(result, result.rows))["shapes-float16"].axes
    assert [axis.get_title() for axis in axes] == [
        f"D = 128, 32:8 heads, pages of {page}" for page in (16, 1, 256)
    ]
    for axis in axes:
        labels = [text.get_text().splitlines()[0] for text in axis.get_xticklabels()]
        assert labels == ["16 x 8192", "1 x 32768", "64 x 2048"]
        heights = [bar.get_height() for bars in axis.containers for bar in bars]
        assert heights == pytest.approx([0.9] * 3 + [1.6] * 3, rel=1e-3)
    assert axes[0].get_ylabel() == "speed / cutlass_attn, contiguous"


def made(name, accumulate, seqlen, head_dim, us):
    shape = asdict(Shape(1, 16, 16, seqlen, seqlen, head_dim))
    row = report.Row("forward", name, name, "float16", **shape, accumulate=accumulate)
    row.max_error, row.rms_error = 1e-3, 1e-4
    row.set_times([us] * 5, us)
    return row


def test_the_figure_of_accumulation(tmp_path):
    result = report.Report(
        "accumulation", "cutlass_attn:auto", {"device": "a GPU", "torch": "2"},
        {"timing": "events_cold_l2"},
    )  # fmt: skip
    for seqlen in (128, 512):
        rows = [made("cutlass_attn:auto", "fp32", seqlen, 64, 10.0)]
        rows.append(made("cutlass_attn:sm80/fp16", "fp16", seqlen, 64, 6.0))
        result.fill_speedups(rows)
        result.rows += rows
    file = tmp_path / "a.json"
    file.write_text(result.dumps())
    assert main(file, tmp_path) == 0
    assert (tmp_path / "a-accumulation.png").read_bytes().startswith(b"\x89PNG")


def ladder(timing):
    """Of two kernels and of PyTorch."""
    result = report.Report("ladder", "scalar", {"device": "Some GPU"}, {"timing": timing})
    for name, us in {"cutlass_attn:scalar/minimal": 3000.0, "torch:auto": 12.0}.items():
        row = report.Row("forward", name, name, "float16", **asdict(Shape(2, 8, 8, 512, 512, 64)))
        row.set_times([us] * 5, us)
        result.rows.append(row)
    return result.dumps()


def test_a_ladder(tmp_path):
    (tmp_path / "l.json").write_text(ladder("cuda_graph_warm"))
    assert main(tmp_path / "l.json", tmp_path) == 0
    assert (tmp_path / "l.png").stat().st_size > 10_000
    assert "Some GPU" in (tmp_path / "l.svg").read_text()


def test_the_ladder_of_a_cpu_is_not_drawn(capsys, tmp_path):
    """On a busy machine such a figure had a kernel at 246 times the speed of torch:math."""
    (tmp_path / "l.json").write_text(ladder("host_clock"))
    assert main(tmp_path / "l.json", tmp_path) == 2
    assert "no figure of times of a CPU" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_times_of_a_busy_machine_are_not_drawn(capsys, tmp_path):
    result = example()
    result.waited = 0.5
    (tmp_path / "a.json").write_text(result.dumps())
    assert main(tmp_path / "a.json", tmp_path) == 2
    assert "threads waited for a core 50% of the time" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_has_to_be_there(capsys, tmp_path):
    assert main("absent.json", tmp_path) == 2
    assert "absent.json: No such file" in capsys.readouterr().err
