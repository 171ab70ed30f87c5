"""`return_max_logit`: the largest logit of each head, of what queries see and nothing else."""

import dataclasses

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
import reference
from cases import torch
from cutlass_attn import attention, attention_varlen, explain, testing

CASES = [
    dataclasses.replace(case, max_logit=True)
    for case in case_list.CASES + case_list.PAIRWISE
    if not case.max_logit
]


def confirm(found, due):
    np.testing.assert_allclose(found.double().cpu().numpy(), due, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("variant", "case"), cases.all_pairs(CASES))
def test_case(variant, case):
    head_dim = cases.head_dim_of(variant, case)
    q, k, v, out = cases.tensors(case, variant.dtype, head_dim, variant.device)
    options = cases.keywords(case, variant.dtype, variant.device)
    own = cases.own(variant)
    result, lse, max_logit = attention(q, k, v, **options, out=out, return_lse=True, **own)
    assert result is out
    assert max_logit.shape == (case.heads,) and max_logit.dtype == torch.float32
    expected = cases.expected(case, variant.dtype, head_dim)
    accuracy = testing.judge(
        cases.to_bhsd(case, out), expected.exact, expected.unfused, variant.dtype
    )
    assert accuracy.ok, accuracy
    assert testing.Reference(*expected[:4]).confirms_lse(lse.cpu().numpy())
    confirm(max_logit, expected.max_logit)


@pytest.mark.parametrize("variant", cases.all_variants(special=True))
def test_variant_takes_all_it_should(variant):
    for case in CASES[::9]:
        if variant.quantize and case.dropout_p:
            continue  # wrong for any kernel
        head_dim = cases.head_dim_of(variant, case)
        q, k, v, _ = cases.tensors(case, variant.dtype, head_dim, variant.device, False)
        options = cases.keywords(case, variant.dtype, variant.device)
        explanation = explain(q, k, v, **options, **cases.own(variant))
        assert (explanation.chosen is not None) == cases.takes(variant, case), explanation


def variants_where(fits):
    return cases.all_variants(
        lambda v: (
            "return_max_logit" in v.options
            and not {"bias", "mask", "latent_kv"} & set(v.needs)
            and fits(v)
        ),
        special=True,
    )


@pytest.mark.parametrize("variant", variants_where(lambda v: "varlen" in v.options))
@pytest.mark.parametrize("causal", [False, True])
def test_packed(variant, causal):
    lengths = ((70, 131), (0, 9), (5, 0), (33, 40))
    given = []
    for m, n in lengths:
        shape = {"batch": 1, "seqlen_q": m or 1, "seqlen_k": n or 1}
        q, k, v = cases.qkv(head_dim=variant.head_dim or 64, dtype=variant.dtype, **shape)
        given.append([q[:, :, :m], k[:, :, :n], v[:, :, :n]])
    q, k, v = (
        torch.cat([x[i][0].transpose(0, 1) for x in given]).to(variant.device) for i in range(3)
    )
    cu_q, cu_k = (
        torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device=variant.device)
        for x in zip(*lengths)
    )
    options = {"causal": causal, "kernel": variant.key}
    out, lse, max_logit = attention_varlen(
        q, k, v, cu_q, cu_k, return_lse=True, return_max_logit=True, **options
    )
    due = [
        reference.attention(*(y.float().numpy() for y in x), variant.dtype, causal=causal)
        for x in given
    ]
    confirm(max_logit, np.max([x.max_logit for x in due], axis=0))
    confirm(lse, np.concatenate([x.lse[0] for x in due], axis=1))
    exact = np.concatenate([x.exact[0] for x in due], axis=1)
    np.testing.assert_allclose(out.float().cpu().numpy(), exact.swapaxes(0, 1), atol=2e-2)


@pytest.mark.parametrize("variant", variants_where(lambda v: "varlen" not in v.kernel))
def test_what_no_query_sees_does_not_count(variant):
    """Keys left of the window, in one tile with keys that are seen, and a sink, with larger
    logits; then NaN."""
    q, k, v = cases.qkv(
        head_dim=variant.head_dim or 64, dtype=variant.dtype, seqlen_q=20, seqlen_k=200
    )
    k[:, :, :150] *= 100
    q, k, v = (x.to(variant.device) for x in (q, k, v))
    sinks = torch.full((4,), 1e4, device=variant.device)
    options = {"window": (30, 0), "kernel": variant.key, "sinks": sinks}
    _, found = attention(q, k, v, return_max_logit=True, **options)
    logits = q.double() @ k.repeat_interleave(2, 1).double().mT / q.shape[-1] ** 0.5
    rows, keys = torch.arange(20)[:, None] + 180, torch.arange(200)
    is_seen = (keys <= rows) & (keys >= rows - 30)
    confirm(found, logits.cpu().masked_fill(~is_seen, -np.inf).amax((0, 2, 3)).numpy())
    k[:, :, :150] = float("nan")
    _, again = attention(q, k, v, return_max_logit=True, **options)
    assert torch.equal(again, found)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_nothing_to_see(shape):
    q, k, v = cases.qkv(**{"heads_kv": 2, **shape})
    _, found = attention(q, k, v, return_max_logit=True)
    assert found.tolist() == [float("-inf")] * 4


