"""`cutlass-attn check`: every kernel that can run here, and PyTorch's, against fp64."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..attention import attention
from ..explain import explain
from ..testing import Reference, judge, reference, round_to
from ..variants import variants
from .experiment.environment import environment
from .experiment.impls import TORCH_BACKENDS, Unsupported, refusal, torch_attention, torch_backend
from .experiment.timing import WarmGraph, clock_times_us, event_times_us, median_us

# Emulating a GPU kernel on the CPU is slow. After this time the remaining inputs are left out, and
# the table says so.
EMULATION_SECONDS = 30.0
TIMED_RUNS = 25


@dataclass(frozen=True)
class Problem:
    """What is checked: shapes, dtype, mask, device and the number of random inputs."""

    batch: int = 2
    heads: int = 8
    heads_kv: int = 8
    seqlen_q: int = 512
    seqlen_k: int = 512
    head_dim: int = 64
    dtype: str = "float16"
    causal: bool = False
    accumulate: str = "fp32"
    device: str = "cpu"
    inputs: int = 5
    seed: int = 0

    def __str__(self) -> str:
        heads = f"{self.heads}" + f":{self.heads_kv}" * (self.heads_kv != self.heads)
        sums = f", sums in {self.accumulate}" * (self.accumulate != "fp32")
        return (
            f"B={self.batch} H={heads} Sq={self.seqlen_q} Sk={self.seqlen_k} D={self.head_dim} "
            f"{self.dtype}{' causal' * self.causal}{sums} on {self.device}"
        )

    def random_input(self, index: int) -> tuple[np.ndarray, ...]:
        """q, k and v, standard normal, as float32 arrays of values that the dtype represents."""
        rng = np.random.default_rng([self.seed, index])
        q_shape = (self.batch, self.heads, self.seqlen_q, self.head_dim)
        kv_shape = (self.batch, self.heads_kv, self.seqlen_k, self.head_dim)
        return tuple(
            round_to(rng.standard_normal(shape), self.dtype)
            for shape in (q_shape, kv_shape, kv_shape)
        )


@dataclass(frozen=True)
class Contender:
    """Something that computes attention: run(q, k, v, return_lse) gives (out, lse or None)."""

    name: str
    run: Callable[..., tuple[Any, Any]]
    ours: bool = True
    emulated: bool = False


@dataclass
class Row:
    """One line of the table; errors are over all inputs."""

    name: str
    ours: bool
    inputs: int = 0
    max: float = 0.0
    mean: float = 0.0
    rms: float = 0.0
    rms_allowed: float = 0.0
    allclose: bool | None = None  # atol = rtol = 1e-3; float16 only
    p50_us: float | None = None  # None for an emulated kernel: its time says nothing
    speedup: float | None = None  # over scalar/minimal
    reason: str = ""  # of the first failure

    @property
    def ok(self) -> bool:
        return not self.reason

    def add(self, problem: Problem, out: np.ndarray, lse: Any, expected: Reference) -> None:
        """Takes one input's result into account."""
        accuracy = judge(out, expected.exact, expected.unfused, problem.dtype, problem.accumulate)
        n = self.inputs
        self.inputs += 1
        self.max = float(np.maximum(self.max, accuracy.max))  # propagates NaN
        self.mean = (self.mean * n + accuracy.mean) / self.inputs
        self.rms = float(np.sqrt((self.rms**2 * n + accuracy.rms**2) / self.inputs))
        self.rms_allowed = max(self.rms_allowed, accuracy.rms_allowed)
        reasons = [accuracy.reason]
        if problem.dtype == "float16" and problem.accumulate == "fp32":
            close = np.allclose(out, expected.exact, atol=1e-3, rtol=1e-3)
            self.allclose = close and self.allclose is not False
            reasons.append("" if close else "not allclose(atol=1e-3, rtol=1e-3)")
        if lse is not None and not expected.confirms_lse(lse):
            with np.errstate(invalid="ignore"):
                worst = np.nanmax(np.abs(lse - expected.lse))
            reasons.append(f"log-sum-exp is off by up to {worst:.3g}")
        self.reason = self.reason or next(filter(None, reasons), "")


@dataclass
class Report:
    """All rows of a check and what they were measured on."""

    problem: Problem
    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Did all of this library's kernels pass? PyTorch's rows are there to compare with."""
        ours = [row for row in self.rows if row.ours]
        return bool(ours) and all(row.ok for row in ours)

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ok": row.ok} for row in self.rows]
        problem, environment = asdict(self.problem), self.environment
        return {"ok": self.ok, "problem": problem, "environment": environment, "rows": rows}


class NumpyArrays:
    """Inputs as numpy arrays."""

    def make(self, x: np.ndarray, dtype: str) -> Any:
        if dtype != "bfloat16":
            return x.astype(dtype)
        try:
            import ml_dtypes  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise ValueError("bfloat16 needs torch or ml_dtypes; neither is installed") from None
        return x.astype(ml_dtypes.bfloat16)

    def to_numpy(self, x: Any) -> np.ndarray:
        return x.astype(np.float32)

    def median_us(self, run: Callable[[], Any], in_graph: bool = False) -> float:
        return median_us(clock_times_us(run, TIMED_RUNS))


class TorchArrays:
    """Inputs as torch tensors on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def make(self, x: np.ndarray, dtype: str) -> Any:
        import torch

        return torch.from_numpy(x).to(self.device, getattr(torch, dtype))

    def to_numpy(self, x: Any) -> np.ndarray:
        return x.float().cpu().numpy()

    def median_us(self, run: Callable[[], Any], in_graph: bool = False) -> float:
        """`in_graph`: without what a launch takes, which shows in events around a short kernel."""
        if self.device == "cpu":
            return median_us(clock_times_us(run, TIMED_RUNS))
        import torch

        with torch.cuda.device(self.device):
            event_times_us(run, 3)  # loads and warms up
            if in_graph:
                return median_us(WarmGraph(self.device).sampler(run)(TIMED_RUNS))
            return median_us(event_times_us(run, TIMED_RUNS))


