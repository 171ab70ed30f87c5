"""Operands with several batch dimensions, as AlphaFold's attention has them."""

import math

import cutlass_attn
import numpy as np
import pytest

torch = pytest.importorskip("torch")

ENTRIES, ROWS, H, S, D = 2, 3, 4, 20, 16


def values(*shape, seed=0, dtype=torch.float16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def formula(q, k, v, bias=None, mask=None):
    score = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    if bias is not None:
        score = score + bias.double()
    if mask is not None:
        score = torch.where(mask, score, -torch.inf)
    return torch.softmax(score, -1) @ v.double(), torch.logsumexp(score, -1)


def close(found, due):
    torch.testing.assert_close(found.double(), due.double(), rtol=4e-3, atol=4e-3)


def seen(*shape):
    mask = values(*shape, seed=9) > -0.5
    mask[..., 0] = True
    return mask


PER_LOGIT = {  # shapes of the bias and of the mask
    "AlphaFold, one entry": (1, (1, 1, H, S, S), (1, ROWS, 1, 1, S)),
    "AlphaFold": (ENTRIES, (ENTRIES, 1, H, S, S), (ENTRIES, ROWS, 1, 1, S)),
    "of rows": (ENTRIES, (1, ROWS, H, S, S), (ROWS, 1, 1, S)),
    "of all": (ENTRIES, (ENTRIES, ROWS, 1, S, S), (S, S)),
    "of none": (ENTRIES, (H, S, S), (1, 1, 1, 1, S)),
}


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("name", PER_LOGIT)
def test_results_and_gradients(name, head_dim):
    entries, of_bias, of_mask = PER_LOGIT[name]
    # As projections give them: (..., S, H, D), transposed.
    rows = [values(entries, ROWS, S, H, head_dim, seed=i).requires_grad_() for i in range(3)]
    q, k, v = (x.transpose(2, 3) for x in rows)
    bias, mask = values(*of_bias, seed=5).requires_grad_(), seen(*of_mask)
    weights = values(entries, ROWS, H, S, head_dim, seed=6)
    out, lse = cutlass_attn.attention(q, k, v, bias=bias, mask=mask, return_lse=True)
    due, due_lse = formula(q, k, v, bias, mask)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    close(out, due)
    close(lse, due_lse)
    alone = cutlass_attn.attention(
        q.detach(), k.detach(), v.detach(), bias=bias.detach(), mask=mask
    )
    assert torch.equal(alone, out.detach())
    leaves = [*rows, bias]
    found = torch.autograd.grad((out.float() * weights).sum(), leaves)
    expected = torch.autograd.grad((due * weights).sum(), leaves)
    for x, y, leaf in zip(found, expected, leaves, strict=True):
        assert x.shape == leaf.shape and x.dtype == leaf.dtype
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_nothing_is_copied(monkeypatch):
    """Operands reach the kernels at their addresses."""
    q, k, v = (values(2, 3, S, H, D, seed=i).transpose(2, 3) for i in range(3))
    seen_by_call = []

    def call(q, k, v, **options):
        seen_by_call.append((q, k, v, options))
        return cutlass_attn.attention(q, k, v, **options)

    from cutlass_attn._call import batch_dims

    bias = values(2, 3, H, S, S)
    batch_dims.attention(call, q, k, v, {"bias": bias})
    ((*operands, options),) = seen_by_call
    for x, y in zip([*operands, options["bias"]], (q, k, v, bias), strict=True):
        assert x.dim() == 4 and x.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("shape", [(1, 1, H, S, S), (2, 1, H, S, S)])
def test_out(shape):
    q, k, v = (values(2, ROWS, H, S, D, seed=i) for i in range(3))
    bias, out = values(*shape, seed=4), torch.empty_like(q)
    result = cutlass_attn.attention(q, k, v, bias=bias, out=out)
    assert result.data_ptr() == out.data_ptr() and result.shape == q.shape
    close(out, formula(q, k, v, bias)[0])


def test_numpy_layout_and_six_dimensions():
    q, k, v = (values(2, 1, ROWS, H, S, D, seed=i) for i in range(3))
    due, _ = formula(q, k, v)
    arrays = [x.transpose(3, 4).contiguous().numpy() for x in (q, k, v)]
    out = cutlass_attn.attention(*arrays, layout="bshd")
    assert isinstance(out, np.ndarray)
    close(torch.from_numpy(out).transpose(3, 4), due)


def test_padding_and_slopes():
    q, k, v = (values(2, ROWS, H, S, D, seed=i) for i in range(3))
    lengths = torch.tensor([[5, 20, 9], [1, 7, 20]], dtype=torch.int32)
    slopes = values(2, ROWS, H, seed=7, dtype=torch.float32).abs()
    out = cutlass_attn.attention(q, k, v, seqused_k=lengths, alibi_slopes=slopes)
    for i in range(2):
        for j in range(ROWS):
            one = [x[i, j][None] for x in (q, k, v)]
            due = cutlass_attn.attention(
                *one, seqused_k=lengths[i, j][None], alibi_slopes=slopes[i, j][None]
            )
            assert torch.equal(out[i, j], due[0])


def test_compiled():
    q, k, v = (values(2, ROWS, H, S, D, seed=i) for i in range(3))
    bias = values(2, 1, H, S, S, seed=4)
    compiled = torch.compile(cutlass_attn.attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, bias=bias), cutlass_attn.attention(q, k, v, bias=bias))


