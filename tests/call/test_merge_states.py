"""merge_states: results over two sets of keys are one."""

import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import _merge_states, merge_states


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("split", [0, 1, 50, 90])
def test_parts_merge_to_the_whole(library, split):
    q, k, v = torch.randn(2, 3, 4, 32), torch.randn(2, 90, 2, 32), torch.randn(2, 90, 2, 16)
    whole = cutlass_attn.attention(q, k, v, layout="bshd", return_lse=True)
    parts = []
    for keys in (slice(0, split), slice(split, 90)):
        parts += cutlass_attn.attention(q, k[:, keys], v[:, keys], layout="bshd", return_lse=True)
    if library == "numpy":
        parts = [x.numpy() for x in parts]
    merged = merge_states(*parts, layout="bshd")
    for ours, theirs in zip(merged, whole, strict=True):
        assert type(ours).__module__.startswith(library)
        torch.testing.assert_close(torch.as_tensor(ours), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_empty_parts_do_not_count(empty):
    o, lse = torch.randn(5, 2, 8), torch.randn(2, 5)
    nothing, nowhere = torch.full_like(o, torch.nan), torch.full_like(lse, empty)
    for merged in (merge_states(o, lse, nothing, nowhere), merge_states(nothing, nowhere, o, lse)):
        torch.testing.assert_close(merged[0], o)
        torch.testing.assert_close(merged[1], lse)
    both = merge_states(nothing, nowhere, nothing, nowhere)
    assert (both[0] == 0).all()
    assert (both[1] == -torch.inf).all()


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_empty_parts_have_no_gradient(layout, empty):
    o = [torch.randn(2, 3, 3, 8) for _ in "ab"]
    lse = [torch.randn(2, 3, 3) for _ in "ab"]
    due = torch.sigmoid(lse[0] - lse[1])  # the share of the first
    lse[0][..., 0] = lse[1][..., 1] = empty
    due[..., 0], due[..., 1] = 0, 1
    for x, log in zip(o, lse, strict=True):
        rows = x if layout == "bhsd" else x.transpose(1, 2)
        rows[log == empty] = torch.nan
    arguments = [x.requires_grad_() for x in (o[0], lse[0], o[1], lse[1])]
    grads = torch.autograd.grad(merge_states(*arguments, layout=layout)[0].sum(), arguments)
    due = due if layout == "bhsd" else due.transpose(1, 2)
    torch.testing.assert_close(grads[0], due[..., None].expand(grads[0].shape))
    torch.testing.assert_close(grads[2], 1 - due[..., None].expand(grads[0].shape))
    for x in (grads[1], grads[3]):
        assert (x[..., :2] == 0).all()
        assert x[..., 2].isfinite().all()
        assert (x[..., 2] != 0).all()


def test_results_of_attention_merge_by_default():
    """As many queries as heads: by its shape alone the log-sum-exp would fit either layout."""
    q, k, v = torch.randn(2, 6, 6, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    whole = cutlass_attn.attention(q, k, v, return_lse=True)
    parts = []
    for keys in (slice(0, 15), slice(15, 40)):
        parts += cutlass_attn.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True)
    for ours, theirs in zip(merge_states(*parts), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merge_refuses_a_log_sum_exp_of_the_other_layout(layout):
    o, lse = torch.ones(2, 5, 3, 8), torch.ones(2, 5, 3)
    lse = lse.mT if layout == "bhsd" else lse
    message = rf"lse_a must have shape \(B, Hq, Sq\).* with layout='{layout}', got"
    with pytest.raises(ValueError, match=message):
        merge_states(o, lse, o, lse, layout=layout)
    with pytest.raises(ValueError, match='layout must be "bhsd" or "bshd", got \'sbhd\''):
        merge_states(o, lse, o, lse, layout="sbhd")


def test_merge_is_exact_far_apart():
    """Log-sum-exps whose exponentials no float holds."""
    o, lse = torch.ones(1, 1, 4, dtype=torch.float16), torch.tensor([[500.0]])
    merged, total = merge_states(o, lse, 3 * o, lse)
    assert (merged == 2).all()
    torch.testing.assert_close(total, lse + np.log(2.0))


def test_merge_refuses_other_shapes():
    o, lse = torch.ones(5, 2, 8), torch.ones(2, 5)
    with pytest.raises(ValueError, match=r"lse_b must have shape .* \(2, 5\) for .*, got \(5, 2\)"):
        merge_states(o, lse, o, lse.T)
    with pytest.raises(ValueError, match=r"o_b must be float32, got torch\.float16"):
        merge_states(o, lse, o.half(), lse)
    with pytest.raises(ValueError, match=r"o_a must have shape .* got \(8,\)"):
        merge_states(o[0, 0], lse, o, lse)
    with pytest.raises(
        TypeError,
        match="lse_a must be a torch tensor or a numpy array, as the others are, got list",
    ):
        merge_states(o, lse.tolist(), o, lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (7, 4, 40), (3, 2, 7), (0, 2, 8)])
def test_the_kernel_is_what_the_arithmetic_is(dtype, shape):
    """What CUDA tensors take, here by its loop on a CPU; and with the sides exchanged."""
    rows, heads = shape[-3], shape[-2]
    lse_shape = (*shape[:-3], heads, rows)
    o_a, o_b = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    lse_a = torch.randn(*shape[:-3], rows, heads).mul(30).transpose(-1, -2)  # of other strides
    lse_b = torch.randn(lse_shape) * 30
    if rows:
        lse_a[..., 0, 0], lse_b[..., 1, 0] = -torch.inf, torch.inf
        o_a[..., 0, 0, :] = torch.nan
        lse_a[..., 1, 1] = lse_b[..., 1, 1] = -torch.inf
    ours = cutlass_attn._C.merge(o_a, lse_a, o_b, lse_b)
    for x, y in zip(ours, merge_states(o_a, lse_a, o_b, lse_b, layout="bshd"), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x, y)
    for x, y in zip(ours, cutlass_attn._C.merge(o_b, lse_b, o_a, lse_a), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (0, 3, 2, 8), (2, 3, 0, 8)])
