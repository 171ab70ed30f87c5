"""The result of `explain`, and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from . import quantized
from ._variants import Variant

MOST_REASONS = 5  # the number of kernels passed over that print() shows


class Verdict(NamedTuple):
    """Whether one variant runs a call, and if not, why not.

    From `splits` on, attributes are set for the chosen variant only.

    Attributes:
        variant: the variant.
        chosen: whether the call runs it.
        reason: why it cannot run, was not asked for or is not preferred; empty if chosen.
        splits: thread blocks that share the keys of a tile.
        workspace_bytes: device memory that its kernels use beyond the call's tensors.
        max_launches: GPU kernels launched, at most; 0 on a CPU.
        score: terms that its GPU kernel applies to a logit, such as "softcap_alibi".
        at_first_use: whether this build lacks the kernel with that score, and NVRTC compiles it.
        mask_is_kept: whether an earlier call has read the mask, and the call uses its map.
    """

    variant: Variant
    chosen: bool
    reason: str
    splits: int = 1
    workspace_bytes: int = 0
    max_launches: int = 0
    score: str = ""
    at_first_use: bool = False
    mask_is_kept: bool = False


@dataclass(frozen=True)
class PassedOver:
    """A kernel for calls of this kind that dispatch prefers to the one that runs.

    Attributes:
        kernel: its name.
        reason: why it does not run: the reason of its variant that comes closest.
        count: number of its variants that have this reason.
    """

    kernel: str
    reason: str
    count: int


@dataclass(frozen=True, repr=False)
class Explanation:
    """Which kernel a call would run and why no preferred one; `table()` has every variant.

    Attributes:
        call: the call's function, shapes and options, in words.
        device: the device it is explained for.
        quantize: the call's 8-bit mode.
        predicted_error: with `quantize`, the predicted RMS error of the worst head, relative to the
            RMS of its result. None if the values of the tensors cannot be read.
        max_error: the call's limit for it.
        predicted_errors: the predicted error of each head, (B, Hq), which `max_error` is compared
            with.
        in_16_bits: with `max_error`, which heads would run in 16 bits, (B, Hq) bool.
        passed_over: kernels that dispatch prefers, in that order; if no kernel takes the call, all
            kernels for calls of this kind.
        score_mod: the name of the compiled score_mod, if the call has one that no other option
            expresses.
        copied: inputs of which a call on a GPU makes aligned copies: docs/attention.md.
    """

    call: str
    device: str
    quantize: str | None = None
    predicted_error: float | None = None
    max_error: float | None = None
    predicted_errors: np.ndarray | None = None
    in_16_bits: np.ndarray | None = None
    passed_over: tuple[PassedOver, ...] = ()
    score_mod: str | None = None
    copied: tuple[str, ...] = ()
    _chosen: Verdict | None = field(default=None, init=False)
    _read_verdicts: Callable[[], tuple[Verdict, ...]] = field(
        default=tuple, init=False, compare=False
    )

    def _with_verdicts(
        self, chosen: Verdict | None, read_all: Callable[[], tuple[Verdict, ...]]
    ) -> Explanation:
        self.__dict__.update(_chosen=chosen, _read_verdicts=read_all)
        return self

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """A verdict on each variant, in order of preference.

        Made when they are first read, which takes longer than everything else in an explanation.
        """
        return self._read_verdicts()

    @property
    def chosen(self) -> Variant | None:
        """The variant that would run; None if no kernel accepts the call."""
        return self._chosen.variant if self._chosen else None

    @property
    def splits(self) -> int:
        """Number of thread blocks that split the keys of a tile (split-KV); 1: not split."""
        return self._chosen.splits if self._chosen else 1

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the kernels use in addition to the operands and results."""
        return self._chosen.workspace_bytes if self._chosen else 0

    @property
    def score(self) -> str:
        """The terms that the GPU kernel applies to a logit, such as "softcap_alibi".

        "identity": no terms. "": a CPU kernel, or a call that no kernel accepts.
        """
        return self._chosen.score if self._chosen else ""

    @property
    def max_launches(self) -> int:
        """How many GPU kernels the call would launch at most; 0 on a CPU, or if it is refused."""
        return self._chosen.max_launches if self._chosen else 0

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy, with the verdicts themselves."""
        return {**self.__dict__, "verdicts": self.verdicts, "_read_verdicts": None}

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __repr__(self) -> str:
        key = self.chosen.key if self.chosen else None
        return f"<Explanation: {key!r} for {self.call} on {self.device}>"

    def __str__(self) -> str:
        """The call, what runs, and up to five reasons why preferred kernels do not run."""
        lines = [self._first_line()]
        if self._chosen is None:
            lines.append(_REFUSED)
        else:
            lines.append(f"-> {self._chosen.variant.key}  {_what_runs(self._chosen)}")
        by_reason: dict[str, list[str]] = {}
        for kernel in self.passed_over:
            by_reason.setdefault(kernel.reason, []).append(kernel.kernel)
        reasons = list(by_reason.items())
        lines += self._copies()
        lines += [f"   {', '.join(names)}: {reason}" for reason, names in reasons[:MOST_REASONS]]
        if more := sum(len(names) for _, names in reasons[MOST_REASONS:]):
            lines.append(f"   and {more} more kernels; table() has all variants")
        if self.quantize is not None:
            lines.append(self._error())
        return "\n".join(lines)

    def table(self) -> str:
        """A line for each variant, in order of preference, with all reasons why it does not run."""
        width = max(len(verdict.variant.key) for verdict in self.verdicts)
        lines = [self._first_line(), *self._copies()]
        for verdict in self.verdicts:
            mark, text = ("->", _what_runs(verdict)) if verdict.chosen else ("  ", verdict.reason)
            lines.append(f"{mark} {verdict.variant.key:<{width}}  {text}")
        if self.chosen is None:
            lines.append(_REFUSED)
        if self.quantize is not None:
            lines.append(self._error())
        return "\n".join(lines)

    def _copies(self) -> list[str]:
        if not self.copied:
            return []
        names = " and ".join(filter(None, (", ".join(self.copied[:-1]), self.copied[-1])))
        be = "is" if len(self.copied) == 1 else "are"
        return [f"   {names} {be} copied first: address or strides not multiples of 16 bytes"]

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
    if verdict.mask_is_kept:
        text += ", the mask's map is kept from an earlier call"
    if verdict.splits > 1:
        text += f", keys in {verdict.splits} splits"
    if verdict.workspace_bytes > 0:
        text += f", {verdict.workspace_bytes} bytes of workspace"
    return text
