"""The result of a measurement, and its JSON file; docs/benchmarking.md describes the fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..document import Document, document, dumps, now
from .problems import FP8_CACHE, TOKEN_BYTES, TOKENS, Problem, Shape
from .stats import Ratio, paired_ratio

OK, WRONG, UNSUPPORTED, FAILED = "ok", "wrong", "unsupported", "failed"
# Most of the runnable time that threads may wait for a core. On two idle cores it was 0.01 to 0.12,
# as a pool's threads spin while others compute; with one other process it was 0.21 to 0.70.
MOST_WAITED = 0.2


@dataclass
class Row:
    """One implementation on one problem. Without a time, `reason` says why, or it is emulated."""

    op: str  # of OPS; in older files "decode" is `attention`
    impl: str  # which code exactly; `requested` until that is known
    requested: str  # what it was asked for as: "cutlass_attn:auto"
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool
    option: str = "none"
    page: int | None = None  # keys of a page of the cache
    accumulate: str = "fp32"  # what it adds products up in, and is judged by
    quantize: str | None = None  # what is in 8 bits, rounded before it is judged
    inputs: int = 0  # random inputs that it was judged on
    max_error: float | None = None  # against fp64, of what was compared
    mean_error: float | None = None
    rms_error: float | None = None
    rms_allowed: float | None = None
    rms_yardstick: float | None = None
    allclose: bool | None = None  # within 1e-3, where all of a float16 result is compared
    # Largest difference from the first one's result, where there is no fp64 result; relative to
    # values beyond 1.
    difference: float | None = None
    us: float | None = None  # median of rounds_us
    tflops: float | None = None
    gbps: float | None = None  # of K and V, read once; for few queries alone
    timing: str = ""
    rounds_us: list[float] = field(default_factory=list)  # each the median of `samples` calls
    samples: int = 0
    host_us: float | None = None  # where it is measured; mean of a call to its return
    speedup: dict[str, Any] | None = None  # {"over", "value", "low", "high"}
    over_rung_before: float | None = None  # of a ladder
    sm_clock: str = ""  # read just after the rounds
    status: str = OK
    reason: str = ""

    @property
    def shape(self) -> Shape:
        return Shape(**{f.name: getattr(self, f.name) for f in fields(Shape)})

    @property
    def problem(self) -> Problem:
        return Problem(self.shape, self.dtype, self.option, self.op, self.page)

    @property
    def ours(self) -> bool:
        return self.requested.startswith("cutlass_attn:")

    @property
    def ratio(self) -> Ratio | None:
        if self.speedup is None:
            return None
        return Ratio(*(self.speedup[name] for name in Ratio._fields))

    def set_times(self, rounds_us: Sequence[float], median_us: float) -> None:
        self.rounds_us = [rounded(us) for us in rounds_us]
        self.us = rounded(median_us)
        self.tflops = rounded(self.problem.flops / median_us / 1e6)
        if self.shape.has_few_queries:
            element_size = 4 if self.dtype == "float32" else 2
            if self.quantize == FP8_CACHE:
                element_size = 1
            size = self.problem.kv_bytes(element_size)
            if self.quantize == TOKENS:
                size = size * TOKEN_BYTES // (2 * self.head_dim)
            self.gbps = rounded(size / median_us / 1e3)


# Left out of a file where they do not apply.
_RARE = ("gbps", "page", "host_us", "over_rung_before", "difference", "allclose")


@dataclass
class Report:
    """All rows, and the device, versions and method of the measurement."""

    grid: str
    baseline: str
    environment: dict[str, Any]
    method: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)  # of other libraries
    absent: dict[str, str] = field(default_factory=dict)  # implementation: why
    commit: str = ""
    date: str = field(default_factory=now)
    aborted: str = ""  # why the rest was not measured
    waited: float = 0.0  # timing the CPU: the largest part of a problem's time without a core
    command: str = "bench"
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether this library's kernels ran and were right on all problems that they support.

        In a check, the kernels were chosen by name, so all must have run.
        """
        ours = [row for row in self.rows if row.ours]
        may_lack = self.command != "check"
        right = all(row.status == OK or (may_lack and row.status == UNSUPPORTED) for row in ours)
        return right and not self.aborted and (may_lack or bool(ours))

    @property
    def busy(self) -> str:
        """The warning that other processes disturbed the times of a CPU; empty if they did not."""
        if self.waited <= MOST_WAITED:
            return ""
        return (
            f"The machine is busy: threads waited for a core {self.waited:.0%} of the time. CPU "
            "times that are disturbed are not compared."
        )

    def fill_speedups(self, rows: Sequence[Row]) -> None:
        """Compares rows of one problem with the baseline's, where that was timed."""
        base = next((r for r in rows if r.requested == self.baseline and r.us is not None), None)
        if base is None:
            return
        for row in rows:
            if row.us is not None:
                ratio = paired_ratio(base.rounds_us, row.rounds_us)
                row.speedup = {"over": self.baseline}
                row.speedup |= {name: rounded(x) for name, x in ratio._asdict().items()}

    def as_json(self) -> Document:
        names = (f.name for f in fields(self))
        head = {name: getattr(self, name) for name in names if name not in ("command", "rows")}
        rows = ({k: x for k, x in asdict(r).items() if k not in _RARE or x is not None}
                for r in self.rows)  # fmt: skip
        return document(self.command, self.ok, rows, **head)

    def dumps(self) -> str:
        return dumps(self.as_json())


def rounded(x: float) -> float:
    """Five digits: more than any measurement repeats."""
    return float(f"{x:.5g}")
