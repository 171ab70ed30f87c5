"""What a process that runs for months asks of calls: many streams, threads, and captures."""

import ctypes
import os
import subprocess
import sys
import threading
import traceback

import cases
import cutlass_attn
import numpy as np
import pytest

torch = pytest.importorskip("torch")

MOST_BYTES = 18 << 20  # kept of a GPU, as kept_bytes() documents it


def test_nothing_is_kept_of_a_gpu_that_no_call_has_used():
    assert cutlass_attn.kept_bytes(63) == 0
    x = np.ones((1, 1, 4, 16), np.float32)
    cutlass_attn.attention(x, x, x)
    assert cutlass_attn.kept_bytes(63) == 0


# --- With a GPU -----------------------------------------------------------------------------------


class Stream:
    """A stream of its own: torch.cuda.Stream hands out 32 in turns."""

    def __init__(self):
        handle = ctypes.c_void_p()
        assert int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))) == 0
        self.handle = handle.value
        self.torch = torch.cuda.ExternalStream(self.handle)

    def destroy(self):
        self.torch.synchronize()
        assert int(torch.cuda.cudart().cudaStreamDestroy(self.handle)) == 0


def decode_call(kernel="sm80/decode", head_dim=64):
    """A few queries over many keys, which blocks share; and its result on the current stream."""
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(1, 2, rows, head_dim, device="cuda", dtype=torch.float16, generator=generator)
        for rows in (1, 4096, 4096)
    )

    def run(out):
        return cutlass_attn.attention(q, k, v, out=out, kernel=kernel)

    due = run(torch.empty_like(q))
    torch.cuda.synchronize()
    return run, due


@cases.needs_gpu
def test_ten_thousand_streams_keep_no_more_than_a_few():
    run, due = decode_call()
    assert cutlass_attn.kept_bytes() > 0
    for i in range(10000):
        stream = Stream()
        out = torch.full_like(due, torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream.torch):
            run(out)
        stream.destroy()
        assert torch.equal(out, due), i
        assert cutlass_attn.kept_bytes() <= MOST_BYTES
        if i % 100 == 0:
            torch.cuda.empty_cache()  # torch keeps memory for each stream as well


@cases.needs_gpu
def test_two_threads_share_a_stream():
    run, due = decode_call()
    stream = torch.cuda.Stream()
    wrong = []

    def work():
        with torch.cuda.stream(stream):
            outs = [run(torch.empty_like(due)) for _ in range(500)]
        stream.synchronize()
        wrong.extend(out for out in outs if not torch.equal(out, due))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@cases.needs_gpu
def test_a_first_use_leaves_a_capture_of_another_thread_valid():
    """In a process of its own: once earlier calls have used up what is kept for streams, the other
    thread gets memory from PyTorch, whose own cudaMalloc invalidates the capture."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment():
    paths = [os.path.dirname(cases.__file__), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def use_first_beside_a_capture():
    run, due = decode_call()
    # A kernel that has yet to be compiled and loaded, too, where this build has one.
    rows = [row for row in cutlass_attn.variants() if row.kernel == "sm80" and not row.compiled]
    late = next((row for row in rows if row.dtype == "float16"), None)
    if late is not None:
        x = torch.randn(1, 2, 100, late.head_dim, device="cuda", dtype=torch.float16)
        late_out = torch.empty(1, 2, 100, late.head_dim_v, device="cuda", dtype=torch.float16)
        v = x[..., : late.head_dim_v].contiguous()
    other, other_out = Stream(), torch.full_like(due, torch.nan)
    torch.cuda.synchronize()
    failures = []

    def first_use():
        try:
            with torch.cuda.stream(other.torch):
                run(other_out)
                if late is not None:
                    cutlass_attn.attention(x, x, v, out=late_out, kernel=late.key)
        except BaseException as failure:
            traceback.print_exc()  # the capture's own error comes first
            failures.append(failure)

    captured = torch.full_like(due, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in global mode
        thread = threading.Thread(target=first_use)
        thread.start()
        thread.join()
        run(captured)
    assert not failures
    graph.replay()
    other.destroy()
    torch.cuda.synchronize()
    assert torch.equal(captured, due)
    assert torch.equal(other_out, due)


if __name__ == "__main__":
    use_first_beside_a_capture()
