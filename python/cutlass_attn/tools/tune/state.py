"""What a run of the tuner has found, on disk: it goes on from there after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..._build.files import replace_file
from .proposers import Tried, ranked
from .space import parse_tile

SCHEMA = 1


@dataclass
class State:
    """The task with all that decides what a result means, and the tiles tried."""

    path: Path
    identity: Mapping[str, Any]  # JSON values; a file of another one is not continued
    tried: list[Tried] = field(default_factory=list)

    @property
    def best(self) -> Tried | None:
        return next(iter(ranked(self.tried)), None)

    @property
    def seconds(self) -> float:
        """How long the run has taken, interruptions left out."""
        return self.tried[-1].seconds if self.tried else 0.0

    def add(self, entry: Tried) -> None:
        """Notes a result and writes the file: a reader sees the old one or the new one."""
        self.tried.append(entry)
        content = {
            "schema": SCHEMA,
            "identity": self.identity,
            "tried": [entry.as_json() for entry in self.tried],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, (json.dumps(content, indent=1) + "\n").encode())


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder. Raises ValueError while there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / "lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another run works in {folder}: wait for its end, or choose another --state"
        ) from None
    with lock:
        yield


def open_state(path: Path, identity: Mapping[str, Any]) -> State:
    """The state in `path`, or a new one. Raises ValueError for a file that is of another run."""
    identity = json.loads(json.dumps(identity))
    if not path.is_file():
        return State(path, identity)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tried = [
            Tried(**{**entry, "candidate": parse_tile(entry["candidate"])})
            for entry in content["tried"]
        ]
        known = content["identity"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no state of the tuner: {error!r}; remove it") from error
    if content.get("schema") != SCHEMA or known != identity:
        differing = [name for name in identity if known.get(name) != identity[name]]
        raise ValueError(
            f"{path} is of another run ({', '.join(differing) or 'another version'} differ): "
            "choose another --state, or remove it"
        )
    return State(path, identity, tried)
