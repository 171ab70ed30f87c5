"""Reads manifest.toml: families, their kernels, and the rows of each kernel."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from families import AXES, Settings, kernel_of
from manifest_rows import (
    ARCHS,
    COUNTS,
    DIM_FIELDS,
    ELEMENTS,
    MAX_AVOIDS,
    MAX_HEAD_DIM,
    TERMS,
    TIERS,
    TILE_FIELDS,
    Cost,
    HeadDims,
    Kernel,
    ManifestError,
    Row,
    Tile,
    choose,
    variant_key,
)

MANIFEST = Path(__file__).with_name("manifest.toml")


@dataclass
class RowSettings:
    """An entry of `rows`; overrides the settings of the kernel and its family for all rows."""

    tile: str = ""
    head_dims: list = dataclasses.field(default_factory=list)
    min_head_dim: int = 0
    dtypes: list = dataclasses.field(default_factory=lambda: ["f16", "bf16"])
    tier: str = "full"
    simt: list = dataclasses.field(default_factory=list)
    entry_names: str = ""
    plain_terms: list = dataclasses.field(default_factory=list)
    cost: dict = dataclasses.field(default_factory=dict)


# The entries of a kernel and of a row, each with a value of its type.
KERNEL_ENTRIES = {name: value for name, value in vars(Settings()).items() if name != "axes"}
ROW_ENTRIES = vars(RowSettings())
AXIS_ENTRIES = [axis for axis in AXES if axis != "general"]
SHARED_ROW_ENTRIES = ("dtypes", "tier", "simt")
OF_TERMS = ("terms", "core_scores")  # in place of `scores`


def _check_type(name: str, value: Any, kind: type, where: str) -> None:
    if type(value) is not kind:
        raise ManifestError(f"{where}: {name} is {value!r}; it must be a {kind.__name__}")


def _check_names(table: dict, allowed: list[str], where: str) -> None:
    for name in table:
        choose(name, allowed, "entry", where)


def _settings(table: dict[str, Any], where: str) -> Settings:
    """Checked settings of a kernel, which override those of its family."""
    settings = Settings()
    for name, value in table.items():
        if name in AXES:
            choose(value, AXES[name], name, where)
            settings.axes[name] = value
        elif name in KERNEL_ENTRIES:
            _check_type(name, value, type(KERNEL_ENTRIES[name]), where)
            setattr(settings, name, value)
    if bool(settings.type) == bool(settings.function):
        raise ManifestError(f"{where}: one of type and function must be given")
    if settings.arch:
        choose(settings.arch, ARCHS, "arch", where)
    _check_avoids(settings.avoids, where)
    choose(settings.entry_names, variant_key.PREFIXES, "entry_names", where)
    return settings


def _check_avoids(avoids: list, where: str) -> None:
    if len(avoids) > MAX_AVOIDS:
        raise ManifestError(f"{where}: avoids has {len(avoids)} entries; allowed: {MAX_AVOIDS}")
    for calls in avoids:
        _check_type("an entry of avoids", calls, dict, where)
        for name, bounds in calls.items():
            if name == "to":
                _check_type("to of avoids", bounds, str, where)
                continue
            choose(name, (*COUNTS, "to"), "avoids", where)
            _check_type(f"{name} of avoids", bounds, list, where)
            are_numbers = all(type(bound) in (int, float) for bound in bounds)
            if not (are_numbers and len(bounds) == 2 and 0 <= bounds[0] < bounds[1]):
                raise ManifestError(
                    f"{where}: {name} of avoids is {bounds!r}; allowed: [from, below], from 0 on"
                )


def _family(name: str, family: Any, scores: dict[str, str]) -> list[Row]:
    where = f"[family.{name}]"
    _check_type("it", family, dict, where)
    shared = dict(family)
    kernels = _tables(shared, "kernels", where) or [{}]
    shared_rows = _tables(shared, "rows", where)
    allowed = [*KERNEL_ENTRIES, *AXIS_ENTRIES, *SHARED_ROW_ENTRIES]
    _check_names(shared, [entry for entry in allowed if entry != "name"], where)
    if shared_rows and all("rows" in own for own in kernels):
        raise ManifestError(f"{where}: rows is given, and every kernel has its own")
    rows: list[Row] = []
    kernels = [kernel for own in kernels for kernel in _of_each_value(own)]
    for number, own in enumerate(kernels, start=1):
        here = f"{where} kernel {number}"
        own_rows = _tables(own, "rows", here)
        _check_names(own, allowed, here)
        replaced = OF_TERMS if "scores" in own else ()
        table = {entry: value for entry, value in shared.items() if entry not in replaced} | own
        kernel = kernel_of(_settings(table, here), scores, here)
        of_family, of_kernel = _of_rows(shared), _of_rows(own)
        entries = [of_family | of_kernel | entry for entry in own_rows]
        entries = entries or [of_family | entry | of_kernel for entry in shared_rows]
        if not entries:
            raise ManifestError(f"{here}: rows is missing, in the kernel and in its family")
        for index, entry in enumerate(entries, start=1):
            _check_names(entry, list(ROW_ENTRIES), f"{where} {kernel.name} row {index}")
            rows += _rows(kernel, entry, f"{where} {kernel.name} row {index}")
    return rows


def _of_each_value(own: dict[str, Any]) -> list[dict[str, Any]]:
    """One kernel for each value of the axes that have a list."""
    found = [own]
    for axis in AXIS_ENTRIES:
        if type(own.get(axis)) is list:
            found = [kernel | {axis: value} for kernel in found for value in own[axis]]
    return found


def _of_rows(table: dict[str, Any]) -> dict[str, Any]:
    return {entry: table[entry] for entry in SHARED_ROW_ENTRIES if entry in table}


def _tables(table: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """Removes and returns the tables of an array, copied; none if it is absent."""
    if name not in table:
        return []
    tables = table.pop(name)
    _check_type(name, tables, list, where)
    if not tables:
        raise ManifestError(f"{where}: {name} must name at least one")
    for entry in tables:
        _check_type(name, entry, dict, where)
    return [dict(entry) for entry in tables]


def _rows(kernel: Kernel, entry: dict[str, Any], where: str) -> list[Row]:
    for name, value in entry.items():
        _check_type(name, value, type(ROW_ENTRIES[name]), where)
    given = RowSettings(**entry)
    for dtype in given.dtypes:
        choose(dtype, ELEMENTS, "dtypes", where)
    for dtype in given.simt:
        choose(dtype, given.dtypes, "simt", where)
    choose(given.tier, TIERS, "tier", where)
    names = given.entry_names or kernel.entry_names
    choose(names, variant_key.PREFIXES, "entry_names", where)
    for term in given.plain_terms:
        choose(term, TERMS, "plain_terms", where)
    for name, value, placeholders in (
        ("head_dims", given.head_dims, DIM_FIELDS),
        ("tile", given.tile, TILE_FIELDS),
    ):
        asked = not kernel.placeholders.isdisjoint(placeholders)
        if asked and not value:
            raise ManifestError(f"{where}: {name} is missing, {kernel.code!r} needs it")
        if value and not asked:
            raise ManifestError(f"{where}: {name} is given, {kernel.code!r} does not use it")
    if not given.dtypes:
        raise ManifestError(f"{where}: dtypes must name at least one")
    if given.simt and kernel.device != "cuda":
        raise ManifestError(f"{where}: simt is for kernels of device cuda, not {kernel.device}")
    if given.cost and not given.tile:
        raise ManifestError(f"{where}: cost is given, {kernel.name} has no choice of tile")

    tile = _tile(given.tile, kernel, where) if given.tile else None
    cost = _cost(given.cost, where) if given.cost else None
    head_dims: list[HeadDims | None] = [None]  # any
    if given.head_dims:
        head_dims = [_head_dims(dims, kernel, where) for dims in given.head_dims]
    rows = [
        Row(
            *(kernel, dtype, dims, tile, given.tier, names, cost),
            plain_terms=tuple(given.plain_terms),
            min_head_dim=given.min_head_dim,
        )
        for dtype in given.dtypes
        for dims in head_dims
    ]
    # Tests run simt rows in every build.
    simt = [row for row in rows if row.dtype in given.simt]
    return rows + [dataclasses.replace(row, simt=True, tier="core") for row in simt]


def _tile(text: str, kernel: Kernel, where: str) -> Tile:
    if not (match := re.fullmatch(variant_key.TILE, text)):
        raise ManifestError(f"{where}: tile is {text!r}; it is like 128x64x4 or 32x32x2c4")
    m, n, warps, columns = match.groups()
    if columns and "columns" not in kernel.placeholders:
        raise ManifestError(f"{where}: tile has columns, {kernel.code!r} does not use them")
    return Tile(int(m), int(n), int(warps), int(columns or 1))


def _head_dims(entry: Any, kernel: Kernel, where: str) -> HeadDims:
    """A number such as 64, or [192, 128] if V has head dim 128."""
    pair = entry if type(entry) is list and len(entry) == 2 else [entry, entry]
    if any(type(dim) is not int or not 0 < dim <= MAX_HEAD_DIM for dim in pair):
        raise ManifestError(
            f"{where}: head_dims has {entry!r}; allowed: 1 to {MAX_HEAD_DIM}, or a pair of those"
        )
    dims = HeadDims(*pair)
    if dims.qk != dims.v and "head_dim_v" not in kernel.placeholders:
        raise ManifestError(f"{where}: head_dims has {entry!r}, {kernel.code!r} has no head_dim_v")
    return dims


def _cost(entry: dict[str, Any], where: str) -> Cost:
    names = [field.name for field in dataclasses.fields(Cost)]
    _check_names(entry, names, f"{where}: cost")
    for name in names:
        if name not in entry:
            raise ManifestError(f"{where}: cost: {name} is missing")
        _check_type(name, entry[name], float, f"{where}: cost")
        if not 0.0 < entry[name] < math.inf:
            raise ManifestError(f"{where}: cost: {name} is {entry[name]}; allowed: above 0")
    return Cost(**entry)


def read_toml(path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"not TOML: {error}") from error


def load(manifest: Path | str = MANIFEST) -> list[Row]:
    """Reads a manifest: its rows in order of preference.

    GPU kernels come first, then the CPU's own, then GPU kernels on the CPU; within each the order
    of the manifest. Raises ManifestError.
    """
    table = read_toml(manifest)
    _check_names(table, ["scores", "family"], "manifest")
    for name in ("scores", "family"):
        if not table.get(name):
            raise ManifestError(f"manifest: {name} must name at least one")
    rows: list[Row] = []
    kernels: dict[str, Kernel] = {}
    seen: set[str] = set()
    for family, entries in table["family"].items():
        for row in _family(family, entries, table["scores"]):
            if kernels.setdefault(row.kernel.name, row.kernel) is not row.kernel:
                raise ManifestError(
                    f"[family.{family}]: a second kernel is {row.kernel.name}; a name is allowed "
                    "once, and follows from the axes where `name` is absent"
                )
            if row.key in seen:
                raise ManifestError(
                    f"[family.{family}]: {row.key} is listed twice; a row is allowed once"
                )
            seen.add(row.key)
            rows.append(row)
    names = list(kernels)
    for number, kernel in enumerate(kernels.values(), start=1):
        for calls in kernel.avoids:
            if "to" in calls:
                choose(calls["to"], names[number:], "to", f"avoids of {kernel.name}")
    return sorted(rows, key=lambda row: (row.simt, row.device == "cpu"))
