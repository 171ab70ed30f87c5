"""From padded batches to packed ones and back, as flash_attn.bert_padding does it.

A padded batch is (B, S, ...) with a mask of the tokens that are there; a packed one is (T, ...),
all of those one after the other, with offsets cu_seqlens (B + 1,) int32. All functions are
differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of input (N, ...), which has two dimensions or more, at indices (T,): (T, ...)."""
    if input.dim() < 2:
        raise ValueError(f"input must have two dimensions or more, got shape {tuple(input.shape)}")
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) of zeros, but values (T, ...) at indices (T,), none of them twice."""
    if values.dim() < 2 or indices.dim() != 1:
        raise ValueError(
            f"values must have two dimensions or more and indices one, got shapes "
            f"{tuple(values.shape)} and {tuple(indices.shape)}"
        )
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch. Waits for the device.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S) bool or int, 1 where there is a token.
        unused_mask: (B, S), 1 where a token is kept that is not attended to.

    Returns:
        The packed tokens (T, ...), their indices (T,) in the flattened batch, cu_seqlens (B + 1,)
        int32, the largest length, and (B,) int32: how many tokens of each are in attention_mask.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return packed, indices, _offsets(lengths), _largest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs a padded batch whose rows hold several sequences each. Waits for the device.

    attention_mask_in_length (B, S) has the lengths of a row's sequences, then zeros: [2, 3, 0, 0,
    0, 0] is a row of six with a sequence of two tokens, one of three, and one token of padding.
    Returns the packed tokens, their indices, cu_seqlens of all sequences, and the largest length.
    """
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    positions = torch.arange(attention_mask_in_length.shape[1], device=tokens.device)
    indices = (positions < tokens).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()].to(torch.int32)
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _offsets(lengths), _largest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) of packed tokens (T, ...); zeros where none was."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    return offsets


def _largest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0