def test_heads_first_on_a_gpu_are_what_the_arithmetic_is(shape):
    o_a, o_b = torch.randn(shape).half(), torch.randn(shape).half()
    lse_a, lse_b = torch.randn(shape[:3]), torch.randn(shape[:3])
    ours = _merge_states._merged_on_gpu(o_a, lse_a, o_b, lse_b, True)
    for x, y in zip(ours, merge_states(o_a, lse_a, o_b, lse_b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x, y)


def test_what_the_kernel_leaves_to_torch():
    o, lse = torch.randn(5, 2, 8), torch.randn(2, 5)
    assert cutlass_attn._C.merge(o, lse, o, lse) is not None
    apart = torch.randn(5, 2, 16)[..., ::2]
    for x in (o.double(), apart, o.clone().requires_grad_()):
        assert cutlass_attn._C.merge(x, lse, x, lse) is None
    merged, _ = merge_states(o.clone().requires_grad_(), lse, o, lse)
    assert merged.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_one_launch_on_a_gpu(dtype, layout):
    o_a, o_b = (torch.randn(4, 3, 8, 128, device="cuda").to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(4, 8, 3, device="cuda") for _ in range(2))
    if layout == "bhsd":
        lse_a, lse_b = lse_a.mT.contiguous(), lse_b.mT.contiguous()
    merge_states(o_a, lse_a, o_b, lse_b, layout=layout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        first = merge_states(o_a, lse_a, o_b, lse_b, layout=layout)
        torch.cuda.synchronize()
    assert len([event for event in profile.events() if "merge" in event.name]) == 1
    again = merge_states(o_b, lse_b, o_a, lse_a, layout=layout)
    on_cpu = merge_states(*(x.cpu() for x in (o_a, lse_a, o_b, lse_b)), layout=layout)
    for x, y, z in zip(first, again, on_cpu, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x.cpu(), z)
