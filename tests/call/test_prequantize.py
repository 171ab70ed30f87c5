"""`prequantize()`: bitwise what calls that quantize have, and what it refuses."""

import cases
import numpy as np
import pytest
from cases import torch
from cutlass_attn import attention, explain, prequantize
from test_quantize import KERNEL, on_engine, qkv

VARIANTS = cases.all_variants(
    lambda v: v.quantize and v.head_dim >= 64 and "prequantized" in v.options
)
PREQUANTIZED = [
    {"seqlen_q": 9, "seqlen_k": 200, "heads": 6},
    {"causal": True, "layout": "bshd"},
    {"seqlen_k": 130, "strided": True, "softmax_scale": 0.3, "softcap": 3.0},
    {"seqlen_k": 0},
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("given", PREQUANTIZED, ids=str)
def test_prequantized_is_bitwise_the_same(variant, given):
    """Of any q, and number of its heads, with any option."""
    options = dict(given)
    shape = {x: options.pop(x) for x in given if x.startswith(("seqlen", "heads"))}
    q, k, v = cases.qkv(
        dtype=variant.dtype, head_dim=variant.head_dim, device=variant.device, **shape
    )
    if options.pop("strided", False):
        k, v = (torch.cat([x, x], dim=3)[..., : x.shape[3]] for x in (k, v))
    if options.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    own = {"kernel": variant.key, "quantize": variant.quantize}
    kept = prequantize(k, v, layout=options.get("layout", "bhsd"), **own)
    own |= {"return_lse": True, **options}
    assert kept.k is k and kept.v is v and kept.quantize == variant.quantize
    few = q[:, :5] if options.get("layout") == "bshd" else q[:, : k.shape[1]]
    for queries in (q, few):
        due = attention(queries, k, v, **own)
        for found, expected in zip(attention(queries, k, v, **own | {"quantize": kept}), due):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prequantized_keys_are_not_read_again(variant):
    """What calls read is what was kept, where the kernel keeps anything."""
    q, k, v = cases.qkv(dtype=variant.dtype, head_dim=variant.head_dim, device=variant.device)
    own = {"kernel": variant.key, "quantize": variant.quantize}
    due = attention(q, k, v, **own)
    kept = prequantize(k, v, **own)
    assert (kept.nbytes == 0) == (variant.kernel.startswith("cpu/"))
    own["quantize"] = kept
    keeps_values = variant.quantize != "qk"
    for x in (k, v) if keeps_values else (k,):
        x.data.zero_()  # which torch does not count
    assert torch.equal(attention(q, k, v, **own), due) == (kept.nbytes > 0)


@on_engine
@pytest.mark.parametrize(
    ("mode", "kernels"),
    [
        ("qk", ("sm80/int8_qk-simt", "sm80/int8_qk_general-simt")),
        ("int8", ("sm80/int8-simt", "sm80/int8_general-simt")),
        ("fp8", ("sm89/int8_fp8-simt", "sm89/int8_fp8_general-simt")),
    ],
)
def test_kernels_read_what_another_has_rounded(mode, kernels):
    q, k, v = qkv(seqlen_k=100)
    for kernel in (*kernels, "auto"):
        kept = prequantize(k, v, quantize=mode, kernel=kernel)
        for other in (*kernels, "auto"):
            due = attention(q, k, v, quantize=mode, kernel=other)
            assert torch.equal(attention(q, k, v, quantize=kept, kernel=other), due)


def test_prequantized_arrays_and_other_views():
    """The same memory in the same order is the same k."""
    q, k, v = qkv()
    kept = prequantize(k, v, quantize="int8")
    due = attention(q, k, v, quantize="int8")
    assert torch.equal(attention(q, k[:], v.detach(), quantize=kept), due)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attention(*turned, quantize=kept, layout="bshd").transpose(1, 2), due)
    arrays = [x.numpy() for x in (q, k, v)]
    kept = prequantize(*arrays[1:], quantize="int8")
    np.testing.assert_array_equal(attention(*arrays, quantize=kept), due.numpy())
    with torch.inference_mode():  # where torch counts no writes
        k, v = k.clone(), v.clone()
        kept = prequantize(k, v, quantize="int8")
        assert torch.equal(attention(q, k, v, quantize=kept), due)


