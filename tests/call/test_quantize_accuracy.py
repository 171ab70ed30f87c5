"""Products in 8 bits: how large their errors are, whether the CPU's kernel has just these, and what
NaN, infinities and degenerate operands do.

test_attention.py has the kernel in every case.
"""

from dataclasses import replace

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
import quantize_reference
import reference
from cases import torch
from cutlass_attn import quantized, testing

from dev.accuracy import inputs, measure, peer

KERNELS = {"qk": "cpu/int8_qk", "int8": "cpu/int8", "fp8": "cpu/int8_fp8"}
VARIANTS = [v for v in cutlass_attn.variants() if v.kernel in KERNELS.values()]
# Kernels of GPUs with "qk" are in test_attention.py.
OF_GPUS = [v for v in cases.compiled_variants() if v.quantize in ("int8", "fp8") and v.head_dim]
modes = pytest.mark.parametrize("mode", KERNELS)
KEYS = 4096
NAMES = [
    "ragged",
    "causal_more_queries",
    "window_causal",
    "chunk_causal",
    "gqa",
    "bshd_gqa",
    "sliced",
    "softcap",
    "scale_negative",
    "sinks_no_key",
    "empty_keys",
    "bias_inf",
    "mask",
    "alibi",
]
CASES = [case for case in case_list.CASES if case.name in NAMES]


def relative(out, expected):
    """RMS error, relative to the RMS of what is expected."""
    return np.sqrt(np.mean(np.square(out - expected)) / np.mean(np.square(expected)))


def by_definition(given, mode):
    arrays = [x[None, None] for x in (given.q, given.k, given.v)]
    bias = given.bias[None, None, None]
    return quantize_reference.attention(*arrays, given.dtype, mode, bias=bias).exact[0, 0]


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_errors(kind, head_dim):
    """Of the modes by their definition, over 4096 keys; of the kernel; and of SageAttention 2++,
    which e4m3 weights and values leave at 3 to 4 %."""
    given = inputs.make(kind, 256, KEYS, head_dim)
    expected = measure.exact(given)
    errors = {"qk": relative(by_definition(given, "qk"), expected)}
    few = replace(given, q=given.q[:96])  # tile after tile in Python
    for mode in ("int8", "fp8"):
        errors[mode] = relative(by_definition(few, mode), expected[:96])
    operands = (few.q, few.k, few.v, few.bias)
    theirs = peer.attention(*operands, "float16", few.softmax_scale)
    errors["peer"] = relative(theirs, expected[:96])
    assert errors["qk"] <= (0.013 if kind == "random" else 0.025), errors
    assert errors["int8"] <= (0.016 if kind == "random" else 0.03), errors
    assert 0.02 < errors["peer"] < 0.05
    # "fp8" has the peer's two roundings to e4m3 as well, but rounds the largest weight, too, and
    # has one scale of V a tile; the peer's largest weight is exact, and V has one a channel.
    assert errors["fp8"] <= 1.35 * errors["peer"], errors

    for mode, kernel in KERNELS.items():
        out, chosen, predicted = measure.run(few, mode, "cpu")
        assert chosen == f"{kernel}/f16"
        error = relative(out, expected[:96])
        due = relative(by_definition(few, "qk"), expected[:96]) if mode == "qk" else errors[mode]
        assert error == pytest.approx(due, rel=0.02), mode
        assert error <= predicted < 2 * error, mode


def test_what_scales_are_for():
    """One scale for all of K, and no shift, would be off by more than the limit."""
    given = inputs.make("biased_k", 64, KEYS, 64)
    expected = measure.exact(given)
    q8, k8 = (
        quantize_reference.to_s8(x, np.abs(x).max()).dequantized() for x in (given.q, given.k)
    )
    logits = q8 @ k8.T * given.softmax_scale
    out, total, _ = quantize_reference.multiply_exact(logits, given.v.astype(np.float64))
    assert relative(out / total, expected) > inputs.limit("qk", "biased_k")
    assert relative(by_definition(given, "qk"), expected) < 0.015


def test_a_sink_anywhere():
    """The definition of "int8" needs no tile of its own for it: u8 weights with a scale of V for
    each tile would be off by 15 %."""
    given = inputs.make("random", 64, KEYS, 64)
    given.bias[777] = 9.0
    given.v[777] *= 0.05
    assert relative(by_definition(given, "int8"), measure.exact(given)) < 0.03


@pytest.mark.parametrize("round_e4m3", [quantized.round_e4m3, quantize_reference.round_e4m3])
def test_e4m3(round_e4m3):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(20_000) * 10.0 ** rng.integers(-4, 3, 20_000), [0.0]])
    x = np.clip(x.astype(np.float32), -448, 448).astype(np.float64)
    np.testing.assert_array_equal(round_e4m3(x), x.astype(ml_dtypes.float8_e4m3fn).astype(float))
    assert round_e4m3(np.array([1e4, -500.0])).tolist() == [448.0, -448.0]


