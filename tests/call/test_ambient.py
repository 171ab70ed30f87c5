"""Calls that are looked at before they run, under torch.autocast and torch.set_default_device."""

import cutlass_attn
import pytest
from cases import torch
from cutlass_attn import attention, attention_varlen, explain

ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.fixture
def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@pytest.mark.usefixtures("autocast")
def test_verified_calls_are_cast_as_others_are():
    q, k, v, bias = (torch.randn(1, 2, n, 64) for n in (12, 12, 12, 12))
    bias = bias[..., :12].contiguous()
    expected = attention(q, k, v, bias=bias)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(attention(q, k, v, bias=bias, verify=True), expected)
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    expected = attention_varlen(*rows, ENDS, ENDS)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(attention_varlen(*rows, ENDS, ENDS, verify=True), expected)


@pytest.mark.usefixtures("autocast")
def test_explain_names_the_kernel_of_the_cast_call():
    q = torch.randn(1, 2, 12, 64)
    assert explain(q, q, q).chosen == explain(*[q.bfloat16()] * 3).chosen
    assert "bfloat16" in str(explain(q, q, q)).splitlines()[0]
    rows = torch.randn(12, 2, 64)
    options = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
    assert "bfloat16" in str(explain(rows, rows, rows, **options)).splitlines()[0]


@pytest.mark.usefixtures("autocast")
def test_prequantized_keys_are_cast():
    k, v = torch.randn(1, 2, 12, 64), torch.randn(1, 2, 12, 64)
    kept = cutlass_attn.prequantize(k, v, quantize="qk")
    assert (kept.k.dtype, kept.v.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device_says_nothing_of_tensors_that_are_given(device):
    q = torch.randn(1, 2, 12, 64)
    expected = attention(q, q, q)
    name = explain(q, q, q).chosen
    with torch.device(device):
        assert torch.equal(attention(q, q, q), expected)
        assert torch.equal(attention(q, q, q, verify=True), expected)
        assert explain(q, q, q).chosen == name
        assert attention(q, q, q, dropout_p=0.5).device == q.device
        kept = cutlass_attn.prequantize(q.half(), q.half(), quantize="qk")
        assert kept.k.device.type == "cpu"
    learned = q.clone().requires_grad_()
    with torch.device(device):
        attention(learned, q, q).sum().backward()
    assert learned.grad.device.type == "cpu"


def test_another_function_mode_still_sees_the_call():
    class Mode(torch.overrides.TorchFunctionMode):
        seen = False

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen |= "cutlass_attn" in str(function)
            return function(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 12, 64)
    with torch.device("cpu"), Mode() as mode:
        attention(q, q, q)
    assert mode.seen


SCORES = {
    "distance": lambda s, b, h, q, k: s + (q - k),
    "of keys": lambda s, b, h, q, k: s + 0.1 * k,
    "squared": lambda s, b, h, q, k: s * s,  # evaluated by torch
    "table": lambda s, b, h, q, k: s + TABLE[h, q, k],
    "two tables": lambda s, b, h, q, k: s + 100 * TABLE[h, q, k] - 100 * TABLE[0, k, q],
}
TABLE = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(1))


def near(b, h, q, k):
    return abs(q - k) < 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCORES)
def test_terms_of_a_score_mod_are_not_cast(name, dtype):
    """A bias of keys in bfloat16 would be off by 1 beyond key 256."""
    q, k, v = torch.randn(3, 1, 2, 300, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    mods, out = {"score_mod": SCORES[name], "mask_mod": near}, torch.empty(q.shape).bfloat16()
    due = attention(*(x.bfloat16() for x in (q, k, v)), **mods)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, k, v, **mods)
        assert attention(q, k, v, **mods, out=out) is out
    assert found.dtype == torch.bfloat16 and torch.equal(out, found)
    if name == "table":  # is cast, as attn_mask of SDPA is
        torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
    else:
        assert torch.equal(found, due)


@pytest.mark.usefixtures("autocast")
def test_a_bias_beside_a_mask_mod_is_cast():
    q = torch.randn(1, 2, 300, 64)
    due = attention(q, q, q, bias=TABLE, mask_mod=near)
    assert torch.equal(attention(q, q, q, bias=TABLE.bfloat16(), mask_mod=near), due)


@pytest.mark.usefixtures("autocast")
def test_explain_translates_a_score_mod_for_the_cast_call():
    q = torch.randn(1, 2, 300, 64)
    assert "bias (1, 1, 1, 300)" in str(explain(q, q, q, score_mod=SCORES["distance"]))


def test_explain_of_a_table_without_memory():
    table = TABLE.bfloat16().to("meta")
    q = torch.empty(1, 2, 300, 64, dtype=torch.bfloat16, device="meta")
    found = explain(q, q, q, score_mod=lambda s, b, h, q, k: s + table[h, q, k], device="H100")
    assert "bias (1, 2, 300, 300)" in str(found)
