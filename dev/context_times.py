"""Times of `context_attention` on the GPUs of a host, beside one of them (docs/several-gpus.md).

    torchrun --nproc_per_node 2 -m dev.context_times --out times.json --trace trace.json
    python -m dev.context_times --draw trace.json --out overlap.png

One GPU and each scheme take turns. A time is that of a call among several that are enqueued without
waiting, as in training, on the slowest rank. *Efficiency* is the time of one GPU over ranks times
that of the scheme. If it is installed, ring-flash-attention runs beside, on the kernels of this
library. The trace is of the last case, forward and backward, on rank 0, and the picture is drawn
from it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

import cutlass_attn
import cutlass_attn.compat.flash_attn
import torch
import torch.distributed as dist
from cutlass_attn.distributed import ContextPlan, context_attention

from .bench.results import checkout_commit

CALLS = 4  # enqueued without waiting
SCHEMES = ("gather", "ring", "ulysses")
PEER = "ring-flash-attention, zigzag"


class Case(NamedTuple):
    rows: int  # of the whole sequence
    heads: int
    heads_kv: int
    head_dim: int = 128


class Passes(NamedTuple):
    forward: Callable[[], Any]
    both: Callable[[], None]  # with the backward pass
    leaves: list[torch.Tensor]  # q, k and v, which get the gradients


CASES = (
    Case(16384, 32, 8),
    Case(32768, 32, 8),
    Case(32768, 32, 32),
    Case(65536, 32, 8),
    Case(262144, 16, 4),
)


def milliseconds(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Of a call, on the slowest rank: until it is complete; until the host has enqueued it."""
    wait(device)
    dist.barrier()
    wait(device)
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    enqueued = time.perf_counter()
    wait(device)
    end = time.perf_counter()
    both = torch.tensor([end - start, enqueued - start], device=device) * (1000 / CALLS)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].item(), both[1].item()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def passes_of(case: Case, device: torch.device) -> dict[str, Passes]:
    """By one GPU, "one", and by each scheme, whose results are compared with those of one GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    torch.manual_seed(0)
    shapes = [(1, case.rows, n, case.head_dim) for n in (case.heads, case.heads_kv, case.heads_kv)]
    whole = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    grad = torch.randn_like(whole[0])
    calls = {"one": passes(cutlass_attn.attention, whole, grad, causal=True, layout="bshd")}
    for scheme in SCHEMES:
        plan = ContextPlan(dist.group.WORLD, case.rows, scheme=scheme)
        local = [plan.shard(x, 1) for x in whole]
        options = {"plan": plan, "causal": True, "layout": "bshd"}
        calls[scheme] = passes(context_attention, local, plan.shard(grad, 1), **options)
        compare(scheme, calls[scheme], calls["one"], plan)
    if importlib.util.find_spec("ring_flash_attn"):
        function = peer().zigzag_ring_flash_attn_func
        plan = ContextPlan(dist.group.WORLD, case.rows, scheme="ring")
        local = [plan.shard(x, 1) for x in whole]
        calls[PEER] = passes(function, local, plan.shard(grad, 1), causal=True)
        compare(PEER, calls[PEER], calls["one"], plan)
    return calls


def peer() -> Any:
    """ring-flash-attention."""
    cutlass_attn.compat.flash_attn.install()
    adapters: Any = ModuleType("ring_flash_attn.adapters")  # they need transformers before 5
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    return importlib.import_module("ring_flash_attn")


def measured(
    case: Case, calls: dict[str, Passes], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of the report."""
    times: dict[Any, list[Any]] = {}
    order = list(calls.items())
    for _ in range(rounds):
        for scheme, of_scheme in order:
            named = {"forward": of_scheme.forward, "forward and backward": of_scheme.both}
            for name, call in named.items():
                times.setdefault((scheme, name), []).append(milliseconds(call, device))
        order.reverse()  # so that none always follows the same one
    rows = []
    for (scheme, name), found in times.items():
        if scheme == "one":
            continue
        ms, host_ms = (median(x) for x in zip(*found))
        one_ms = median(x for x, _ in times["one", name])
        efficiency = one_ms / (dist.get_world_size() * ms)
        numbers = {"ms": ms, "host_ms": host_ms, "one_gpu_ms": one_ms, "efficiency": efficiency}
        rows.append(
            case._asdict()
            | {"scheme": scheme, "pass": name}
            | {name: round(x, 3) for name, x in numbers.items()}
        )
    return rows


