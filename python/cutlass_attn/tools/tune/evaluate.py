"""From a tile to a score, by steps from the cheapest to the dearest: the first may be enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import tuning
from ..._build.tuned_toml import Rule, Tuning
from ..gates.thresholds import failures, load_gates
from .proposers import Tried
from .space import Candidate, Space, why_no_room
from .static import predicted_us

INPUTS = 5
ROUNDS = 7
_NEVER = 1e9

# What a step finds is added to `figures`; it returns why the tile is rejected, or nothing.
Step = Callable[[Candidate, Candidate, dict[str, Any]], str]
# Runs a job of worker.py with these tiles as variants.
Worker = Callable[[dict[str, Any], Sequence[Candidate]], dict[str, Any]]


class Evaluator:
    """Evaluates tiles of a task, on a device or, with `device` None, by the static model."""

    def __init__(
        self, space: Space, device: str | None, worker: Worker, ncu: str | None = None
    ) -> None:
        self.space, self.task, self.device = space, space.task, device
        self._worker, self._ncu = worker, ncu
        self._figures: dict[Candidate, dict[str, Any]] = {}
        self.without_counters = "" if device else "no GPU"  # why no gate is measured

    @property
    def steps(self) -> list[tuple[str, Step]]:
        """In the order in which a tile has to pass them; the last one gives the score."""
        found: list[tuple[str, Step]] = [
            ("space", self._in_space),
            ("resources", self._resources),
            ("compile", self._compile),
            ("spills", self._spills),
        ]
        if self.device is None:
            return [*found, ("gates", self._static_gates), ("model", self._model)]
        measured: list[tuple[str, Step]] = [("correctness", self._correct), ("gates", self._gates)]
        return [*found, *measured, ("time", self._time)]

    def evaluate(
        self,
        candidate: Candidate,
        incumbent: Candidate,
        incumbent_score: float,
        show: Callable[[str], None] = lambda _: None,
    ) -> Tried:
        """Takes a tile as far as it gets. The score is relative to that of the first incumbent."""
        figures: dict[str, Any] = {}
        name = ""
        for name, step in self.steps:
            show(name)
            if reason := step(candidate, incumbent, figures):
                if (
                    name in ("spills", "gates") and candidate == incumbent
                ):  # it runs now all the same
                    figures["fails"] = "; ".join(filter(None, (figures.get("fails"), reason)))
                    continue
                return Tried(candidate, name, reason, None, figures)
        self._figures[candidate] = figures
        return Tried(candidate, name, "", incumbent_score * figures["speedup"], figures)

    def remember(self, entry: Tried) -> None:
        """Takes over what an earlier run found."""
        self._figures[entry.candidate] = entry.figures or {}

    def _in_space(self, candidate: Candidate, _: Candidate, figures: dict[str, Any]) -> str:
        return self.space.why_not(candidate)

    def _resources(self, candidate: Candidate, _: Candidate, figures: dict[str, Any]) -> str:
        tile = self.task.tile(candidate)
        figures["shared_memory"] = tile.smem_bytes
        return why_no_room(tile, self.task.limits)

    def _compile(self, candidate: Candidate, _: Candidate, figures: dict[str, Any]) -> str:
        job = {"job": "compile", "key": self.task.key(candidate), "arch": self.task.limits.arch}
        answer = self._worker({**job, "model": self.device is None}, [candidate])
        figures.update(answer)
        return str(figures.pop("error", ""))

    def _spills(self, candidate: Candidate, _: Candidate, figures: dict[str, Any]) -> str:
        names = ("stack", "spill_stores", "spill_loads")
        found = [f"{figures[name]} bytes of {name}" for name in names if figures.get(name)]
        return ", ".join(found)

    def _correct(self, candidate: Candidate, _: Candidate, figures: dict[str, Any]) -> str:
        job = {
            "job": "check",
            "key": self.task.key(candidate),
            "head_dim": self.task.head_dim,
            "dtype": self.task.dtype,
            "device": self.device,
            "inputs": INPUTS,
        }
        return str(self._worker(job, [candidate]).get("error", ""))

    def _static_gates(self, candidate: Candidate, _: Candidate, figures: dict[str, Any]) -> str:
        known = {name: figures[name] for name in ("registers", "shared_memory")}
        known["local_memory"] = figures.get("stack", 0)
        rows = load_gates().judge(self.task.kernel, self.task.head_dim, "", known)
        return "; ".join(map(str, failures(rows)))

    def _gates(self, candidate: Candidate, _: Candidate, figures: dict[str, Any]) -> str:
        if not self.without_counters:
            shapes = [asdict(shape) for shape in self.task.shapes]
            job = {"job": "gates", "key": self.task.key(candidate), "shapes": shapes}
            answer = self._worker({**job, "device": self.device, "ncu": self._ncu}, [candidate])
            if "figures" in answer:
                figures["gates"] = answer["figures"]
                return "; ".join(answer["failed"])
            if "error" in answer:  # says nothing of other tiles
                return f"not measured: {answer['error']}"
            self.without_counters = str(answer["unavailable"])
        return self._static_gates(candidate, candidate, figures)

    def _time(self, candidate: Candidate, incumbent: Candidate, figures: dict[str, Any]) -> str:
        if candidate == incumbent:
            figures["speedup"] = 1.0
            return ""
        job = {
            "job": "time",
            "key": self.task.key(candidate),
            "incumbent": self.task.key(incumbent),
            "shapes": [asdict(shape) for shape in self.task.shapes],
            "dtype": self.task.dtype,
            "device": self.device,
            "rounds": ROUNDS,
            "timing": "graph" if max(s.flops for s in self.task.shapes) < 5e9 else "events",
        }
        answer = self._worker(job, [candidate, incumbent])
        if "error" in answer:
            return str(answer["error"])
        figures.update(answer)
        return ""

    def _model(self, candidate: Candidate, incumbent: Candidate, figures: dict[str, Any]) -> str:
        model = figures["model"]
        if "error" in model:
            return f"the model does not apply: {model['error']}"
        figures["predicted_us"] = self._predict(candidate, figures)
        base = figures if candidate == incumbent else self._figures[incumbent]
        figures["speedup"] = base["predicted_us"] / figures["predicted_us"]
        return ""

    def _predict(self, candidate: Candidate, figures: dict[str, Any]) -> float:
        tile = self.task.tile(candidate)
        times = [
            predicted_us(figures["model"], tile, figures["registers"], shape, self.task.limits)
            for shape in self.task.shapes
        ]
        return sum(times)


class Processes:
    """Runs jobs of worker.py, each in a process of its own."""

    def __init__(self, space: Space, folder: Path, timeout: float = 600.0) -> None:
        self._task, self._timeout = space.task, timeout
        self._file = folder / "candidates.toml"

    def __call__(self, job: dict[str, Any], tiles: Sequence[Candidate]) -> dict[str, Any]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self._tuning(tiles).dumps(), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "cutlass_attn.tools.tune.worker"],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                timeout=self._timeout,
                env={**os.environ, tuning.VARIABLE: str(self._file)},
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer in {self._timeout:.0f} s"}
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            said = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
            return {"error": f"the process ended with status {done.returncode}: {said[0]}"}
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    def _tuning(self, tiles: Sequence[Candidate]) -> Tuning:
        """Makes variants of the tiles; which of them would be preferred does not matter."""
        task, names = self._task, list(dict.fromkeys(map(str, tiles)))
        least = [_NEVER] * (len(names) - 1) + [0.0]
        return Tuning(
            [
                Rule(task.limits.device_class, task.kernel, task.dims, name, limit)
                for name, limit in zip(names, least)
            ]
        )
