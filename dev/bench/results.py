"""Files of results: where they go, which sources they are of, how they are read and summed up."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cutlass_attn.tools.document import SCHEMA
from cutlass_attn.tools.experiment.report import OK, Report, Row
from cutlass_attn.tools.experiment.stats import geometric_mean


def load(path: str | Path) -> Report:
    """Reads a result's file, of schema 1 or 2. Raises ValueError for other files, OSError if it
    cannot be read."""
    try:
        content = json.loads(Path(path).read_text())
        schema = content["schema"]
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError):
        raise ValueError(f"{path} is not a result of `python -m dev.bench`") from None
    if schema not in (1, SCHEMA):
        raise ValueError(f"{path} has schema {schema!r}; this version reads 1 and {SCHEMA}")
    if "grid" not in content:
        raise ValueError(f"{path} is of `cutlass-attn {content['command']}`, not of a benchmark")
    rows = [Row(**row) for row in content["rows"]]
    head = {f.name: content[f.name] for f in fields(Report) if f.name in content}
    return Report(**{**head, "rows": rows})


@dataclass(frozen=True)
class Mean:
    """Geometric mean of the speed-ups of the rows that have one."""

    value: float
    rows: int
    of: int  # rows asked for, with those that did not run or were wrong


def mean_speedup(rows: Sequence[Row]) -> Mean | None:
    """None if no row is right and has a ratio."""
    ratios = [row.ratio.value for row in rows if row.ratio and row.status == OK]
    return Mean(geometric_mean(ratios), len(ratios), len(rows)) if ratios else None


def unique(values: Any) -> list[Any]:
    """In order of appearance."""
    return list(dict.fromkeys(values))


def checkout() -> Path | None:
    """The folder of this project's sources that is the working directory or contains it."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        project = folder / "pyproject.toml"
        if project.is_file():
            found = re.search(r'^name = "cutlass_attn"$', project.read_text(), re.MULTILINE)
            return folder if found else None
    return None


def checkout_commit() -> str:
    """The commit of the sources around the working directory, "-dirty" with changes to them."""
    folder = checkout()
    if folder is None:
        return ""
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def default_path(device: str, grid: str) -> Path:
    """benchmarks/results/<device>-<grid>.json of a checkout, or that name right here."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    name = Path(f"{slug}-{grid}.json")
    folder = checkout()
    return folder / "benchmarks" / "results" / name if folder else name
