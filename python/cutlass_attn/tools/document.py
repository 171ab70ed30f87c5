"""The JSON format of all commands' results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

# Schema 1 was that of `bench` alone; its files can still be read.
SCHEMA = 2


class Document(TypedDict, total=False):
    """Entries of all results. Each command adds its own: docs/benchmarking.md."""

    schema: int
    command: str  # "check", "bench", "profile", ...
    ok: bool  # whether the exit status is 0
    date: str  # UTC, ISO 8601
    environment: dict[str, Any]  # device, driver, versions; of measurements
    rows: list[dict[str, Any]]


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def document(
    command: str, ok: bool, rows: Iterable[Mapping[str, Any]], date: str = "", **entries: Any
) -> Document:
    """A command's result as the document that is written."""
    head: Any = {"schema": SCHEMA, "command": command, "ok": ok, "date": date or now()}
    return head | entries | {"rows": [dict(row) for row in rows]}  # type: ignore[no-any-return]


def dumps(result: Document) -> str:
    """JSON text with a line per row. NaN and infinities become null, as JSON has none."""
    head: dict[str, Any] = dict(_without_nan(result))
    rows = head.pop("rows")
    text = json.dumps(head, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return f'{text},\n "rows": [\n{lines}\n ]\n}}\n'


def write(result: Document, file: str) -> None:
    """Writes the result into a file, or to stdout for "-"."""
    if file == "-":
        print(dumps(result), end="")
    else:
        Path(file).write_text(dumps(result), encoding="utf-8")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
