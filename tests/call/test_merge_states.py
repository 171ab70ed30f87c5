"""merge_states: results over two sets of keys are one."""

import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import merge_states


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("split", [0, 1, 50, 90])
def test_parts_merge_to_the_whole(library, split):
    q, k, v = torch.randn(2, 3, 4, 32), torch.randn(2, 90, 2, 32), torch.randn(2, 90, 2, 16)
    whole = cutlass_attn.attention(q, k, v, layout="bshd", return_lse=True)
    parts = []
    for keys in (slice(0, split), slice(split, 90)):
        parts += cutlass_attn.attention(q, k[:, keys], v[:, keys], layout="bshd", return_lse=True)
    merged = merge_states(*(parts if library == "torch" else [x.numpy() for x in parts]))
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


def test_merge_is_exact_far_apart():
    """Log-sum-exps whose exponentials no float holds."""
    o, lse = torch.ones(1, 1, 4, dtype=torch.float16), torch.tensor([[500.0]])
    merged, total = merge_states(o, lse, 3 * o, lse)
    assert (merged == 2).all()
    torch.testing.assert_close(total, lse + np.log(2.0))


def test_merge_refuses_other_shapes():
    o, lse = torch.ones(5, 2, 8), torch.ones(2, 5)
    with pytest.raises(ValueError, match=r"lse_b must have shape \(2, 5\), got \(5, 2\)"):
        merge_states(o, lse, o, lse.T)
    with pytest.raises(ValueError, match=r"o_b must be float32, got torch\.float16"):
        merge_states(o, lse, o.half(), lse)
    with pytest.raises(ValueError, match=r"o_a must have shape .* got \(8,\)"):
        merge_states(o[0, 0], lse, o, lse)
    with pytest.raises(
        TypeError,
        match="lse_a must be a torch tensor or a numpy array, as the others are, got ndarray",
    ):
        merge_states(o, lse.numpy(), o, lse)
