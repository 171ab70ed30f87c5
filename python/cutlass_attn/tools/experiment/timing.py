"""How long a call takes: on the GPU by events or in a CUDA graph, on the host by its clock.

torch is imported where a GPU is timed, so that `cutlass-attn check` works without it.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Calls in one CUDA graph: enough for the start of the graph not to count.
GRAPH_CALLS = 50
# Long enough a sleep, in GPU clocks per timed call, for the host to queue the calls meanwhile.
_SLEEP_CLOCKS = 1_000_000
# How long a GPU is busy before its clock is looked at, and how long that takes.
_BUSY_US = 100_000
_CLOCK_SLEEPS = (100_000, 600_000)

Run = Callable[[], Any]
# Takes the number of samples, returns the microseconds of each.
Sampler = Callable[[int], list[float]]


def event_times_us(run: Run, samples: int, before: Run | None = None) -> list[float]:
    """Microseconds on the current CUDA device of each of so many calls; `before` is not timed.

    The GPU is kept busy at first, so that all work is queued by the time it starts and the events
    measure kernels, not the host's pace.
    """
    import torch

    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
    torch.cuda._sleep(_SLEEP_CLOCKS * samples)
    for start, end in marks:
        if before is not None:
            before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in marks]


def sm_clock_mhz(run: Run, call_us: float) -> float:
    """The clock of the current CUDA device's SMs just after 100 ms of calls of `call_us` each.

    Two sleeps of so many clocks are timed: what they differ by has no launch in it. A driver tells
    no more than the clock by the time it is asked, of a GPU that may be idle again.
    """
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for _ in range(max(1, min(1000, int(_BUSY_US / call_us)))):
        run()
    # The first one is for the host to queue the others meanwhile.
    for clocks, mark in zip((_CLOCK_SLEEPS[1], *_CLOCK_SLEEPS), marks):
        torch.cuda._sleep(clocks)
        mark.record()
    torch.cuda.synchronize()
    short_ms, long_ms = marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])
    return (_CLOCK_SLEEPS[1] - _CLOCK_SLEEPS[0]) / (long_ms - short_ms) / 1e3


def clock_times_us(run: Run, samples: int, limit_s: float = 2.0) -> list[float]:
    """Microseconds of so many calls by the host's clock; fewer, at least one, after `limit_s`."""
    times: list[float] = []
    while len(times) < samples and sum(times) < limit_s * 1e6:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def mean_host_us(run: Run, calls: int) -> float:
    """Mean time from a call to its return, with nothing running on the GPU when it is called."""
    import torch

    clock, synchronize = time.perf_counter_ns, torch.cuda.synchronize
    total = 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(calls):
            synchronize()
            start = clock()
            run()
            total += clock() - start
    finally:
        if collecting:
            gc.enable()
    synchronize()
    return total / calls / 1e3


# {thread: nanoseconds on a core, and waiting for one}
CoreTimes = dict[str, tuple[int, int]]


def core_times() -> CoreTimes:
    """Of this process's threads, as Linux counts them; empty where it does not."""
    found = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has ended
            on_core, waiting, _ = map(int, file.read_text().split())
            found[file.parent.name] = on_core, waiting
    return found


def waited(before: CoreTimes, after: CoreTimes) -> float | None:
    """Part of the time in between that threads which could run had no core; None if unknown."""
    known = after.keys() & before.keys()
    on_core, waiting = (sum(after[x][i] - before[x][i] for x in known) for i in (0, 1))
    return waiting / (on_core + waiting) if on_core + waiting else None


def median_us(times: list[float]) -> float:
    return float(np.median(times))


class ColdEvents:
    """Events around each call, with an L2 cache that holds nothing of its operands."""

    name = "events_cold_l2"

    def __init__(self, device: str) -> None:
        import torch

        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(size, dtype=torch.int8, device=device).zero_

    def sampler(self, run: Run) -> Sampler:
        return lambda samples: event_times_us(run, samples, self._flush)


class WarmGraph:
    """One of many calls in a CUDA graph: no launch from the host, operands in L2 if they fit."""

    name = "cuda_graph_warm"

    def __init__(self, device: str) -> None:
        pass

    def sampler(self, run: Run) -> Sampler:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                run()

        def sample(samples: int) -> list[float]:
            return [us / GRAPH_CALLS for us in event_times_us(graph.replay, samples)]

        return sample


class HostClock:
    """The host's clock around each call: for the CPU."""

    name = "host_clock"

    def __init__(self, device: str) -> None:
        pass

    def sampler(self, run: Run) -> Sampler:
        return lambda samples: clock_times_us(run, samples)


Timer = ColdEvents | WarmGraph | HostClock


def timer_for(kind: str, device: str) -> type[Timer]:
    """`kind` is "events" or "graph"; it says how a GPU is timed and is moot on the CPU."""
    if device == "cpu":
        return HostClock
    return WarmGraph if kind == "graph" else ColdEvents
