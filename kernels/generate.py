#!/usr/bin/env python3
"""Turns manifest.toml into translation units and the variant registry.

    generate.py --out DIR [--tier core|full] [--cuda] [--simt]

and runtime/tuned.toml into the table that tiles are chosen by. It writes into DIR

    <row>.cu, <row>_simt.cpp  one unit per compiled kernel x dtype x head dim x tile
    kernel_facts.cpp          what the host knows of GPU kernels left out: compiled at first use
    units.json                their sources, for NVRTC
    registry_launchers.inc    what registry.cpp must see declared: CA_LAUNCHER(symbol),
                              CA_FACTS(symbol), #include
    registry_table.inc        CA_VARIANT(...) per row of the manifest, compiled or not
    score_table.inc           CA_SCORES(name, functors) per GPU kernel
    tuned_table.inc           CA_TUNED(...) per rule of runtime/tuned.toml
    space.json                what the tuner may choose, by space.toml, and the source to fill in
    units.cmake               the lists CUTLASS_ATTN_CUDA_UNITS and CUTLASS_ATTN_SIMT_UNITS

A file whose content would stay the same is left untouched, so that nothing rebuilds without need;
a unit that no row asks for any more is deleted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import string
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _load_tuning_file() -> Any:
    """The format of tuned.toml, which the package reads as well; without the package around it."""
    path = Path(__file__).parents[1] / "python" / "cutlass_attn" / "tuning_file.py"
    spec = importlib.util.spec_from_file_location("tuning_file", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tuning_file = _load_tuning_file()

MANIFEST = Path(__file__).with_name("manifest.toml")
TUNED = Path(__file__).with_name("runtime") / "tuned.toml"
SPACE = Path(__file__).with_name("space.toml")
BANNER = "// Generated from kernels/manifest.toml by kernels/generate.py; do not edit.\n"

ELEMENTS = {"f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t", "f32": "float"}
DTYPES = {"f16": "DType::kFloat16", "bf16": "DType::kBFloat16", "f32": "DType::kFloat32"}
DEVICES = {"cuda": "Device::kCuda", "cpu": "Device::kCpu"}
ACCUMULATE = {
    "fp32": "Accumulate::kFloat32",
    "fp16_qk": "Accumulate::kFloat16Qk",
    "fp16_pv": "Accumulate::kFloat16Pv",
    "fp16": "Accumulate::kFloat16",
}
TIERS = ("core", "full")
# Options of a call that a kernel may lack (kernels/runtime/options.hpp), and for those that change
# a logit the scores that know them.
OPTIONS: dict[str, tuple[str, ...]] = {
    "softcap": ("softcap", "general"),
    "negative_scale": ("softcap", "general"),
    "alibi_slopes": ("general",),
    "bias": ("general",),
    "mask": ("general",),
    "sinks": (),
    "dropout": (),
}
MAX_HEAD_DIM = 512  # kMaxHeadDim of core/params.hpp
# What a kernel type may leave to its rows, beside {element}.
DIM_FIELDS = ("head_dim", "head_dim_v")
TILE_FIELDS = ("m", "n", "warps", "columns")


class ManifestError(ValueError):
    """The manifest contradicts itself; the message names the row, what it says and what may be."""


@dataclass(frozen=True)
class Kernel:
    """A [kernel.<name>] table: a family of kernels and what it asks of a call."""

    name: str
    device: str  # "cuda" or "cpu"
    include: str
    code: str  # cuda: the kernel type, with placeholders; cpu: the function
    scores: dict[str, str] = field(default_factory=dict)  # {token: C++ functor}; cuda only
    options: tuple[str, ...] = tuple(OPTIONS)
    min_compute_capability: int = 0
    alignment: int = 1
    head_dim_multiple: int = 0  # takes multiples up to a row's head dim; 0: that one alone
    automatic: bool = True
    accumulate: str = "fp32"

    @property
    def placeholders(self) -> set[str]:
        return {field for _, field, _, _ in string.Formatter().parse(self.code) if field}


@dataclass(frozen=True)
class Tile:
    m: int  # queries
    n: int  # keys
    warps: int  # below each other
    columns: int = 1  # warps beside each other, which share rows

    def __str__(self) -> str:
        text = f"{self.m}x{self.n}x{self.warps}"
        return text if self.columns == 1 else f"{text}c{self.columns}"


@dataclass(frozen=True)
class HeadDims:
    """The head dim of Q and K and that of V and O which a row is compiled for."""

    qk: int
    v: int

    def __str__(self) -> str:
        return f"d{self.qk}" if self.v == self.qk else f"d{self.qk}v{self.v}"


@dataclass(frozen=True)
class Row:
    """One variant of the library."""

    kernel: Kernel
    dtype: str
    head_dims: HeadDims | None  # None: any
    tile: Tile | None
    tier: str
    simt: bool = False  # the kernel of a GPU, compiled for the CPU

    @property
    def kernel_name(self) -> str:
        return self.kernel.name + ("-simt" if self.simt else "")

    @property
    def device(self) -> str:
        return "cpu" if self.simt else self.kernel.device

    @property
    def key(self) -> str:
        parts = [self.kernel_name, self.dtype]
        if self.head_dims:
            parts.append(str(self.head_dims))
        if self.tile:
            parts.append(str(self.tile))
        return "/".join(parts)

    @property
    def stem(self) -> str:
        """The row as a C++ identifier: sm80_f16_d64_64x64x4, with _simt at its end."""
        name = replace(self, simt=False).key
        return re.sub(r"\W", "_", name) + ("_simt" if self.simt else "")

    @property
    def launcher(self) -> str:
        """The C++ function that launches this row."""
        return self.kernel.code if self.kernel.device == "cpu" else f"launch_{self.stem}"

    @property
    def type(self) -> str:
        """The C++ kernel type of a GPU kernel."""
        tile = vars(self.tile) if self.tile else {}
        dims = self.head_dims or HeadDims(0, 0)
        return self.kernel.code.format(
            element=ELEMENTS[self.dtype], head_dim=dims.qk, head_dim_v=dims.v, **tile
        )

    @property
    def arguments(self) -> str:
        """The kernel type and its scores, as template arguments."""
        return ", ".join([self.type, *self.kernel.scores.values()])

    @property
    def facts(self) -> str:
        """The C++ constant that describes this row where it is not compiled."""
        return f"facts_{self.stem}"

    def nvrtc_unit(self) -> str:
        """The source to compile at run time: a kernel per score, named by the score's token."""
        return nvrtc_unit(self.kernel, self.type)

    def unit(self) -> tuple[str, str]:
        """File name and content of the translation unit of a GPU kernel."""
        side = "host" if self.simt else "device"
        arguments = self.arguments
        text = (
            f"{BANNER}"
            f'#include "{self.kernel.include}"\n'
            f'#include "simt/{side}_launch.hpp"\n\n'
            "namespace cutlass_attn {\n\n"
            f"Status {self.launcher}(AttnParams const& params, LaunchOptions const& options) {{\n"
            f"  return simt::launch_{side}<{arguments}>(params, options);\n"
            "}\n\n"
            "}  // namespace cutlass_attn\n"
        )
        return self.stem + (".cpp" if self.simt else ".cu"), text


