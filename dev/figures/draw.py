"""Figures of a report, as PNG and SVG. Equal reports give equal SVG files, byte for byte."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from cutlass_attn.tools.experiment.report import OK, Report, Row
from cutlass_attn.tools.experiment.timing import ColdEvents, HostClock, WarmGraph
from matplotlib.figure import Figure

from ..bench.results import mean_speedup, unique

# Okabe and Ito's colours, which colour-blind eyes can distinguish, each with its own marker. An
# implementation that is known by name looks alike in every figure.
_STYLES = {
    "cutlass_attn:auto": ("#0072B2", "o"),
    "torch:flash": ("#000000", "s"),
    "torch:cudnn": ("#D55E00", "^"),
    "torch:efficient": ("#CC79A7", "v"),
    "torch:math": ("#999999", "x"),
    "cutlass_attn:contiguous": ("#56B4E9", "<"),
    "cutlass_attn:dense": ("#56B4E9", "<"),
    "cutlass_attn:fp8_cache": ("#009E73", "v"),
    "flash_attn_interface": ("#009E73", "D"),
    "flash_attn.cute": ("#E69F00", "P"),
}
_OTHERS = (("#56B4E9", "<"), ("#F0E442", ">"), ("#009E73", "*"), ("#CC79A7", "h"), ("#999999", "d"))
_LABELS = {
    "cutlass_attn:auto": "cutlass_attn",
    "cutlass_attn:contiguous": "cutlass_attn, contiguous",
    "cutlass_attn:dense": "cutlass_attn, a dense call for each sequence",
    "cutlass_attn:fp8_cache": "cutlass_attn, cache in fp8",
    "flash_attn": "FlashAttention-2",
    "flash_attn_interface": "FlashAttention-3",
    "flash_attn.cute": "FlashAttention-4",
}
_TIMINGS = {
    ColdEvents.name: "cold L2",
    WarmGraph.name: "in a CUDA graph",
    HostClock.name: "on the CPU",
}
# White background of the number above a bar: for a bar just below 1 the number lies on the line.
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "cutlass_attn",  # otherwise the ids in an SVG are random
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
}


def draw(report: Report, stem: str, folder: Path) -> list[Path]:
    """Writes `<stem>-<figure>.png` and `.svg` into the folder, made if need be; returns them.

    Figures: the mean speed-up over the report's baseline; for each dtype the rate against the
    number of keys, if there are lengths to compare, or for few queries, where reading K and V takes
    the time, the speed-up of each shape. Rows that are wrong are left out.

    Raises ValueError for a report without a time.
    """
    if report.grid == "ladder":
        return draw_ladder(report, stem, folder)
    rows = [row for row in report.rows if row.us is not None and row.status == OK]
    if len({row.accumulate for row in report.rows}) > 1:
        return draw_accumulation(report, f"{stem}-accumulation", folder)
    if not rows:
        raise ValueError("the result has no row with a time to draw")
    with matplotlib.rc_context(_SETTINGS):
        figures = {f"{stem}-{name}": figure for name, figure in _figures(report, rows)}
        return _save(figures, folder)


def draw_ladder(report: Report, stem: str, folder: Path) -> list[Path]:
    """Bars with the speed of each rung and of PyTorch's backends, over scalar/minimal or, if that
    has no time, over the slowest. Wrong rows are hatched.

    Raises ValueError for a ladder without a time, or with those of a CPU: they depend on what else
    the machine runs.
    """
    if report.method.get("timing") == HostClock.name:
        raise ValueError("no figure of times of a CPU: they depend on what else the machine runs")
    if not any(row.us for row in report.rows):
        raise ValueError("no row of the ladder has a time to draw")
    with matplotlib.rc_context(_SETTINGS):
        return _save({stem: _ladder_figure(report)}, folder)


def draw_accumulation(report: Report, stem: str, folder: Path) -> list[Path]:
    """A column per head dim: errors against the length, and below the speed over fp32."""
    with matplotlib.rc_context(_SETTINGS):
        return _save({stem: _accumulation_figure(report)}, folder)


def _save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            path = folder / f"{name}{suffix}"
            figure.savefig(path, dpi=150, metadata=metadata)
            written.append(path)
    return written


def _figures(report: Report, rows: list[Row]) -> Iterator[tuple[str, Figure]]:
    for dtype in unique(row.dtype for row in rows):
        these = [row for row in rows if row.dtype == dtype]
        if all(row.gbps is not None for row in these):  # decoding
            if any(row.ratio for row in these if row.requested != report.baseline):
                yield f"shapes-{dtype}", _shapes_figure(report, these)
            continue
        columns = [c for c in unique(map(_column, these)) if len(_lengths(these, c)) > 1]
        if columns:
            shown = [row for row in these if _column(row) in columns]
            yield f"rate-{dtype}", _rate_figure(report, shown, columns)
    if any(row.ratio for row in rows if row.requested != report.baseline):
        yield "speedup", _speedup_figure(report)


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    others = iter(_OTHERS * 8)
    return {name: _STYLES.get(name) or next(others) for name in names}


class _Column(NamedTuple):
    """Properties that the rows of a column of panels share."""

    head_dim: int
    heads_q: int
    heads_kv: int
    page: int

    @property
    def title(self) -> str:
        heads = f"{self.heads_q}" + f":{self.heads_kv}" * (self.heads_kv != self.heads_q)
        pages = f", pages of {self.page}" * (self.page > 0)
        return f"D = {self.head_dim}, {heads} heads{pages}"


def _column(row: Row) -> _Column:
    return _Column(row.head_dim, row.heads_q, row.heads_kv, row.page or 0)


def _lengths(rows: list[Row], column: _Column) -> list[int]:
    return sorted({row.seqlen_k for row in rows if _column(row) == column})


def _rate_figure(report: Report, rows: list[Row], columns: list[_Column]) -> Figure:
    """Panels: a column per head dim and heads, a row without and one with a causal mask."""
    masks = sorted({row.causal for row in rows})
    styles = _styles(unique(row.requested for row in rows))
    figure, axes = _panels(len(masks), len(columns))
    for i, causal in enumerate(masks):
        for j, column in enumerate(columns):
            axis = axes[i][j]
            panel = [row for row in rows if (row.causal, _column(row)) == (causal, column)]
            for name, (color, marker) in styles.items():
                points = _points([row for row in panel if row.requested == name])
                if points:
                    axis.plot(
                        *zip(*points), color=color, marker=marker, label=_LABELS.get(name, name)
                    )
            axis.set_title(f"{column.title}{', causal' * causal}", fontsize=10)
            axis.set_xscale("log", base=2)
            lengths = _lengths(rows, column)
            axis.set_xticks(lengths, [_short(length) for length in lengths], minor=False)
            axis.set_xticks([], minor=True)
            if i == len(masks) - 1:
                axis.set_xlabel("keys")
        axes[i][0].set_ylabel("TFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # for all panels, whose limits have grown with each other's lines
    _finish(figure, axes, _title(report, rows[0].dtype))
    return figure


def _points(rows: list[Row]) -> list[tuple[int, float]]:
    """(keys, TFLOP/s); for several batches of one length, the largest."""
    found: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: (row.seqlen_k, row.batch, row.seqlen_q)):
        assert row.tflops is not None  # the caller leaves out rows without a time
        found[row.seqlen_k] = row.tflops
    return list(found.items())


def _shapes_figure(report: Report, rows: list[Row]) -> Figure:
    """A panel per head dim, heads and page size: the speed-up over the baseline of each batch x
    keys, with this library's time below it. A time, unlike a rate in bytes, also compares caches of
    different dtypes."""
    columns = unique(map(_column, rows))
    shapes = {c: unique((r.batch, r.seqlen_k) for r in rows if _column(r) == c) for c in columns}
    names = [
        name
        for name in unique(row.requested for row in rows)
        if name != report.baseline and any(row.ratio for row in rows if row.requested == name)
    ]
    styles = _styles(names)
    figure = Figure(
        figsize=(max(7.0, 0.4 * len(names) * sum(map(len, shapes.values())) + 2.5), 4.4),
        layout="constrained",
    )
    ratios = [len(of_column) for of_column in shapes.values()]
    axes = figure.subplots(1, len(columns), squeeze=False, sharey=True, width_ratios=ratios)
    width = 0.85 / len(names)
    for axis, column in zip(axes[0], columns):
        found = {(r.requested, r.batch, r.seqlen_k): r for r in rows if _column(r) == column}
        for n, name in enumerate(names):
            of_name = [found.get((name, *shape)) for shape in shapes[column]]
            values = [row.ratio.value if row and row.ratio else 0.0 for row in of_name]
            bars = axis.bar(
                [x + (n - (len(names) - 1) / 2) * width for x in range(len(values))],
                values,
                width,
                color=styles[name][0],
                edgecolor="white",
                linewidth=0.5,
                label=_LABELS.get(name, name),
            )
            texts = [f"{value:.2f}" if value else "" for value in values]
            axis.bar_label(bars, texts, rotation=90, fontsize=7, padding=3, bbox=_BEHIND)
        ticks = []
        for batch, keys in shapes[column]:
            row = found.get(("cutlass_attn:auto", batch, keys))
            ticks.append(f"{batch} x {keys}" + (f"\n{row.us:.0f} us" if row and row.us else ""))
        axis.set_xticks(range(len(ticks)), ticks, fontsize=8)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.margins(y=0.15)
        axis.grid(visible=False, axis="x")
        axis.set_title(column.title, fontsize=10)
    axes[0][0].set_ylabel(f"speed / {_LABELS.get(report.baseline, report.baseline)}")
    axes[0][0].set_xlabel("batch x keys, and the time of cutlass_attn")
    _finish(figure, axes, _title(report, rows[0].dtype))
    return figure


def _speedup_figure(report: Report) -> Figure:
    """A panel per dtype: bars of geometric means per head dim and mask, and over all rows."""
    dtypes = unique(row.dtype for row in report.rows)
    kinds = sorted(set(map(_kind, report.rows)))
    groups = [
        f"D = {d}" + "\ncausal" * causal + f"\npages of {page}" * (page > 0)
        for d, causal, page in kinds
    ]
    groups.append("all")
    names = [
        name
        for name in unique(row.requested for row in report.rows)
        if name != report.baseline and mean_speedup(_of(report, name))
    ]
    styles = _styles(names)
    figure, axes = _panels(len(dtypes), 1, width=max(7.0, 0.28 * len(groups) * (len(names) + 2)))
    width = 0.85 / len(names)
    partial = False
    for axis, dtype in zip((row[0] for row in axes), dtypes):
        for n, name in enumerate(names):
            rows = [row for row in _of(report, name) if row.dtype == dtype]
            parts = [[r for r in rows if _kind(r) == kind] for kind in kinds]
            means = [mean_speedup(part) for part in [*parts, rows]]
            bars = axis.bar(
                [x + (n - (len(names) - 1) / 2) * width for x in range(len(groups))],
                [mean.value if mean else 0.0 for mean in means],
                width,
                color=styles[name][0],
                edgecolor="white",
                linewidth=0.5,
                label=_LABELS.get(name, name),
            )
            texts = [f"{m.value:.2f}{'*' * (m.rows < m.of)}" if m else "" for m in means]
            partial |= any(mean.rows < mean.of for mean in means if mean)
            axis.bar_label(bars, texts, rotation=90, fontsize=7, padding=3, bbox=_BEHIND)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.set_xticks(range(len(groups)), groups)
        axis.margins(y=0.15)
        axis.grid(visible=False, axis="x")
        axis.set_ylabel(f"speed / {_LABELS.get(report.baseline, report.baseline)}")
        axis.set_title(dtype, fontsize=10)
    _finish(figure, axes, _title(report) + "\n* not on all of these shapes" * partial)
    return figure


def _ladder_figure(report: Report) -> Figure:
    rows = [row for row in report.rows if row.us]
    times = [row.us or math.nan for row in rows]
    names = [row.impl.removeprefix("cutlass_attn:") for row in rows]
    base = max(times)
    over = names[times.index(base)]
    for name, us in zip(names, times):
        if name.startswith("scalar/minimal/"):
            base, over = us, "scalar/minimal"
    figure = Figure(figsize=(max(7.0, 1.1 * len(rows) + 2.0), 4.6), layout="constrained")
    axis = figure.subplots()
    bars = axis.bar(
        range(len(rows)),
        [base / us for us in times],
        0.6,
        color=["#0072B2" if row.ours else "#999999" for row in rows],
        hatch=["" if row.status == OK else "//" for row in rows],
    )
    texts = [f"{base / us:.3g}x\n{us:,.{0 if us >= 100 else 1}f} us" for us in times]
    axis.bar_label(bars, texts, fontsize=8, padding=3)
    # "sm80/f16/d64/64x64x4" on three lines
    names = [re.sub(r"/(f16|bf16|f32)", r"\n\1", name).replace(":", "\n") for name in names]
    axis.set_xticks(range(len(rows)), names, fontsize=8)
    axis.set_yscale("log")
    axis.margins(y=0.2)
    axis.grid(visible=False, axis="x")
    axis.set_ylabel(f"speed / {over}")
    hatched = "\nhatched: wrong results" * any(row.status != OK for row in rows)
    emulated = any(row.us is None and row.status == OK for row in report.rows)
    note = "\nemulated kernels have no time" * emulated
    title = f"{rows[0].problem}: {report.environment['device']}"
    axis.set_title(f"{title}{note}{hatched}", fontsize=10)
    return figure


_SUMS_STYLES = {
    "fp32": ("#000000", "s"),
    "fp16_qk": ("#0072B2", "o"),
    "fp16_pv": ("#E69F00", "^"),
    "fp16": ("#D55E00", "D"),
}


def _accumulation_figure(report: Report) -> Figure:
    rows = [row for row in report.rows if row.rms_error is not None]
    head_dims = unique(row.head_dim for row in rows)
    timed = any(row.ratio for row in rows)
    size = (max(6.0, 3.6 * len(head_dims)), 6.0 if timed else 3.5)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1 + timed, max(1, len(head_dims)), squeeze=False, sharey="row")
    for column, head_dim in enumerate(head_dims):
        top = panels[0][column]
        for sums, (color, marker) in _SUMS_STYLES.items():
            mine = [r for r in rows if (r.head_dim, r.accumulate) == (head_dim, sums)]
            lengths = [row.seqlen_k for row in mine]
            style: Any = {"color": color, "marker": marker, "markersize": 4}
            top.plot(lengths, [row.rms_error for row in mine], **style, label=f"{sums}, RMS")
            top.plot(lengths, [row.max_error for row in mine], "--", **style, label="largest")
            if timed:
                ratios = [row.ratio.value if row.ratio else math.nan for row in mine]
                panels[1][column].plot(lengths, ratios, **style)
        top.set_title(f"D = {head_dim}", fontsize=10)
        top.set_yscale("log")
        for row_of_panels in panels:
            row_of_panels[column].set_xscale("log", base=2)
        panels[-1][column].set_xlabel("keys")
    panels[0][0].set_ylabel("error against fp64")
    if timed:
        panels[1][0].set_ylabel(f"speed / {report.baseline.removeprefix('cutlass_attn:')}")
        panels[1][0].set_ylim(bottom=0)
    if head_dims:
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"fp16 accumulation: {report.environment['device']}", fontsize=11)
    return figure


def _kind(row: Row) -> tuple[int, bool, int]:
    return row.head_dim, row.causal, row.page or 0


def _of(report: Report, name: str) -> list[Row]:
    return [row for row in report.rows if row.requested == name]


def _panels(rows: int, columns: int, width: float = 4.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(max(7.0, width * columns), 3.0 * rows + 1.0), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=True)


def _finish(figure: Figure, axes: Sequence[Sequence[Any]], title: str) -> None:
    """One legend for all panels, below them, with the entries of every panel."""
    entries: dict[str, Any] = {}
    for axis in (axis for row in axes for axis in row):
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    columns = 4 if figure.get_figwidth() > 9 else 3
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False
    )
    figure.suptitle(title, fontsize=11)


def _title(report: Report, dtype: str = "") -> str:
    facts = [report.environment["device"], dtype, f"torch {report.environment['torch']}"]
    return ", ".join(filter(None, facts)) + f", {_TIMINGS[report.method['timing']]}"


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
