"""Who proposes the next tile to try.

A proposer sees a Context: the task and the device's limits, what was tried with its scores, and
what profilers and compilers said of it (I1, I2 and I3 of EvoEngineer, arXiv 2510.03760). It keeps
nothing between rounds, and its random numbers follow from the seed and the number of rounds, so a
run that is interrupted goes on as it would have.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from .space import AXES, Candidate, Space, Task, parse_tile


class ProposalError(ValueError):
    """A program proposed nothing that can be tried; the message says what it answered."""


@dataclass(frozen=True)
class Tried:
    """A tile, and what came of it."""

    candidate: Candidate
    stage: str  # the last one that it came to
    reason: str = ""  # why it was rejected there; empty if it has a score
    score: float | None = None  # speed over that of the first incumbent
    figures: dict[str, Any] | None = None
    seconds: float = 0.0  # since the start of the run, at its end

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "candidate": str(self.candidate)}


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """Those with a score, the best first."""
    scored = [entry for entry in tried if entry.score is not None]
    return sorted(scored, key=lambda entry: -(entry.score or 0.0))


@dataclass(frozen=True)
class Context:
    """All that is known when the next tile is proposed: one at least has a score."""

    space: Space
    tried: Sequence[Tried]
    refused: tuple[str, ...] = ()  # why the last answers of a proposer could not be tried

    @property
    def task(self) -> Task:
        return self.space.task

    @property
    def untried(self) -> list[Candidate]:
        known = {entry.candidate for entry in self.tried}
        return [candidate for candidate in self.space.candidates if candidate not in known]

    def elites(self, count: int) -> list[Candidate]:
        """The best so far, the best first."""
        return [entry.candidate for entry in ranked(self.tried)[:count]]

    def as_json(self) -> dict[str, Any]:
        tried = [entry.as_json() for entry in self.tried]
        insights = [
            {"tile": str(entry.candidate), **entry.figures} for entry in self.tried if entry.figures
        ]
        return {
            "task": {**self.task.as_json(), "axes": self.space.axes},
            "incumbent": str(self.elites(1)[0]),
            "tried": [{k: v for k, v in entry.items() if k != "figures"} for entry in tried],
            "insights": insights,
            "refused": self.refused,
        }


class Proposer(Protocol):
    """Proposes a tile that was not tried, or None if there is none. May raise ProposalError."""

    def propose(self, context: Context) -> Candidate | None: ...


def _random(seed: int, context: Context) -> random.Random:
    return random.Random(f"{seed}/{len(context.tried)}")


@dataclass(frozen=True)
class Exhaustive:
    """Every tile, in the order of the space."""

    def propose(self, context: Context) -> Candidate | None:
        return next(iter(context.untried), None)


@dataclass(frozen=True)
class Random:
    """Any tile, all alike."""

    seed: int = 0

    def propose(self, context: Context) -> Candidate | None:
        untried = context.untried
        return _random(self.seed, context).choice(untried) if untried else None


@dataclass(frozen=True)
class Evolutionary:
    """A child of the best: of two of them, or of one with an axis moved by a step or two."""

    seed: int = 0
    elites: int = 4
    explore: float = 0.15  # how often any tile at all
    attempts: int = 200

    def propose(self, context: Context) -> Candidate | None:
        untried = set(context.untried)
        if not untried:
            return None
        draw = _random(self.seed, context)
        parents = context.elites(self.elites)
        if draw.random() >= self.explore:
            for _ in range(self.attempts):
                child = self._mutate(draw.choice(parents), context.space, draw)
                if len(parents) > 1 and draw.random() < 0.5:
                    one, other = draw.sample(parents, 2)
                    child = self._cross(one, other, draw)
                if child in untried:
                    return child
        return draw.choice(sorted(untried))

    @staticmethod
    def _cross(a: Candidate, b: Candidate, draw: random.Random) -> Candidate:
        return Candidate(*(getattr(draw.choice((a, b)), name) for name in AXES))

    @staticmethod
    def _mutate(parent: Candidate, space: Space, draw: random.Random) -> Candidate:
        child = parent
        for name in draw.sample(AXES, draw.choice((1, 1, 2))):  # most often a single one
            values = space.axes[name]
            value = getattr(child, name)
            near = values.index(value) if value in values else 0
            step = draw.choice((-2, -1, 1, 2))
            child = replace(child, **{name: values[min(max(near + step, 0), len(values) - 1)]})
        return child


@dataclass(frozen=True)
class Command:
    """A program of the user's: the context comes on its stdin as JSON, a tile is due on stdout.

    An answer is {"tile": "128x64x4"} or {"m": 128, "n": 64, "warps": 4}; null ends the run.
    """

    program: str
    timeout: float = 600.0

    def propose(self, context: Context) -> Candidate | None:
        try:
            done = subprocess.run(
                shlex.split(self.program),
                input=json.dumps(context.as_json()),
                capture_output=True,
                text=True,
                timeout=self.timeout,
            )
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            raise ProposalError(f"{self.program}: {error}") from error
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
            raise ProposalError(f"{self.program} ended with status {done.returncode}: {said[0]}")
        candidate = parse_answer(done.stdout)
        if candidate is None:
            return None
        if reason := context.space.why_not(candidate):
            raise ProposalError(f"{candidate} is not in the space: {reason}")
        if any(entry.candidate == candidate for entry in context.tried):
            raise ProposalError(f"{candidate} was tried already")
        return candidate


def parse_answer(text: str) -> Candidate | None:
    """A tile from a program's JSON. Raises ProposalError with what is wrong with it."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProposalError(f"no JSON: {error}; got {text[:200]!r}") from error
    if answer is None:
        return None
    if not isinstance(answer, dict):
        raise ProposalError(
            f"an answer is an object such as {{'tile': '128x64x4'}}, got {answer!r}"
        )
    if type(answer.get("tile")) is str:
        try:
            return parse_tile(answer["tile"])
        except ValueError as error:
            raise ProposalError(str(error)) from error
    values: dict[str, Any] = {name: answer.get(name) for name in AXES}
    values["columns"] = answer.get("columns", 1)
    if wrong := [name for name, value in values.items() if type(value) is not int or value < 1]:
        raise ProposalError(f"{', '.join(wrong)} must be a whole number above 0, got {answer!r}")
    return Candidate(**values)


# By their names on the command line, of the seed.
PROPOSERS: dict[str, Callable[[int], Proposer]] = {
    "exhaustive": lambda _: Exhaustive(),
    "random": Random,
    "evolutionary": Evolutionary,
}


def make_proposer(name: str, seed: int, program: str | None) -> Proposer:
    """The one of that name, or the program's with "command". Raises ValueError."""
    if (name == "command") != (program is not None):
        raise ValueError("--command PROGRAM goes with --proposer command, and with no other")
    if program is not None:
        return Command(program)
    return PROPOSERS[name](seed)
