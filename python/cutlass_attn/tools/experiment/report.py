"""What a benchmark found, and its JSON file; docs/benchmarking.md describes the fields."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .problems import Shape
from .stats import Ratio, geometric_mean, paired_ratio

SCHEMA = 1

OK, WRONG, UNSUPPORTED, FAILED = "ok", "wrong", "unsupported", "failed"


@dataclass
class Row:
    """One implementation on one shape. Without a time, `reason` says why."""

    op: str
    impl: str  # which code exactly; `requested` until that is known
    requested: str  # what it was asked for as: "cutlass_attn:auto"
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool
    us: float | None = None  # median of rounds_us
    tflops: float | None = None
    gbps: float | None = None  # decode only
    timing: str = ""
    rounds_us: list[float] = field(default_factory=list)  # each the median of `samples` calls
    samples: int = 0
    host_us: float | None = None  # where it is measured; mean of a call to its return
    speedup: dict[str, Any] | None = None  # {"over", "value", "low", "high"}
    rms_error: float | None = None  # against fp64, of what was compared
    rms_allowed: float | None = None
    sm_clock: str = ""  # read just after the rounds
    status: str = OK
    reason: str = ""

    @property
    def shape(self) -> Shape:
        return Shape(**{f.name: getattr(self, f.name) for f in fields(Shape)})

    @property
    def ratio(self) -> Ratio | None:
        if self.speedup is None:
            return None
        return Ratio(*(self.speedup[name] for name in Ratio._fields))

    def set_times(self, rounds_us: Sequence[float], median_us: float) -> None:
        self.rounds_us = [rounded(us) for us in rounds_us]
        self.us = rounded(median_us)
        self.tflops = rounded(self.shape.flops / median_us / 1e6)
        if self.op == "decode":
            element_size = 4 if self.dtype == "float32" else 2
            self.gbps = rounded(self.shape.bytes(element_size) / median_us / 1e3)

    def as_json(self) -> dict[str, Any]:
        left_out = {"gbps": self.op != "decode", "host_us": self.host_us is None}
        return {name: x for name, x in asdict(self).items() if not left_out.get(name, False)}


@dataclass
class Report:
    """All rows, and what they were measured on and how."""

    grid: str
    baseline: str
    environment: dict[str, Any]
    method: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)  # of other libraries
    absent: dict[str, str] = field(default_factory=dict)  # implementation: why
    commit: str = ""
    date: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    aborted: str = ""  # why the rest was not measured
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Did this library's kernels run and give right results wherever they are supported?"""
        ours = [row for row in self.rows if row.requested.startswith("cutlass_attn:")]
        return not self.aborted and all(row.status in (OK, UNSUPPORTED) for row in ours)

    def fill_speedups(self, rows: Sequence[Row]) -> None:
        """Compares rows of one shape and dtype with the baseline's, where that was timed."""
        base = next((r for r in rows if r.requested == self.baseline and r.us is not None), None)
        if base is None:
            return
        for row in rows:
            if row.us is not None:
                ratio = paired_ratio(base.rounds_us, row.rounds_us)
                row.speedup = {"over": self.baseline}
                row.speedup |= {name: rounded(x) for name, x in ratio._asdict().items()}

    def dumps(self) -> str:
        """The JSON document, a line per row."""
        head = {"schema": SCHEMA, **{f.name: getattr(self, f.name) for f in fields(self)}}
        del head["rows"]
        text = json.dumps(head, indent=1).removesuffix("\n}")
        rows = ",\n".join("  " + json.dumps(row.as_json()) for row in self.rows)
        return f'{text},\n "rows": [\n{rows}\n ]\n}}\n'


def load(path: str | Path) -> Report:
    """Reads a file that `dumps` wrote. Raises ValueError for another one, OSError for none."""
    try:
        document = json.loads(Path(path).read_text())
        schema = document["schema"]
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError):
        raise ValueError(f"{path} is not a result of `cutlass-attn bench`") from None
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; this version reads {SCHEMA}")
    rows = [Row(**row) for row in document["rows"]]
    head = {f.name: document[f.name] for f in fields(Report) if f.name != "rows"}
    return Report(**head, rows=rows)


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


def rounded(x: float) -> float:
    """Five digits: more than any measurement repeats."""
    return float(f"{x:.5g}")