def arrays_for(device: str) -> NumpyArrays | TorchArrays:
    """torch's tensors where torch is installed, else numpy's arrays (on the CPU alone)."""
    try:
        import torch  # noqa: F401
    except ImportError:
        if device != "cpu":
            raise ValueError("a GPU is reached through torch, which is not installed") from None
        return NumpyArrays()
    return TorchArrays(device)


def contenders(
    problem: Problem,
    kernels: Iterable[str],
    sample: Any,
    backends: Iterable[str] | None = None,
) -> list[Contender | Row]:
    """What to run: the kernels asked for, or all of the build that can, then PyTorch's `backends`,
    or all of them if no kernel was asked for. A Row is a kernel that was asked for by name and
    cannot run."""
    q, k, v = sample
    found: list[Contender | Row] = []
    names = list(kernels)
    sums = problem.accumulate
    for name in names or _candidates(sums, problem.dtype):
        explanation = explain(q, k, v, causal=problem.causal, kernel=name, accumulate=sums)
        chosen = explanation.chosen
        if chosen is not None:
            found.append(
                Contender(chosen.key, _ours(problem, chosen.key), emulated=_emulated(chosen.kernel))
            )
        elif names:
            found.append(Row(name, ours=True, reason=refusal(explanation, name)))
    if backends is None:
        backends = () if names else TORCH_BACKENDS
    if not isinstance(q, np.ndarray):
        found += _torch_contenders(problem, sample, backends)
    return found


def _candidates(accumulate: str, dtype: str) -> list[str]:
    """The compiled variants, and the kernels that have none of them for this dtype: each of these
    runs its best variant, compiled at first use."""
    there = [v for v in variants() if v.accumulate == accumulate and v.dtype == dtype]
    in_build = {variant.kernel for variant in there if variant.compiled}
    names = (variant.key if variant.compiled else variant.kernel for variant in there)
    return [name for name in dict.fromkeys(names) if name not in in_build]


def _emulated(kernel: str) -> bool:
    return kernel.endswith("-simt")


def _ours(problem: Problem, key: str) -> Callable[..., tuple[Any, Any]]:
    def run(q: Any, k: Any, v: Any, return_lse: bool) -> tuple[Any, Any]:
        result = attention(
            q,
            k,
            v,
            causal=problem.causal,
            kernel=key,
            accumulate=problem.accumulate,
            return_lse=return_lse,
        )
        return result if return_lse else (result, None)

    return run


def _torch_contenders(problem: Problem, sample: Any, backends: Iterable[str]) -> list[Contender]:
    def run(backend: str, q: Any, k: Any, v: Any, return_lse: bool) -> tuple[Any, Any]:
        with torch_backend(backend):
            return torch_attention(q, k, v, problem.causal), None

    q, k, v = sample
    found = []
    for backend in backends:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns at length about what it cannot run
            try:
                run(backend, q, k, v, False)
            except (RuntimeError, Unsupported):
                continue
        found.append(Contender(f"torch {backend}", partial(run, backend), ours=False))
    return found


def run_check(
    problem: Problem,
    kernels: Iterable[str],
    progress: Callable[[str, int, int], None],
    backends: Iterable[str] | None = None,
    in_graph: bool = False,
) -> Report:
    """Runs everything; `progress(what, done, total)` is called before each step and at the end.

    `kernels` and `backends` are as for contenders(); `in_graph`: times on a GPU are those of calls
    in a CUDA graph.

    Raises ValueError for a problem that cannot be set up, such as heads that do not divide.
    """
    if problem.accumulate != "fp32" and problem.dtype != "float16":
        raise ValueError(f"sums in {problem.accumulate} are for float16, not {problem.dtype}")
    arrays = arrays_for(problem.device)
    inputs = [problem.random_input(i) for i in range(problem.inputs)]
    samples = [tuple(arrays.make(x, problem.dtype) for x in data) for data in inputs]
    plan = contenders(problem, kernels, samples[0], backends)

    total = problem.inputs * (1 + len(plan))
    expected: list[Reference] = []
    for q, k, v in inputs:
        progress("fp64 reference", len(expected), total)
        expected.append(
            reference(q, k, v, problem.dtype, causal=problem.causal, accumulate=problem.accumulate)
        )

    report = Report(problem, environment(problem.device))
    for position, contender in enumerate(plan, start=1):
        if isinstance(contender, Row):
            report.rows.append(contender)
            continue
        row = Row(contender.name, contender.ours)
        report.rows.append(row)
        started = time.perf_counter()
        try:
            for i, (sample, exact) in enumerate(zip(samples, expected, strict=True)):
                progress(contender.name, position * problem.inputs + i, total)
                out, lse = contender.run(*sample, contender.ours)
                lse = None if lse is None else arrays.to_numpy(lse)
                row.add(problem, arrays.to_numpy(out), lse, exact)
                if contender.emulated and time.perf_counter() - started > EMULATION_SECONDS:
                    break
            if not contender.emulated:
                run = partial(contender.run, *samples[0], False)
                row.p50_us = arrays.median_us(run, in_graph)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            row.reason = row.reason or str(error)
    progress("done", total, total)
    _fill_speedups(report.rows)
    return report


def _fill_speedups(rows: list[Row]) -> None:
    base = next((row.p50_us for row in rows if row.name.startswith("scalar/minimal/")), None)
    if base:
        for row in rows:
            row.speedup = base / row.p50_us if row.p50_us else None
