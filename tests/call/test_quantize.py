"""`quantize=`: who takes it, what it goes with, and what becomes of values that are not ordinary.

test_attention.py has the kernels in every case."""

import re

import cases
import cutlass_attn
import numpy as np
import pytest
import quantize_reference
import reference
from cutlass_attn import attention, explain, quantized
from cutlass_attn._call import call

torch = cases.torch
VARIANTS = cases.all_variants(lambda v: v.quantize and v.head_dim >= 64)
INT8 = cases.all_variants(lambda v: v.quantize == "int8")
FP8 = cases.all_variants(lambda v: v.quantize == "fp8")
on_engine = pytest.mark.skipif(
    cutlass_attn.build_info().simt != "all", reason="a build without GPU kernels on the CPU"
)
KERNEL = "sm80/int8_qk-simt"


def qkv(**shape):
    return cases.qkv(head_dim=64, **shape)


# --- The argument ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"quantize": "int4"},
            ValueError,
            'quantize must be None, "qk", "int8" or "fp8", got .int4.',
        ),
        ({"quantize": 8}, TypeError, 'quantize must be a string such as "qk", got 8'),
        ({"quantize": "qk", "dropout_p": 0.25}, ValueError, "dropout_p is 0.25.*allowed: 0"),
        ({"quantize": "qk", "accumulate": "fp16"}, ValueError, 'accumulate is "fp16"; allowed'),
        ({"quantize": "qk", "kernel": "cpu"}, ValueError, 'needs quantize=None, got "qk"'),
        ({"kernel": KERNEL}, ValueError, 'needs quantize="qk", got None'),
    ],
)
def test_errors_name_the_argument(given, error, message):
    q, k, v = qkv()
    with pytest.raises(error, match=message):
        attention(q, k, v, **given)
    with pytest.raises(error, match=message):
        attention(*(x.numpy() for x in (q, k, v)), **given)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_dtypes_are_refused(dtype):
    q = torch.zeros(1, 1, 4, 64, dtype=getattr(torch, dtype))
    with pytest.raises(ValueError, match=f'quantize is "qk", but q, k and v are {dtype}; allowed'):
        attention(q, q, q, quantize="qk")


@pytest.mark.parametrize("needs", range(3))
def test_gradients_are_refused(needs):
    tensors = qkv()
    tensors[needs].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient with quantize='qk'"):
        attention(*tensors, quantize="qk")
    with pytest.raises(ValueError, match='quantize is "qk", but gradients are asked for'):
        cutlass_attn.explain(*tensors, quantize="qk", grad=True)


@on_engine
def test_without_recording_gradients_inputs_may_need_them():
    q, k, v = qkv()
    q.requires_grad_()
    with torch.no_grad():
        assert attention(q, k, v, quantize="qk", kernel=KERNEL).isfinite().all()


def test_decode_does_not_know_it():
    ends = torch.tensor([0, 4], dtype=torch.int32)
    cache = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'quantize'"):
        cutlass_attn.attention_decode(cache[:, :, :1], cache, cache, ends[1:], quantize="qk")


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_89", "sm_90"])
def test_auto_takes_it_for_nothing_else(device):
    tensors = qkv()
    chosen = cutlass_attn.explain(*tensors, device=device).chosen
    assert chosen is None or chosen.quantize is None  # None: in a build for CPUs alone
    for verdict in cutlass_attn.explain(*tensors, device=device, quantize="qk"):
        if verdict.chosen:
            assert verdict.variant.quantize == "qk"
        if verdict.variant.quantize is None:
            assert not verdict.chosen
            if verdict.variant.device == ("cpu" if device == "cpu" else "cuda"):
                assert 'needs quantize=None, got "qk"' in verdict.reason


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 96), (200, 256), (8, 16)])
@pytest.mark.parametrize("option", [{}, {"softcap": 3.0}, {"mask": True}])
@pytest.mark.parametrize("mode", ["qk", "int8", "fp8"])
def test_a_gpu_has_a_kernel(head_dim, head_dim_v, option, mode):
    q = torch.zeros(1, 4, 300, head_dim, dtype=torch.float16, device="meta")
    v = torch.zeros(1, 2, 300, head_dim_v, dtype=torch.float16, device="meta")
    k = torch.zeros(1, 2, 300, head_dim, dtype=torch.float16, device="meta")
    if "mask" in option:
        option = {"mask": torch.ones(300, 300, dtype=torch.bool, device="meta")}
    verdicts = cutlass_attn.explain(q, k, v, device="sm_89", quantize=mode, **option)
    reasons = [x.reason for x in verdicts if x.variant.quantize == mode]
    # Or it would, were it compiled.
    lacks = ("not compiled into this build", "could run")
    assert verdicts.chosen or any(x.startswith(lacks) for x in reasons), verdicts


