"""`cutlass-attn check --ladder`: the kernels from the plainest to the fastest, and what each gains.

It is a check like any other (check.py), of one variant of every kernel, in another order and with
PyTorch's attention beside them. What is added here: the speed-up of each rung over the one before,
and the same steps in an earlier effort, on another GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..explain import explain
from ..variants import variants
from .check import Problem, Report, Row, arrays_for, run_check
from .experiment.impls import TORCH_BACKENDS

# PyTorch's own choice first: what a call of its attention gets.
BACKENDS = ("auto", *TORCH_BACKENDS)
# The batch, heads and length of a ladder whose kernels are emulated.
EMULATED_SHAPE = (1, 2, 128)
EARLIER_GPU = "NVIDIA L4"


@dataclass(frozen=True)
class Comparison:
    """How many times as fast as `base` one of `faster` is: rungs, or PyTorch's own choice.

    `earlier` is what the earlier effort had, lowest and highest; where `hoped`, what it hoped for.
    """

    faster: tuple[str, ...]
    base: str
    earlier: tuple[float, float]
    hoped: bool = False

    def __str__(self) -> str:
        return f"{' or '.join(self.faster)} over {self.base}"

    @property
    def earlier_text(self) -> str:
        low, high = self.earlier
        text = f"{low:.3g}" + f" to {high:.3g}" * (high > low)
        return text + (" hoped for" if self.hoped else "")


# Its times at the reference shape, in us: 2870 minimal, 1028 tiled, 47.1 PyTorch; 400 to 500 were
# hoped for from the vectorized kernel. Of its two kernels for tensor cores one gave wrong results,
# the other did not compile.
_TENSOR_CORES = ("wmma", "sm80", "sm90")
_SDPA = "torch auto"
COMPARISONS = (
    Comparison(("scalar/tiled",), "scalar/minimal", (2870 / 1028, 2870 / 1028)),
    Comparison(("scalar/vectorized",), "scalar/tiled", (1028 / 500, 1028 / 400), hoped=True),
    Comparison(_TENSOR_CORES, "scalar/tiled", (10.0, 10.0), hoped=True),
    Comparison((_SDPA,), "scalar/minimal", (2870 / 47.1, 2870 / 47.1)),
    Comparison(_TENSOR_CORES, _SDPA, (2.0, 2.0), hoped=True),
)


@dataclass
class Ladder:
    """A check's report whose first rows are the rungs, the plainest first."""

    report: Report
    rungs: list[str]  # the kernel of each

    @property
    def is_emulated(self) -> bool:
        return any(kernel.endswith("-simt") for kernel in self.rungs)

    def step(self, row: Row) -> float | None:
        """How many times as fast as the rung before a rung is; None if either has no time."""
        rows = self.report.rows
        at = next(i for i, other in enumerate(rows) if other is row)
        if not 0 < at < len(self.rungs):
            return None
        return _ratio(rows[at - 1].p50_us, row.p50_us)

    def us(self, name: str) -> float | None:
        """The time of a rung, by its kernel, or of a row that is none."""
        named = [*self.rungs, *(row.name for row in self.report.rows[len(self.rungs) :])]
        rows = dict(zip(named, self.report.rows, strict=True))
        return rows[name].p50_us if name in rows else None

    def here(self, comparison: Comparison) -> float | None:
        """The ratio of a comparison on this machine; None if a time is missing."""
        times = [us for us in map(self.us, comparison.faster) if us is not None]
        return _ratio(self.us(comparison.base), min(times, default=None))

    def as_json(self) -> dict[str, Any]:
        """The check's document; its rows have `rung`, a kernel or null, and `over_rung_before`."""
        document = self.report.as_json()
        names = [*self.rungs, *[None] * (len(self.report.rows) - len(self.rungs))]
        for entry, row, name in zip(document["rows"], self.report.rows, names, strict=True):
            entry |= {"rung": name, "over_rung_before": self.step(row)}
        earlier = [
            {"what": str(x), **asdict(x), "here": self.here(x), "gpu": EARLIER_GPU}
            for x in COMPARISONS
        ]
        return {**document, "emulated": self.is_emulated, "earlier_effort": earlier}


def rungs(problem: Problem) -> dict[str, str]:
    """The ladder's kernels that can run the problem, and the variant of each.

    `variants()` has them in order of preference: from the top of the ladder to its foot. A kernel
    with more options is no rung of its own.
    """
    arrays = arrays_for(problem.device)
    q, k, v = (arrays.make(x, problem.dtype) for x in problem.random_input(0))
    found: dict[str, str] = {}
    for kernel in reversed(list(dict.fromkeys(variant.kernel for variant in variants()))):
        if "/general" in kernel:
            continue
        chosen = explain(q, k, v, causal=problem.causal, kernel=kernel).chosen
        if chosen is not None:
            found[kernel] = chosen.key
    return found


def run_ladder(problem: Problem, progress: Callable[[str, int, int], None]) -> Ladder:
    """Checks and times the rungs and PyTorch's attention; `progress` and errors: run_check()."""
    found = rungs(problem)
    if not found:
        raise ValueError("no kernel can run this; cutlass_attn.explain says why")
    report = run_check(problem, found.values(), progress, BACKENDS, in_graph=True)
    return Ladder(report, list(found))


def _ratio(base: float | None, us: float | None) -> float | None:
    return base / us if base and us else None