def nvrtc_unit(kernel: Kernel, kernel_type: str, checks: str = "") -> str:
    entries = "".join(
        f'extern "C" CA_KERNEL_ENTRY({token}, Kernel, {functor})\n'
        for token, functor in kernel.scores.items()
    )
    return (
        f'#include "{kernel.include}"\n'
        '#include "simt/kernel_entry.hpp"\n\n'
        "namespace cutlass_attn {\n\n"
        f"using Kernel = {kernel_type};\n{checks}"
        f"{entries}\n"
        "}  // namespace cutlass_attn\n"
    )


# What add_tile() is told of a tile that is no row.
ADDED_TILE = """static_assert(Kernel::kThreads == {threads} && Kernel::kSmemBytes == {smem_bytes});
static_assert(Kernel::kBlockM == {m} && Kernel::kPacksHeads);
"""


@dataclass(frozen=True)
class Build:
    """What this build compiles."""

    tier: str = "core"
    cuda: bool = True
    simt: bool = True

    def compiles(self, row: Row) -> bool:
        if TIERS.index(row.tier) > TIERS.index(self.tier):
            return False
        if row.simt:
            return self.simt
        return self.cuda or row.device == "cpu"

    def leaves_to_nvrtc(self, row: Row) -> bool:
        """Is it a GPU kernel that this build does not compile, but can load?"""
        return self.cuda and row.device == "cuda" and not self.compiles(row)


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
    scores = _take(table, "scores", list, where, default=list(all_scores))
    options = _take(table, "options", list, where, default=list(OPTIONS))
    for entry, values, allowed in (("scores", scores, all_scores), ("options", options, OPTIONS)):
        for value in values:
            _choose(value, allowed, entry, where)
    for option in options if device == "cuda" else []:
        if (known := OPTIONS[option]) and not set(known) & set(scores):
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
        min_compute_capability=_take(table, "min_compute_capability", int, where, default=0),
        alignment=_take(table, "alignment", int, where, default=1),
        head_dim_multiple=_take(table, "head_dim_multiple", int, where, default=0),
        automatic=_take(table, "automatic", bool, where, default=True),
        accumulate=_choose(
            _take(table, "accumulate", str, where, default="fp32"), ACCUMULATE, "accumulate", where
        ),
    )
    _nothing_left(table, where)
    placeholders = {"element", *DIM_FIELDS, *TILE_FIELDS} if device == "cuda" else set()
    if unknown := kernel.placeholders - placeholders:
        raise ManifestError(
            f"{where}: {kernel.code!r} asks for {', '.join(sorted(unknown))}; "
            f"known: {', '.join(sorted(placeholders)) or 'nothing'}"
        )
    return kernel


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

    rows = [Row(kernel, dtype, d, tile, tier) for dtype in dtypes for d in head_dims]
    simt_tier = tier if simt is True else simt
    return rows + [replace(row, simt=True, tier=simt_tier) for row in rows if simt]


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
        tuning = tuning_file.parse(Path(path).read_text(encoding="utf-8"))
    except tuning_file.TuningError as error:
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
        source = nvrtc_unit(kernel, kernel.code, ADDED_TILE)
        space[name] = {"axes": axes, "elements": ELEMENTS, "source": source}
    return space


