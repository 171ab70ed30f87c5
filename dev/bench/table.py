"""Prints a report: times with their ratios, and the geometric means."""

from __future__ import annotations

from cutlass_attn.tools.experiment.report import FAILED, OK, WRONG, Report, Row
from cutlass_attn.tools.experiment.table import number
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .results import Mean, mean_speedup, unique

_NOTES = {WRONG: "[red]wrong[/]", FAILED: "[red]failed[/]", OK: ""}


def print_report(console: Console, report: Report) -> None:
    """Prints all rows, the means, and why other rows are missing."""
    console.print(_rows_table(report))
    if any(row.ratio for row in report.rows):
        console.print(_means_table(report))
    for reason, count in _reasons(report.rows).items():
        rows = f" ({count} rows)" * (count > 1)
        console.print(f"{reason}{rows}", highlight=False, markup=False)
    for name, reason in report.absent.items():
        console.print(f"{name}: {reason}", highlight=False, markup=False)
    if report.busy:
        console.print(report.busy, highlight=False)
    if report.aborted:
        console.print(f"stopped early: {report.aborted}", highlight=False, markup=False)


def _rows_table(report: Report) -> Table:
    rows = [row for row in report.rows if row.inputs]
    options = any(row.option != "none" for row in rows)
    errors = report.grid.startswith("accumulation")
    decode = any(row.gbps is not None for row in rows)
    host = any(row.host_us is not None for row in rows)
    headings = ["dtype", "shape", "implementation"]
    headings += ["max error", "RMS", "RMS allowed"] * errors + ["difference"] * options
    headings += ["us", "TFLOP/s"]
    headings += ["TB/s"] * decode + ["host us"] * host
    table = Table(*headings, f"x {report.baseline}", "95 %", "", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    before = None
    for row in rows:
        problem = (row.dtype, row.problem.title)
        title = ["", ""] if problem == before else list(problem)
        before = problem
        found = (row.max_error, row.rms_error, row.rms_allowed)
        cells = [number(x, ".2e") for x in found] * errors
        cells += [number(row.difference, ".1e")] * options
        cells += [number(row.us, ".1f"), number(row.tflops, ".4g")]
        cells += [number(row.gbps and row.gbps / 1e3, ".3f")] * decode
        cells += [number(row.host_us, ".2f")] * host
        interval = f"{row.ratio.low:.3f} - {row.ratio.high:.3f}" if row.ratio else "-"
        ratio = number(row.ratio and row.ratio.value, ".3f")
        table.add_row(*title, escape(row.impl), *cells, ratio, interval, _NOTES[row.status])
    return table


def _means_table(report: Report) -> Table:
    head_dims = unique(row.head_dim for row in report.rows)
    title = f"speed-up over {report.baseline}, geometric mean"
    table = Table(title, "dtype", *(f"D={d}" for d in head_dims), "all", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for dtype in unique(row.dtype for row in report.rows):
        for name in unique(row.requested for row in report.rows):
            rows = [row for row in report.rows if (row.dtype, row.requested) == (dtype, name)]
            groups = [[row for row in rows if row.head_dim == d] for d in head_dims] + [rows]
            means = [mean_speedup(group) for group in groups]
            if any(means) and name != report.baseline:
                table.add_row(escape(name), dtype, *map(_mean, means))
    return table


def _mean(mean: Mean | None) -> str:
    if mean is None:
        return "-"
    part = f" ({mean.rows} of {mean.of})" if mean.rows < mean.of else ""
    return f"{mean.value:.3f}{part}"


def _reasons(rows: list[Row]) -> dict[str, int]:
    """What failed or is not supported, and in how many rows."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.reason:
            reason = f"{row.impl}: {row.status}: {row.reason}"
            counts[reason] = counts.get(reason, 0) + 1
    return counts
