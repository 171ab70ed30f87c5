"""Gradients of tensors that a score_mod captures, in the C++ of backward kernels.

The kernels that add them: tests/cpp/simt/test_captures.cpp on a CPU, the last tests here on a GPU.
"""

import ctypes
import math
import re
import struct
from types import SimpleNamespace

import cases
import pytest

torch = pytest.importorskip("torch")

import cutlass_attn  # noqa: E402
import on_cpu  # noqa: E402
from cutlass_attn import _compiled, jit  # noqa: E402
from cutlass_attn._call.call import Call  # noqa: E402
from cutlass_attn._mods import cpp  # noqa: E402
from cutlass_attn._mods.derivative import derivative  # noqa: E402
from cutlass_attn._mods.graph import evaluate  # noqa: E402
from cutlass_attn._mods.tracing import trace  # noqa: E402

B, H, SQ, SK = 2, 4, 7, 9


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


HEADS = random(H, seed=1)
NUMBER = random(seed=2)
DISTANCES = random(2 * SK, H, seed=3).T  # not contiguous
BUCKETS = random(32, H, seed=4, dtype=torch.float64)
ROWS = random(B, SQ, seed=5)
KEYS = random(1, SK, seed=6).expand(B, SK)
PAIRS = random(H, SQ, SK, seed=7)
IDS = torch.tensor([3, 1, 0, 2, 2, 4, 5, 1, 0])


def bucket(distance):
    """T5's: exact near by, logarithmic beyond."""
    size = abs(distance)
    far = 4 + (torch.log(torch.clamp(size, min=1) / 4) * 3).to(torch.int64)
    return torch.where(size < 4, size, far.clamp(4, 15)) + torch.where(distance > 0, 16, 0)


# {name: (function, spread of each element that it reads, whether gradients depend on the score)}
SCORES = {
    "distance": (lambda s, b, h, q, k: s + DISTANCES[h, q - k + SK], ["Distance"], False),
    "T5": (lambda s, b, h, q, k: s + BUCKETS[bucket(q - k), h], ["Distance"], False),
    "beyond": (lambda s, b, h, q, k: s + DISTANCES[h, 3 * (k - q)], ["Distance"], False),
    "compared": (lambda s, b, h, q, k: s + HEADS[torch.where(k > q, 1, h)], ["Distance"], False),
    "slopes": (lambda s, b, h, q, k: s - HEADS[h] * abs(q - k), ["Head"], False),
    "temperature": (lambda s, b, h, q, k: s * HEADS[h] * NUMBER, ["Head", "Head"], True),
    "cap": (lambda s, b, h, q, k: NUMBER * torch.tanh(s / NUMBER), ["Head"], True),
    "rows, keys": (lambda s, b, h, q, k: s + ROWS[b, q] * KEYS[b, k], ["Query", "Key"], False),
    "pairs": (lambda s, b, h, q, k: torch.sin(s) * PAIRS[h, q, k], ["Each"], True),
    "not distances": (lambda s, b, h, q, k: s + DISTANCES[h, q - 2 * k], ["Each"], False),
    "ids": (
        lambda s, b, h, q, k: s + HEADS[IDS[q]] * HEADS[IDS[q - k]],
        ["Query", "Distance"],
        False,
    ),
    "by score": (lambda s, b, h, q, k: s + HEADS[s.to(torch.int64).clamp(0, 3)], ["Each"], True),
}


def traced(name):
    graph = trace(SCORES[name][0], "score_mod")
    wanted = [i for i, x in enumerate(graph.captures) if x.is_floating_point()]
    return graph, derivative(graph, wanted)


