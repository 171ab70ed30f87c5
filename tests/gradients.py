"""Attention in torch's own operations, which torch differentiates to compare with."""

import torch
from cutlass_attn import testing


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    attention_chunk=None,
    softmax_scale=None,
    softcap=0.0,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    rng_state=None,
):
    """The result and the log-sum-exp, of (B, H, S, D), in the precision of the inputs."""
    batch, heads, seqlen_q, head_dim = q.shape
    group, seqlen_k = heads // k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = q @ k.mT * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    key = torch.arange(seqlen_k, device=q.device)
    own = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    if alibi_slopes is not None:
        logits = logits - alibi_slopes.view(-1, heads, 1, 1) * (key - own).abs()
    if bias is not None:
        logits = logits + bias
    left, right = window if isinstance(window, tuple) else (window, window)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    seen &= (key <= own) | (not causal)
    if left is not None:
        seen &= key >= own - left
    if right is not None:
        seen &= key <= own + right
    if attention_chunk is not None:
        seen &= key // attention_chunk == own // attention_chunk
    if mask is not None:
        seen = seen & mask
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    lse = logits.logsumexp(-1)
    # Of a row without keys the weights are 0, and so is what changes them.
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0.0)[..., None])[..., :seqlen_k]
    if dropout_p:
        shape = (batch, heads, seqlen_q, seqlen_k)
        kept = testing.dropout_mask(rng_state.cpu().numpy(), shape, dropout_p)
        weights = weights * torch.from_numpy(kept).to(q.device) / testing.kept_share(dropout_p)
    return weights @ v, lse
