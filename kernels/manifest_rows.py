"""Kernels and rows, which manifest_reader.py makes from manifest.toml, and their C++, which
generate.py writes."""

from __future__ import annotations

import importlib
import itertools
import math
import string
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import facts
from facts import FACTS

BANNER = "// Generated from kernels/manifest.toml by kernels/generate.py; do not edit.\n"


def _load(name: str) -> Any:
    """Imports a module of formats that the package reads as well, without the package itself."""
    package = "_cutlass_attn_formats"
    if package not in sys.modules:
        module = types.ModuleType(package)
        module.__path__ = [str(Path(__file__).parents[1] / "python" / "cutlass_attn" / "_build")]
        sys.modules[package] = module
        facts.load(f"{package}.facts")
    return importlib.import_module(f"{package}.{name}")


tuned_toml = _load("tuned_toml")
variant_key = _load("variant_key")

ELEMENTS = {dtype["key"]: dtype["type"] for dtype in FACTS["dtypes"].values()}
DTYPES = {d["key"]: f"DType::{d['enumerator']}" for d in FACTS["dtypes"].values()}
OPS = {"forward": "Op::kForward", "backward": "Op::kBackward"}
ACCUMULATE = {name: f"Accumulate::{value}" for name, value in FACTS["accumulate"].items()}
QUANTIZE = {name: f"Quantize::{value}" for name, value in FACTS["quantize"].items()}
TIERS = ("core", "full")
SIMT = ("all", "scalar", "none")  # GPU kernels to compile for the CPU as well
OPTIONS: dict[str, list[str]] = FACTS["options"]
BACKWARD_OPTIONS: list[str] = FACTS["backward"]["options"]
COMPILED_OPTIONS: list[str] = FACTS["compiled"]["options"]
ARCHS: dict[str, list[int]] = FACTS["archs"]
# Numbers of a call for which a kernel can avoid ranges; manifest.toml explains each.
COUNTS = (
    *("blocks_per_sm", "rows", "keys", "splits", "num_splits"),
    *("head_dim", "fill", "repeats", "visible"),
)
MAX_AVOIDS = 4  # ManifestKernel::kMaxAvoids
MAX_HEAD_DIM: int = FACTS["limits"]["max_head_dim"]
TERMS: dict[str, dict] = FACTS["terms"]
# Fields that rows fill in to complete a kernel type.
DIM_FIELDS = ("head_dim", "head_dim_v")
TILE_FIELDS = ("m", "n", "warps", "columns")
ROW_FIELDS = ("element", *DIM_FIELDS, *TILE_FIELDS)


class ManifestError(ValueError):
    """The manifest is wrong; the message says where, what was given and what is allowed."""


def choose(value: object, allowed: Iterable[object], name: str, where: str) -> None:
    """Raises ManifestError if the value is not allowed."""
    if value not in (listed := list(allowed)):
        words = (str(x).lower() if type(x) is bool else str(x) for x in listed)
        raise ManifestError(f"{where}: {name} is {value!r}; allowed: {', '.join(words)}")


def compositions(terms: list[str], needs: list[str]) -> dict[str, str]:
    """The scores of a kernel that takes every set of these terms: {token: C++ type}, smaller sets
    first. Terms whose option a call must use are in every set."""
    required = [term for term in terms if set(TERMS[term]["options"]) & set(needs)]
    others = [term for term in terms if term not in required]
    scores = {}
    for count in range(len(others) + 1):
        for some in itertools.combinations(others, count):
            chosen = [term for term in TERMS if term in required or term in some]
            types = ", ".join(TERMS[term]["type"] for term in chosen)
            scores["_".join(chosen) or "identity"] = f"Score<{types}>"
    return scores


