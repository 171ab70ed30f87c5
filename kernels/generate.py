#!/usr/bin/env python3
"""Turns manifest.toml into translation units and the variant registry.

    generate.py --out DIR [--tier core|full] [--cuda] [--simt all|scalar|none] [--archs 80]

and runtime/tuned.toml into the table of tile rules. It writes into DIR

    <row>.cu, <row>.cpp       one unit per compiled kernel x dtype x head dim x tile
    facts.hpp, facts.py       the content of facts.toml
    units.json                for NVRTC: sources of GPU kernels, or of scores of a kernel, that this
                              build leaves out; compiled at first use
    manifest_units.inc        declarations for manifest.cpp
    manifest_table.inc        kKernels, kRows (compiled or not) and kTuned, for manifest.cpp
    score_mods.json           kernels that a score_mod can be compiled with, and all their scores
    space.json                the tuner's search space (space.toml), and sources to fill in
    units.cmake               the lists CUTLASS_ATTN_CUDA_UNITS_<arch>, CUTLASS_ATTN_SIMT_UNITS

A file whose content would stay the same is not written, so that nothing is rebuilt without need. A
unit that no row requires any more is deleted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import facts
from facts import FACTS
from manifest_reader import MANIFEST, load, read_toml
from manifest_rows import (
    ARCHS,
    BANNER,
    ELEMENTS,
    SIMT,
    TIERS,
    TILE_FIELDS,
    Build,
    ManifestError,
    Row,
    choose,
    designated,
    device_source,
    quote,
    tuned_toml,
)

TUNED = Path(__file__).with_name("runtime") / "tuned.toml"
SPACE = Path(__file__).with_name("space.toml")


def load_tuned(rows: list[Row], path: Path | str = TUNED) -> list[Any]:
    """Reads the tile rules, whose tiles must be in `rows`. Raises ManifestError."""
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
        choose(rule.tile, dict.fromkeys(tiles[rule.kernel, rule.head_dims]), "tile", rule.where)
    return tuning.rules


def load_space(rows: list[Row], path: Path | str = SPACE) -> dict[str, Any]:
    """The tuner's search space of each kernel, and its source to fill in. Raises ManifestError."""
    space = {}
    for name, axes in read_toml(path).items():
        kernels = {row.kernel_name: row.kernel for row in rows if row.device == "cuda"}
        choose(name, kernels, "kernel", "space")
        kernel = kernels[name]
        if set(axes) != kernel.placeholders.intersection(TILE_FIELDS):
            raise ManifestError(f"space: {name} has {sorted(axes)}, not the axes of its tile")
        source = device_source(
            kernel, kernel.code, "{symbol}", dict.fromkeys(kernel.scores, "{symbol}")
        )
        space[name] = {
            "axes": axes,
            "elements": ELEMENTS,
            "core_scores": list(kernel.core_scores),
            "source": source,
        }
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
            "decode": str(rule.decode).lower(),
        }
    )


def _array(declaration: str, entries: Iterable[str]) -> str:
    return f"{declaration} = {{\n" + "".join(f"    {entry},\n" for entry in entries) + "};\n"


def outputs(
    rows: list[Row], tuned: list[Any], build: Build, space: dict[str, Any] | None = None
) -> dict[str, str]:
    """All generated files: {file name: content}."""
    compiled = [row for row in rows if build.compiles(row)]
    units = [row for row in compiled if row.kernel.device == "cuda"]
    kernels = list({row.kernel.name: row.kernel for row in rows}.values())
    files = {row.file_name: row.source(build.scores(row)) for row in units}
    left_out = {
        row.key: row.source(scores) for row in rows if (scores := build.scores_for_nvrtc(row))
    }
    files["score_mods.json"] = json.dumps(
        {
            row.key: row.source(list(row.kernel.scores))
            for row in rows
            if build.cuda and row.device == "cuda" and "score_mod" in row.kernel.options
        },
        indent=1,
    )
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
    """Makes `directory` hold exactly `files`; writes only files that differ."""
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
    parser.add_argument("--out", type=Path, required=True, help="directory for these files alone")
    parser.add_argument("--tier", choices=TIERS, default="core")
    parser.add_argument("--cuda", action="store_true", help="compile the GPU kernels")
    parser.add_argument("--simt", choices=SIMT, default="none", help="GPU kernels for the CPU")
    parser.add_argument("--archs", default="80,89", help="compiled ahead; other rows are for NVRTC")
    options = parser.parse_args(arguments)
    source = options.manifest
    try:
        rows = load(source)
        source = options.tuned
        tuned = load_tuned(rows, source)
        source = options.space
        space = load_space(rows, source)
        source = "command line"
        archs = tuple(filter(None, options.archs.split(",")))
        for arch in archs:
            choose(arch, ARCHS, "archs", "--archs")
    except ManifestError as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 1
    build = Build(options.tier, options.cuda, options.simt, archs)
    write(options.out, outputs(rows, tuned, build, space))
    return 0


if __name__ == "__main__":
    sys.exit(main())
