"""What the commands share: the terminal, and the names of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .._build.facts import DTYPES

SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def make_console(stderr: bool = False) -> Console:
    """Wide enough for the tables: a wrapped line can be read, a shortened number cannot."""
    console = Console(stderr=stderr)
    console.width = max(console.width, 140)
    return console


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for as long as the context; it gives show(what, done, total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def parse_dtypes(text: str) -> list[str]:
    """Of --dtype: names with commas between. Raises ValueError for one that is unknown."""
    found = [SHORT_DTYPES.get(name, name) for name in text.split(",")]
    for name in found:
        if name not in DTYPES:
            raise ValueError(f"--dtype must be of {', '.join(SHORT_DTYPES)}, got {name!r}")
    return found
