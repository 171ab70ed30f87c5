"""`python -m dev.profile`: every GPU variant's figures next to its gates.

Measured by Nsight Compute if it and a GPU are present, otherwise read off the machine code.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutlass_attn import _C
from cutlass_attn._build.variant_key import key_of
from cutlass_attn._explain import explain
from cutlass_attn._explanation import Explanation
from cutlass_attn._variants import Variant, variants
from cutlass_attn.devices import CUDA, parse_device
from cutlass_attn.tools.document import Document, document
from cutlass_attn.tools.experiment.environment import environment
from cutlass_attn.tools.experiment.problems import Shape

from ..gates import ncu
from ..gates.thresholds import FAIL, Judgement, load_gates
from ..sass import disassemble as sass
from ..sass.tiles import tile_of

LIBRARY = Path(_C.__file__).parent / "lib" / "libcutlass_attn.so"

# (what, done, total)
Progress = Callable[[str, int, int], None]


@dataclass
class Row:
    """A variant's gates in one call, or of its code only."""

    kernel: str
    shape: Shape | None  # None: for machine code only
    gates: list[Judgement] = field(default_factory=list)
    score: str = ""  # for machine code: the score of the kernel
    reason: str = ""  # why no figure was read

    @property
    def ok(self) -> bool:
        return not self.reason and all(gate.verdict != FAIL for gate in self.gates)

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "shape": str(self.shape) if self.shape else None,
            "score": self.score or None,
            "ok": self.ok,
            "reason": self.reason or None,
            "gates": [gate.as_json() for gate in self.gates],
        }


@dataclass
class Report:
    """The profiled rows, the device, and what was missing to measure more."""

    device: str
    environment: dict[str, Any]
    static_only: str = ""  # why Nsight Compute measured nothing
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False  # interrupted before all rows were measured

    @property
    def ok(self) -> bool:
        return bool(self.rows) and not self.interrupted and all(row.ok for row in self.rows)

    def failing(self) -> dict[str, str]:
        """{variant: the gates that it fails in calls with many queries, or in its code}."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.shape is None or not row.shape.has_few_queries:
                failed = [str(gate) for gate in row.gates if gate.verdict == FAIL]
                found.setdefault(row.kernel, []).extend(failed)
        return {key: "; ".join(dict.fromkeys(texts)) for key, texts in found.items() if texts}

    def as_json(self) -> Document:
        return document(
            "profile",
            self.ok,
            (row.as_json() for row in self.rows),
            device=self.device,
            static_only=self.static_only or None,
            interrupted=self.interrupted,
            environment=self.environment,
        )


def default_shapes(variant: Variant, device: str) -> list[Shape]:
    """4 x 4096 queries and keys with 2048 columns of heads, and one query on 8192 keys.

    The latter, decoding, only for the tile that dispatch chooses for it: others never run it.
    """
    head_dim = variant.head_dim or 64
    heads = max(1, 2048 // head_dim)
    forward = Shape(4, heads, heads, 4096, 4096, head_dim)
    decode = Shape(16, 32, 8, 1, 8192, head_dim)
    return [forward, decode] if _is_chosen(variant, decode, device) else [forward]


def _is_chosen(variant: Variant, shape: Shape, device: str) -> bool:
    """Whether this variant of its kernel runs a call."""
    chosen = _explained(variant, shape, device, variant.kernel).chosen
    return chosen is not None and chosen.key == variant.key


def _explained(variant: Variant, shape: Shape, device: str, kernel: str) -> Explanation:
    """Explanation of a call with `variant`'s dtype and accumulator, for a kernel or one variant."""
    import torch

    dtype = getattr(torch, variant.dtype)
    heads, lengths = (shape.heads_q, shape.heads_kv), (shape.seqlen_q, shape.seqlen_k)
    q, k = (
        torch.empty(shape.batch, h, s, shape.head_dim, dtype=dtype, device="meta")
        for h, s in zip(heads, lengths, strict=True)
    )
    kind: dict[str, Any] = {"accumulate": variant.accumulate, "quantize": variant.quantize}
    return explain(q, k, k, kernel=kernel, device=device, **kind)


