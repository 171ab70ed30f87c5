"""Prints a report: errors of a check, or times with their ratios and the geometric means."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .report import FAILED, OK, WRONG, Mean, Report, Row, mean_speedup, unique

_NOTES = {WRONG: "[red]wrong[/]", FAILED: "[red]failed[/]", OK: ""}


def print_check(console: Console, report: Report) -> None:
    """Prints errors and times of a check or a ladder, and why a kernel failed."""
    close = any(row.allclose is not None for row in report.rows)
    steps = any(row.over_rung_before for row in report.rows)
    headings = ["kernel", "inputs", "max error", "mean", "RMS", "RMS allowed", "verdict"]
    headings += ["allclose 1e-3"] * close + ["us", "speed-up"] + ["over rung before"] * steps
    table = Table(*headings, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    asked = report.method.get("num_inputs", 1)
    for row in report.rows:
        errors = (row.max_error, row.mean_error, row.rms_error, row.rms_allowed)
        cells = [row.impl.removeprefix("cutlass_attn:"), f"{row.inputs}/{asked}"]
        cells += [_number(x, ".2e") for x in errors]
        cells.append("[green]pass[/]" if row.status == OK else "[red]FAIL[/]")
        cells += [{True: "yes", False: "[red]no[/]", None: "-"}[row.allclose]] * close
        ratio = row.ratio.value if row.ratio else None
        cells += [_number(row.us, ".1f"), _number(ratio, ".2f")]
        table.add_row(*cells, *[_number(row.over_rung_before, ".2f")] * steps)
    sums = {row.accumulate for row in report.rows if row.ours} - {"fp32"}
    words = f", {' and '.join(sorted(sums))} accumulation" * bool(sums)
    what = report.rows[0].problem if report.rows else report.grid
    device = report.environment["device"]
    console.print(f"{what}{words} on {device}, against fp64", highlight=False, markup=False)
    console.print(table)
    for row in report.rows:
        if row.status != OK:
            name = row.impl.removeprefix("cutlass_attn:")
            console.print(f"{name}: {row.reason}", highlight=False, markup=False)
    if report.busy:
        console.print(report.busy, highlight=False)
    if any(row.ratio for row in report.rows):
        console.print(f"The speed-up is over {report.baseline.removeprefix('cutlass_attn:')}.")
    if any(0 < row.inputs < asked and row.status == OK for row in report.rows):
        console.print("Emulated kernels stop at the first input that ends after 30 s.")
    if not any(row.ours for row in report.rows):
        console.print("No kernel can run this; cutlass_attn.explain says why.")


def print_report(console: Console, report: Report) -> None:
    """Prints all rows, the means, and why the others are missing."""
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
        cells = [_number(x, ".2e") for x in found] * errors
        cells += [_number(row.difference, ".1e")] * options
        cells += [_number(row.us, ".1f"), _number(row.tflops, ".4g")]
        cells += [_number(row.gbps and row.gbps / 1e3, ".3f")] * decode
        cells += [_number(row.host_us, ".2f")] * host
        interval = f"{row.ratio.low:.3f} - {row.ratio.high:.3f}" if row.ratio else "-"
        ratio = _number(row.ratio and row.ratio.value, ".3f")
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


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _reasons(rows: list[Row]) -> dict[str, int]:
    """What went wrong or is not supported, and in how many rows."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.reason:
            reason = f"{row.impl}: {row.status}: {row.reason}"
            counts[reason] = counts.get(reason, 0) + 1
    return counts
