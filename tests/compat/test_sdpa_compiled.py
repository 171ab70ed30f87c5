"""compat.sdpa and its neighbours under torch.compile and torch.func: symbolic sizes, caches."""

import os
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from cutlass_attn.compat import diffusers, flash_attn, sdpa, transformers  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

# --- Symbolic sizes -------------------------------------------------------------------------------


def half(shape, order=(0, 1, 2, 3)):
    return torch.empty_permuted(shape, order, dtype=torch.float16).normal_()


class Layer:
    is_causal = True


# A function and its arguments, of sizes that follow from a number.
FUNCTIONS = {
    "bhsd": (sdpa.scaled_dot_product_attention, lambda n: [half((n, n + 1, n + 2, 16))] * 3),
    "bshd": (
        sdpa.scaled_dot_product_attention,
        lambda n: [half((n, n + 1, n + 2, 16), (0, 2, 1, 3))] * 3,
    ),
    "sbhd": (
        sdpa.scaled_dot_product_attention,
        lambda n: [half((n, n + 1, n + 2, 16), (2, 0, 1, 3))] * 3,
    ),
    "GQA": (
        lambda q, k: sdpa.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        lambda n: [half((n, 4 * n, n + 2, 16)), half((n, n, n + 5, 16))],
    ),
    "one key head": (
        sdpa.scaled_dot_product_attention,
        lambda n: [half((n, n + 1, n + 2, 16)), *[half((1, 1, n + 5, 16))] * 2],
    ),
    "mask": (
        sdpa.scaled_dot_product_attention,
        lambda n: [*[half((n, n + 1, n + 2, 16))] * 3, torch.rand(n, 1, n + 2, n + 2) < 0.6],
    ),
    "causal": (
        lambda q, k: sdpa.scaled_dot_product_attention(q, k, k, is_causal=True),
        lambda n: [half((n, n + 1, n + 2, 16)), half((n, n + 1, n + 5, 16))],
    ),
    "diffusers": (diffusers.attention, lambda n: [half((n, n + 1, n + 2, 16))] * 3),
    "flash_attn": (flash_attn.flash_attn_func, lambda n: [half((n, n + 1, n + 2, 16))] * 3),
    "transformers": (
        lambda x, mask: transformers.attention_forward(Layer, x, x, x, mask)[0],
        lambda n: [half((n, n + 1, n + 2, 16)), torch.randn(n, 1, n + 2, n + 2)],
    ),
}


def recorder():
    """A list, and a backend that appends each graph to it."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def assert_compiles_once(function, make):
    graphs, backend = recorder()
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
    for n in (3, 5, 7):
        arguments = make(n)
        result, due = compiled(*arguments), function(*arguments)
        assert torch.equal(result, due) and result.stride() == due.stride()
    assert len(graphs) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_symbolic_sizes_compile_once(name):
    assert_compiles_once(*FUNCTIONS[name])


@pytest.mark.parametrize("name", ["bhsd", "sbhd", "mask"])
def test_symbolic_sizes_under_route(name):
    with sdpa.route(("cpu",), report=False) as report:
        assert_compiles_once(F.scaled_dot_product_attention, FUNCTIONS[name][1])
    assert report.taken and not report.passed_on


# --- What is compiled under a route, and before and after it --------------------------------------


def runs_here(function, *arguments):
    """A dispatch mode would see the call, too, but keep compiled code from running."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function(*arguments)
    return any("cutlass_attn" in event.key for event in seen.key_averages())


def test_compiled_code_follows_the_route():
    q = half((2, 4, 6, 8))
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="aot_eager")
    compiled(q)
    assert not runs_here(compiled, q)
    for _ in range(2):
        with sdpa.route(("cpu",), report=False) as report:
            compiled(q)
            assert runs_here(compiled, q)
        assert report.taken and not report.passed_on
        compiled(q)
        assert not runs_here(compiled, q)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_compiled_call_is_counted_once(backend, needs_gradient):
    """AOTAutograd runs it several times when it traces."""
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=backend)
    with sdpa.route(("cpu",), report=False) as report:
        for dtype in (torch.float16, torch.float32):
            q = torch.randn(2, 4, 6, 8, dtype=dtype, requires_grad=needs_gradient)
            compiled(q)
            compiled(q)
    assert report.taken == {"float16, head_dim 8": 1}
    assert report.passed_on == {"dtype torch.float32": 1}


PROGRAM = """
import contextlib, sys, torch
from torch.profiler import profile

F = torch.nn.functional
q = torch.ones(2, 4, 6, 8).half()
compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q))
context = contextlib.nullcontext()
if sys.argv[1] == "routed":
    from cutlass_attn.compat import sdpa
    context = sdpa.route(("cpu",), report=False)
with context:
    compiled(q)
    with profile() as seen:
        compiled(q)
print(any("cutlass_attn" in event.key for event in seen.key_averages()))
"""


@pytest.mark.parametrize("order", [["routed", "plain"], ["plain", "routed"]], ids=" ".join)
def test_caches_on_disk_know_of_the_route(order, tmp_path):
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    for kind in order:
        command = [sys.executable, "-c", PROGRAM, kind]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(kind == "routed")


def test_a_route_leaves_the_caches_key_as_it_was():
    before = sdpa._cache_tag()
    with sdpa.route(("cpu",), report=False):
        assert "cutlass_attn" in (sdpa._cache_tag() or "")
    assert sdpa._cache_tag() == before


def test_another_thread_compiles_what_it_would_without_the_route_or_has_its_key():
    """From torch 2.12 on settings are of a thread, the keys of caches on disk among them."""
    q = half((2, 4, 6, 8))
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="aot_eager")
    tags = []
    with sdpa.route(("cpu",), report=False) as report:
        here = sdpa._cache_tag()
        thread = threading.Thread(target=lambda: (tags.append(sdpa._cache_tag()), compiled(q)))
        thread.start()
        thread.join()
    reasons = {"it is compiled in another thread than the one that opened the route"}
    assert set(report.passed_on) == (set() if tags == [here] else reasons)
    assert bool(report.taken) == (tags == [here])


# --- torch.func -----------------------------------------------------------------------------------


def loss(q):
    return F.scaled_dot_product_attention(q, q, q).float().sum()


TRANSFORMS = {
    "grad": torch.func.grad(loss),
    "vjp": lambda q: torch.func.vjp(loss, q)[1](torch.ones(()))[0],
    "jacrev": torch.func.jacrev(
        lambda q: F.scaled_dot_product_attention(q, q, q).float().sum((1, 2, 3))
    ),
    "vmap of grad": lambda q: torch.vmap(torch.func.grad(loss))(q[:, None]),
    "vmap": lambda q: torch.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(q[:, None]),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of batching rules that it lacks
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_work_under_route(name):
    q = half((2, 3, 4, 8))
    due = TRANSFORMS[name](q)
    with sdpa.route(("cpu",), report=False):
        assert torch.equal(TRANSFORMS[name](q), due)
