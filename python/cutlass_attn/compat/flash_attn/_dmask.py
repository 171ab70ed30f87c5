"""S_dmask: what flash_attn records of its softmax weights for its own tests."""

from __future__ import annotations

from typing import Any

import torch

from cutlass_attn import testing


def dropout_record(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """(B, Hq, Sq, Sk) with both lengths rounded up to 128, in q's dtype.

    Each entry is exp(logit - m), negative where dropout took it. m is the row's largest logit in
    the entry's block of keys and all blocks after it: flash_attn goes through them from the last to
    the first, and writes a block down when it has seen no other. Made by plain torch operations
    in fp32, and by the host's copy of the dropout mask: slow, and for tests alone.

    q is (B, Sq, Hq, D), k (B, Sk, Hkv, D); options are those of `attention`.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    k = k.repeat_interleave(heads // k.shape[2], dim=2)
    logits = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * options["softmax_scale"]
    if options["softcap"]:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    keys = torch.arange(seqlen_k, device=q.device)
    distance = keys - (torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q)
    if (slopes := options["alibi_slopes"]) is not None:
        logits -= slopes[..., None, None] * distance.abs()
    left, right = options["window"]
    if options["causal"]:
        right = 0
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    logits = logits.masked_fill(~visible, -torch.inf)

    rounded = (batch, heads, -(-seqlen_q // 128) * 128, -(-seqlen_k // 128) * 128)
    padded = q.new_full(rounded, -torch.inf, dtype=torch.float32)
    padded[:, :, :seqlen_q, :seqlen_k] = logits
    largest = padded.unflatten(-1, (-1, _block(head_dim))).amax(-1, keepdim=True)
    largest = largest.flip(-2).cummax(-2).values.flip(-2)
    largest = largest.expand(*largest.shape[:-1], _block(head_dim)).flatten(-2)
    weights = torch.exp(padded - largest.masked_fill(largest == -torch.inf, 0))
    kept = testing.dropout_mask(
        options["rng_state"].cpu().numpy(),
        (batch, heads, seqlen_q, seqlen_k),
        options["dropout_p"],
    )
    dropped = torch.from_numpy(~kept).to(q.device)
    weights[:, :, :seqlen_q, :seqlen_k] *= torch.where(dropped, -1.0, 1.0)
    return weights.to(q.dtype)


def _block(head_dim: int) -> int:
    """Keys of a block of flash_attn's forward pass with dropout."""
    return 128 if head_dim <= 32 else 64 if head_dim <= 96 else 32 if head_dim <= 128 else 64
