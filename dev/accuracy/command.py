"""The command `python -m dev.accuracy`."""

from __future__ import annotations

import click
from cutlass_attn.tools.console import (
    DTYPE,
    SIZE,
    command,
    json_option,
    make_console,
    progress_bar,
    say,
    seed_option,
)
from cutlass_attn.tools.document import document, write
from cutlass_attn.tools.experiment.environment import default_device, environment
from rich.table import Table

from .inputs import KINDS
from .measure import MODES, PEER, Row, as_json, measure


@command(
    "python -m dev.accuracy --mode qk --head-dim 128 --json errors.json",
    "a mode is off by more than its limit",
)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    multiple=True,
    help="A mode of quantize; may be repeated (all).",
)
@click.option(
    "--inputs",
    "kinds",
    type=click.Choice(list(KINDS)),
    multiple=True,
    help="A kind of inputs; may be repeated (all).",
)
@click.option(
    "--head-dim", "head_dims", type=SIZE, multiple=True, help="May be repeated (64 and 128)."
)
@click.option("--seqlen", type=SIZE, default=256, help="Queries, a multiple of 32.")
@click.option("--seqlen-k", type=SIZE, default=4096, help="Keys, a multiple of 64.")
@click.option("--dtype", type=DTYPE, default="fp16", help="fp16 or bf16.")
@click.option("--device", help='"cpu", "cuda" or "cuda:N"; by default a usable GPU, else the CPU.')
@seed_option
@json_option
def accuracy(
    modes: tuple[str, ...],
    kinds: tuple[str, ...],
    head_dims: tuple[int, ...],
    seqlen: int,
    seqlen_k: int,
    dtype: str,
    device: str | None,
    seed: int,
    json_file: str | None,
) -> int:
    """Errors of products in 8 bits, against fp64.

    RMS errors of the result, in percent of its own RMS, for inputs that 8 bits find easy or hard,
    next to errors without `quantize` and of SageAttention 2++, whose algorithm runs in numpy.
    """
    console = make_console(stderr=json_file == "-")
    where = device or default_device()
    with progress_bar() as show:
        rows = measure(
            kinds or KINDS,
            head_dims or (64, 128),
            modes or MODES,
            queries=seqlen,
            keys=seqlen_k,
            dtype=dtype,
            device=where,
            seed=seed,
            progress=show,
        )
    names = list(dict.fromkeys(row.mode for row in rows))
    table = Table("inputs", "D", *names, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, head_dim in dict.fromkeys((row.inputs, row.head_dim) for row in rows):
        found = {row.mode: row for row in rows if (row.inputs, row.head_dim) == (kind, head_dim)}
        table.add_row(kind, str(head_dim), *(_percent(found[name]) for name in names))
    say(console, f"RMS error in percent, {seqlen} queries, {seqlen_k} keys, {dtype}, on {where}")
    console.print(table)
    for kind in dict.fromkeys(row.inputs for row in rows):
        say(console, f"{kind}: {KINDS[kind].what}")
    say(console, "In parentheses: what is predicted.")
    if PEER in names:
        say(console, f"{PEER} is SageAttention 2++'s algorithm, computed in numpy.")
    ok = all(row.ok for row in rows)
    if not ok:
        say(console, "An error marked with * is above its limit.")
    if json_file:
        write(
            document("accuracy", ok, as_json(rows), environment=environment(where), seed=seed),
            json_file,
        )
    return 0 if ok else 1


def _percent(row: Row) -> str:
    predicted = "" if row.predicted is None else f" ({100 * row.predicted:.2g})"
    return f"{100 * row.rms:.2g}{'' if row.ok else '*'}{predicted}"
