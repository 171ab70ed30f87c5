"""Terminal output, and the options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .experiment.problems import SHAPE_FORM, Shape, parse_dtype, parse_shape

EXIT_STATUS = {
    0: "done",
    1: "{}",
    2: "an argument is wrong, a file cannot be read or written, or a requirement is missing",
    130: "interrupted",
}


def command(example: str, fails: str = "") -> Callable[[Callable[..., Any]], click.Command]:
    """Decorates a command: its help ends with an example and exit statuses; `fails` is status 1."""
    meant = {code: text.format(fails) for code, text in EXIT_STATUS.items()}
    lines = [f"{code:>3}  {text}" for code, text in meant.items() if text]
    epilog = "\b\nExample:\n  " + example.replace("\n", "\n  ")
    epilog += "\n\n\b\nExit status:\n  " + "\n  ".join(lines)
    return click.command(epilog=epilog, context_settings={"show_default": True})


def run(given: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a command or a group of commands, by default with sys.argv; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = given.main(arguments, prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except (OSError, ValueError) as error:  # OSError: a file cannot be read or written
        commands = given.commands if isinstance(given, click.Group) else {}
        name = " ".join([program, *[x for x in arguments if x in commands][:1]])
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return int(status or 0)


class _Parsed(click.ParamType):
    """The type of an option that a function parses; run() prints the function's ValueError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return self._parse(value) if isinstance(value, str) else value


DTYPE = _Parsed("dtype", parse_dtype)
DTYPES = _Parsed("dtypes", lambda text: tuple(map(parse_dtype, text.split(","))))
SHAPE = _Parsed(SHAPE_FORM, parse_shape)
SIZE = click.IntRange(min=1)
BOTH_MASKS = {"both": (False, True), "no": (False,), "yes": (True,)}


def _writable(context: click.Context, _option: Any, file: str | None) -> str | None:
    """The file, checked before the command runs, which may take minutes. Raises ValueError."""
    if file is None or file == "-" or context.resilient_parsing:
        return file
    path = Path(file)
    if not path.parent.is_dir():
        raise ValueError(f"--json {file}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--json {file}: no file can be written there")
    return file


json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=_writable,
    help="Also write the result there as JSON; - is stdout.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of the random inputs."
)
shapes_option = click.option(
    "--shape",
    "shapes",
    type=SHAPE,
    multiple=True,
    metavar=SHAPE_FORM.upper(),
    help="Batch, query heads, key heads, queries, keys, head dim; may be repeated.",
)
causal_option = click.option(
    "--causal",
    type=click.Choice(list(BOTH_MASKS)),
    default="both",
    help="Whether to use a causal mask, or each shape with and without.",
)


def with_masks(shapes: Any, causal: str) -> tuple[Shape, ...]:
    """Each shape without and with a causal mask. One query sees every key: only without."""
    return tuple(
        shape.masked(mask)
        for shape in shapes
        for mask in (BOTH_MASKS[causal] if shape.seqlen_q > 1 else (False,))
    )


def make_console(stderr: bool = False) -> Console:
    """A console wide enough for the tables: rich shortens numbers that do not fit."""
    console = Console(stderr=stderr)
    console.width = max(console.width, 170)
    return console


def say(console: Console, text: str) -> None:
    """Prints a line without markup or highlighting; bytes of a path that are no UTF-8, escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    console.print(text, highlight=False, markup=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar on stderr; yields show(what, done, total)."""
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
