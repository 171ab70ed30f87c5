"""Nested tensors of layout torch.jagged are packed sequences; others are refused by name."""

import cutlass_attn
import pytest
from cases import torch
from cutlass_attn import attention

LENGTHS = (3, 0, 7, 5)


def nested(heads, head_dim=16, layout="bhsd"):
    """(the nested tensor, its leaves)."""
    leaves = [torch.randn(n, heads, head_dim, requires_grad=True) for n in LENGTHS]
    x = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
    return (x.transpose(1, 2) if layout == "bhsd" else x), leaves


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"window": (2, 0)}])
def test_jagged_tensors_are_sequences_of_their_own(layout, options):
    (q, qs), (k, ks), (v, vs) = (nested(h, layout=layout) for h in (4, 2, 2))
    out, lse = attention(q, k, v, layout=layout, return_lse=True, **options)
    assert out.is_nested and out.shape[0] == len(LENGTHS)
    leaves = [*qs, *ks, *vs]
    grads = torch.autograd.grad(out.values().square().sum() + lse.values().sum(), leaves)
    total = 0
    rows = out.transpose(1, 2) if layout == "bhsd" else out
    for i in range(len(LENGTHS)):
        one = [x[i][None] for x in (qs, ks, vs)]
        expected, expected_lse = attention(*one, layout="bshd", return_lse=True, **options)
        torch.testing.assert_close(rows[i], expected[0])
        torch.testing.assert_close(lse.transpose(1, 2)[i], expected_lse[0].t())
        total = total + expected.square().sum() + expected_lse.sum()
    for ours, theirs in zip(grads, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"mask_mod": lambda b, h, q, k: q >= k}, "mask_mod; allowed: None"),
        ({"score_mod": lambda s, b, h, q, k: s * 2}, "score_mod; allowed: None"),
        ({"verify": True}, "verify; allowed: False"),
        ({"bias": torch.zeros(1, 1, 1, 1)}, "bias; allowed: None"),
        ({"accumulate": "fp16"}, "accumulate; allowed: 'fp32'"),
    ],
)
def test_options_that_nested_tensors_lack(option, allowed):
    q, _ = nested(2)
    with pytest.raises(ValueError, match=f"nested tensors have no {allowed}"):
        attention(q, q, q, **option)


def test_other_nested_tensors_are_refused_by_name():
    q, _ = nested(2)
    dense = torch.randn(4, 2, 5, 16)
    strided = torch.nested.nested_tensor([torch.randn(2, n, 16) for n in LENGTHS])
    with pytest.raises(TypeError, match=r"layout torch\.jagged, or none of them; k is dense"):
        attention(q, dense, dense)
    with pytest.raises(TypeError, match=r"must not be nested; allowed: .* of layout torch.jagged"):
        attention(strided, strided, strided)
    with pytest.raises(TypeError, match="sinks must not be a nested tensor"):
        attention(dense, dense, dense, sinks=q)
    with pytest.raises(ValueError, match="nested tensors have no mask"):
        attention(q, q, q, mask=torch.ones(4, 1, 5, 5, dtype=torch.bool))
    for name in ("seqused_q", "leftpad_q", "leftpad_k"):
        with pytest.raises(ValueError, match=f"nested tensors have no {name}"):
            attention(q, q, q, **{name: [0] * len(LENGTHS)})
    with pytest.raises(ValueError, match='"bhsd" or "bshd", got \'sbhd\''):
        attention(q, q, q, layout="sbhd")
    with pytest.raises(ValueError, match="q must be nested over its sequences"):
        attention(q, q, q, layout="bshd")
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"must not be (a )?nested"):
        cutlass_attn.attention_varlen(q, q, q, ends)
    with pytest.raises(TypeError, match=r"must not be (a )?nested"):
        cutlass_attn.attention_decode(q.detach(), dense, dense, ends[1:])
    with pytest.raises(TypeError, match=r"must not be (a )?nested"):
        cutlass_attn.explain(q, q, q)


@pytest.mark.parametrize(
    ("function", "more", "ndim"),
    [("attention", (), 4), ("attention_varlen", (torch.tensor([0, 3]).int(),), 3)],
)
def test_sizes_unknown_at_compile_time(function, more, ndim):
    """What `_C` says of a wrong number of dimensions, where it cannot see the sizes."""
    torch.compiler.reset()

    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def call(x):
        return getattr(cutlass_attn, function)(x, x, x, *more)

    with pytest.raises(Exception, match=f"q must have {ndim} dimensions"):
        call(torch.randn([2, 3, 16] if ndim == 4 else [2, 3]))
