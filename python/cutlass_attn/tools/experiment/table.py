"""Prints the report of a check."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .report import OK, Report


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
        cells += [number(x, ".2e") for x in errors]
        cells.append("[green]pass[/]" if row.status == OK else "[red]FAIL[/]")
        cells += [{True: "yes", False: "[red]no[/]", None: "-"}[row.allclose]] * close
        ratio = row.ratio.value if row.ratio else None
        cells += [number(row.us, ".1f"), number(ratio, ".2f")]
        table.add_row(*cells, *[number(row.over_rung_before, ".2f")] * steps)
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


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
