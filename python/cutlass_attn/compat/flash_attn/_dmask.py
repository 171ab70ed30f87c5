"""S_dmask: the softmax weights that flash_attn returns for tests.

Each entry is exp(logit - m), negative if dropout dropped it. m is the row's largest logit in the
entry's block of keys and in all later blocks: flash_attn processes blocks from the last to the
first, and writes each block with the maximum so far. Computed by torch operations in fp32 and a
dropout mask on the host: slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutlass_attn import testing


@torch.library.custom_op(
    "cutlass_attn::dropout_mask",
    mutates_args=(),
    schema="(Tensor rng_state, SymInt[] shape, float dropout_p) -> Tensor",
)
def _kept(rng_state: torch.Tensor, shape: Sequence[int], dropout_p: float) -> torch.Tensor:
    """Which weights dropout keeps, of shape (B, Hq, Sq, Sk). An operator, since torch.compile
    cannot trace its numpy code."""
    batch, heads, seqlen_q, seqlen_k = shape
    kept = testing.dropout_mask(rng_state, (batch, heads, seqlen_q, seqlen_k), dropout_p)
    return torch.from_numpy(kept).to(rng_state.device)


@_kept.register_fake
def _(rng_state: torch.Tensor, shape: Sequence[int], dropout_p: float) -> torch.Tensor:
    return rng_state.new_empty(shape, dtype=torch.bool)


def dropout_record(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """(B, Hq, Sq, Sk) with both lengths rounded up to 128, in q's dtype.

    q is (B, Sq, Hq, D), k (B, Sk, Hkv, D); options are those of `attention`.
    """
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    kept = _kept(options["rng_state"], shape, options["dropout_p"])
    return _record(q, k, options, kept)


def packed_record(
    q: torch.Tensor,
    k: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    options: dict[str, Any],
) -> torch.Tensor:
    """(B, Hq, Sq, Sk) of the longest sequences, both rounded up to 128, zeros in shorter ones.

    q is (Tq, Hq, D), k (Tk, Hkv, D), offsets those of queries and keys, (B + 1,).
    """
    at_q, at_k = (x.tolist() for x in offsets)
    batch, heads = len(at_q) - 1, q.shape[1]
    kept = _kept(options["rng_state"], (batch, heads, *longest), options["dropout_p"])
    record = q.new_zeros(batch, heads, *(_rounded(n) for n in longest))
    for b in range(batch):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        own = kept[b : b + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        slopes = options["alibi_slopes"]
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        one = _record(q[None, rows], k[None, keys], options | {"alibi_slopes": slopes}, own)
        record[b, :, : one.shape[2], : one.shape[3]] = one[0]
    return record


def _record(
    q: torch.Tensor, k: torch.Tensor, options: dict[str, Any], kept: torch.Tensor
) -> torch.Tensor:
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

    rounded = (batch, heads, _rounded(seqlen_q), _rounded(seqlen_k))
    padded = q.new_full(rounded, -torch.inf, dtype=torch.float32)
    padded[:, :, :seqlen_q, :seqlen_k] = logits
    largest = padded.unflatten(-1, (-1, _block(head_dim))).amax(-1, keepdim=True)
    largest = largest.flip(-2).cummax(-2).values.flip(-2)
    largest = largest.expand(*largest.shape[:-1], _block(head_dim)).flatten(-2)
    weights = torch.exp(padded - largest.masked_fill(largest == -torch.inf, 0))
    weights[:, :, :seqlen_q, :seqlen_k] *= torch.where(kept, 1.0, -1.0)
    return weights.to(q.dtype)


def _rounded(length: int) -> int:
    return -(-length // 128) * 128


def _block(head_dim: int) -> int:
    """Keys of a block of flash_attn's forward pass with dropout."""
    return 128 if head_dim <= 32 else 64 if head_dim <= 96 else 32 if head_dim <= 128 else 64