def test_gradients_are_those_without_it():
    q, k, v = (x.requires_grad_() for x in cases.qkv())
    out, lse, max_logit = attention(q, k, v, return_lse=True, return_max_logit=True)
    assert out.requires_grad and lse.requires_grad and not max_logit.requires_grad
    found = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    out, lse = attention(q, k, v, return_lse=True)
    due = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_compiled(return_lse, needs_gradient):
    q, k, v = (x.requires_grad_(needs_gradient) for x in cases.qkv())

    def call(q, k, v):
        return attention(q, k, v, causal=True, return_lse=return_lse, return_max_logit=True)

    found = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    due = call(q, k, v)
    assert len(found) == len(due) == 2 + return_lse
    assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))
    assert not found[-1].requires_grad
    if needs_gradient:
        sums = (x[0].float().sum() for x in (found, due))
        of_found, of_due = (torch.autograd.grad(x, (q, k, v)) for x in sums)
        assert all(torch.equal(x, y) for x, y in zip(of_found, of_due, strict=True))


def test_compiled_packed():
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in cases.qkv(batch=1, seqlen_k=33))
    offsets = torch.tensor([0, 20, 33], dtype=torch.int32)

    def call(q, k, v):
        return attention_varlen(q, k, v, offsets, return_max_logit=True)

    found = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip(found, call(q, k, v), strict=True))


def test_vmap_gives_those_of_each_call():
    q, k, v = (torch.stack([x, 2 * x]) for x in cases.qkv())
    call = lambda q, k, v: attention(q, k, v, return_max_logit=True)[1]  # noqa: E731
    found = torch.func.vmap(call)(q, k, v)
    due = torch.stack([call(*x) for x in zip(q, k, v)])
    assert torch.equal(found, due) and (found[1] > found[0]).all()


def test_operator():
    q, k, v = cases.qkv(batch=1, seqlen_q=5, seqlen_k=7)
    options = {"return_lse": True, "return_max_logit": True}
    from cutlass_attn._call import operator

    args = operator._SCHEMA.arguments(q=q, k=k, v=v, **options)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.cutlass_attn.attention_forward, args, test_utils=tests)


def test_batch_dimensions_and_nested_tensors():
    q, k, v = cases.qkv()
    _, due = attention(q, k, v, return_max_logit=True)
    out, lse, found = attention(
        *(x[None] for x in (q, k, v)), return_lse=True, return_max_logit=True
    )
    assert torch.equal(found, due) and out.shape[1:] == q.shape and lse.dim() == 4
    bias = torch.zeros(2, 1, 4, 33, 50, dtype=q.dtype)  # repeats over one batch dimension alone
    bias[1] = 3
    several = [torch.stack([x, x]) for x in (q, k, v)]
    _, found = attention(*several, bias=bias, return_max_logit=True)
    torch.testing.assert_close(found, due + 3)
    parts = [[x[0, :, :9], x[1]] for x in (q, k, v)]
    nested = [
        torch.nested.nested_tensor([y.transpose(0, 1) for y in x], layout=torch.jagged)
        for x in parts
    ]
    _, found = attention(*nested, layout="bshd", return_max_logit=True)
    each = [attention(*(x[i][None] for x in parts), return_max_logit=True)[1] for i in range(2)]
    torch.testing.assert_close(found, torch.maximum(*each))


def test_numpy_and_float64():
    for dtype in ("float16", "float64"):
        q, k, v = (x.double().numpy().astype(dtype) for x in cases.qkv())
        _, found = attention(q, k, v, return_max_logit=True, sinks=np.full(4, 99.0, _number(dtype)))
        due = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), "float32").max_logit
        assert isinstance(found, np.ndarray) and found.dtype == _number(dtype)
        np.testing.assert_allclose(found, due, rtol=1e-5)


def _number(dtype):
    return np.float64 if dtype == "float64" else np.float32


def test_masks_and_terms():
    q, k, v = cases.qkv()
    mask = torch.zeros(50, dtype=torch.bool)
    mask[:7] = True
    _, found = attention(q, k, v, mask_mod=lambda b, h, i, j: j < 7, return_max_logit=True)
    _, due = attention(q, k, v, mask=mask, return_max_logit=True)
    torch.testing.assert_close(found, due)
    with pytest.raises(ValueError, match="score_mod and return_max_logit are both given"):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: s + i, return_max_logit=True)


def test_autocast_and_out():
    q, k, v = (x.float().requires_grad_() for x in cases.qkv())
    out = torch.empty_like(q, dtype=torch.bfloat16, requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        result, found = attention(q, k, v, out=out, return_max_logit=True)
    assert torch.equal(result, out) and found.shape == (4,)


def test_verify_compares_it(monkeypatch):
    q, k, v = cases.qkv()
    _, due = attention(q, k, v, return_max_logit=True)
    _, found = attention(q, k, v, return_max_logit=True, verify=True)
    assert torch.equal(found, due)
    offsets = [0, 33]
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k[:, :, :33], v[:, :, :33])]
    assert len(attention_varlen(*packed, offsets, return_max_logit=True, verify=True)) == 2

    real = cutlass_attn._C.forward

    def wrong(q, k, v, options, **more):
        results = real(q, k, v, options, **more)
        if not str(options.get("kernel", "")).startswith("scalar"):
            results[-1][1] += 0.01
        return results

    monkeypatch.setattr(cutlass_attn._C, "forward", wrong)
    with pytest.raises(cutlass_attn.VerificationError, match=r"max_logit in 1 of 4.*head 1"):
        attention(q, k, v, return_max_logit=True, verify=True)


def test_errors():
    q, k, v = cases.qkv()
    with pytest.raises(TypeError, match="return_max_logit must be"):
        attention(q, k, v, return_max_logit=1)
    with pytest.raises(ValueError, match="return_max_logit"):
        attention(q, k, v, return_max_logit=True, quantize="int8")
    with pytest.raises(ValueError, match="return_max_logit"):
        attention(q, k, v, return_max_logit=True, kernel="scalar/tiled-simt")
    with pytest.raises(TypeError, match=r"attention_decode.*return_max_logit"):
        cutlass_attn.attention_decode(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 50, return_max_logit=True
        )