def test_explain():
    q = values(1, ROWS, H, 200, D)
    bias, mask = values(1, 1, H, 200, 200), seen(1, ROWS, 1, 1, 200)
    found = cutlass_attn.explain(q, q, q, bias=bias, mask=mask, device="H100")
    assert found.chosen.kernel == "sm90/bias_mask"
    assert f"q ({ROWS}, {H}, 200, {D})" in str(found)
    q, bias = (x.expand(2, -1, -1, -1, -1) for x in (q, bias))
    found = cutlass_attn.explain(q, q, q, bias=bias, device="H100")
    assert f"bias (1, {H}, 200, 200)" in str(found)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"k": values(2, H, S, D)}, r"k has shape \(2, 4, 20, 16\); allowed: batch"),
        ({"v": values(3, 2, H, S, D)}, r"v has shape \(3, 2, 4, 20, 16\); allowed"),
        ({"q": values(3, 2, H, S, D).transpose(0, 1)}, "q of shape .* no single one in memory"),
        ({"bias": values(3, 1, H, S, S)}, "bias has 3 entries in its first dimension, allow"),
        ({"mask": seen(2, 2, 3, 1, 1, S)}, "mask has 6 dimensions, allowed: up to 5"),
        ({"mask": seen(2, 3, 1, 1, S + 1)}, "mask must have 1 to 4 dimensions that broadcast"),
        ({"seqused_k": torch.ones(6, dtype=torch.int32)}, "seqused_k has shape"),
        ({"layout": "hbsd"}, "layout"),
    ],
)  # fmt: skip
def test_errors(change, said):
    given = {name: values(2, 3, H, S, D) for name in "qkv"}
    with pytest.raises(ValueError, match=said):
        cutlass_attn.attention(**{**given, **change})


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 9), (1, 3, 1, 1, 9), (3, 1, 5, 1)])
def test_dropout_with_a_mask_of_some_batch_dimensions(library, shape):
    """Every entry has a number in the batch, and so weights that it drops, of its own."""
    q, k = torch.randn(2, 3, 2, 5, 8), torch.randn(2, 3, 2, 9, 8)
    options = {"mask": torch.rand(shape) < 0.7, "rng_state": torch.tensor([3, 4])}
    if library == "numpy":
        q, k = q.numpy(), k.numpy()
        options = {name: x.numpy() for name, x in options.items()}
    full = np.broadcast_to(np.asarray(options["mask"]), (2, 3, 2, 5, 9)).reshape(6, 2, 5, 9)
    full = full.copy() if library == "numpy" else torch.from_numpy(full.copy())
    one = (q.reshape(6, 2, 5, 8), k.reshape(6, 2, 9, 8), k.reshape(6, 2, 9, 8))
    expected = cutlass_attn.attention(*one, **{**options, "mask": full}, dropout_p=0.5)
    out = cutlass_attn.attention(q, k, k, **options, dropout_p=0.5)
    assert (out.reshape(6, 2, 5, 8) == expected).all()