# As a kernel calls them: where logits share an element, with one index for all of them.
ADD = """
template <int j, class Mod>
void add{n}(Mod const& mod, float score, float g, int b, int h, int q, int k) {{
  if constexpr (j < Mod::kSums) {{
    typename Mod::template Nth<j> const nth{{}};
    constexpr auto spread = Mod::kSpread[j];
    int const row = spread == Mod::kPerDistance ? q - k + 5
                    : spread == Mod::kEach || spread == Mod::kPerQuery ? q : 0;
    int const key = spread == Mod::kPerDistance ? 5
                    : spread == Mod::kEach || spread == Mod::kPerKey ? k : 0;
    *mod.sum(nth, score, b, h, row, key) += g * mod.slope(nth, score, b, h, q, k);
    add{n}<j + 1>(mod, score, g, b, h, q, k);
  }}
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The C++ of all functions, and their sources."""
    parts, sources = [], {}
    for n, name in enumerate(SCORES):
        graph, found = traced(name)
        functions = {"score": graph.result, "grad": found.score}
        sources[name] = graph, cpp.source(graph, functions, f"Mod{n}", found)
        arguments = f"float const* score, float const* g, Mod{n} const* mod"
        body = f"add{n}<0>(*mod, score[i], g[i], b, h, q, k);"
        run = on_cpu.for_logits(f"run{n}", arguments, (B, H, SQ, SK), body)
        parts += [sources[name][1].text, ADD.format(n=n), run]
    return on_cpu.library(tmp_path_factory.mktemp("captures"), parts), sources


@on_cpu.needs_gxx
@pytest.mark.parametrize("name", SCORES)
def test_sums_are_torchs_gradients(name, library):
    compiled, sources = library
    graph, source = sources[name]
    score = random(B, H, SQ, SK, seed=11) * 2
    grad = random(B, H, SQ, SK, seed=12)
    sums = [torch.zeros(graph.captures[i].shape) for i in source.sums]
    run = getattr(compiled, f"run{list(SCORES).index(name)}")
    run(on_cpu.pointer(score), on_cpu.pointer(grad), cpp.packed(source, sums))
    captures = [graph.captures[i] for i in source.sums]
    index = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    leaves = [x.detach().requires_grad_() for x in captures]
    graph.captures = [
        next((y for y, z in zip(leaves, captures) if z is x), x) for x in graph.captures
    ]
    total = evaluate(graph, graph.result, {"score": score, **dict(zip("bhqk", index))})
    due = torch.autograd.grad((total * grad).sum(), leaves)
    for x, y in zip(sums, due, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SCORES)
def test_what_kernels_know_of_the_gradients(name):
    graph, found = traced(name)
    _, words, reads_score = SCORES[name]
    text = cpp.source(graph, {"grad": found.score}, of=found).text
    kinds = ", ".join("kEach" if x == "Each" else f"kPer{x}" for x in words)
    assert f"kSpread[] = {{{kinds}}};" in text
    assert f"kSumsReadScore = {str(reads_score).lower()};" in text


@pytest.mark.parametrize(
    ("function", "is_steep"),
    [
        (lambda s, b, h, q, k: 1 / s, True),
        (lambda s, b, h, q, k: torch.where(s > 0, torch.log(s), s), True),
        (lambda s, b, h, q, k: s**-2, True),
        (lambda s, b, h, q, k: s * s + s**3 + HEADS[h] / 3, False),
        (lambda s, b, h, q, k: torch.nn.functional.gelu(s) + torch.atan(s), False),
        (lambda s, b, h, q, k: 5 * torch.tanh(s / 5), False),
        (lambda s, b, h, q, k: torch.sigmoid(s) + torch.exp(HEADS[h]), False),
    ],
)
def test_steep_derivatives_are_named(function, is_steep):
    graph = trace(function, "score_mod")
    text = jit._score_mods[_compiled.made(graph).name]
    assert f"kGradIsSteep = {str(is_steep).lower()};" in text


def test_kernels_without_such_gradients_have_no_code_for_them():
    graph = trace(SCORES["distance"][0], "score_mod")
    assert "kSums = 0;" in jit._score_mods[_compiled.made(graph).name]
    assert "kSums = 1;" in jit._score_mods[_compiled.made(graph, [0], graph).name]


def test_masks_are_no_part_of_the_derivative():
    """A mask that becomes a term does not make a function of distances one of scores."""
    graph = trace(SCORES["distance"][0], "score_mod")
    q = torch.zeros(1, H, 16, 64, dtype=torch.float16)
    mask = torch.ones(16, 16, dtype=torch.bool)
    whole, _ = _compiled.masked(graph, Call(q, q, q, {"mask": mask}))
    text = jit._score_mods[_compiled.made(whole, [0], graph).name]
    assert "Captured<bool, 2>" in text and "kSumsReadScore = false" in text