# --- The arithmetic -------------------------------------------------------------------------------


def test_two_statements_of_the_rounding_agree():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 9, 40)).astype(np.float32)
    k = (rng.standard_normal((2, 2, 150, 40)) + 2).astype(np.float16).astype(np.float32)
    k[0, 0, 5, 3], k[1, 1, 100, 7] = np.inf, np.nan
    k[1, 0, 64:128] = 1.5
    v = np.ones((2, 2, 150, 1), np.float32)
    ours = quantized.operands(q, k)
    shared = [0, 0, 1, 1]
    with np.errstate(invalid="ignore"):
        logits = ours.q.astype(np.float64) @ ours.k[:, shared].swapaxes(2, 3).astype(np.float64)
        logits = (logits + ours.q_shift) * 40**-0.5
    theirs = reference.attention_int8(q, k, v, "float16")
    np.testing.assert_array_equal(np.isnan(logits).any(-1), np.isnan(theirs.lse))
    ordinary = ~np.isnan(theirs.lse)
    assert ordinary.any() and not ordinary.all()
    lse = np.log(np.exp(logits[ordinary]).sum(-1))
    np.testing.assert_allclose(lse, theirs.lse[ordinary], rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bias", [0.0, 4.0])
def test_error_against_what_was_given(variant, bias):
    """Of the order that rounding explains; a bias that all keys share costs nothing."""
    rng = np.random.default_rng(1)
    shape = (1, 2, 256, variant.head_dim)
    q, k, v = (rng.standard_normal(shape) + x for x in (0.0, bias, 0.0))
    dtype = getattr(torch, variant.dtype)
    tensors = [torch.from_numpy(x).to(variant.device, dtype) for x in (q, k, v)]
    q, k, v = (x.float().cpu().numpy() for x in tensors)
    exact = reference.attention(q, k, v, variant.dtype).exact
    out = attention(*tensors, **cases.own(variant)).float().cpu().numpy()
    error = np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2))
    limit = {"qk": 0.014, "int8": 0.018, "fp8": 0.045}[variant.quantize]
    assert 0.002 < error < limit + (0.004 if bias else 0), error


