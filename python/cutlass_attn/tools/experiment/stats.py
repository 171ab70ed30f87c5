"""Interleaved rounds: their order, ratios of their times with an interval, the geometric mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# 97.5 % quantiles of Student's t distribution with 1 to 10 degrees of freedom.
_STUDENT_T = (12.706, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


class Ratio(NamedTuple):
    """How many times as fast as the baseline, and the ends of the 95 % interval."""

    value: float
    low: float
    high: float


def round_order(count: int, number: int) -> list[int]:
    """The order of `count` implementations in round `number`, which counts from 0.

    A Williams design: over 2 x `count` rounds, each implementation runs twice right after each
    other one. A GPU lowers its clock under load, so an implementation that always ran after a light
    one would appear faster.
    """
    order = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    if count % 2 and number % 2:
        order.reverse()
    return [(number + i) % count for i in order]


def paired_ratio(baseline_us: Sequence[float], us: Sequence[float]) -> Ratio:
    """Speed relative to a baseline that was timed in the same rounds.

    Both hold one time per round, of at least two rounds. A drift of the clock changes both times of
    a round and cancels in their ratio. The value is the geometric mean of the ratios, the interval
    is Student's for the mean of their logarithms.

    Raises ValueError for lengths that differ or are below 2.
    """
    n = len(us)
    if len(baseline_us) != n or n < 2:
        raise ValueError(
            f"a ratio needs equally many rounds, at least 2, got {len(baseline_us)} and {n}"
        )
    logs = [math.log(base / time) for base, time in zip(baseline_us, us)]
    mean = math.fsum(logs) / n
    variance = math.fsum((x - mean) ** 2 for x in logs) / (n - 1)
    half_width = student_t(n - 1) * math.sqrt(variance / n)
    return Ratio(math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width))


def student_t(degrees: int) -> float:
    """The 97.5 % quantile; good to 0.1 %."""
    if degrees <= len(_STUDENT_T):
        return _STUDENT_T[degrees - 1]
    z = _NORMAL  # Abramowitz and Stegun 26.7.5, two terms
    first = (z**3 + z) / (4 * degrees)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def geometric_mean(values: Iterable[float]) -> float:
    """Raises ValueError for no values, or one that is not positive."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("a geometric mean needs a value")
    return math.exp(math.fsum(logs) / len(logs))