def test_gradients_have_the_tensors_dtype_and_shape(monkeypatch):
    """Without a GPU: a backward pass that adds 1.5 to each element."""
    table = random(3, 5, seed=1, dtype=torch.bfloat16).requires_grad_()
    unused = random(4, seed=2).requires_grad_()
    number = random(seed=3, dtype=torch.float64).requires_grad_()
    ids = torch.arange(5)
    seen = []

    def forward(q, k, v, options, **_):
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(q, k, v, options, score_mod, wanted, **_):
        seen.append(wanted)
        at = 0
        for rank, kind in re.findall(r"Captured<\w+, (\d)> (\w)\d;", texts[0]):
            if kind == "s":
                (pointer,) = struct.unpack_from("=Q", score_mod[1], at)
                elements = (ctypes.c_float * (15 if rank == "2" else 1)).from_address(pointer)
                assert not any(elements)
                elements[:] = [1.5] * len(elements)
            at += (8 + 12 * max(int(rank), 1) + 7) // 8 * 8
        return torch.zeros_like(q), None, None, None, None

    texts = []
    real = _compiled.made

    def made(*args):
        result = real(*args)
        texts[:] = [jit._score_mods[result.name]]
        return result

    monkeypatch.setattr(_compiled, "_C", SimpleNamespace(forward=forward, backward=backward))
    monkeypatch.setattr(_compiled, "made", made)
    q = torch.zeros(1, 3, 5, 64, dtype=torch.float16)
    graph = trace(
        lambda s, b, h, q, k: s * number + table[h, ids[q]] + 0.0 * (unused[h] > 0), "score_mod"
    )
    out, _ = _compiled.attention(Call(q, q, q), graph)
    grads = torch.autograd.grad(out.sum(), [table, number, unused])
    assert torch.equal(grads[0], torch.full((3, 5), 1.5, dtype=torch.bfloat16))
    assert torch.equal(grads[1], torch.tensor(1.5, dtype=torch.float64))
    assert torch.equal(grads[2], torch.zeros(4))
    assert seen == [[True, False, False, False, False]]  # no kernel would run without one


def test_deterministic_is_refused():
    table = torch.zeros(H, 64, requires_grad=True)
    graph = trace(lambda s, b, h, q, k: s + table[h, q - k + 32], "score_mod")
    q = torch.zeros(1, H, 16, 64, dtype=torch.float16)
    words = r"captures a tensor of shape \(4, 64\) that requires a gradient.*allowed: "
    with pytest.raises(ValueError, match=rf"^deterministic is True.*{words}deterministic=False"):
        _compiled.attention(Call(q, q, q, {"deterministic": True}), graph)
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(ValueError, match=rf"use_deterministic_algorithms is on.*{words}torch"):
            _compiled.attention(Call(q, q, q), graph)
    finally:
        torch.use_deterministic_algorithms(False)


# --- On a GPU ------------------------------------------------------------------------------------


def tables(dtype, device="cuda"):
    """Of 4 heads and up to 400 queries and keys."""
    shapes = {
        "distances": (H, 800),
        "buckets": (32, H),
        "heads": (H,),
        "number": (),
        "keys": (400,),
    }
    return {
        name: random(*shape, seed=i, dtype=dtype).to(device).mul(0.5).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }


ON_GPU = {
    "distance": lambda t, s, b, h, q, k: s + t["distances"][h, q - k + 400],
    "T5": lambda t, s, b, h, q, k: s + t["buckets"][bucket(q - k), h],
    "slopes": lambda t, s, b, h, q, k: s - t["heads"][h] * abs(q - k) * 0.05,
    "temperature": lambda t, s, b, h, q, k: s * (1.0 + t["heads"][h]) * (t["number"] + 2.0),
    "keys": lambda t, s, b, h, q, k: torch.tanh(s) * t["keys"][k] + t["keys"][q],
    "pairs": lambda t, s, b, h, q, k: s + t["distances"][h, (q * k) % 800] * t["heads"][h],
}


