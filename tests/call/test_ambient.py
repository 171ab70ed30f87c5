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