# --- Values that are not ordinary -----------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_fewer_columns_than_the_kernel_has(variant):
    """What lies behind a row in the workspace, and comes into a tile with it, counts for nothing:
    right, and bitwise the same where another batch entry is behind the last row."""
    q, k, v = cases.qkv(dtype=variant.dtype, head_dim=variant.head_dim, device=variant.device)
    q, k = (x[..., : variant.head_dim - 24].contiguous() for x in (q, k))
    v = v[..., : (variant.head_dim_v or 64) - 40].contiguous()
    own = cases.own(variant)
    out = attention(q, k, v, verify=True, **own)
    assert torch.equal(out[:1], attention(q[:1], k[:1], v[:1], **own))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bad_key_is_its_groups_business(variant, bad, causal):
    """Rows that see a key of the same group of its tile become NaN, others do not change a bit."""
    q, k, v = cases.qkv(
        dtype=variant.dtype,
        head_dim=variant.head_dim,
        device=variant.device,
        batch=1,
        heads=1,
        heads_kv=1,
        seqlen_q=150,
        seqlen_k=150,
    )
    for key in (0, 20, 63, 64, 149):
        clean, broken = k.clone(), k.clone()
        clean[0, 0, key, 5], broken[0, 0, key, 5] = 0, bad  # the sampled mean takes it for 0
        options = {"causal": causal, "return_lse": True, **cases.own(variant)}
        expected, expected_lse = attention(q, clean, v, **options)
        out, lse = attention(q, broken, v, **options)
        tile = range(key // 64 * 64, min(key // 64 * 64 + 64, 150))
        first = next(j for j in tile if j % 8 // 2 == key % 8 // 2)
        sees = torch.arange(150) >= (first if causal else 0)
        assert out[0, 0, sees].isnan().all() and lse[0, 0, sees].isnan().all()
        assert torch.equal(out[0, 0, ~sees], expected[0, 0, ~sees])
        assert torch.equal(lse[0, 0, ~sees], expected_lse[0, 0, ~sees])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bad_query_is_its_rows_business(variant):
    q, k, v = cases.qkv(dtype=variant.dtype, head_dim=variant.head_dim, device=variant.device)
    expected = attention(q, k, v, **cases.own(variant))
    for bad in (float("nan"), float("inf")):
        broken = q.clone()
        broken[1, 2, 20, 7] = bad
        out = attention(broken, k, v, **cases.own(variant))
        assert out[1, 2, 20].isnan().all()
        out[1, 2, 20] = expected[1, 2, 20]
        assert torch.equal(out, expected)


def one_head(variant):
    """q, k and v of 150 rows."""
    sizes = dict.fromkeys(("seqlen_q", "seqlen_k"), 150)
    sizes |= dict.fromkeys(("batch", "heads", "heads_kv"), 1)
    own = {"dtype": variant.dtype, "device": variant.device}
    return cases.qkv(head_dim=variant.head_dim or 64, **own, **sizes)


@pytest.mark.parametrize("variant", INT8)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 3)}], ids=str)
def test_a_bad_value_is_its_keys_business(variant, bad, options):
    """Rows that see the key are NaN in all columns; others are what they are without its value."""
    q, k, v = one_head(variant)
    options = {**options, "return_lse": True, **cases.own(variant)}
    for key in (0, 20, 63, 64, 149):
        clean, broken = v.clone(), v.clone()
        clean[0, 0, key], broken[0, 0, key, 5] = 0, bad
        expected, expected_lse = attention(q, k, clean, **options)
        out, lse = attention(q, k, broken, **options)
        rows = torch.arange(150)
        sees = rows >= key
        if "window" in options:
            sees = (rows >= key - 3) & (rows <= key + 20)
        assert out[0, 0, sees].isnan().all() and torch.equal(lse, expected_lse)
        assert torch.equal(out[0, 0, ~sees], expected[0, 0, ~sees])


