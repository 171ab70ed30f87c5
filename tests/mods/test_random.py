"""attention() with random functions: results and all gradients against the formula in float64."""

import math
import random

import pytest

torch = pytest.importorskip("torch", minversion="2.9")

import cutlass_attn  # noqa: E402
import on_cpu  # noqa: E402
from cutlass_attn._mods import cpp  # noqa: E402
from cutlass_attn._mods.derivative import derivative  # noqa: E402
from cutlass_attn._mods.graph import evaluate  # noqa: E402
from cutlass_attn._mods.tracing import trace  # noqa: E402
from random_mods import (  # noqa: E402
    FLOATS,
    HKV,
    HQ,
    OTHERS,
    SK,
    SQ,
    B,
    D,
    function,
    mask_mod,
    score_mod,
)

SEEDS = range(60)


def operands(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, HQ, SQ, D), (B, HKV, SK, D), (B, HKV, SK, D), (B, HQ, SQ, D), (B, HQ, SQ)
    return [torch.randn(*x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def formula(q, k, v, score_mod, mask_mod=None):
    k, v = (x.repeat_interleave(HQ // HKV, dim=1) for x in (k, v))
    score = q @ k.mT / math.sqrt(D)
    index = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    score = torch.as_tensor(score_mod(score, *index), dtype=torch.float64).expand(score.shape)
    if mask_mod is not None:
        score = torch.where(mask_mod(*index), score, -torch.inf)
    is_empty = (score == -torch.inf).all(-1, keepdim=True)
    score = torch.where(is_empty, 0.0, score)
    out = torch.where(is_empty, 0.0, torch.softmax(score, -1) @ v)
    return out, torch.where(is_empty[..., 0], -torch.inf, torch.logsumexp(score, -1))


def texts(seed):
    choose = random.Random(seed)
    return score_mod(choose), mask_mod(choose) if seed % 2 else None


@pytest.fixture(autouse=True)
def _float64():
    """An integer times a number is float64 in the formula as well."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def tables():
    for x in FLOATS.values():
        x.requires_grad_()
    yield list(FLOATS.values())
    for x in FLOATS.values():
        x.requires_grad_(False)


@pytest.mark.parametrize("seed", SEEDS)
def test_results_and_gradients(seed, tables):
    of_score, of_mask = texts(seed)

    def mods(at_once):
        made = {"score_mod": function(of_score, "score_mod", at_once)}
        if of_mask is not None:
            made["mask_mod"] = function(of_mask, "mask_mod", at_once)
        return made

    *inputs, grad, grad_lse = operands()
    leaves = [x.requires_grad_() for x in inputs]

    def results(out, lse):
        lse = torch.where(lse.isinf(), 0.0, lse)
        total = (out * grad).sum() + (lse * grad_lse).sum()
        grads = [None] * len([*leaves, *tables])
        if total.requires_grad:
            grads = torch.autograd.grad(
                total, [*leaves, *tables], materialize_grads=True, allow_unused=True
            )
        return out, lse, *grads

    due = results(*formula(*leaves, **mods(True)))
    found = results(*cutlass_attn.attention(*leaves, **mods(False), return_lse=True))
    names = ["out", "lse", "q", "k", "v", *FLOATS]
    for name, x, y in zip(names, found, due, strict=True):
        torch.testing.assert_close(
            x,
            y,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda m, name=name: f"{name}: {m}\n{of_score}\n{of_mask}",
        )


@pytest.mark.parametrize("seed", [0, 2])
def test_under_torch_compile(seed, tables):
    """Operands and captured tensors that compiled code computes, with gradients through it."""
    text = texts(seed)[0]
    leaves = [x.requires_grad_() for x in operands()[:3]]

    def model(q, k, v, *tables):
        scaled = {name: x * 1.5 for name, x in zip(FLOATS, tables)}
        mod = eval(f"lambda s, b, h, q, k: {text}", {**OTHERS, **scaled})
        out, lse = cutlass_attn.attention(q * 2, k, v, score_mod=mod, return_lse=True)
        return (out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sum()) * 3

    def results(function):
        total = function(*leaves, *tables)
        asked = [*leaves, *tables]
        return total, *torch.autograd.grad(total, asked, materialize_grads=True, allow_unused=True)

    torch._dynamo.reset()
    due, found = results(model), results(torch.compile(model, backend="aot_eager"))
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The C++ of all seeds, with the graphs."""
    parts, graphs = [], {}
    for n in SEEDS:
        graph = trace(function(texts(n)[0]), "score_mod")
        roots = {"apply": graph.result, "grad": derivative(graph).score}
        source = cpp.source(graph, roots, f"Mod{n}")
        graphs[n] = graph, source, roots
        parts += [source.text, on_cpu.values(n, (B, HQ, SQ, SK))]
    return on_cpu.library(tmp_path_factory.mktemp("mods"), parts), graphs


@on_cpu.needs_gxx
@pytest.mark.parametrize("seed", SEEDS)
def test_cpp(seed, library):
    """What a GPU's kernel is compiled with, in float32. Where a comparison of two floats is decided
    by their rounding the result may be any, and few logits are near one."""
    compiled, graphs = library
    graph, source, roots = graphs[seed]
    shape = (B, HQ, SQ, SK)
    score = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    out, gradient = on_cpu.run_values(compiled, seed, source, score)
    index = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    variables = dict(zip("bhqk", index))
    for found, root in zip((out, gradient), roots.values(), strict=True):
        due = evaluate(graph, root, {"score": score.double(), **variables}, torch.float64)
        close = torch.isclose(found.double(), due.expand(shape), rtol=1e-3, atol=1e-3)
        assert close.float().mean() > 0.997, (texts(seed)[0], source.text)
