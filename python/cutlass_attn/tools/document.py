"""The one form in which every command writes its result as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

# 1 was of `bench` alone; a file of it is still read.
SCHEMA = 2


class Document(TypedDict, total=False):
    """What all results have; each command adds its own entries, docs/benchmarking.md has them."""

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
    """A result as it is written."""
    head: Any = {"schema": SCHEMA, "command": command, "ok": ok, "date": date or now()}
    return head | entries | {"rows": [dict(row) for row in rows]}  # type: ignore[no-any-return]


def dumps(result: Document) -> str:
    """As text, a line per row; what is not a number is null, as JSON has no NaN."""
    head: dict[str, Any] = dict(_without_nan(result))
    rows = head.pop("rows")
    text = json.dumps(head, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return f'{text},\n "rows": [\n{lines}\n ]\n}}\n'


def write(result: Document, file: str) -> None:
    """Into a file, or on stdout for "-"."""
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