def _quote(text: str) -> str:
    return f'"{text}"'


def _table_line(row: Row, build: Build) -> str:
    compiled = build.compiles(row)
    dims = row.head_dims or HeadDims(0, 0)
    fields = (
        row.launcher if compiled else "nullptr",
        f"&{row.facts}" if build.leaves_to_nvrtc(row) else "nullptr",
        _quote(row.kernel_name),
        _quote(row.key),
        DEVICES[row.device],
        DTYPES[row.dtype],
        str(dims.qk),
        str(dims.v),
        str(row.kernel.head_dim_multiple),
        ACCUMULATE[row.kernel.accumulate],
        " | ".join(f"option::{name}" for name in row.kernel.options) or "0",
        str(row.tile.m if row.tile else 0),
        _quote(str(row.tile or "")),
        _quote(row.tier),
        str(compiled).lower(),
        str(row.kernel.automatic and not row.simt).lower(),
        "0" if row.simt else str(row.kernel.min_compute_capability),
        str(row.kernel.alignment),
    )
    return f"CA_VARIANT({', '.join(fields)})\n"


def _tuned_line(rule: Any) -> str:
    qk, v = rule.dims()
    fields = (
        str(rule.smem_kb),
        _quote(rule.kernel),
        str(qk),
        str(v),
        _quote(rule.tile),
        f"{rule.min_blocks_per_sm}f",
        str(rule.decode).lower(),
    )
    return f"CA_TUNED({', '.join(fields)})\n"


def _facts_unit(rows: list[Row]) -> str:
    headers = sorted({row.kernel.include for row in rows})
    return (
        BANNER
        + "".join(f'#include "{header}"\n' for header in [*headers, "core/score.hpp"])
        + '#include "runtime/image.hpp"\n\nnamespace cutlass_attn {\n\n'
        + "".join(
            f"extern KernelFacts const {row.facts};\n"
            f"constexpr KernelFacts {row.facts} = facts_of<{row.arguments}>();\n"
            for row in rows
        )
        + "\n}  // namespace cutlass_attn\n"
    )


def outputs(
    rows: list[Row], tuned: list[Any], build: Build, space: dict[str, Any] | None = None
) -> dict[str, str]:
    """Everything the build needs: {file name: content}."""
    compiled = [row for row in rows if build.compiles(row)]
    units = [row for row in compiled if row.kernel.device == "cuda"]
    files = dict(row.unit() for row in units)
    left_out = [row for row in rows if build.leaves_to_nvrtc(row)]
    if left_out:
        files["kernel_facts.cpp"] = _facts_unit(left_out)
    files["units.json"] = json.dumps({row.key: row.nvrtc_unit() for row in left_out}, indent=1)
    files["space.json"] = json.dumps(space or {}, indent=1)
    lists = {
        "CUTLASS_ATTN_FACTS_UNITS": ["kernel_facts.cpp"] if left_out else [],
        "CUTLASS_ATTN_CUDA_UNITS": [name for name in files if name.endswith(".cu")],
        "CUTLASS_ATTN_SIMT_UNITS": [name for name in files if name.endswith("_simt.cpp")],
    }
    headers = sorted({row.kernel.include for row in compiled if row.kernel.device == "cpu"})
    files["registry_launchers.inc"] = BANNER + "".join(
        [f'#include "{header}"\n' for header in headers]
        + [f"CA_LAUNCHER({row.launcher})\n" for row in units]
        + [f"CA_FACTS({row.facts})\n" for row in left_out]
    )
    files["registry_table.inc"] = BANNER + "".join(_table_line(row, build) for row in rows)
    gpu_kernels = {row.kernel.name: row.kernel for row in rows if row.kernel.device == "cuda"}
    files["score_table.inc"] = BANNER + "".join(
        f"CA_SCORES({', '.join([_quote(name), *kernel.scores.values()])})\n"
        for name, kernel in gpu_kernels.items()
    )
    files["tuned_table.inc"] = BANNER.replace("manifest", "runtime/tuned") + "".join(
        _tuned_line(rule) for rule in tuned
    )
    files["units.cmake"] = BANNER.replace("//", "#") + "".join(
        "\n  ".join([f"set({name}", *(f"${{CMAKE_CURRENT_LIST_DIR}}/{unit}" for unit in names)])
        + ")\n"
        for name, names in lists.items()
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
    options = parser.parse_args(arguments)
    source = options.manifest
    try:
        rows, _ = load(source)
        source = options.tuned
        tuned = load_tuned(rows, source)
        source = options.space
        space = load_space(rows, source)
    except ManifestError as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 1
    build = Build(options.tier, options.cuda, options.simt)
    write(options.out, outputs(rows, tuned, build, space))
    return 0


if __name__ == "__main__":
    sys.exit(main())
