"""Reads gates.toml and compares the figures of kernels with its thresholds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GATES = Path(__file__).with_name("gates.toml")

PASS, FAIL, SHOWN, UNKNOWN = "pass", "FAIL", "-", "not measured"


@dataclass(frozen=True)
class Gate:
    """A figure, and the metrics of Nsight Compute that it is computed from."""

    name: str
    what: str
    unit: str
    ncu: tuple[str, ...] = ()
    or_ncu: tuple[str, ...] = ()
    percent_of: str = ""


@dataclass(frozen=True)
class Threshold:
    """Limit of a figure, upper or lower, from a head dim on."""

    most: float | None = None
    least: float | None = None
    head_dim: int = 0

    def __post_init__(self) -> None:
        if (self.most is None) == (self.least is None):
            raise ValueError("a threshold is either `most` or `least`")

    def holds(self, value: float) -> bool:
        return value <= self.most if self.most is not None else value >= (self.least or 0)

    def __str__(self) -> str:
        return f"<= {self.most:g}" if self.most is not None else f">= {self.least:g}"


@dataclass(frozen=True)
class Judgement:
    """A row of the table."""

    gate: Gate
    threshold: Threshold | None
    measured: float | None
    verdict: str  # PASS, FAIL, SHOWN without a threshold, UNKNOWN without a figure

    def __str__(self) -> str:
        measured = "?" if self.measured is None else f"{self.measured:.4g}"
        text = f"{self.gate.what} {measured} {self.gate.unit}".rstrip()
        return f"{text}, {self.threshold} allowed" if self.threshold else text

    def as_json(self) -> dict[str, Any]:
        threshold = self.threshold
        return {
            "gate": self.gate.name,
            "unit": self.gate.unit,
            "threshold": str(threshold) if threshold else None,
            "measured": self.measured,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Class:
    """Kernels with common thresholds, by kind of call and gate."""

    kernels: tuple[str, ...]
    thresholds: Mapping[str, Mapping[str, Threshold]]  # "always", "forward", "decode"


class Gates:
    """The content of gates.toml."""

    def __init__(self, gates: dict[str, Gate], classes: list[Class]) -> None:
        self.gates = gates
        self._classes = {kernel: entry for entry in classes for kernel in entry.kernels}

    def judge(
        self, kernel: str, head_dim: int, op: str, figures: Mapping[str, float]
    ) -> list[Judgement]:
        """A row per gate, for a call `op`, "forward", "decode" or "" for machine code alone."""
        thresholds: dict[str, Threshold] = {}
        if known := self._classes.get(kernel):
            for kind in ("always", op):
                thresholds |= known.thresholds.get(kind, {})
        rows = []
        for name, gate in self.gates.items():
            threshold, measured = thresholds.get(name), figures.get(name)
            if threshold and head_dim < threshold.head_dim:
                threshold = None
            if measured is None:
                verdict = UNKNOWN
            elif threshold is None:
                verdict = SHOWN
            else:
                verdict = PASS if threshold.holds(measured) else FAIL
            rows.append(Judgement(gate, threshold, measured, verdict))
        return rows


def failures(rows: list[Judgement]) -> list[Judgement]:
    return [row for row in rows if row.verdict == FAIL]


@cache
def load_gates(path: Path = GATES) -> Gates:
    """Reads the thresholds. Raises ValueError for an entry that is unknown."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    gates = {}
    for name, entry in table["gate"].items():
        metrics, other = (tuple(entry.pop(key, ())) for key in ("ncu", "or_ncu"))
        gates[name] = Gate(name, ncu=metrics, or_ncu=other, **entry)
    classes = []
    for entry in table["class"]:
        kernels = tuple(entry.pop("kernels"))
        thresholds = {}
        for kind, limits in entry.items():
            if kind not in ("always", "forward", "decode"):
                raise ValueError(f"{path}: class of {kernels[0]}: unknown entry {kind}")
            if unknown := set(limits) - set(gates):
                raise ValueError(f"{path}: class of {kernels[0]}: no gate {unknown.pop()}")
            thresholds[kind] = {name: Threshold(**limit) for name, limit in limits.items()}
        classes.append(Class(kernels, thresholds))
    return Gates(gates, classes)
