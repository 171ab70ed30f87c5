"""Runs a function in several processes of a group, with a limit for its time."""

import multiprocessing
import os
import pickle
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(function, size, folder, limit=240, backend="gloo"):
    """What function(rank, size) returns on each rank; with "nccl" each has a GPU. Raises
    TimeoutError, and what a rank raises; the processes have ended in any case."""
    arguments = (function, size, str(folder), backend)
    # Forked from a process that has imported torch, which takes longer than most of these tests.
    multiprocessing.set_forkserver_preload(["torch", "cutlass_attn"])
    context = mp.start_processes(
        _work, args=arguments, nprocs=size, join=False, start_method="forkserver"
    )
    end = time.monotonic() + limit
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError(f"{size} processes of {function.__name__} after {limit} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(size)]


def _work(rank, function, size, folder, backend):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=limit)
    try:
        result = function(rank, size)
    finally:
        dist.destroy_process_group()
    with open(f"{folder}/rank{rank}", "wb") as file:
        pickle.dump(result, file)
    # Without the interpreter's end: gloo's threads may free a tensor then, and wait for the GIL in
    # code that may not throw, which is an abort.
    os._exit(0)


def outcome(function, *args):
    """Its failure as text; None if there is none. All ranks go on with the next case."""
    try:
        function(*args)
    except Exception:
        return traceback.format_exc()
    return None