def choose(names: Iterable[str], dtypes: Sequence[str]) -> list[Variant]:
    """The GPU variants of `names`, keys or kernels; by default the compiled automatic ones.

    Raises ValueError for a name that no GPU variant has.
    """
    names = list(names)
    there = [v for v in variants() if v.device == "cuda"]
    for name in names:
        if not any(name in (v.key, v.kernel) for v in there):
            kernels = ", ".join(dict.fromkeys(v.kernel for v in there))
            raise ValueError(
                f"there is no GPU kernel {name!r}; there are {kernels}, and their variants"
            )
    if not names:
        return [
            v for v in there if v.compiled and v.automatic and v.dtype in dtypes and not v.needs
        ]
    return [v for v in there if v.key in names or (v.kernel in names and v.dtype in dtypes)]


# Resources and counts of instructions, by a kernel's symbol and its score.
_Library = tuple[dict[tuple[str, str], dict[str, int]], dict[tuple[str, str], Any]]


def static_rows(chosen: Sequence[Variant], arch: str, progress: Progress) -> list[Row]:
    """Each variant's gates that its machine code for `arch` determines, one row per score.

    Hopper's kernels have code for sm_90a.
    """
    from cutlass_attn import jit

    progress("reading the library", 0, len(chosen))
    library: dict[str, _Library] = {}
    capability = int(arch.removeprefix("sm_").rstrip("a"))
    rows = []
    for done, variant in enumerate(chosen):
        progress(variant.key, done, len(chosen))
        try:
            own = jit.arch_for(variant.key, capability)
            if own not in library:
                library[own] = _read_library(chosen, own)
            resources, counts = library[own]
            here = [x for x in resources if key_of(x[0], [variant.kernel]) == variant.key]
            for entry in here:
                rows.append(_static_row(variant, entry[1], resources[entry], counts[entry]))
            if not here:
                rows += _rows_of_cubin(variant, own)
        except (ValueError, RuntimeError) as error:
            rows.append(Row(variant.key, None, reason=str(error)))
    return rows


def _read_library(chosen: Sequence[Variant], arch: str) -> _Library:
    """Machine code of these variants in the library."""
    if not any(v.compiled for v in chosen) or arch not in _compiled_for():
        return {}, {}
    resources = sass.read_resources(LIBRARY, arch)
    wanted, kernels = {v.key for v in chosen}, [v.kernel for v in chosen]
    entries = [entry for entry in resources if key_of(entry[0], kernels) in wanted]
    return resources, sass.read_counts(LIBRARY, arch, entries)


def _compiled_for() -> list[str]:
    return str(_C.build_info()["architectures"]).split(",")