def test_peer_refuses_what_it_does_not_know():
    given = inputs.make("random", 33, 100, 64)
    with pytest.raises(ValueError, match="33 queries and 100 keys, not multiples of 32 and 64"):
        peer.attention(given.q, given.k, given.v, given.bias, "float16", 0.125)


# --- The kernel -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_oracles_agree(case):
    """That of test_attention.py, which holds the kernel to it in every case, has two matrices in
    place of the shift."""
    arrays, options = cases.values(case, "float16", 64), cases.arrays(case, "float16")
    ours = quantize_reference.attention(*arrays, "float16", **case.scalars, **options)
    theirs = reference.attention_int8(*arrays, "float16", **case.scalars, **options)
    np.testing.assert_allclose(ours.exact, theirs.exact, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.lse, theirs.lse, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=cases.needs(variant))
        for variant in (*VARIANTS, *OF_GPUS)
        for case in CASES
        if cases.takes(variant, case)
    ],
)
def test_modes(variant, case):
    """Each by its definition, as far as the result's dtype goes, but for a few rows in which the
    rounding of a weight falls the other way."""
    head_dim = variant.head_dim or 64
    q, k, v, out = cases.tensors(case, variant.dtype, head_dim, variant.device)
    options = cases.keywords(case, variant.dtype, variant.device)
    _, lse = cutlass_attn.attention(
        q, k, v, **options, out=out, return_lse=True, **cases.own(variant)
    )
    arrays, options = cases.values(case, variant.dtype, head_dim), cases.arrays(case, variant.dtype)
    expected = quantize_reference.attention(
        *arrays, variant.dtype, variant.quantize, **case.scalars, **options
    )
    unit = 2.0**-11 if variant.dtype == "float16" else 2.0**-8
    off = np.abs(cases.to_bhsd(case, out) - expected.exact)
    if variant.quantize != "qk" and variant.head_dim:  # on a GPU, or as it would be there
        # e4m3: sums of a tile are rounded to fp16, too, and so are weights before; 1 or 2 %
        # of them become the next number, 6 % off. int8: weights are fp16 before
        # they are integers, and 2 to 4 % of them become the next one. By a computation in numpy
        # that is 0.2 % of the result's RMS and, with few keys, up to 0.005 of the log-sum-exp.
        rms, lse_usual, lse_most = (
            (0.018, 4e-3, 0.04) if variant.quantize == "fp8" else (0.003, 4e-3, 8e-3)
        )
        error = np.square(off).mean()
        assert np.sqrt(error) <= (rms + unit) * np.sqrt(np.square(expected.exact).mean())
        is_off = ~np.isclose(lse.cpu().numpy(), expected.lse, atol=lse_usual, rtol=1e-5)
        assert is_off.mean() < 0.01
        np.testing.assert_allclose(lse.cpu().numpy(), expected.lse, atol=lse_most, rtol=1e-5)
        assert variant.quantize == "fp8" or off.max() < 0.02
        return
    is_off = (off > unit * np.abs(expected.exact) + 2.0**-14).any(axis=-1)
    is_off |= ~np.isclose(lse.cpu().numpy(), expected.lse, atol=2e-5, rtol=1e-5)
    assert is_off.mean() <= (0 if variant.quantize == "qk" else 0.03)
    assert off.max() < (0.02 if variant.head_dim else 0.1)


def test_rule_catches_a_wrong_scale(monkeypatch):
    """With the scales of other lane groups, and with those of a whole tile, the rule fails."""
    case = next(case for case in case_list.CASES if case.name == "ragged")
    q, k, v = cases.values(case, "float16", 64)
    expected = quantize_reference.attention(q, k, v, "float16")
    right = quantize_reference.quantize_keys

    def moved(k, shift):
        found = right(k, shift)
        return quantize_reference.Quantized(found.values, np.roll(found.scale, 2, axis=0))

    def of_tile(k, shift):
        return quantize_reference.to_s8(k - shift, np.abs(k - shift).max())

    for wrong in (moved, of_tile):
        monkeypatch.setattr(quantize_reference, "quantize_keys", wrong)
        out = quantize_reference.attention(q, k, v, "float16").exact
        assert not testing.judge(out, expected.exact, expected.unfused, "float16").ok, wrong


# --- Bad input ------------------------------------------------------------------------------------


def tensors(seqlen_q, seqlen_k, head_dim=64, heads=1):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, rows, head_dim, generator=generator).half()
        for rows in (seqlen_q, seqlen_k, seqlen_k)
    ]


