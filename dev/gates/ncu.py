"""Figures of one kernel launch, by Nsight Compute."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .thresholds import Gate

_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


class NcuError(RuntimeError):
    """Nsight Compute is missing, may not read the counters, or failed; the message says which."""


class NcuUnavailable(NcuError):
    """Nsight Compute is missing, or may not read the counters: no launch can be measured."""


def find_ncu(path: str | None = None) -> str:
    """The program: `path`, else that on PATH, else in the usual places. Raises NcuUnavailable."""
    if path is not None:
        if found := shutil.which(path):
            return found
        raise NcuUnavailable(f"no Nsight Compute at {path}")
    if found := shutil.which("ncu"):
        return found
    for pattern in _PLACES:
        for place in sorted(Path("/").glob(pattern[1:]), reverse=True):
            return str(place)
    raise NcuUnavailable("no Nsight Compute: ncu is not on PATH; it comes with the CUDA toolkit")


def known_metrics(ncu: str) -> set[str]:
    """Names, without suffixes such as .sum, of the metrics of the present GPU. Raises NcuError."""
    text = _run([ncu, "--query-metrics"])
    return set(re.findall(r"^([a-z0-9]+__\w+)\b", text, re.MULTILINE))


def wanted(gates: Iterable[Gate], known: set[str]) -> dict[str, tuple[str, ...]]:
    """{gate: its metrics} that the GPU has; metrics of the launch are always available."""

    def there(metric: str) -> bool:
        return metric.startswith("launch__") or metric.partition(".")[0] in known

    chosen = {}
    for gate in gates:
        for metrics in (gate.ncu, gate.or_ncu):
            needed = (*metrics, gate.percent_of) if gate.percent_of else metrics
            if metrics and all(map(there, needed)):
                chosen[gate.name] = metrics
                break
    return chosen


def measure(ncu: str, program: Sequence[str], metrics: Iterable[str]) -> dict[str, float]:
    """Metrics of the one kernel that `program` launches while its profiler is on.

    The clocks are not changed: with clocks locked by Nsight Compute, utilisation would be that of
    another machine. Raises NcuError.
    """
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--launch-count", "1"]
    command += ["--metrics", ",".join(dict.fromkeys(metrics)), *program]
    launches = parse_csv(_run(command))
    if not launches:
        raise NcuError("Nsight Compute saw no kernel")
    return launches[0]


def parse_csv(text: str) -> list[dict[str, float]]:
    """{metric: value} of each launch in the output of `ncu --csv --page raw`.

    Metrics without a number, such as n/a, are left out.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    launches = []
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not (row["ID"] or "").isdigit():  # the units, below the names
            continue
        numbers = {name: _number(value) for name, value in row.items() if "__" in (name or "")}
        launches.append({name: value for name, value in numbers.items() if value is not None})
    return launches


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def figures(
    gates: Mapping[str, Gate], chosen: Mapping[str, Iterable[str]], values: Mapping[str, float]
) -> dict[str, float]:
    """The gates' figures from the metrics in `wanted`; gates with a missing metric are left out."""
    found = {}
    for name, metrics in chosen.items():
        parts = [values.get(metric) for metric in metrics]
        total = sum(part for part in parts if part is not None)
        if None in parts:
            continue
        if whole := gates[name].percent_of:
            if whole not in values:
                continue
            total = 100 * total / values[whole] if values[whole] else 0.0
        found[name] = total
    return found


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except OSError as error:
        raise NcuUnavailable(f"Nsight Compute: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise NcuError(f"Nsight Compute: {error}") from error
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        raise NcuUnavailable(
            "Nsight Compute may not read the GPU's counters: run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0 (ERR_NVGPUCTRPERM)"
        )
    if done.returncode != 0 or "==ERROR==" in output:
        lines = [line for line in output.splitlines() if line.strip()]
        # The last output of the program, and the report of Nsight Compute.
        said = [line for line in lines if not line.startswith("==")][-3:]
        said += [line for line in lines if "==ERROR==" in line]
        text = "\n".join(said)
        raise NcuError(f"Nsight Compute failed, exit status {done.returncode}: {text}")
    return done.stdout