@dataclass(frozen=True)
class Kernel:
    """A kernel with all its tiles, and its requirements of a call."""

    name: str
    device: str  # "cuda" or "cpu"
    include: str
    code: str  # cuda: the kernel type, with placeholders; cpu: the function
    scores: dict[str, str] = field(default_factory=dict)  # {token: C++ functor}; cuda only
    core_scores: tuple[str, ...] = ()  # the first scores, which builds of tier core compile
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # options that a call must use
    # Options whose operand it reads for two neighbouring keys at a time.
    pairs: tuple[str, ...] = ()
    op: str = "forward"
    pre_post: bool = False  # cuda only: a launch before it and one after it
    arch: str = ""  # cuda only, one of ARCHS
    params: str = "ForwardParams"  # the struct of its parameters, and its header
    params_include: str = "core/forward_params.hpp"
    alignment: int = 1
    # Also takes smaller head dims that are multiples of this; 0: only a row's own.
    head_dim_multiple: int = 0
    automatic: bool = True
    accumulate: str = "fp32"
    quantize: str = "none"
    tma: bool = False  # reads operands through TMA
    scalar: bool = False  # a GPU kernel without tensor cores
    avoids: tuple[
        dict, ...
    ] = ()  # calls left to later kernels: {COUNTS: [from, below], "to": name}
    entry_names: str = "cutlass"  # or "plain", see variant_key.PREFIXES

    @property
    def table_entry(self) -> str:
        """The kernel as a ManifestKernel of kernels/runtime/manifest.hpp."""
        fields = {
            "name": quote(self.name),
            "op": OPS[self.op],
            "arch": quote(self.arch),
            "options": _bits(self.options),
            "needs": _bits(self.needs),
            "pairs": _bits(self.pairs),
            "head_dim_multiple": str(self.head_dim_multiple),
            "accumulate": ACCUMULATE[self.accumulate],
            "quantize": QUANTIZE[self.quantize],
            "compute_capability": "{{{}, {}}}".format(*ARCHS.get(self.arch, (0, 0))),
            "alignment": str(self.alignment),
            "automatic": str(self.automatic).lower(),
            "tma": str(self.tma).lower(),
            "scalar": str(self.scalar).lower(),
        }
        if self.avoids:
            fields["avoids"] = f"{{{', '.join(map(_ranges, self.avoids))}}}"
            fields["num_avoids"] = str(len(self.avoids))
        if self.device == "cuda":
            arguments = ", ".join([self.params, *self.scores.values()])
            function = "arguments_with_pre_post_of" if self.pre_post else "arguments_of"
            tokens = ", ".join(quote(token) for token in self.scores)
            fields["max_rows"] = f"max_rows_of<{self.params}>"
            fields["arguments"] = f"{function}<{arguments}>({{{tokens}}})"
        else:
            fields["function"] = f"&{self.code}"
        return designated(fields)

    @property
    def placeholders(self) -> set[str]:
        return {field for _, field, _, _ in string.Formatter().parse(self.code) if field}


@dataclass(frozen=True)
class Tile:
    m: int  # queries
    n: int  # keys
    warps: int  # along M
    columns: int = 1  # warps along N, which share rows

    def __str__(self) -> str:
        text = f"{self.m}x{self.n}x{self.warps}"
        return text if self.columns == 1 else f"{text}c{self.columns}"


@dataclass(frozen=True)
class Cost:
    """Predicted time of a row's tiles: TileCost of kernels/runtime/tile_cost.hpp."""

    tile_us: float  # per tile of queries
    step_us: float  # per tile of keys of it


@dataclass(frozen=True)
class HeadDims:
    """The head dims that a row is compiled for: of Q and K, and of V and O."""

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
    entry_names: str = "cutlass"
    cost: Cost | None = None
    simt: bool = False  # a GPU kernel compiled for the CPU
    plain_terms: tuple[str, ...] = ()  # whose scores have plain entry names
    min_head_dim: int = 0  # of the calls that it is for; 0: any

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
    def symbol(self) -> str:
        """The row as a C++ identifier, such as cutlass_attn_sm80_f16_d64_64x64x4."""
        return str(variant_key.symbol_of(self.key, self.entry_names))

    def entry_symbol(self, score: str) -> str:
        """Prefix of the name of a score's entry."""
        is_plain = not set(self.plain_terms).isdisjoint(score.split("_"))
        names = "plain" if is_plain else self.entry_names
        return str(variant_key.symbol_of(self.key, names))

    @property
    def type(self) -> str:
        """The C++ kernel type of a GPU kernel."""
        tile = vars(self.tile) if self.tile else {}
        dims = self.head_dims or HeadDims(0, 0)
        return self.kernel.code.format(
            element=ELEMENTS[self.dtype], head_dim=dims.qk, head_dim_v=dims.v, **tile
        )

    def source(self, scores: Iterable[str]) -> str:
        """The translation unit of a GPU kernel with some of its scores for the GPU, by nvcc or
        NVRTC; or with all scores for the CPU."""
        if self.simt:
            arguments = ", ".join([self.type, *self.kernel.scores.values()])
            unit = "host_unit_with_pre_post" if self.kernel.pre_post else "host_unit"
            return (
                f"{BANNER}"
                f'#include "{self.kernel.include}"\n'
                '#include "simt/host_unit.hpp"\n\n'
                "namespace cutlass_attn {\n\n"
                f"extern KernelUnit const {self.symbol}__unit;\n"
                f"KernelUnit const {self.symbol}__unit = simt::{unit}<{arguments}>();\n\n"
                "}  // namespace cutlass_attn\n"
            )
        symbols = {score: self.entry_symbol(score) for score in scores}
        return device_source(self.kernel, self.type, self.symbol, symbols)

    @property
    def file_name(self) -> str:
        return variant_key.file_stem(self.key) + (".cpp" if self.simt else ".cu")

    def table_entry(self, build: Build) -> str:
        """The row as a ManifestRow of kernels/runtime/manifest.hpp."""
        compiled = build.compiles(self)
        dims = self.head_dims or HeadDims(0, 0)
        is_unit = compiled and self.kernel.device == "cuda"
        return designated(
            {
                "kernel": quote(self.kernel.name),
                "key": quote(self.key),
                "dtype": DTYPES[self.dtype],
                "head_dim": str(dims.qk),
                "head_dim_v": str(dims.v),
                "min_head_dim": str(self.min_head_dim),
                "tile": quote(str(self.tile or "")),
                "cost": self._cost,
                "tier": quote(self.tier),
                "is_simt": str(self.simt).lower(),
                "compiled": str(compiled).lower(),
                "symbol": quote(self.symbol),
                "plain_scores": str(self._plain_scores),
                "unit": f"&{self.symbol}__unit" if is_unit else "nullptr",
            }
        )

    @property
    def _plain_scores(self) -> int:
        """One bit per score; set if its entry's name does not begin with the row's symbol."""
        scores = enumerate(self.kernel.scores)
        return sum(1 << i for i, score in scores if self.entry_symbol(score) != self.symbol)

    @property
    def _cost(self) -> str:
        if self.cost is None or self.tile is None:
            return "{}"
        return f"{{{self.tile.n}, {self.cost.tile_us}f, {self.cost.step_us}f}}"