def _rows_of_cubin(variant: Variant, arch: str) -> list[Row]:
    """Machine code of a variant that NVRTC compiles."""
    from cutlass_attn import jit

    if variant.key not in jit.units():
        raise ValueError(f"the library has no machine code of it for {arch}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(jit.cubin(variant.key, arch))
        return [
            _static_row(variant, score, used, counts)
            for score, (used, counts) in read_cubin(path, arch).items()
        ]


def read_cubin(path: Path, arch: str) -> dict[str, tuple[dict[str, int], Any]]:
    """{score: (resources, counts of instructions)} of a .cubin."""
    resources = sass.parse_resources(sass.dump("-res-usage", path, arch))
    listings = dict(sass.parse_listings(sass.dump("-sass", path, arch)))
    return {
        entry[1]: (used, sass.count(listings[name]))
        for name, used in resources.items()
        if (entry := sass.identify(name))
    }


def _static_row(variant: Variant, score: str, used: dict[str, int], counts: Any) -> Row:
    tile = tile_of(variant.key, score)
    figures = sass.static_figures(used, counts, tile.smem_bytes if tile else None)
    judged = load_gates().judge(variant.kernel, variant.head_dim, "", figures)
    known = [gate for gate in judged if gate.measured is not None or gate.threshold]
    return Row(variant.key, None, known, score)


def fitting_calls(
    chosen: Sequence[Variant], shapes: Sequence[Shape], fitting: Collection[str], device: str
) -> list[tuple[Variant, Shape]]:
    """Each variant in each shape; variants with a key in `fitting` only in shapes that they fit.

    A variant fits a shape if it can run it and no variant of its kernel in `fitting` with a smaller
    head dim can. Raises ValueError if a shape has no variant.
    """
    calls = []
    for shape in shapes:
        takers = [
            v for v in chosen if v.key in fitting and _explained(v, shape, device, v.key).chosen
        ]
        least: dict[tuple[str, str], int] = {}
        for v in takers:
            family = v.kernel, v.dtype
            least[family] = min(v.head_dim, least.get(family, v.head_dim))
        there = [
            (v, shape)
            for v in chosen
            if v.key not in fitting or (v in takers and v.head_dim == least[v.kernel, v.dtype])
        ]
        if not there:
            raise ValueError(
                f"none of the variants asked for takes {shape}; cutlass_attn.explain says why"
            )
        calls += there
    return calls


def measured_rows(
    chosen: Sequence[Variant],
    shapes: Sequence[Shape],
    device: str,
    program: str | None,
    progress: Progress,
    fitting: Collection[str] = (),
) -> Iterator[Row]:
    """Each variant's gates in each shape, or in those of default_shapes(), by Nsight Compute.

    `fitting` is as for fitting_calls(). Raises NcuError if it cannot.
    """
    tool = ncu.find_ncu(program)
    gates = load_gates()
    metrics = ncu.wanted(gates.gates.values(), ncu.known_metrics(tool))
    names = [name for group in metrics.values() for name in group]
    names += [gates.gates[name].percent_of for name in metrics if gates.gates[name].percent_of]
    if shapes:
        calls = fitting_calls(chosen, shapes, fitting, device)
    else:
        calls = [(v, shape) for v in chosen for shape in default_shapes(v, device)]
    for done, (variant, shape) in enumerate(calls):
        progress(f"{variant.key}: {shape}", done, len(calls))
        numbers = ",".join(str(getattr(shape, name)) for name in _SIZES)
        causal = "causal" if shape.causal else "whole"
        launch = [
            sys.executable,
            str(Path(__file__).with_name("launch.py")),
            variant.key,
            variant.dtype,
        ]
        try:
            values = ncu.measure(tool, [*launch, numbers, causal, device], names)
        except ncu.NcuError as error:
            if "ERR_NVGPUCTRPERM" in str(error):
                raise
            yield Row(variant.key, shape, reason=str(error))
            continue
        figures = ncu.figures(gates.gates, metrics, values)
        op = "decode" if shape.has_few_queries else "forward"
        judged = gates.judge(variant.kernel, shape.head_dim, op, figures)
        yield Row(variant.key, shape, judged)


_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")


def run_profile(
    names: Iterable[str],
    dtypes: Sequence[str],
    shapes: Sequence[Shape],
    device: str,
    program: str | None,
    progress: Progress,
) -> Report:
    """Profiles on "cuda" or "cuda:N", or reads the code for an architecture such as "sm_89".

    If Nsight Compute or the GPU is missing, the report says so and has only the part of the machine
    code. An interrupted report has the rows measured so far.
    Raises ValueError for a wrong name or device, and ToolNotFound without cuobjdump.
    """
    (kind, index, capability, _sms), _ = parse_device(device)
    if kind != CUDA:
        raise ValueError(f'--device must be "cuda", "cuda:N" or "sm_89"-like, got {device!r}')
    names = list(names)
    chosen = choose(names, dtypes)
    lack = "asked for the machine code alone" if capability else ""
    if not lack:
        info = _C.device_info(CUDA, index)
        capability, lack = info["compute_capability"], info["unavailable"]
    rows: list[Row] = []
    interrupted = False
    if present := not lack:
        try:
            fitting = [v.key for v in chosen if v.key not in names]
            for row in measured_rows(chosen, shapes, device, program, progress, fitting):
                rows.append(row)
        except ncu.NcuError as error:
            lack, rows = str(error), []
        except KeyboardInterrupt:
            if not rows:
                raise
            interrupted = True
    arch = f"sm_{capability}"
    if not capability or (present and arch not in _compiled_for()):
        arch = next((name for name in _compiled_for() if name.startswith("sm_")), "sm_89")
    present = bool(rows)
    report = Report(device if present else arch, environment(device if present else "cpu"), lack)
    report.rows = rows or static_rows(chosen, arch, progress)
    report.interrupted = interrupted
    progress("done", 1, 1)
    return report
