"""torch's flex_attention, computed by the fused kernels of `cutlass_attn.attention`.

    from cutlass_attn.compat.flex import flex_attention, create_block_mask

score_mod and mask_mod are read, not compiled: what they say is handed to `attention` as softcap,
ALiBi slopes, bias, causal mask, window, chunk or bool mask. What has no such form is an error that
says so; nothing falls back to an implementation that is not fused. Needs torch 2.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    or_masks,
)

import cutlass_attn
from cutlass_attn._mods import masks, scores
from cutlass_attn._mods.graph import UnsupportedModError
from cutlass_attn._mods.tracing import trace

from . import _block_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "UnsupportedModError",
    "and_masks",
    "create_block_mask",
    "flex_attention",
    "or_masks",
]

ScoreMod = Callable[..., torch.Tensor]

_NO_MASK = 1 << 30  # BLOCK_SIZE of a BlockMask that stands for none

# Tuning of the Triton kernels, which says nothing here.
_KERNEL_OPTIONS = {
    *("num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2"),
    *("BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ"),
    *("FORCE_USE_FLEX_ATTENTION", "USE_TMA", "BACKEND", "kpack", "matrix_instr_nonkdim"),
    "waves_per_eu",
}


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, without a compilation.

    Arguments, results and their meaning are torch's; docs/flex.md lists what score_mod and mask_mod
    may be. A BlockMask is read once, and its mask kept for as long as the object lives.

    Args:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E); B may be 1 if block_mask has the batch size of query.
        value: (B, Hkv, S, Ev).
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, of scalars; h is the query head.
        block_mask: a BlockMask of lengths L and S.
        scale: factor of q @ k^T, before score_mod; None is ``1 / sqrt(E)``.
        enable_gqa: allows Hq to be a multiple of Hkv.
        return_lse: also return the log-sum-exp; `return_aux` is torch's newer form of it.
        kernel_options: torch's names are accepted and ignored.
        return_aux: ``AuxRequest(lse=True)``: also return ``AuxOutput(lse)``.

    Returns:
        (B, Hq, L, Ev) in query's dtype; with `return_lse` a pair with the natural log-sum-exp,
        float32 (B, Hq, L); with `return_aux` a pair with an AuxOutput. A query that sees no key
        gives zeros and -inf. Differentiable in query, key, value and in captured tensors that are
        added to the score, on a CPU as well.

    Raises:
        UnsupportedModError: a NotImplementedError: score_mod or mask_mod cannot be traced, or no
            kernel computes it.
        NotImplementedError: operands are not 4-D or are nested; ``AuxRequest(max_scores=True)``.
        TypeError, ValueError, RuntimeError: as torch's function, or as `attention`.
    """
    return _compute(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        kernel_options,
        wants_lse=_wants_lse(return_lse, return_aux),
        has_aux=return_aux is not None,
    )


# torch.compile breaks its graph here: it would trace the tracer.
@torch.compiler.disable
def _compute(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: dict[str, Any] | None,
    wants_lse: bool,
    has_aux: bool,
) -> Any:
    _check_options(kernel_options)
    lengths = _check_operands(query, key, value, enable_gqa)
    _check_block_mask(query, key, block_mask)
    call = _translate(query, score_mod, block_mask, lengths)
    q, k, v = (
        x if x.stride(-1) == 1 else x.contiguous()
        for x in (query, key[:, :, : call.keys], value[:, :, : call.keys])
    )
    if k.shape[0] != q.shape[0]:
        k, v = k.expand(len(q), -1, -1, -1), v.expand(len(q), -1, -1, -1)
    softmax_scale = (1 / math.sqrt(query.shape[-1]) if scale is None else scale) * call.scale
    result = cutlass_attn.attention(
        q, k, v, softmax_scale=softmax_scale, return_lse=wants_lse, **call.options
    )
    if not wants_lse:
        return (result, AuxOutput()) if has_aux else result
    out, lse = result
    lse = lse + call.lse_shift
    return (out, AuxOutput(lse=lse)) if has_aux else (out, lse)


@dataclass(frozen=True)
class _Call:
    """What a call of `attention` gets for score_mod and block_mask."""

    scale: float  # of softmax_scale
    keys: int  # those beyond are seen by no query
    options: dict[str, Any]
    lse_shift: torch.Tensor | float