def dense(q, k, v, function, mask):
    """By torch, in the precision of the inputs."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = q @ k.mT / math.sqrt(q.shape[-1])
    index = torch.meshgrid(*(torch.arange(n, device=q.device) for n in score.shape), indexing="ij")
    score = torch.where(mask(*index), function(score, *index), -torch.inf)
    lse = score.logsumexp(-1, keepdim=True)
    return torch.exp(score - torch.where(lse.isinf(), 0.0, lse)) @ v


def check_on_gpu(name, dtype, of_tables, head_dim, call, mask, lengths=(300, 333)):
    """call(q, k, v, score_mod): the result of the library."""
    shapes = (B, H, lengths[0], head_dim), *[(B, 2, lengths[1], head_dim)] * 2
    leaves = [
        random(*x, seed=20 + i, dtype=dtype).cuda().requires_grad_() for i, x in enumerate(shapes)
    ]
    weights = random(*shapes[0], seed=30, dtype=dtype).cuda()
    given = tables(of_tables)
    exact = {x: y.detach().double() for x, y in given.items()}
    # Of each logit's share of "number": they cancel, and each is rounded.
    exact["number"] = exact["number"].expand(B, H, *lengths).clone()
    exact = {x: y.requires_grad_() for x, y in exact.items()}
    wide = [x.detach().double().requires_grad_() for x in leaves]
    due = torch.autograd.grad(
        (dense(*wide, lambda *x: ON_GPU[name](exact, *x), mask) * weights).sum(),
        [*wide, *exact.values()], materialize_grads=True, allow_unused=True,
    )  # fmt: skip
    found = torch.autograd.grad(
        (call(*leaves, lambda *x: ON_GPU[name](given, *x)) * weights).sum(),
        [*leaves, *given.values()], materialize_grads=True, allow_unused=True,
    )  # fmt: skip
    limit = 4e-3 if dtype == torch.float16 else 3e-2
    for of, x, y in zip(["q", "k", "v", *given], found, due, strict=True):
        assert not x.isnan().any(), of
        allowed = limit * max(1, float(y.norm()))
        if of == "number":
            allowed = max(limit, torch.finfo(dtype).eps / 2 * float(y.norm()))
            y = y.sum()
        error = float((x.double() - y).norm())
        assert error < allowed, (of, error, allowed)


def all_keys(b, h, q, k):
    return k >= 0


def causal(b, h, q, k):  # aligned bottom-right, as the library's
    return k <= q + 33


def documents(b, h, q, k):
    return (q // 50 == k // 50) & (q % 11 != 3)  # some rows have no keys


@cases.needs_gpu
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize(
    ("dtype", "of_tables", "head_dim"),
    [
        (torch.float16, torch.float32, 64),
        (torch.bfloat16, torch.bfloat16, 128),
        (torch.float16, torch.float16, 96),
        (torch.float16, torch.float32, 256),
    ],
)
def test_gpu(name, dtype, of_tables, head_dim):
    def call(q, k, v, score_mod):
        return cutlass_attn.attention(q, k, v, score_mod=score_mod, causal=True)

    check_on_gpu(name, dtype, of_tables, head_dim, call, causal)


@cases.needs_gpu
@pytest.mark.parametrize("name", ["distance", "temperature"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_with_a_mask(name, head_dim):
    def call(q, k, v, score_mod):
        return cutlass_attn.attention(q, k, v, score_mod=score_mod, mask_mod=documents)

    check_on_gpu(name, torch.float16, torch.float32, head_dim, call, documents)


@cases.needs_gpu
@pytest.mark.parametrize("name", ["distance", "slopes"])
def test_gpu_flex_and_compile(name):
    flex = pytest.importorskip("cutlass_attn.compat.flex")

    def call(q, k, v, score_mod):
        return flex.flex_attention(q, k, v, score_mod, enable_gqa=True)

    check_on_gpu(name, torch.bfloat16, torch.float32, 64, call, all_keys)

    def model(q, k, v, score_mod):
        return cutlass_attn.attention(q * 1.0, k, v, score_mod=score_mod) * 1.0

    compiled = torch.compile(model, backend="aot_eager")
    check_on_gpu(name, torch.float16, torch.float32, 64, compiled, all_keys)
