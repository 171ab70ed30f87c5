"""The format of tuned.toml, which says which tile of a kernel runs.

    [smem_228."sm80"]         GPUs by the shared memory of an SM, and a kernel
    d64 = ["128x64x4", "64x64x4"]

    [smem_228."sm80".decode]  for calls of at most 16 queries; without it the rules above apply
    d64 = ["64x128x4"]

    [failing.smem_228]        variants that fail a performance gate there: others are preferred
    "sm80/f16/d64/128x128x4" = "tensor-pipe utilisation 31 %, >= 40 allowed"

kernels/runtime/tuned.toml says which tile of a list runs. This module reads it at build time, and
the user's file at import (tuning.py), so it imports nothing of the package but `facts`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from .facts import SMEM_CLASSES_KB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Classes of GPUs, by the shared memory of an SM in KB.
DEVICE_CLASSES = {f"smem_{kb}": kb for kb in SMEM_CLASSES_KB}
FAILING, DECODE = "failing", "decode"


def device_class(smem_per_sm: int) -> str:
    """The class of a GPU with this many bytes of shared memory per SM: the largest that fits."""
    reached = [name for name, kb in DEVICE_CLASSES.items() if kb * 1024 <= smem_per_sm]
    return reached[-1] if reached else next(iter(DEVICE_CLASSES))


class TuningError(ValueError):
    """A mistake in a tuning file; the message names the line if it is known."""


@dataclass(frozen=True)
class Rule:
    """A tile of a list: for calls with MIN_TILES_PER_SM of it, or the last one for all others."""

    device_class: str
    kernel: str
    head_dims: str  # as in a key: "d64", "d192v128"
    tile: str
    line: int = 0
    decode: bool = False  # only for calls of at most MAX_DECODE_QUERIES queries

    @property
    def smem_kb(self) -> int:
        return DEVICE_CLASSES[self.device_class]

    @property
    def table(self) -> str:
        return _table_name(self.device_class, self.kernel, self.decode)

    @property
    def where(self) -> str:
        return f"[{self.table}] {self.head_dims}"

    @property
    def rows(self) -> int:
        """Queries of the tile."""
        return int(self.tile.partition("x")[0])

    def dims(self) -> tuple[int, int]:
        """Head dim of Q and K, and of V."""
        qk, _, v = self.head_dims[1:].partition("v")
        return int(qk), int(v or qk)


@dataclass(frozen=True)
class Failing:
    """A variant that fails a gate on GPUs of a class."""

    device_class: str
    key: str
    reason: str
    line: int = 0

    @property
    def smem_kb(self) -> int:
        return DEVICE_CLASSES[self.device_class]


@dataclass
class Tuning:
    """The content of a tuning file."""

    rules: list[Rule] = field(default_factory=list)
    failing: list[Failing] = field(default_factory=list)

    def dumps(self, before: str = "") -> str:
        """The text of the file: `before` with its comments, updated to this content."""
        import tomlkit  # not at build time

        known = parse(before)._tables()
        content = tomlkit.parse(before or _TITLE)
        wanted = self._tables()
        for path in {**known, **wanted}:
            *above, last = path
            parent: Any = content
            for name in above:
                if name not in parent:
                    parent[name] = tomlkit.table(is_super_table=True)
                parent = parent[name]
            if last not in parent:
                parent[last] = tomlkit.table()
            entries, now = wanted.get(path, {}), known.get(path, {})
            for name in now.keys() - entries.keys():
                del parent[last][name]
            for name, value in entries.items():
                if now.get(name) != value:
                    parent[last][name] = value
            if not parent[last]:
                del parent[last]
        return tomlkit.dumps(content)

    def _tables(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """The tables by their paths of names."""
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for rule in self.rules:
            path = (rule.device_class, rule.kernel, *[DECODE] * rule.decode)
            found.setdefault(path, {}).setdefault(rule.head_dims, []).append(rule.tile)
        for mark in self.failing:
            found.setdefault((FAILING, mark.device_class), {})[mark.key] = mark.reason
        return found


_TITLE = "# Written by `cutlass-attn tune`; docs/tuning.md has the format.\n"


def _quoted(text: str) -> str:
    return f'"{text}"'


def parse(text: str) -> Tuning:
    """Parses a file. Raises TuningError. The caller checks that tiles and variants exist."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TuningError(f"not TOML: {error}") from error
    lines = _Lines(text)
    tuning = Tuning()
    for name, entries in table.items():
        if name == FAILING:
            for device_class, keys in _table(entries, f"[{FAILING}]").items():
                _check_class(device_class, lines)
                for key, reason in _table(keys, f"[{FAILING}.{device_class}]").items():
                    line = lines.find(f"{FAILING}.{device_class}", key)
                    if type(reason) is not str:
                        raise TuningError(f"{_at(line)}{key}: the reason must be a text")
                    tuning.failing.append(Failing(device_class, key, reason, line))
            continue
        _check_class(name, lines)
        for kernel, by_dims in _table(entries, f"[{name}]").items():
            by_dims = dict(_table(by_dims, f"[{_table_name(name, kernel)}]"))
            decode = by_dims.pop(DECODE, {})
            for dims, tiles in by_dims.items():
                tuning.rules += _rules(name, kernel, dims, tiles, lines)
            for dims, tiles in _table(decode, f"[{_table_name(name, kernel, True)}]").items():
                tuning.rules += _rules(name, kernel, dims, tiles, lines, decode=True)
    return tuning


def _check_class(name: str, lines: _Lines) -> None:
    if name not in DEVICE_CLASSES:
        line = lines.find("", name)
        allowed = ", ".join(DEVICE_CLASSES)
        raise TuningError(f"{_at(line)}device class is {name!r}; allowed: {allowed}")


def _table_name(device_class: str, kernel: str, decode: bool = False) -> str:
    return f"{device_class}.{_quoted(kernel)}" + f".{DECODE}" * decode


def _rules(
    name: str, kernel: str, dims: str, tiles: Any, lines: _Lines, decode: bool = False
) -> list[Rule]:
    table = _table_name(name, kernel, decode)
    header, where = table.replace('"', ""), f"[{table}] {dims}"
    start = lines.find(header, dims)
    if not re.fullmatch(r"d[1-9]\d{0,3}(v[1-9]\d{0,3})?", dims):
        raise TuningError(f'{_at(start)}{where}: head dims are like d64 or d192v128, got "{dims}"')
    if type(tiles) is not list or not tiles or any(type(tile) is not str for tile in tiles):
        raise TuningError(
            f'{_at(start)}{where} must be a list of tiles such as ["128x64x4", "64x64x4"]'
        )
    return [
        Rule(name, kernel, dims, tile, lines.find(header, f'"{tile}"', start), decode)
        for tile in tiles
    ]


def _table(entry: Any, where: str) -> dict[str, Any]:
    if type(entry) is not dict:
        raise TuningError(f"{where} must be a table")
    return entry


def _at(line: int) -> str:
    return f"line {line}: " if line else ""


class _Lines:
    """Line numbers in a TOML file, which the parser does not give."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def find(self, header: str, needle: str, start: int = 0) -> int:
        """The first line from `start` on, within the table `header` if it has a line of its own,
        that has `needle`; else `start`. Lines count from 1, 0 is none."""
        table = ""
        for number, line in enumerate(self._lines, start=1):
            text = line.split("#")[0].strip()
            if text.startswith("["):
                table = text.strip("[] ").replace('"', "").replace("'", "")
            if number >= start and needle in text and (not header or table == header):
                return number
        return start
