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

# Of a tile and the one to beat, at first itself. What a step finds is added to `figures`; it says
# why the tile is rejected, or nothing.
Step = Callable[[Candidate, Tried, dict[str, Any]], str]
# Runs a job of worker.py with these tiles as variants.
Worker = Callable[[dict[str, Any], Sequence[Candidate]], dict[str, Any]]


class Evaluator:
    """Evaluates tiles of a task, on a device or, with `device` None, by the static model."""

    def __init__(
        self, space: Space, device: str | None, worker: Worker, ncu: str | None = None
    ) -> None:
        self.space, self.task, self.device = space, space.task, device
        self._worker, self._ncu = worker, ncu
        self._shapes = [asdict(shape) for shape in self.task.shapes]
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
        incumbent: Tried | None = None,
        show: Callable[[str], None] = lambda _: None,
    ) -> Tried:
        """Takes a tile as far as it gets. The score is relative to that of the first incumbent."""
        figures: dict[str, Any] = {}
        incumbent = incumbent or Tried(candidate, "", score=1.0, figures=figures)
        name = ""
        for name, step in self.steps:
            show(name)
            if reason := step(candidate, incumbent, figures):
                # The first runs now all the same.
                if name in ("spills", "gates") and candidate == incumbent.candidate:
                    figures["fails"] = "; ".join(filter(None, (figures.get("fails"), reason)))
                    continue
                return Tried(candidate, name, reason, None, figures)
        return Tried(candidate, name, "", (incumbent.score or 1.0) * figures["speedup"], figures)

    def _ask(self, job: str, *tiles: Candidate, **about: Any) -> dict[str, Any]:
        """A job of worker.py about the first of the tiles."""
        return self._worker({"job": job, "key": self.task.key(tiles[0]), **about}, tiles)

    def _in_space(self, candidate: Candidate, _: Tried, figures: dict[str, Any]) -> str:
        return self.space.why_not(candidate)

    def _resources(self, candidate: Candidate, _: Tried, figures: dict[str, Any]) -> str:
        tile = self.task.tile(candidate)
        figures["shared_memory"] = tile.smem_bytes
        return why_no_room(tile, self.task.limits)

    def _compile(self, candidate: Candidate, _: Tried, figures: dict[str, Any]) -> str:
        model = {} if self.device else {"model": self.task.score}
        figures.update(self._ask("compile", candidate, arch=self.task.limits.arch, **model))
        return str(figures.pop("error", ""))

    def _spills(self, candidate: Candidate, _: Tried, figures: dict[str, Any]) -> str:
        names = ("stack", "spill_stores", "spill_loads")
        found = [f"{figures[name]} bytes of {name}" for name in names if figures.get(name)]
        return ", ".join(found)

    def _correct(self, candidate: Candidate, _: Tried, figures: dict[str, Any]) -> str:
        kind = {"head_dim": self.task.head_dim, "dtype": self.task.dtype, "device": self.device}
        return str(self._ask("check", candidate, **kind, inputs=INPUTS).get("error", ""))

    def _static_gates(self, candidate: Candidate, _: Tried, figures: dict[str, Any]) -> str:
        known = {name: figures[name] for name in ("registers", "shared_memory")}
        known["local_memory"] = figures.get("stack", 0)
        rows = load_gates().judge(self.task.kernel, self.task.head_dim, "", known)
        return "; ".join(map(str, failures(rows)))

    def _gates(self, candidate: Candidate, _: Tried, figures: dict[str, Any]) -> str:
        if not self.without_counters:
            where = {"shapes": self._shapes, "device": self.device, "ncu": self._ncu}
            answer = self._ask("gates", candidate, **where)
            if "figures" in answer:
                figures["gates"] = answer["figures"]
                return "; ".join(answer["failed"])
            if "error" in answer:  # says nothing of other tiles
                return f"not measured: {answer['error']}"
            self.without_counters = str(answer["unavailable"])
        return self._static_gates(candidate, _, figures)

    def _time(self, candidate: Candidate, incumbent: Tried, figures: dict[str, Any]) -> str:
        if candidate == incumbent.candidate:
            figures["speedup"] = 1.0
            return ""
        answer = self._ask(
            "time",
            candidate,
            incumbent.candidate,
            incumbent=self.task.key(incumbent.candidate),
            shapes=self._shapes,
            dtype=self.task.dtype,
            device=self.device,
            rounds=ROUNDS,
            timing="graph" if max(s.flops for s in self.task.shapes) < 5e9 else "events",
        )
        if "error" in answer:
            return str(answer["error"])
        figures.update(answer)
        return ""

    def _model(self, candidate: Candidate, incumbent: Tried, figures: dict[str, Any]) -> str:
        model = figures["model"]
        if "error" in model:
            return f"the model does not apply: {model['error']}"
        tile = self.task.tile(candidate)
        figures["predicted_us"] = sum(
            predicted_us(model, tile, figures["registers"], shape, self.task.limits)
            for shape in self.task.shapes
        )
        base = incumbent.figures or {}
        figures["speedup"] = base["predicted_us"] / figures["predicted_us"]
        return ""


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
        where = self._task.limits.device_class, self._task.kernel, self._task.dims
        names = dict.fromkeys(map(str, tiles))
        rules = [Rule(*where, name, float(least)) for least, name in enumerate(names)]
        return Tuning(rules[::-1])
