"""Times of calls: on a GPU by events or in a CUDA graph, on a CPU by the host's clock.

torch is imported only to time a GPU: `cutlass-attn check` works without torch.
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
    """Microseconds of each of `samples` calls on the current CUDA device; `before` is not timed.

    The GPU sleeps first, so that the host has queued all work when it starts: the events then
    measure kernels, not the speed of the host.
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
    """The clock of the current CUDA device's SMs right after 100 ms of calls of `call_us` each.

    Two sleeps of known numbers of clocks are timed; their difference does not include a launch. The
    driver would report the clock at the time of the question, when the GPU may be idle again.
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
    """Microseconds of `samples` calls by the host's clock; after `limit_s` it stops earlier."""
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
    """Core times of this process's threads, as Linux counts them; empty on other systems."""
    found = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has ended
            on_core, waiting, _ = map(int, file.read_text().split())
            found[file.parent.name] = on_core, waiting
    return found


def waited(before: CoreTimes, after: CoreTimes) -> float | None:
    """The share of runnable time that threads waited for a core; None if unknown."""
    known = after.keys() & before.keys()
    on_core, waiting = (sum(after[x][i] - before[x][i] for x in known) for i in (0, 1))
    return waiting / (on_core + waiting) if on_core + waiting else None


def median_us(times: list[float]) -> float:
    return float(np.median(times))


class ColdEvents:
    """Times by events, with an L2 cache that has none of the operands."""

    name = "events_cold_l2"

    def __init__(self, device: str) -> None:
        import torch

        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(size, dtype=torch.int8, device=device).zero_

    def sampler(self, run: Run) -> Sampler:
        return lambda samples: event_times_us(run, samples, self._flush)


class WarmGraph:
    """The mean time of a call in a CUDA graph of many: no launches, operands in L2 if they fit."""

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
    """Times by the host's clock, for CPU calls."""

    name = "host_clock"

    def __init__(self, device: str) -> None:
        pass

    def sampler(self, run: Run) -> Sampler:
        return lambda samples: clock_times_us(run, samples)


Timer = ColdEvents | WarmGraph | HostClock


def timer_for(kind: str, device: str) -> type[Timer]:
    """The timer for a device; `kind`, "events" or "graph", is how a GPU is timed."""
    if device == "cpu":
        return HostClock
    return WarmGraph if kind == "graph" else ColdEvents