def attend(q, k, v, mode="qk", **options):
    return cutlass_attn.attention(q, k, v, quantize=mode, return_lse=True, **options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", [0, 70, 127, 149])
def test_bad_key(bad, key):
    """It poisons its tile of 64 keys at most, there the 16 that share its scale: rows that see one
    of them are NaN, and others are what they are without it."""
    q, k, v = tensors(150, 150)
    options = {"window": (20, 3)}
    poisoned = k.clone()
    poisoned[0, 0, key, 5] = bad
    out, lse = attend(q, poisoned, v, **options)
    # A key that is sampled moves the shift; with 0 in its place it is the same one.
    zeroed = k.clone()
    zeroed[0, 0, key, 5] = 0
    clean, clean_lse = attend(q, zeroed, v, **options)
    group = [n for n in range(150) if n // 64 == key // 64 and n % 8 // 2 == key % 8 // 2]
    sees = np.array(
        [
            any(first <= n < end for n in group)
            for first, end in (
                reference.visible_keys(row, 150, 150, False, (20, 3)) for row in range(150)
            )
        ]
    )
    assert 0 < sees.sum() < 110
    assert out[0, 0][sees].isnan().all() and lse[0, 0][sees].isnan().all()
    assert torch.equal(out[0, 0][~sees], clean[0, 0][~sees])
    assert torch.equal(lse[0, 0][~sees], clean_lse[0, 0][~sees])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_query(bad):
    """Its row is NaN, no other changes."""
    q, k, v = tensors(20, 90)
    clean, clean_lse = attend(q, k, v)
    q[0, 0, 7, 3] = bad
    out, lse = attend(q, k, v)
    is_bad = torch.arange(20) == 7
    assert out[0, 0, 7].isnan().all() and lse[0, 0, 7].isnan()
    assert torch.equal(out[0, 0][~is_bad], clean[0, 0][~is_bad])
    assert torch.equal(lse[0, 0][~is_bad], clean_lse[0, 0][~is_bad])


def close(mode, out, expected):
    """Within what the mode does to values: half a step of 127, or of 3 bits of mantissa."""
    step = {"qk": 0, "int8": 1 / 254, "fp8": 1 / 16}[mode]
    torch.testing.assert_close(out.float(), expected, atol=1e-4 + 4 * step, rtol=1e-3)


@modes
def test_zeros(mode):
    """Weights of zero logits are equal: no 0 / 0 of a scale."""
    q, k, v = tensors(9, 100)
    mean = v.float().mean(dim=2, keepdim=True).expand_as(q)
    for zeroed in (q, k):
        operands = [torch.zeros_like(x) if x is zeroed else x for x in (q, k, v)]
        out, lse = attend(*operands, mode)
        close(mode, out, mean)
        torch.testing.assert_close(lse, torch.full_like(lse, np.log(100)), atol=1e-3, rtol=0)
    out, _ = attend(q, k, torch.zeros_like(v), mode)
    assert (out == 0).all()


@modes
def test_equal_keys(mode):
    """Nothing is left of them without their mean; their product with the query is in the LSE."""
    q, k, v = tensors(9, 100)
    k[:] = k[:, :, :1]
    out, lse = attend(q, k, v, mode)
    mean = v.float().mean(dim=2, keepdim=True).expand_as(q)
    close(mode, out, mean)
    logits = (q.float() @ k.float().mT)[..., 0] / 8
    torch.testing.assert_close(lse, logits + np.log(100), atol=1e-3, rtol=1e-4)


@modes
def test_one_key(mode):
    q, k, v = tensors(33, 1)
    out, lse = attend(q, k, v, mode)
    assert mode != "qk" or torch.equal(out, v.expand_as(out))
    close(mode, out, v.float().expand_as(out))
    torch.testing.assert_close(lse, (q.float() @ k.float().mT)[..., 0] / 8, atol=1e-3, rtol=1e-4)


@modes
def test_constant_values(mode):
    """Whatever the weights, their mean is the value, but for rounding them."""
    q, k, v = tensors(33, 150)
    v[:] = 0.75
    out, _ = attend(q * 4, k, v, mode)
    off = {"qk": 0.0, "int8": 0.02, "fp8": 0.06}[mode]
    assert ((out.float() - 0.75).abs() <= 0.75 * off).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.key)
def test_verify(variant):
    """The result stands beside a scalar kernel's on operands rounded in numpy."""
    if cutlass_attn.build_info().simt == "none":
        pytest.skip("this build has no scalar kernels for the CPU")
    case = next(case for case in case_list.CASES if case.name == "softcap")
    q, k, v, _ = cases.tensors(case, variant.dtype, 64, "cpu")
    options = cases.keywords(case, variant.dtype, "cpu")
    options |= {"quantize": variant.quantize, "verify": True}
    cutlass_attn.attention(q, k + 1, v, **options)


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads):
    q, k, v = tensors(600, 300, heads=3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = attend(q, k, v, causal=True)
        torch.set_num_threads(threads)
        found = attend(q, k, v, causal=True)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