def device_source(kernel: Kernel, kernel_type: str, symbol: str, entries: dict[str, str]) -> str:
    """One kernel per score, <symbol in entries>__<token>, and the data that the host reads.

    All declared names contain the symbol, because CMake compiles several of these sources as one.
    """
    alias = f"{symbol}__kernel"
    code = "".join(
        f"CA_KERNEL_ENTRY({of_entry}, {token}, {alias}, {kernel.scores[token]})\n"
        for token, of_entry in entries.items()
    )
    unit = "CA_KERNEL_UNIT"
    if kernel.pre_post:
        unit += "_WITH_PRE_POST"
        for token, launch in (("before", "Before"), ("after", "After")):
            code += f"CA_PRE_POST_ENTRY({symbol}, {token}, {alias}, {launch})\n"
    listed = ", ".join(f"CA_ENTRY({of_entry}, {token})" for token, of_entry in entries.items())
    return (
        f'{BANNER}#include "{kernel.include}"\n'
        '#include "simt/kernel_unit.hpp"\n\n'
        "namespace cutlass_attn {\n\n"
        f"using {alias} = {kernel_type};\n"
        f"{code}"
        f"{unit}({symbol}, {alias}, {listed})\n\n"
        "}  // namespace cutlass_attn\n"
    )


@dataclass(frozen=True)
class Build:
    """The variants that this build compiles."""

    tier: str = "core"
    cuda: bool = True
    simt: str = "all"  # one of SIMT
    archs: tuple[str, ...] = ("80", "89")  # of GPU code

    def compiles(self, row: Row) -> bool:
        if TIERS.index(row.tier) > TIERS.index(self.tier):
            return False
        if row.simt:
            return self.simt == "all" or (self.simt == "scalar" and row.kernel.scalar)
        return row.device == "cpu" or (self.cuda and row.kernel.arch in self.archs)

    def scores(self, row: Row) -> list[str]:
        """The scores of a row that it compiles."""
        if not self.compiles(row):
            return []
        is_core = self.tier == "core" and not row.simt
        return list(row.kernel.core_scores if is_core else row.kernel.scores)

    def scores_for_nvrtc(self, row: Row) -> list[str]:
        """The scores of a GPU kernel that it does not compile, but can load."""
        if not self.cuda or row.device != "cuda":
            return []
        compiled = self.scores(row)
        return [score for score in row.kernel.scores if score not in compiled]


def _ranges(calls: dict[str, Any]) -> str:
    """An entry of avoids as CallRanges of kernels/runtime/manifest.hpp."""

    def bound(value: float) -> str:
        return "kUnlimited" if value == math.inf else f"{float(value)}f"

    fields = {
        name: f"{{{bound(first)}, {bound(below)}}}"
        for name in COUNTS
        for first, below in filter(None, [calls.get(name)])
    }
    return designated(fields | ({"to": quote(calls["to"])} if "to" in calls else {}))


def _bits(options: tuple[str, ...]) -> str:
    return " | ".join(f"option::{name}" for name in options) or "0"


def quote(text: str) -> str:
    return f'"{text}"'


def designated(fields: dict[str, str]) -> str:
    """A brace-enclosed list of C++20's designated initialisers."""
    return "{" + ", ".join(f".{name} = {value}" for name, value in fields.items()) + "}"
