"""torch's flex_attention without a compiler, and the limits of torch's tests.

On a CPU torch's function has no gradients. `eager` computes what it does, with the gradients that
it has on a GPU.
"""

import contextlib
import math
import random

import pytest
from cases import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, noop_mask


def generator(device, seed=0):
    return torch.Generator(device).manual_seed(seed)


def normal(made, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=made, device=made.device).to(dtype)


def operands(made, shape, *more, dtype=torch.float32):
    """q, k and v of one shape, or of these, with a gradient."""
    shapes = (shape, *(more or (shape, shape)))
    return [normal(made, *x, dtype=dtype).requires_grad_() for x in shapes]


def identity(s, b, h, q, k):
    return s


class Rounded(torch.autograd.Function):
    """The gradient is of this dtype."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


class Weighted(torch.autograd.Function):
    """out and lse of scores. Its backward pass reads `out` as it is rounded."""

    @staticmethod
    def forward(ctx, scores, v):
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
        out = weights.to(v.dtype) @ v
        ctx.save_for_backward(weights, v, out)
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        weights, v, out = ctx.saved_tensors
        wide = grad.to(weights.dtype)
        of_weights = wide @ v.to(weights.dtype).mT - (out * wide).sum(-1, keepdim=True)
        return weights * (of_weights + grad_lse[..., None]), weights.to(v.dtype).mT @ grad


def scores_of(q, k, score, mask):
    """After both functions, in float32 or float64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = Rounded.apply(q.to(wide) @ k.to(wide).mT, q.dtype) / math.sqrt(q.shape[-1])
    index = [torch.arange(n, device=q.device) for n in scores.shape]
    with TransformGetItemToIndex():
        visible = _vmap_for_bhqkv(mask, prefix=())(*index)
        return torch.where(visible, _vmap_for_bhqkv(score, prefix=(0,))(scores, *index), -torch.inf)


def eager(q, k, v, score=identity, mask=noop_mask):
    """out and lse as torch's function without a compiler computes them, with its gradients."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return Weighted.apply(scores_of(q, k, score, mask), v.expand(len(q), -1, -1, -1))


def exactly(q, k, v, *mods):
    return eager(*(x.double() for x in (q, k, v)), *mods)


@contextlib.contextmanager
def known_refusal(q):
    """On a GPU no kernel computes float32 with a score_mod that no option expresses."""
    try:
        yield
    except ValueError as error:
        is_known = q.device.type == "cuda" and q.dtype == torch.float32
        if not is_known or "does not implement score_mod" not in str(error):
            raise
        pytest.skip("no kernel for float32 with this score_mod")


def check(ours, of_torch, exact, factor, by_squares=False):
    """torch's rule: a mean error of at most `factor` times that of eager torch."""
    assert ours.shape == of_torch.shape and ours.dtype == of_torch.dtype
    error, allowed = ((x.double() - exact).abs() for x in (ours, of_torch))
    error, allowed = (
        x.square().mean().sqrt() if by_squares else x.mean() for x in (error, allowed)
    )
    assert error <= factor * allowed + 1e-7, f"{float(error):.3e}, torch's {float(allowed):.3e}"


def paged(score, block_mask, k, v, made):
    """Keys and values in pages of one batch, in random order, and the mods for them."""
    batch, heads, seqlen, page = *k.shape[:3], block_mask.BLOCK_SIZE[1]
    pages = -(-seqlen // page) * batch
    attention = PagedAttention(pages, page, batch, device=k.device)
    for parts in (4, 2, 1):
        for b in random.Random(parts).sample(range(batch), batch):
            attention.reserve(*(torch.tensor(x, device=k.device) for x in (b, seqlen // parts)))
    caches = [normal(made, 1, heads, pages * page, x.shape[-1], dtype=x.dtype) for x in (k, v)]
    rows = torch.arange(seqlen, device=k.device, dtype=torch.int32).expand(batch, -1)
    which = torch.arange(batch, device=k.device, dtype=torch.int32)
    attention.assign(which, rows, k.detach(), v.detach(), *caches)
    lengths = torch.full((batch,), seqlen, device=k.device)
    converted = attention.convert_logical_block_mask(block_mask, kv_len=lengths)
    return *caches, attention.get_score_mod(score, kv_len=lengths), converted