@pytest.mark.parametrize("variant", FP8)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_is_its_columns_business(variant, bad):
    """In e4m3 it makes its column NaN; the others are what they are, the largest of the tile, of
    the same key, too.
    """
    q, k, v = one_head(variant)
    options = {"return_lse": True, **cases.own(variant)}
    for key in (0, 20, 149):
        clean, broken = v.clone(), v.clone()
        clean[0, 0, key, 6] = broken[0, 0, key, 6] = 1000
        clean[0, 0, key, 5], broken[0, 0, key, 5] = 0, bad
        expected, expected_lse = attention(q, k, clean, **options)
        out, lse = attention(q, k, broken, **options)
        assert out[..., 5].isnan().all()
        out[..., 5] = expected[..., 5]
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def lse_error(variant):
    """Of weights that are all the same: in int8 they are not once they took scales of V over."""
    return {"qk": 1e-3, "int8": 4e-3, "fp8": 1e-3}[variant.quantize]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seqlen_k", [1, 70])
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_keys_that_are_all_the_same(variant, seqlen_k, value):
    """No division by zero: every weight is the same, and the LSE knows the keys' value."""
    q, k, v = cases.qkv(
        dtype=variant.dtype, head_dim=variant.head_dim, device=variant.device, seqlen_k=seqlen_k
    )
    k.fill_(value)
    out, lse = attention(q, k, v, return_lse=True, **cases.own(variant))
    mean = v.float().mean(2, keepdim=True).expand(-1, -1, 33, -1).repeat_interleave(2, 1)
    atol = 2e-2 if variant.quantize != "qk" or "bf16" in variant.key else 2e-3
    rtol = 0.07 if variant.quantize == "fp8" else 2e-2  # three bits of V
    torch.testing.assert_close(out.float(), mean, atol=atol, rtol=rtol)
    logit = q.float().sum(-1) * value * variant.head_dim**-0.5
    torch.testing.assert_close(lse, logit + np.log(seqlen_k), atol=lse_error(variant), rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_queries_and_no_keys(variant):
    q, k, v = cases.qkv(dtype=variant.dtype, head_dim=variant.head_dim, device=variant.device)
    out, lse = attention(q * 0, k, v, return_lse=True, **cases.own(variant))
    atol = 1e-5 if variant.quantize == "qk" else lse_error(variant)
    torch.testing.assert_close(lse, torch.full_like(lse, np.log(50)), atol=atol, rtol=0)
    assert out.isfinite().all()
    nothing = k[:, :, :0], v[:, :, :0]
    out, lse = attention(q, *nothing, return_lse=True, **cases.own(variant))
    assert (out == 0).all() and (lse == -np.inf).all()


# --- Other ways in --------------------------------------------------------------------------------


@on_engine
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"causal": True, "layout": "bshd"}])
def test_verify_confirms_it(options):
    tensors = qkv()
    if options.get("layout") == "bshd":
        tensors = [x.transpose(1, 2) for x in tensors]
    for mode, kernel in (("qk", KERNEL), ("int8", "cpu/int8"), ("fp8", "cpu/int8_fp8")):
        own = {"kernel": kernel, "quantize": mode, **options}
        assert torch.equal(attention(*tensors, verify=True, **own), attention(*tensors, **own))


@on_engine
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_verify_of_rounded_weights_takes_what_is_not_ordinary(mode):
    """Of values that are not finite it looks at the log-sum-exp's place alone."""
    q, k, v = qkv(batch=1, heads=1, heads_kv=1, seqlen_q=80, seqlen_k=70)
    bad = [x.clone() for x in (q, k, v)]
    for x in bad:
        x[0, 0, 5, 3] = float("nan")
    few = {"quantize": mode, "verify": True, "causal": True}
    for operands in ((bad[0], k, v), (q, bad[1], v), (q, k, bad[2]), (q * 0, k, v), (q, k * 0, v)):
        attention(*operands, **few)
    attention(q, k, v * 0, **few)
    assert (attention(q, k[:, :, :0], v[:, :, :0], **few) == 0).all()
    assert attention(q[:, :, :0], k, v, **few).shape == (1, 1, 0, 64)