def test_prequantized_refuses_another_k_or_v():
    q, k, v = qkv()
    kept = prequantize(k, v, quantize="qk")
    what = r"\(batch, heads, seqlen, head_dim\) = \(2, 2, 50, 64\), than the call's"
    for other in (k.clone(), k[:, :, :40], k[:, :1], k.flip(1)):
        with pytest.raises(ValueError, match=f"PrequantizedKV of another k, {what}"):
            attention(q, other, v[:, : other.shape[1], : other.shape[2]], quantize=kept)
    for other in (v.clone(), v[..., :32], k):
        with pytest.raises(ValueError, match=f"PrequantizedKV of another v, {what}"):
            attention(q, k, other, quantize=kept)
    with pytest.raises(ValueError, match="of another k"):
        attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), quantize=kept)
    for x, name in ((k, "k"), (v, "v")):
        kept = prequantize(k, v, quantize="qk")
        x.mul_(1)
        message = rf"{name} was written to after prequantize\(\): its version is 1, and was 0"
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, quantize=kept)


def test_prequantize_names_what_is_wrong():
    q, k, v = qkv()
    for wrong in (None, 8, prequantize(k, v, quantize="qk")):
        with pytest.raises(TypeError, match='quantize must be a string such as "qk", got'):
            prequantize(k, v, quantize=wrong)
    with pytest.raises(ValueError, match='quantize must be None, "qk", "int8" or "fp8", got'):
        prequantize(k, v, quantize="int4")
    with pytest.raises(ValueError, match='quantize is "qk", but q, k and v are float32; allowed'):
        prequantize(k.float(), v.float(), quantize="qk")
    with pytest.raises(ValueError, match="k and v must have equal lengths, got 50 and 40 keys"):
        prequantize(k, v[:, :, :40], quantize="qk")
    with pytest.raises(TypeError, match="must all be torch tensors or all numpy arrays"):
        prequantize(k, v.tolist(), quantize="qk")
    with pytest.raises(ValueError, match='needs quantize=None, got "qk"'):
        prequantize(k, v, quantize="qk", kernel="cpu")
    with pytest.raises(ValueError, match="k and v must be on a CPU or CUDA device, got meta"):
        prequantize(k.to("meta"), v.to("meta"), quantize="qk")
    with pytest.raises(ValueError, match=r"dropout_p is 0\.25"):
        attention(q, k, v, quantize=prequantize(k, v, quantize="qk"), dropout_p=0.25)


def test_prequantized_has_no_gradient_and_is_not_recorded():
    q, k, v = qkv()
    kept = prequantize(k, v, quantize="qk")
    due = attention(q, k, v, quantize="qk")
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(attention(q.float(), k, v, quantize=kept), due)
    with pytest.raises(NotImplementedError, match=r"no gradient with quantize=PrequantizedKV\("):
        attention(q.requires_grad_(), k, v, quantize=kept)
    with pytest.raises(NotImplementedError, match="prequantize has no gradient, and k or v"):
        prequantize(k.requires_grad_(), v, quantize="qk")
    q, k = q.detach(), k.detach()

    message = "quantize=PrequantizedKV do not work under torch.compile"
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda q: attention(q, k, v, quantize=kept))(q[None])
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda k: prequantize(k, v, quantize="qk") and k)(k[None])
    for function in (
        lambda q, k, v: attention(q, k, v, quantize=kept),
        lambda q, k, v: prequantize(k, v, quantize="qk").k,
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(function, backend="eager", fullgraph=True)(q, k, v)

    @torch.compile(backend="eager")
    def around(q, k, v):
        return attention(q + 0, k, v, quantize=kept)

    assert torch.equal(around(q, k, v), due)
    torch.compiler.reset()


@on_engine
@pytest.mark.parametrize("mode", ["qk", "int8", "fp8"])
def test_verify_and_explain_know_what_is_prequantized(mode):
    q, k, v = qkv()
    kernel = {"qk": KERNEL, "int8": "sm80/int8-simt", "fp8": "sm89/int8_fp8-simt"}[mode]
    kept = prequantize(k, v, quantize=mode, kernel=kernel)
    options = {"quantize": kept, "kernel": kernel}
    assert torch.equal(attention(q, k, v, verify=True, **options), attention(q, k, v, **options))
    found, due = explain(q, k, v, **options), explain(q, k, v, quantize=mode, kernel=kernel)
    assert found.chosen == due.chosen and found.quantize == mode
    assert found.predicted_error == due.predicted_error
    assert found.workspace_bytes == 0 and kept.nbytes == due.workspace_bytes > 0
    assert f'quantize PrequantizedKV("{mode}", k (2, 2, 50, 64), v (2, 2, 50, 64)' in str(found)