def _translate(
    query: torch.Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    lengths: masks.Lengths,
) -> _Call:
    device = query.device
    interval = masks.Interval()
    visible: list[torch.Tensor] = []  # bool masks, all of which count
    score = scores.Score()
    if score_mod is not None:
        graph = trace(score_mod, "score_mod", device)
        score = scores.split(graph)
        for node in score.masks:
            own, rest = masks.split(graph, node)
            interval = _joined(interval, own, visible, lengths, device)
            if rest is not None:
                with torch.no_grad(), torch.inference_mode(False):
                    visible.append(masks.dense(graph, rest, lengths, device))
    mask = None
    if block_mask is not None:
        mask = _block_mask.read(block_mask, lengths)
        interval = _joined(interval, mask.interval, visible, lengths, device)
        if mask.dense is not None:
            visible.append(mask.dense)
    found = masks.options(interval, lengths)
    if found is None:
        if mask is None or not (mask.has_interval and mask.interval == interval):
            visible.append(masks.dense_interval(interval, lengths, device))
        found = lengths.k, {}
    keys, options = found
    if score.softcap:
        options["softcap"] = score.softcap
    if visible:
        dense = visible[0]
        for x in visible[1:]:
            dense = dense & x
        options["mask"] = dense[..., :keys]
    lse_shift: torch.Tensor | float = 0.0
    if score.terms:
        of_call = masks.Lengths(lengths.b, lengths.h, lengths.q, keys)
        operands = scores.operands(graph, score.terms, of_call, interval.high, query)
        lse_shift = operands.lse_shift
        if operands.bias is not None:
            options["bias"] = operands.bias
        if operands.alibi_slopes is not None:
            options["alibi_slopes"] = operands.alibi_slopes
    return _Call(score.scale, keys, options, lse_shift)


def _joined(
    first: masks.Interval,
    second: masks.Interval,
    visible: list[torch.Tensor],
    lengths: masks.Lengths,
    device: torch.device,
) -> masks.Interval:
    both = first & second
    if both is None:  # two chunk lengths
        visible.append(masks.dense_interval(second, lengths, device))
        return first
    return both


def _wants_lse(return_lse: bool, return_aux: AuxRequest | None) -> bool:
    if return_aux is None:
        return return_lse
    if return_lse:
        raise ValueError("return_lse and return_aux are both given; AuxRequest(lse=True) is enough")
    if return_aux.max_scores:
        raise NotImplementedError("AuxRequest(max_scores=True): no kernel returns maxima")
    return bool(return_aux.lse)


def _check_options(kernel_options: dict[str, Any] | None) -> None:
    for name in kernel_options or {}:
        if name.removeprefix("fwd_").removeprefix("bwd_") not in _KERNEL_OPTIONS:
            raise ValueError(f"kernel_options has no {name!r}; there are {sorted(_KERNEL_OPTIONS)}")


def _check_operands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> masks.Lengths:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise NotImplementedError(f"{name} is nested; pack it for attention_varlen")
        if x.dim() != 4:
            raise NotImplementedError(f"{name} must have 4 dimensions, got {tuple(x.shape)}")
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}; query is on {query.device}")
    (_, heads_q, _, head_dim), (_, heads_kv, _, head_dim_k) = query.shape, key.shape
    if head_dim != head_dim_k:
        raise ValueError(f"head dims of query and key differ: {head_dim} and {head_dim_k}")
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"query has {heads_q} heads, which {heads_kv} of key do not divide")
    if heads_q != heads_kv and not enable_gqa:
        raise ValueError(
            f"query has {heads_q} heads and key {heads_kv}: that needs enable_gqa=True"
        )
    return masks.Lengths(len(query), heads_q, query.shape[2], key.shape[2])


def _check_block_mask(query: torch.Tensor, key: torch.Tensor, block_mask: BlockMask | None) -> None:
    batch, batch_kv = len(query), len(key)
    if block_mask is None:
        if batch != batch_kv:
            raise ValueError(
                f"batch sizes of query and key differ, {batch} and {batch_kv}, without a block_mask"
            )
        return
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
    counts = block_mask.kv_num_blocks
    if counts.device != query.device:
        raise RuntimeError(f"block_mask is on {counts.device}; query is on {query.device}")
    if counts.dim() != 3:
        raise ValueError(
            f"block_mask.kv_num_blocks must have 3 dimensions, got {tuple(counts.shape)}"
        )
    if batch != batch_kv and (batch_kv != 1 or len(counts) != batch):
        raise ValueError(
            f"batch sizes of query, key and block_mask are {batch}, {batch_kv} and {len(counts)}; "
            "key may have 1 where block_mask has that of query"
        )
    for name, size, due in (
        ("batch size", counts.shape[0], batch),
        ("number of heads", counts.shape[1], query.shape[1]),
    ):
        if size not in (1, due):
            raise ValueError(f"block_mask has {name} {size}; query has {due}, and 1 is allowed")
    if block_mask.BLOCK_SIZE == (_NO_MASK, _NO_MASK):
        return
    lengths, of_call = tuple(block_mask.seq_lengths), (query.shape[2], key.shape[2])
    if lengths != of_call:
        raise ValueError(
            f"block_mask is of lengths {lengths}; query and key have {of_call}. Create it for "
            "these lengths"
        )
