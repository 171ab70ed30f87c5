"""float64, which the CPU computes for gradcheck's sake: forward and backward."""

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
import reference
from cases import torch
from cutlass_attn import _C, attention, testing

TOLERANCE = 1e-14


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


SLOPES = torch.tensor([0.1, 1 / 3], dtype=torch.float64)
SCALARS = {
    "default scale": {},
    "scale": {"softmax_scale": 0.1},
    "negative scale": {"softmax_scale": -1 / 3},
    "softcap": {"softcap": 0.7},
    "large softcap": {"softcap": 1e8},
    "softcap beyond float32": {"softcap": 1e300},
    "softcap below float32": {"softcap": 1e-50},
    "slopes": {"alibi_slopes": SLOPES},
    "slopes of each entry": {"alibi_slopes": torch.stack([SLOPES, 7 * SLOPES])},
    "slopes of float32": {"alibi_slopes": SLOPES.float()},
    "dropout": {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4])},
}


def scalar_operands(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 2, 5, 24), (2, 2, 70, 24), (2, 2, 70, 24))
    draw = lambda size: torch.randn(size, dtype=torch.float64, generator=generator)  # noqa: E731
    return [draw(size).requires_grad_() for size in shapes]


def by_torch(q, k, v, softmax_scale=24**-0.5, softcap=0.0, alibi_slopes=None, dropout_p=0.0, **_):
    logits = q @ k.transpose(2, 3) * softmax_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if alibi_slopes is not None:
        distance = (keys - (rows + k.shape[2] - q.shape[2])).abs()
        logits = logits - alibi_slopes.double()[..., None, None] * distance
    weights = torch.softmax(logits, -1)
    if dropout_p:
        shape = (*q.shape[:3], k.shape[2])
        kept = testing.dropout_mask(np.array([3, 4]), shape, dropout_p)
        share = 1 - round(dropout_p * 2**15) / 2**15
        weights = weights * torch.from_numpy(np.asarray(kept)).ne(0) / share
    return weights @ v


@pytest.mark.parametrize("options", SCALARS.values(), ids=SCALARS)
def test_scalars_and_slopes_are_float64_numbers(options):
    inputs = scalar_operands()
    out = attention(*inputs, **options)
    due = by_torch(*inputs, **options)
    torch.testing.assert_close(out, due, rtol=0, atol=1e-13)
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, due))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [SCALARS["scale"], SCALARS["softcap"], SCALARS["slopes"]])
def test_scalars_of_packed_calls_and_caches(options):
    q, k, v = (x.detach() for x in scalar_operands())
    due = by_torch(q, k, v, **options).transpose(1, 2)
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    lengths = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 70)]
    packed = cutlass_attn.attention_varlen(*(x.flatten(0, 1) for x in rows), *lengths, **options)
    torch.testing.assert_close(packed, due.flatten(0, 1), rtol=0, atol=1e-13)
    cached = cutlass_attn.attention_decode(
        *rows, torch.full((2,), 70, dtype=torch.int32), causal=False, **options
    )
    torch.testing.assert_close(cached, due, rtol=0, atol=1e-13)


def test_a_score_mod_with_slopes_is_float64():
    q, k, v = (x.detach() for x in scalar_operands())
    offset = 70 - 5
    out = attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s - SLOPES[h] * torch.abs(i + offset - j)
    )
    torch.testing.assert_close(out, by_torch(q, k, v, alibi_slopes=SLOPES), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "dtype, message",
    [
        (torch.float16, "alibi_slopes must be float64 like q, or float32, got torch.float16"),
        (torch.int64, "alibi_slopes must be float64 like q, or float32, got torch.int64"),
    ],
)
def test_other_slopes_are_refused(dtype, message):
    with pytest.raises(ValueError, match=message):
        attention(*scalar_operands(), alibi_slopes=torch.ones(2, dtype=dtype))
    narrow = (x.detach().float() for x in scalar_operands())
    with pytest.raises(ValueError, match=r"alibi_slopes must be float32, got torch\.float64"):
        attention(*narrow, alibi_slopes=torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_scalars_are_finite(name, value):
    with pytest.raises(ValueError, match=f"{name} is -?(inf|nan), allowed: a(ny)? finite number"):
        attention(*scalar_operands(), **{name: value})


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 2, 5, 7), (2, 1, 1, 7), (7,)])
def test_gradient_of_a_bias_in_its_own_dtype(dtype, shape):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    bias = torch.randn(shape, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(attention(q, k, v, bias=bias).square().sum(), bias)
    logits = q @ k.mT / 8**0.5 + bias.double()
    (due,) = torch.autograd.grad((logits.softmax(-1) @ v).square().sum(), bias)
    assert grad.dtype is dtype
    torch.testing.assert_close(grad, due)


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
    with pytest.raises(ValueError, match="k_new is float64, allowed: float16, bfloat16, float32"):
        cutlass_attn.attention_decode(
            k[:1, None], cache, cache.clone(), 0, k_new=k[:1, None], v_new=k[:1, None]
        )


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
