"""What `explain` answers, and how it prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import quantized
from ._variants import Variant

MOST_REASONS = 5  # why kernels were passed over, in what print() shows


@dataclass(frozen=True)
class Verdict:
    """Whether one variant runs a call, and if not, why."""

    variant: Variant
    chosen: bool
    reason: str  # why it cannot run, was not asked for or is not preferred; empty if chosen
    splits: int = 1  # if chosen: thread blocks that share the keys of a tile
    workspace_bytes: int = 0  # if chosen: of the memory that its kernels use among themselves
    max_launches: int = 0  # if chosen: of GPU kernels, 0 on a CPU; some may turn out empty
    score: str = ""  # if chosen: the terms that its GPU kernel adds to a logit, as softcap_alibi
    at_first_use: bool = False  # if chosen: whether the build left its kernel with that score out


@dataclass(frozen=True)
class PassedOver:
    """A kernel for calls of this kind that dispatch prefers to the one that runs."""

    kernel: str
    reason: str  # why it does not run: of its variants that come closest, the first one's
    count: int  # how many variants come as close


@dataclass(frozen=True, repr=False)
class Explanation:
    """Which kernel a call would run and why no preferred one; `table()` has every variant."""

    call: str
    device: str
    verdicts: tuple[Verdict, ...]
    quantize: str | None = None
    # Of `quantize`, of the head with the largest: what the result's RMS error is expected to be,
    # relative to its RMS. None without it, and for tensors without numbers.
    predicted_error: float | None = None
    max_error: float | None = None
    # The same of each head, (B, Hq): what `max_error` decides by.
    predicted_errors: np.ndarray | None = None
    # With `max_error`, of each head, (B, Hq): whether it would run in 16 bits.
    in_16_bits: np.ndarray | None = None
    # In order of preference; if no kernel takes the call, all kernels for calls of this kind.
    passed_over: tuple[PassedOver, ...] = ()
    # What a score_mod that is none of the other options is compiled as.
    score_mod: str | None = None

    @property
    def chosen(self) -> Variant | None:
        """The variant that would run; None if no kernel accepts the call."""
        return next((verdict.variant for verdict in self.verdicts if verdict.chosen), None)

    @property
    def splits(self) -> int:
        """Number of thread blocks that split the keys of a tile (split-KV); 1: not split."""
        return next((verdict.splits for verdict in self.verdicts if verdict.chosen), 1)

    @property
    def workspace_bytes(self) -> int:
        """Device memory in bytes that the kernels use beside the operands and the result."""
        return next((verdict.workspace_bytes for verdict in self.verdicts if verdict.chosen), 0)

    @property
    def score(self) -> str:
        """The terms that the GPU kernel is composed of, such as "softcap_alibi"; "identity" for
        none, "" for kernels of the CPU and for calls that would be refused."""
        return next((verdict.score for verdict in self.verdicts if verdict.chosen), "")

    @property
    def max_launches(self) -> int:
        """How many GPU kernels the call would launch at most; 0 on a CPU, or if it is refused."""
        return next((verdict.max_launches for verdict in self.verdicts if verdict.chosen), 0)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __repr__(self) -> str:
        key = self.chosen.key if self.chosen else None
        return f"<Explanation: {key!r} for {self.call} on {self.device}>"

    def __str__(self) -> str:
        """The call, what runs, and up to five reasons why preferred kernels do not run."""
        lines = [self._first_line()]
        for verdict in self.verdicts:
            if verdict.chosen:
                lines.append(f"-> {verdict.variant.key}  {_what_runs(verdict)}")
        if self.chosen is None:
            lines.append(_REFUSED)
        by_reason: dict[str, list[str]] = {}
        for kernel in self.passed_over:
            by_reason.setdefault(kernel.reason, []).append(kernel.kernel)
        reasons = list(by_reason.items())
        lines += [f"   {', '.join(names)}: {reason}" for reason, names in reasons[:MOST_REASONS]]
        if more := sum(len(names) for _, names in reasons[MOST_REASONS:]):
            lines.append(f"   and {more} more kernels; table() has all variants")
        if self.quantize is not None:
            lines.append(self._error())
        return "\n".join(lines)

    def table(self) -> str:
        """A line for each variant, in order of preference, with all reasons why it does not run."""
        width = max(len(verdict.variant.key) for verdict in self.verdicts)
        lines = [self._first_line()]
        for verdict in self.verdicts:
            mark, text = ("->", _what_runs(verdict)) if verdict.chosen else ("  ", verdict.reason)
            lines.append(f"{mark} {verdict.variant.key:<{width}}  {text}")
        if self.chosen is None:
            lines.append(_REFUSED)
        if self.quantize is not None:
            lines.append(self._error())
        return "\n".join(lines)

    def _first_line(self) -> str:
        return f"{self.call} on {self.device}"

    def _error(self) -> str:
        error = f"quantize={self.quantize!r}: an RMS error of "
        if self.predicted_error is not None:
            error += f"{self.predicted_error:.1%} is predicted from q, k and v"
            if self.in_16_bits is None:
                return error
            return (
                f"{error}; {self.in_16_bits.sum()} of {self.in_16_bits.size} heads are beyond "
                f"max_error={self.max_error:g}, or share a key head with one, and run in 16 bits"
            )
        of_random, of_others = quantized.ERRORS_FOUND[self.quantize or ""]
        return (
            error + f"{of_random:.1%} was found for normal inputs, up to {of_others:.1%} for others"
        )


_REFUSED = "no kernel takes this call"


def _what_runs(verdict: Verdict) -> str:
    text = "runs, compiled at first use" if verdict.at_first_use else "runs"
    if verdict.variant.tile:
        text += f", tile {verdict.variant.tile}"
    if verdict.score not in ("", "identity", "general"):
        text += f", with {verdict.score.replace('_', ', ')}"
    if verdict.max_launches == 1:
        text += ", 1 launch"
    elif verdict.max_launches > 1:
        text += f", up to {verdict.max_launches} launches"
    if verdict.splits > 1:
        text += f", keys in {verdict.splits} splits"
    if verdict.workspace_bytes > 0:
        text += f", {verdict.workspace_bytes} bytes of workspace"
    return text
