"""fp16 accumulation: who may ask for it, which kernels run then, and how far they may be off.

test_attention.py judges these kernels in every case; here is what only they do.
"""

import cases
import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import testing

attention = cutlass_attn.attention
IN_FP16 = ["fp16", "fp16_qk", "fp16_pv"]
HEAD_DIM = 64
VARIANTS = cases.all_variants(lambda v: v.accumulate != "fp32" and v.head_dim >= HEAD_DIM)


def qkv(*lengths, dtype=torch.float16, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, 1, n, HEAD_DIM, generator=generator).to(device, dtype)
        for n in (lengths[0], lengths[1], lengths[1])
    ]


def run(variant, q, k, v, **options):
    return attention(q, k, v, kernel=variant.key, accumulate=variant.accumulate, **options)


@pytest.mark.parametrize("function", [attention, cutlass_attn.explain])
@pytest.mark.parametrize(
    ("value", "error"), [("half", ValueError), ("", ValueError), (None, TypeError), (16, TypeError)]
)
def test_bad_values(function, value, error):
    with pytest.raises(error, match=f"accumulate must be .*fp32.*, got {value!r}"):
        function(*qkv(3, 5), accumulate=value)


@pytest.mark.parametrize("accumulate", IN_FP16)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_cpu_has_no_such_kernel(accumulate, dtype):
    """Refused, and nothing else runs in its place: with torch, numpy, and under torch.compile."""
    q, k, v = qkv(3, 5, dtype=dtype)
    reason = f'(?s)no kernel takes.*cpu/.*needs accumulate="fp32", got "{accumulate}"'
    with pytest.raises(ValueError, match=reason):
        attention(q, k, v, accumulate=accumulate)
    if dtype != torch.bfloat16:
        with pytest.raises(ValueError, match=reason):
            attention(*(x.numpy() for x in (q, k, v)), accumulate=accumulate)


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("accumulate", ["fp32", *IN_FP16])
def test_kernels_run_the_sums_they_are_asked_for(accumulate, device):
    """Every variant with other sums says that it has them; that is never all that is amiss."""
    explanation = cutlass_attn.explain(*qkv(70, 90), accumulate=accumulate, device=device)
    for verdict in explanation:
        needs = f'needs accumulate="{verdict.variant.accumulate}", got "{accumulate}"'
        on_cpu = verdict.variant.device == "cpu"
        matches = verdict.variant.accumulate == accumulate
        assert on_cpu or (needs in verdict.reason) != matches, verdict
    chosen = explanation.chosen
    assert chosen is None or chosen.accumulate == accumulate
    assert (f"accumulate {accumulate}" in str(explanation)) == (accumulate != "fp32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_forced_kernels_do_not_run_unasked(variant):
    q, k, v = qkv(3, 5, device=variant.device)
    for other in {"fp32", *IN_FP16} - {variant.accumulate}:
        text = f'needs accumulate="{variant.accumulate}", got "{other}"'
        with pytest.raises(ValueError, match=text):
            attention(q, k, v, kernel=variant.key, accumulate=other)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"softmax_scale": -0.1}, {"softmax_scale": 0.0}, {"softmax_scale": 1e-35}],
    ids=str,
)
def test_scores_they_lack(variant, options):
    with pytest.raises(ValueError, match=r"does not implement (softcap|negative_scale)"):
        run(variant, *qkv(3, 5, device=variant.device), **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_under_compile(variant):
    q, k, v = qkv(20, 33, device=variant.device)

    def model(q, k, v):
        return run(variant, q * 2, k, v)

    torch.compiler.reset()  # each variant counts as one more version of the same function
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), model(q, k, v))


@pytest.mark.parametrize("variant", VARIANTS)
def test_error_does_not_grow_with_the_keys(variant):
    """Values around 1: a sum over all keys in fp16 would be off by more with each of them."""
    rng = np.random.default_rng(0)
    for seqlen_k in (128, 2048):
        q, k = (rng.standard_normal((1, 1, n, HEAD_DIM)) for n in (9, seqlen_k))
        v = 1 + rng.standard_normal(k.shape) / 8
        arrays = [testing.round_to(x, "float16") for x in (q / 8, k, v)]
        expected = testing.reference(*arrays, "float16", accumulate=variant.accumulate)
        tensors = [torch.from_numpy(x).to(variant.device, torch.float16) for x in arrays]
        out, lse = run(variant, *tensors, return_lse=True)
        out = out.float().cpu().numpy()
        accuracy = testing.judge(
            out, expected.exact, expected.unfused, "float16", variant.accumulate
        )
        assert accuracy.ok, accuracy
        assert expected.confirms_lse(lse.cpu().numpy())
        # docs/accumulation.md: 4 u max|v|, and the rounding of the weights and of the result.
        assert variant.accumulate != "fp16_pv" or accuracy.max < 6 * 2.0**-11 * np.abs(v).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_beyond_65504(variant):
    """q.k is a number of fp16: infinite beyond 65504. A row with such a product is NaN, a product
    below -65504 hides its key."""
    q, k, v = qkv(2, 40, device=variant.device)
    q[:] = 40
    k[:] = 0
    k[0, 0, 7] = 40
    q[0, 0, 1] = -40
    out, lse = run(variant, q, k, v, return_lse=True)
    if variant.accumulate == "fp16_pv":
        assert torch.equal(out[0, 0, 0], v[0, 0, 7])  # the one key that weighs anything
    else:
        assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan()
    others = torch.cat([v[:, :, :7], v[:, :, 8:]], dim=2).float().mean(dim=2)
    torch.testing.assert_close(out[0, 0, 1].float(), others[0, 0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_of_large_values(variant):
    """Up to 1023 no sum of P V overflows, whichever way the logits go: here upwards, in steps that
    kernels with other sums let pass before they look for a new maximum."""
    q, k, v = qkv(65, 200, device=variant.device)
    q[:], k[:] = 0, 0
    q[..., 0] = 8
    k[0, 0, :, 0] = torch.arange(200, device=variant.device) / 8
    v[:] = 1023
    out = run(variant, q, k, v)
    torch.testing.assert_close(out.float(), torch.full_like(out, 1023).float(), atol=2, rtol=0)


@pytest.mark.parametrize("accumulate", IN_FP16)
def test_rule_catches_a_sum_over_all_keys(accumulate):
    """The yardstick has roundings of its own; it must not excuse a kernel without the second
    level, nor one that rounds weights or results once more than it should."""
    rng = np.random.default_rng(0)
    q, k, v = (
        testing.round_to(rng.standard_normal((1, 1, n, HEAD_DIM)), "float16")
        for n in (8, 2048, 2048)
    )
    expected = testing.reference(q, k, v, "float16", accumulate=accumulate)
    assert testing.judge(expected.unfused, expected.exact, expected.unfused, "float16").ok
    logits = q[0, 0].astype(np.float64) @ k[0, 0].T / np.sqrt(HEAD_DIM)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    total = np.zeros((8, HEAD_DIM))
    for j in range(0, 2048, 16):
        total += weights[:, j : j + 16] @ v[0, 0, j : j + 16]
        total = testing.round_to(total, "float16").astype(np.float64)
    one_level = (total / weights.sum(axis=1, keepdims=True))[None, None]
    verdict = testing.judge(one_level, expected.exact, expected.unfused, "float16", accumulate)
    assert not verdict.ok
