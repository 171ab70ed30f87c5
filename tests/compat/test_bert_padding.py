"""compat.flash_attn.bert_padding: padded batches to packed rows, and back."""

import cutlass_attn
import pytest

torch = pytest.importorskip("torch")

from cutlass_attn.compat import flash_attn  # noqa: E402
from cutlass_attn.compat.flash_attn import bert_padding  # noqa: E402


def test_padding_round_trip():
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]], dtype=torch.bool)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(packed, x[mask])
    assert indices.tolist() == [0, 1, 2, 10, 12, 13, 14]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 3, 3, 7], torch.int32)
    assert (longest, type(longest)) == (4, int)
    assert used.tolist() == [3, 0, 4]
    padded = bert_padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None, None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())


def test_padding_with_unused_tokens():
    x = torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    unused = torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, _, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert torch.equal(packed, x[(mask + unused).bool()])
    assert cu_seqlens.tolist() == [0, 2, 4]
    assert longest == 2
    assert used.tolist() == [1, 2]


def test_padding_of_concatenated_sequences():
    x = torch.randn(3, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    unpad = bert_padding.unpad_input_for_concatenated_sequences
    packed, indices, cu_seqlens, longest = unpad(x, lengths)
    assert torch.equal(packed, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6


def test_rows_by_index():
    x = torch.randn(4, 2)
    index = torch.tensor([3, 0])
    assert torch.equal(bert_padding.index_first_axis(x, index), x[index])
    put = bert_padding.index_put_first_axis(x[index], index, 5)
    assert torch.equal(put, torch.stack([x[0], *torch.zeros(2, 2), x[3], torch.zeros(2)]))
    with pytest.raises(ValueError, match="two dimensions"):
        bert_padding.index_first_axis(x[0], index)
    with pytest.raises(ValueError, match="two dimensions"):
        bert_padding.index_put_first_axis(x[0], index, 5)


def test_padded_batch_through_varlen():
    """As models use it: unpad, attend, pad; the same as a padded call with a mask."""
    x = torch.randn(2, 6, 2, 16).half()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    packed, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(x, mask)
    out = flash_attn.flash_attn_varlen_func(
        packed, packed, packed, cu_seqlens, cu_seqlens, longest, longest, causal=True
    )
    due = cutlass_attn.attention(
        x, x, x, causal=True, mask=mask[:, None, None], layout="bshd"
    )  # rows of padding differ: they are not in the packed batch
    padded = bert_padding.pad_input(out, indices, 2, 6)
    torch.testing.assert_close(padded, due * mask[..., None, None], rtol=1e-3, atol=1e-3)