def passes(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor,
    **options: Any,
) -> Passes:
    leaves = [x.clone().requires_grad_() for x in tensors]

    @torch.no_grad()
    def forward() -> Any:
        return function(*leaves, **options)

    def both() -> None:
        for x in leaves:
            x.grad = None
        function(*leaves, **options).backward(grad)

    return Passes(forward, both, leaves)


def compare(scheme: str, found: Passes, due: Passes, plan: ContextPlan) -> None:
    """Raises AssertionError unless results and gradients are those of one GPU."""
    found.both()
    due.both()
    pairs = [(found.forward(), due.forward())]
    pairs += [(x.grad, y.grad) for x, y in zip(found.leaves, due.leaves)]
    for name, (x, y) in zip(("out", "of q", "of k", "of v"), pairs):
        y = plan.shard(y, 1).float()
        error, largest = (x.float() - y).abs().max(), y.abs().max()
        assert error <= largest / 64, f"{scheme}, {name}: {error} of {largest}"


def trace(call: Callable[[], Any]) -> list[list[Any]]:
    """Start and duration in us, stream and name of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        dist.barrier()
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    rows = sorted([e["ts"], e["dur"], e["args"]["stream"], e["name"][:60]] for e in kernels)
    rows = [row for row in rows if "AllReduce" not in row[3]]  # the barrier
    return [[round(start - rows[0][0], 1), round(us, 1), *rest] for start, us, *rest in rows]


def draw(file: str, out: str) -> None:
    """A picture of a trace: attention kernels, transfers, and the rest, which copies."""
    from matplotlib.figure import Figure

    lanes = {"attention": "cutlass_attn", "transfers": "nccl", "copies": ""}
    colours = dict(zip(lanes, ("#0072B2", "#D55E00", "#999999")))
    traces = json.loads(Path(file).read_text())
    figure = Figure(figsize=(9, 1.6 * len(traces)), layout="constrained")
    all_axes = figure.subplots(len(traces), sharex=True, squeeze=False)[:, 0]
    for axes, (scheme, kernels) in zip(all_axes, traces.items()):
        for start, us, _, name in kernels:
            lane = next(lane for lane, part in lanes.items() if part in name)
            at = list(lanes).index(lane)
            axes.broken_barh([(start / 1000, us / 1000)], (at - 0.4, 0.8), color=colours[lane])
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.set_title(scheme, fontsize=10, loc="left")
        axes.invert_yaxis()
    all_axes[-1].set_xlabel("ms")
    figure.savefig(out, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.context_times")
    parser.add_argument("--out", help="the report, JSON; with --draw the picture")
    parser.add_argument("--trace", help="the trace of the last case, JSON")
    parser.add_argument("--draw", help="a trace to draw")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", help="rows,heads,heads_kv,head_dim", action="append")
    given = parser.parse_args(arguments)
    if given.draw:
        draw(given.draw, given.out)
        return 0
    has_gpus = torch.cuda.is_available()
    if given.trace and not has_gpus:
        parser.error("--trace needs GPUs")
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    cases = [Case(*map(int, x.split(","))) for x in given.case or ()] or CASES
    rows: list[dict[str, Any]] = []
    traces: dict[str, Any] = {}
    for case in cases:
        calls = passes_of(case, device)
        of_case = measured(case, calls, given.rounds, device)
        rows += of_case
        if rank == 0:
            print(*(" ".join(map(str, row.values())) for row in of_case), sep="\n", flush=True)
    if given.trace:
        traces = {scheme: trace(x.both) for scheme, x in calls.items() if scheme != "one"}
    if rank == 0:
        name = torch.cuda.get_device_name() if has_gpus else "cpu"
        about = {
            "device": name,
            "ranks": dist.get_world_size(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpus else "",
            "date": date.today().isoformat(),
            "commit": checkout_commit(),
            "rounds": given.rounds,
        }
        if given.out:
            Path(given.out).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        if given.trace:
            Path(given.trace).write_text(json.dumps(traces) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
