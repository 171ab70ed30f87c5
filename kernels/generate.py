#!/usr/bin/env python3
"""Turns manifest.toml into translation units and the variant registry.

    generate.py --out DIR [--tier core|full] [--cuda] [--simt] [--archs 80]

and runtime/tuned.toml into the table that tiles are chosen by. It writes into DIR

    <row>.cu, <row>.cpp       one unit per compiled kernel x dtype x head dim x tile
    facts.hpp, facts.py       what facts.toml says
    units.json                sources of the GPU kernels left out, for NVRTC: compiled at first use
    manifest_units.inc        what manifest.cpp must see declared
    manifest_table.inc        kKernels, kRows (compiled or not) and kTuned, for manifest.cpp
    space.json                what the tuner may choose, by space.toml, and the source to fill in
    units.cmake               the lists CUTLASS_ATTN_CUDA_UNITS_<arch>, CUTLASS_ATTN_SIMT_UNITS

A file whose content would stay the same is left untouched, so that nothing rebuilds without need;
a unit that no row asks for any more is deleted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import facts
from facts import FACTS
from manifest_rows import (
    ACCUMULATE,
    ARCHS,
    BACKWARD_OPTIONS,
    BANNER,
    DEVICES,
    DIM_FIELDS,
    ELEMENTS,
    MAX_HEAD_DIM,
    OPS,
    OPTIONS,
    QUANTIZE,
    TERMS,
    TIERS,
    TILE_FIELDS,
    Build,
    Cost,
    HeadDims,
    Kernel,
    ManifestError,
    Row,
    Tile,
    compositions,
    designated,
    device_source,
    quote,
    tuned_toml,
    variant_key,
)

MANIFEST = Path(__file__).with_name("manifest.toml")
TUNED = Path(__file__).with_name("runtime") / "tuned.toml"
SPACE = Path(__file__).with_name("space.toml")


def _take(table: dict, name: str, kind: type, where: str, **default: Any) -> Any:
    """Removes and returns table[name], checked to be a `kind`."""
    if name not in table:
        if "default" in default:
            return default["default"]
        raise ManifestError(f"{where}: {name} is missing")
    value = table.pop(name)
    if type(value) is not kind:
        raise ManifestError(f"{where}: {name} is {value!r}; it must be a {kind.__name__}")
    return value


def _choose(value: str, allowed: Iterable[str], name: str, where: str) -> str:
    if value not in allowed:
        raise ManifestError(f"{where}: {name} is {value!r}; allowed: {', '.join(allowed)}")
    return value


def _nothing_left(table: dict, where: str) -> None:
    if table:
        raise ManifestError(f"{where}: unknown entry {', '.join(sorted(table))}")


def _kernel(name: str, table: dict, all_scores: dict[str, str]) -> Kernel:
    where = f'[kernel."{name}"]'
    table = dict(table)
    device = _choose(_take(table, "device", str, where), DEVICES, "device", where)
    terms = _take(table, "terms", list, where, default=[])
    for term in terms:
        _choose(term, TERMS, "terms", where)
    if terms:
        all_scores = compositions(terms, table.get("needs", []))
    scores = _take(table, "scores", list, where, default=list(all_scores))
    op = _choose(_take(table, "op", str, where, default="forward"), OPS, "op", where)
    known_options = [x for x in OPTIONS if op == "backward" or x not in BACKWARD_OPTIONS]
    options = _take(table, "options", list, where, default=known_options)
    needs = _take(table, "needs", list, where, default=[])
    for entry, values, allowed in (
        ("scores", scores, all_scores),
        ("options", options, known_options),
        ("needs", needs, options),
    ):
        for value in values:
            _choose(value, allowed, entry, where)
    for option in options if device == "cuda" else []:
        parts = {part for score in scores for part in score.split("_")}
        if (known := OPTIONS[option]) and not set(known) & parts:
            raise ManifestError(
                f"{where}: options has {option!r}, which needs one of the scores {', '.join(known)}"
            )
    kernel = Kernel(
        name=name,
        device=device,
        include=_take(table, "include", str, where),
        code=_take(table, "type" if device == "cuda" else "function", str, where),
        scores={score: all_scores[score] for score in scores} if device == "cuda" else {},
        options=tuple(options),
        needs=tuple(needs),
        op=op,
        asides=device == "cuda" and _take(table, "asides", bool, where, default=False),
        arch=_choose(_take(table, "arch", str, where), ARCHS, "arch", where)
        if device == "cuda"
        else "",
        params=_take(table, "params", str, where, default=Kernel.params),
        params_include=_take(table, "params_include", str, where, default=Kernel.params_include),
        alignment=_take(table, "alignment", int, where, default=1),
        head_dim_multiple=_take(table, "head_dim_multiple", int, where, default=0),
        automatic=_take(table, "automatic", bool, where, default=True),
        max_rows=_take(table, "max_rows", int, where, default=0),
        accumulate=_choose(
            _take(table, "accumulate", str, where, default="fp32"), ACCUMULATE, "accumulate", where
        ),
        quantize=_choose(
            _take(table, "quantize", str, where, default="none"), QUANTIZE, "quantize", where
        ),
        tma=device == "cuda" and _take(table, "tma", bool, where, default=False),
        min_blocks_per_sm=_take(table, "min_blocks_per_sm", float, where, default=0.0),
        only_split=device == "cuda" and _take(table, "only_split", bool, where, default=False),
        entry_names=_entry_names(table, where, "cutlass") if device == "cuda" else "cutlass",
    )
    _nothing_left(table, where)
    placeholders = {"element", *DIM_FIELDS, *TILE_FIELDS} if device == "cuda" else set()
    if unknown := kernel.placeholders - placeholders:
        raise ManifestError(
            f"{where}: {kernel.code!r} asks for {', '.join(sorted(unknown))}; "
            f"known: {', '.join(sorted(placeholders)) or 'nothing'}"
        )
    return kernel


def _entry_names(table: dict, where: str, default: str) -> str:
    names = _take(table, "entry_names", str, where, default=default)
    return str(_choose(names, variant_key.PREFIXES, "entry_names", where))


def _head_dims(entry: Any, kernel: Kernel, where: str) -> HeadDims:
    """64, or [192, 128] where V has a head dim of its own."""
    pair = entry if type(entry) is list and len(entry) == 2 else [entry, entry]
    if any(type(dim) is not int or not 0 < dim <= MAX_HEAD_DIM for dim in pair):
        raise ManifestError(
            f"{where}: head_dims has {entry!r}; allowed: 1 to {MAX_HEAD_DIM}, or a pair of those"
        )
    dims = HeadDims(*pair)
    if dims.qk != dims.v and "head_dim_v" not in kernel.placeholders:
        raise ManifestError(f"{where}: head_dims has {entry!r}, {kernel.code!r} has no head_dim_v")
    return dims


def _rows(number: int, table: dict, kernels: dict[str, Kernel]) -> list[Row]:
    where = f"[[variant]] {number}"
    table = dict(table)
    name = _take(table, "kernel", str, where)
    kernel = kernels[_choose(name, kernels, "kernel", where)]
    where += f" (kernel {name})"

    dtypes = _take(table, "dtypes", list, where)
    for dtype in dtypes:
        _choose(dtype, ELEMENTS, "dtypes", where)
    entries = _take(table, "head_dims", list, where, default=None)
    head_dims: list[HeadDims | None] = [None]
    if entries is not None:
        head_dims = [_head_dims(entry, kernel, where) for entry in entries]
    if not dtypes or not head_dims:
        raise ManifestError(f"{where}: dtypes and head_dims must name at least one each")

    tile = None
    if (entry := _take(table, "tile", dict, where, default=None)) is not None:
        entry = dict(entry)
        m, n, warps = (_take(entry, field, int, f"{where}: tile") for field in ("m", "n", "warps"))
        tile = Tile(m, n, warps, _take(entry, "columns", int, f"{where}: tile", default=1))
        if tile.columns != 1 and "columns" not in kernel.placeholders:
            raise ManifestError(f"{where}: tile has columns, {kernel.code!r} does not use them")
        _nothing_left(entry, f"{where}: tile")
    tier = _choose(_take(table, "tier", str, where), TIERS, "tier", where)
    names = _entry_names(table, where, default=kernel.entry_names)
    cost = None
    if (entry := _take(table, "cost", dict, where, default=None)) is not None:
        cost = _cost(dict(entry), f"{where}: cost")
        if tile is None:
            raise ManifestError(f"{where}: cost is given, {name} has no choice of tile")
    simt = table.pop("simt", False)
    if type(simt) is not bool:
        _choose(simt, TIERS, "simt", where)
    _nothing_left(table, where)

    for entry_name, given, placeholders in (
        ("head_dims", head_dims != [None], DIM_FIELDS),
        ("tile", tile is not None, TILE_FIELDS),
    ):
        asked = not kernel.placeholders.isdisjoint(placeholders)
        if asked and not given:
            raise ManifestError(f"{where}: {entry_name} is missing, {kernel.code!r} needs it")
        if given and not asked:
            raise ManifestError(f"{where}: {entry_name} is given, {kernel.code!r} does not use it")
    if simt and kernel.device != "cuda":
        raise ManifestError(f"{where}: simt is for kernels of device cuda, not {kernel.device}")

    rows = [Row(kernel, dtype, d, tile, tier, names, cost) for dtype in dtypes for d in head_dims]
    simt_tier = tier if simt is True else simt
    return rows + [replace(row, simt=True, tier=simt_tier) for row in rows if simt]


def _cost(entry: dict, where: str) -> Cost:
    times = {field: _take(entry, field, float, where) for field in ("tile_us", "step_us")}
    _nothing_left(entry, where)
    for field, time in times.items():
        if not 0.0 < time < math.inf:
            raise ManifestError(f"{where}: {field} is {time}; allowed: above 0")
    return Cost(**times)


def _read(path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"not TOML: {error}") from error


def load(manifest: Path | str = MANIFEST) -> tuple[list[Row], dict[str, str]]:
    """Reads a manifest: its rows in order of preference, and its scores {token: C++ functor}.

    GPU kernels come first, then the CPU's own, then GPU kernels on the CPU; within each the order
    of the manifest. Raises ManifestError.
    """
    table = _read(manifest)
    scores = _take(table, "scores", dict, "manifest")
    kernels = {
        name: _kernel(name, entry, scores) for name, entry in table.pop("kernel", {}).items()
    }
    rows: list[Row] = []
    for number, entry in enumerate(table.pop("variant", []), start=1):
        rows += _rows(number, entry, kernels)
    _nothing_left(table, "manifest")
    if not scores or not rows:
        raise ManifestError("manifest: scores and [[variant]] must name at least one each")

    seen: set[str] = set()
    for row in rows:
        if row.key in seen:
            raise ManifestError(f"[[variant]] {row.key} is there twice")
        seen.add(row.key)
    return sorted(rows, key=lambda row: (row.simt, row.device == "cpu")), scores


def load_tuned(rows: list[Row], path: Path | str = TUNED) -> list[Any]:
    """Reads the choices of tiles, which must be among `rows`. Raises ManifestError."""
    tiles: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.head_dims and row.tile and not row.simt:
            tiles.setdefault((row.kernel_name, str(row.head_dims)), []).append(str(row.tile))
    try:
        tuning = tuned_toml.parse(Path(path).read_text(encoding="utf-8"))
    except tuned_toml.TuningError as error:
        raise ManifestError(str(error)) from error
    if tuning.failing:
        raise ManifestError("tuned: [failing] is for a user's own file")
    for rule in tuning.rules:
        if (rule.kernel, rule.head_dims) not in tiles:
            raise ManifestError(f"{rule.where}: no row of the manifest")
        _choose(rule.tile, dict.fromkeys(tiles[rule.kernel, rule.head_dims]), "tile", rule.where)
    return tuning.rules


def load_space(rows: list[Row], path: Path | str = SPACE) -> dict[str, Any]:
    """What the tuner may choose of a kernel, and its source to fill in. Raises ManifestError."""
    space = {}
    for name, axes in _read(path).items():
        kernels = {row.kernel_name: row.kernel for row in rows if row.device == "cuda"}
        kernel = kernels[_choose(name, kernels, "kernel", "space")]
        if set(axes) != kernel.placeholders.intersection(TILE_FIELDS):
            raise ManifestError(f"space: {name} has {sorted(axes)}, not the axes of its tile")
        source = device_source(kernel, kernel.code, "{symbol}")
        space[name] = {"axes": axes, "elements": ELEMENTS, "source": source}
    return space


def _tuned_entry(rule: Any) -> str:
    qk, v = rule.dims()
    return designated(
        {
            "smem_kb": str(rule.smem_kb),
            "kernel": quote(rule.kernel),
            "head_dim": str(qk),
            "head_dim_v": str(v),
            "tile": quote(rule.tile),
            "min_blocks_per_sm": f"{rule.min_blocks_per_sm}f",
            "decode": str(rule.decode).lower(),
        }
    )


def _array(declaration: str, entries: Iterable[str]) -> str:
    return f"{declaration} = {{\n" + "".join(f"    {entry},\n" for entry in entries) + "};\n"


def outputs(
    rows: list[Row], tuned: list[Any], build: Build, space: dict[str, Any] | None = None
) -> dict[str, str]:
    """Everything the build needs: {file name: content}."""
    compiled = [row for row in rows if build.compiles(row)]
    units = [row for row in compiled if row.kernel.device == "cuda"]
    kernels = list({row.kernel.name: row.kernel for row in rows}.values())
    files = {row.file_name: row.source() for row in units}
    left_out = {row.key: row.source() for row in rows if build.leaves_to_nvrtc(row)}
    files["units.json"] = json.dumps(left_out, indent=1)
    files["space.json"] = json.dumps(space or {}, indent=1)
    headers = {k.include for k in kernels if k.device == "cpu"}
    headers |= {k.params_include for k in kernels if k.device == "cuda"}
    files["manifest_units.inc"] = (
        BANNER
        + "".join(f'#include "{header}"\n' for header in sorted(headers))
        + "namespace cutlass_attn {\n"
        + "".join(f"extern KernelUnit const {row.symbol}__unit;\n" for row in units)
        + "}\n"
    )
    files["manifest_table.inc"] = (
        BANNER
        + _array("ManifestKernel const kKernels[]", (kernel.table_entry for kernel in kernels))
        + _array("ManifestRow const kRows[]", (row.table_entry(build) for row in rows))
        + _array("ManifestRule const kTuned[]", map(_tuned_entry, tuned))
    )
    lists = {
        f"CUTLASS_ATTN_CUDA_UNITS_{arch}": [
            row.file_name for row in units if not row.simt and row.kernel.arch == arch
        ]
        for arch in ARCHS
    }
    lists["CUTLASS_ATTN_SIMT_UNITS"] = [row.file_name for row in units if row.simt]
    files["facts.hpp"], files["facts.py"] = facts.header(FACTS), facts.module(FACTS)
    cmake = f"set(CUTLASS_ATTN_UNIT_ARCHS {' '.join(ARCHS)})\n"
    files["units.cmake"] = (
        BANNER.replace("//", "#")
        + cmake
        + "".join(
            "\n  ".join([f"set({name}", *(f"${{CMAKE_CURRENT_LIST_DIR}}/{unit}" for unit in names)])
            + ")\n"
            for name, names in lists.items()
        )
    )
    return files


def write(directory: Path, files: dict[str, str]) -> None:
    """Makes `directory` hold exactly `files`, touching only what differs."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.iterdir():
        if stale.is_file() and stale.name not in files:
            stale.unlink()
    for name, text in files.items():
        path = directory / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", type=Path, default=MANIFEST)
    parser.add_argument("--tuned", type=Path, default=TUNED)
    parser.add_argument("--space", type=Path, default=SPACE)
    parser.add_argument("--out", type=Path, required=True, help="directory for nothing else")
    parser.add_argument("--tier", choices=TIERS, default="core")
    parser.add_argument("--cuda", action="store_true", help="compile the GPU kernels")
    parser.add_argument("--simt", action="store_true", help="compile GPU kernels for the CPU")
    parser.add_argument("--archs", default="80,89", help="of GPU code; other rows are for NVRTC")
    options = parser.parse_args(arguments)
    source = options.manifest
    try:
        rows, _ = load(source)
        source = options.tuned
        tuned = load_tuned(rows, source)
        source = options.space
        space = load_space(rows, source)
        source = "command line"
        archs = tuple(filter(None, options.archs.split(",")))
        for arch in archs:
            _choose(arch, ARCHS, "archs", "--archs")
    except ManifestError as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 1
    build = Build(options.tier, options.cuda, options.simt, archs)
    write(options.out, outputs(rows, tuned, build, space))
    return 0


if __name__ == "__main__":
    sys.exit(main())
