"""How `python -m dev.bench` times a call, and what it makes of the times."""

import math
import threading
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from cases import torch
from cutlass_attn.tools.experiment import stats, timing


def test_the_clock_stops_in_time():
    assert len(timing.clock_times_us(lambda: None, 7)) == 7
    assert len(timing.clock_times_us(lambda: None, 7, limit_s=1e-9)) == 1


def test_time_without_a_core():
    before = {"1": (100, 50), "2": (0, 0), "ended": (7, 7)}
    after = {"1": (160, 70), "2": (0, 20), "new": (9, 9)}
    assert timing.waited(before, after) == pytest.approx(40 / 100)
    assert timing.waited({}, after) is None  # a system that counts nothing
    assert timing.waited(before, before) is None


@pytest.mark.skipif(not timing.core_times(), reason="this system does not count time on cores")
def test_time_on_cores_is_counted():
    before, end = timing.core_times(), time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    after, thread = timing.core_times(), str(threading.get_native_id())
    assert after[thread][0] - before[thread][0] >= 0.09e9
    assert 0 <= timing.waited(before, after) < 1


@pytest.mark.parametrize("call_us", [500.0, 2.0])
def test_the_clock_of_the_sms(monkeypatch, call_us):
    """Of a GPU that slows down under load and starts a kernel after 3 us; for short calls the host,
    which takes 10 us to launch anything, is behind it.
    """
    host_us, gpu_us, mhz, calls = [0.0], [0.0], [1980.0], []

    def launch(us):
        host_us[0] += 10
        gpu_us[0] = max(gpu_us[0], host_us[0]) + us

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            launch(0.0)
            self.us = gpu_us[0]

        def elapsed_time(self, end):
            return (end.us - self.us) / 1e3

    def call():
        calls.append(1)
        launch(3 + call_us)
        mhz[0] = 1410.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: launch(3 + clocks / mhz[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.sm_clock_mhz(call, call_us) == pytest.approx(1410)
    assert len(calls) == {500.0: 200, 2.0: 1000}[call_us]
    timing.sm_clock_mhz(call, 1e6)  # a slow one is called nevertheless
    assert len(calls) == {500.0: 201, 2.0: 1001}[call_us]


@pytest.mark.parametrize("count", range(1, 10))
def test_rounds_follow_every_order_of_two_alike(count):
    """Who is timed right after whom: each after each other one twice in twice as many rounds."""
    orders = [stats.round_order(count, number) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert followed == {(a, b): 2 for a in range(count) for b in range(count) if a != b}


def test_ratio_cancels_what_moves_a_whole_round():
    drift = np.array([1.0, 1.3, 0.9, 1.1, 2.0])
    ratio = stats.paired_ratio(30 * drift, 20 * drift)
    assert ratio == pytest.approx((1.5, 1.5, 1.5))


def test_ratio_and_its_interval():
    """Quotients 1, 2, 4: the logarithms' mean is ln 2, their standard deviation ln 2 as well."""
    ratio = stats.paired_ratio([1, 2, 4], [1, 1, 1])
    width = 4.3027 * math.log(2) / math.sqrt(3)
    assert ratio.value == pytest.approx(2)
    assert math.log(ratio.high) == pytest.approx(math.log(2) + width)
    assert math.log(ratio.low) == pytest.approx(math.log(2) - width)


def test_interval_covers_the_truth_19_times_in_20():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        base, ours = np.exp(rng.normal(0, 0.02, (2, 5)))
        _, low, high = stats.paired_ratio(1.25 * base, ours)
        covered += low <= 1.25 <= high
    assert 0.935 < covered / 2000 < 0.965


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (10, 2.2281), (11, 2.2010), (30, 2.0423), (1000, 1.9623)]
)
def test_student_t(degrees, quantile):
    assert stats.student_t(degrees) == pytest.approx(quantile, rel=2e-3)


@pytest.mark.parametrize(("base", "ours"), [([1, 2], [1]), ([1], [1]), ([], [])])
def test_ratio_needs_the_same_rounds(base, ours):
    with pytest.raises(ValueError, match=f"got {len(base)} and {len(ours)}"):
        stats.paired_ratio(base, ours)


def test_geometric_mean():
    assert stats.geometric_mean([1, 2, 4]) == pytest.approx(2)
    with pytest.raises(ValueError, match="needs a value"):
        stats.geometric_mean([])
