"""float64, which the CPU computes for gradcheck's sake: forward and backward."""

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
import reference
from cases import torch
from cutlass_attn import _C, attention, testing

# A scale that is given is read as a float32 number, and so are slopes.
TOLERANCE = 3e-7


def float64(x):
    return x.double() if x.dtype in (torch.float16, torch.float32) else x


@pytest.mark.parametrize("case", [*case_list.CASES, *case_list.PAIRWISE], ids=str)
def test_forward(case):
    head_dim = case.head_dim or 64
    q, k, v, _ = map(float64, cases.tensors(case, "float16", head_dim, "cpu"))
    options = dict(cases.keywords(case, "float16", "cpu"))
    for name in ("bias", "sinks"):
        if name in options:
            options[name] = float64(options[name])
    out, lse = attention(q, k, v, **options, return_lse=True)
    assert out.dtype is lse.dtype is torch.float64
    given = dict(cases.arrays(case, "float16"))
    if case.dropout_p:
        shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
        given["kept"] = testing.dropout_mask(given.pop("rng_state"), shape, case.dropout_p)
    due = reference.attention(
        *cases.values(case, "float16", head_dim),
        "float16",
        **{**case.scalars, "dropout_p": case.dropout_p},
        **given,
    )
    actual = out.transpose(1, 2) if case.layout == "bshd" else out
    size = 1 + np.abs(due.lse[np.isfinite(due.lse)]).max(initial=0.0)
    np.testing.assert_allclose(actual.numpy(), due.exact, rtol=0, atol=5 * size * TOLERANCE)
    np.testing.assert_allclose(lse.numpy(), due.lse, rtol=0, atol=size * TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"softcap": 1e8}], ids=str)
def test_the_default_scale_is_a_float64_number(options):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 5, 24), (1, 2, 70, 24), (1, 2, 70, 24))
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, **options)
    due = torch.softmax(q @ k.transpose(2, 3) / 24**0.5, -1) @ v
    torch.testing.assert_close(out, due, rtol=0, atol=1e-13)
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, due))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Attention(torch.autograd.Function):
    """The forward and the backward pass as they are, for gradcheck."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, options):
        ctx.options = {**options, "bias": bias, "sinks": sinks}
        out, lse = attention(q, k, v, return_lse=True, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        *qkv, out, lse = ctx.saved_tensors
        inputs = {"q": qkv[0], "k": qkv[1], "v": qkv[2]}
        inputs |= {name: ctx.options[name] for name in ("bias", "sinks")}
        grads = {f"grad_{n}": x if x is None else torch.empty_like(x) for n, x in inputs.items()}
        given = {"grad_out": grad_out, "out": out, "softmax_lse": lse, "grad_softmax_lse": grad_lse}
        given = {name: x.contiguous() for name, x in given.items()}
        _C.backward(*qkv, ctx.options, **given, **grads)
        return *grads.values(), None


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 1.5, "window": (3, 2)},
    "dropout": {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4])},
    "chunk": {"attention_chunk": 4},
    "negative": {"softmax_scale": -0.3},
    "alibi": {"alibi_slopes": torch.tensor([0.1, -0.2, 0.3, 0.4])},
    "mask": {"mask": torch.rand(5, 9, generator=torch.Generator().manual_seed(0)) < 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bias", [None, (2, 4, 5, 9), (1, 4, 1, 9), (5, 1), (1, 1, 1, 1)], ids=str)
def test_gradcheck(name, bias):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        return x.requires_grad_()

    inputs = [draw(2, 4, 5, 6), draw(2, 2, 9, 6), draw(2, 2, 9, 3)]
    inputs += [None if bias is None else draw(*bias), draw(4)]
    run = lambda *x: Attention.apply(*x, OPTIONS[name])  # noqa: E731
    if name == "mask":  # a row that sees no key has an LSE that is the sink alone
        OPTIONS[name]["mask"][2] = False
    assert torch.autograd.gradcheck(run, inputs)


def test_packed():
    q = torch.randn(7, 2, 8, dtype=torch.float64)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    out, lse = cutlass_attn.attention_varlen(q, q, q, cu, causal=True, return_lse=True)
    for rows in (slice(0, 3), slice(3, 7)):
        x = q[rows].transpose(0, 1)[None]
        due, due_lse = attention(x, x, x, causal=True, return_lse=True)
        assert torch.equal(out[rows], due[0].transpose(0, 1))
        assert torch.equal(lse[:, rows], due_lse[0])


def test_no_kernel_on_a_gpu():
    x = torch.empty(1, 1, 4, 16, dtype=torch.float64, device="meta")
    verdicts = cutlass_attn.explain(x, x, x, device="sm_89")
    assert verdicts.chosen is None
    on_gpu = [v for v in verdicts if v.variant.device == "cuda"]
    assert all("needs float" in v.reason or "needs bfloat16" in v.reason for v in on_gpu)


def test_what_is_float64_beside_the_operands():
    q = torch.zeros(1, 2, 4, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"sinks must be float64 like q, got torch\.float32"):
        attention(q, q, q, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="bias must be float64 like q, or float32, got"):
        attention(q, q, q, bias=torch.zeros(4, 4, dtype=torch.float16))
    due = attention(q, q, q, bias=torch.ones(4, 4))
    assert torch.equal(due, attention(q, q, q, bias=torch.ones(4, 4, dtype=torch.float64)))


def test_no_cache_of_it():
    k = torch.zeros(2, 1, 8, dtype=torch.float64)
    cache = torch.zeros(1, 4, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="k is float64, allowed: float16, bfloat16, float32"):
        cutlass_attn.append_kv(k, k, cache, cache, torch.tensor([0, 1]))


def test_no_other_kernel_verifies_it():
    q = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    packed, offsets = q[0].transpose(0, 1), torch.tensor([0, 5], dtype=torch.int32)
    calls = (
        lambda: attention(q, q, q, verify=True),
        lambda: cutlass_attn.attention_varlen(
            packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, verify=True
        ),
        lambda: cutlass_attn.attention_decode(q, q, q, offsets[:1], verify=True),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"verify=True: q is float64, .* allowed: float16"):
            call()