@on_engine
@pytest.mark.parametrize("mode", ["int8", "fp8"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_verify_sees_a_fault_in_rounded_weights(monkeypatch, mode, layout):
    tensors = [x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in qkv()]
    options = {"quantize": mode, "layout": layout, "verify": True}
    real = call.Call.run

    def wrong(self, **instead):
        found = real(self, **instead)
        if self.options.get("quantize") is None:
            return found
        out, lse = found
        last = out[:, -1] if layout == "bshd" else out[:, :, -1]
        last *= 1.5  # a query of 33
        return out, lse

    attention(*tensors, **options)
    monkeypatch.setattr(call.Call, "run", wrong)
    with pytest.raises(cutlass_attn.VerificationError, match="disagree on out, in 33 evenly"):
        attention(*tensors, **options)


@on_engine
@pytest.mark.parametrize(
    ("mode", "least", "most"), [("qk", 0.4, 2), ("int8", 0.6, 2.2), ("fp8", 2, 5)]
)
def test_verify_reports_the_error(caplog, mode, least, most):
    with caplog.at_level("INFO", logger="cutlass_attn"):
        attention(*qkv(), quantize=mode, verify=True)
    (record,) = caplog.records
    found = re.match(r"cpu/int8.*RMS error (\S+) %, .* against scalar/", record.getMessage())
    assert found and least < float(found[1]) < most, record.getMessage()


def test_verify_says_what_it_does_not_take():
    q, k, v = (np.ones((1, 1, 2, 264), np.float16) for _ in range(3))
    with pytest.raises(ValueError, match=r"head_dim is 264, .*allowed: up to 256"):
        attention(q, k, v, quantize="qk", verify=True)


@on_engine
def test_verify_sees_a_wrong_result(monkeypatch):
    """The rounded operands, not those that were given, are what it compares with."""
    q, k, v = qkv()
    real = quantized.operands

    def other(q, k):
        found = real(q, k)
        return quantized.Operands(q, k - found.shift[:, :, None], found.shift, found.q_shift)

    monkeypatch.setattr(quantized, "operands", other)
    with pytest.raises(cutlass_attn.VerificationError, match="disagree"):
        attention(q, k, v, quantize="qk", kernel=KERNEL, verify=True)


@pytest.mark.parametrize("mode", ["qk", "int8", "fp8"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_explain_predicts_the_error(mode, layout):
    """Of the head with the largest, from numbers where there are."""
    q, k, v = qkv(batch=1, seqlen_q=300, seqlen_k=600)
    arrays = (x.float().numpy() for x in (q, k, v))
    due = quantize_reference.predicted(*arrays, "float16", mode).max()
    options = {"quantize": mode, "layout": layout}
    nothing = q[:, :, :0]
    if layout == "bshd":
        q, k, v, nothing = (x.transpose(1, 2) for x in (q, k, v, nothing))
    found = explain(q, k, v, **options)
    assert found.predicted_error == pytest.approx(due, rel=0.1)
    assert f"{found.predicted_error:.1%} is predicted from q, k and v" in str(found)
    arrays = [x.numpy() for x in (q, k, v)]
    assert explain(*arrays, **options).predicted_error == found.predicted_error
    assert explain(nothing, k, v, **options).predicted_error == 0
    nowhere = [x.to("meta") for x in (q, k, v)]
    without = explain(*nowhere, **options, device="sm_89")
    assert without.predicted_error is None and "was found for normal inputs" in str(without)
    assert explain(q, k, v, layout=layout).predicted_error is None


@on_engine
def test_numpy_and_the_operator_are_the_same():
    q, k, v = qkv()
    options = {"quantize": "qk", "kernel": KERNEL, "causal": True}
    expected = attention(q, k, v, **options)
    arrays = attention(*(x.numpy() for x in (q, k, v)), **options)
    np.testing.assert_array_equal(arrays, expected.numpy())

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q, k, v):
        return attention(q, k, v, **options)

    assert torch.equal(compiled(q, k, v), expected)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = attention(*(mode.from_tensor(x) for x in (q, k, v)), **options)
    assert fake.shape == expected.shape and fake.dtype == expected.dtype


@on_engine
@pytest.mark.parametrize(
    "kernel",
    [
        KERNEL,
        "sm80/int8_qk_general-simt",
        "sm80/int8-simt",
        "sm80/int8_general-simt",
        "sm89/int8_fp8-simt",
        "sm89/int8_fp8_general-simt",
        "sm90/int8_fp8-simt",
    ],
)
def test_check_asks_for_it(capsys, kernel):
    """Who names a kernel gets its products, and a judge who knows of their rounding."""
    from cutlass_attn.tools import cli

    small = ["--device", "cpu", "--batch", "1", "--seqlen", "70", "--causal"]
    assert cli.main(["check", *small, "--kernel", kernel]) == 0
    text = capsys.readouterr().out
    assert f"{kernel}/f16/d64" in text and "pass" in text
