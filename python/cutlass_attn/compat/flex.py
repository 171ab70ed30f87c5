"""torch's flex_attention, computed by the fused kernels of `cutlass_attn.attention`.

    from cutlass_attn.compat.flex import flex_attention, create_block_mask

score_mod and mask_mod are translated to options of `attention`: softcap, ALiBi slopes, bias, causal
mask, window, chunk or bool mask. Any other score_mod runs as it does in `attention`. Needs torch
2.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from cutlass_attn import _C
from cutlass_attn._call import torch_library
from cutlass_attn._call.call import Call
from cutlass_attn._modified import compiles_well, computed
from cutlass_attn._mods import block_mask as _block_mask
from cutlass_attn._mods import masks
from cutlass_attn._mods.graph import Graph, UnsupportedModError
from cutlass_attn._mods.translate import Mods, translate

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

# Options of torch's Triton kernels, which are ignored.
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
    """torch.nn.attention.flex_attention.flex_attention, without torch.compile.

    Arguments and results are torch's; docs/flex.md lists the supported score_mod and mask_mod. A
    BlockMask is read once, and its mask is kept for as long as the object lives.

    Args:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E); B may be 1 if block_mask has the batch size of query. It and value may
            have a narrower float dtype than query, such as float8: they are copied to query's.
        value: (B, Hkv, S, Ev).
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, of scalars; h is the query head.
        block_mask: a BlockMask of lengths L and S.
        scale: factor of q @ k^T, before score_mod; None is ``1 / sqrt(E)``.
        enable_gqa: allows Hq to be a multiple of Hkv.
        return_lse: also return the log-sum-exp; `return_aux` is torch's newer form of it.
        kernel_options: accepted and ignored.
        return_aux: ``AuxRequest(lse=True, max_scores=True)``: also return ``AuxOutput(lse,
            max_scores)``.

    Returns:
        (B, Hq, L, Ev) in query's dtype, its dimensions in query's order in memory; with
        `return_lse` a pair with the natural log-sum-exp, float32 (B, Hq, L); with `return_aux` a
        pair with an AuxOutput. A query that sees no key gives zeros and -inf. Differentiable in
        query, key, value and in captured float tensors, on a CPU as well.

    Raises:
        UnsupportedModError: a NotImplementedError: score_mod or mask_mod cannot be traced, or no
            kernel computes it.
        NotImplementedError: operands are not 4-D or are nested; ``AuxRequest(max_scores=True)``
            with a score_mod that no option of `attention` expresses, or under torch.func; such a
            score_mod, or a mask that vmap maps, under torch.func.
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
        aux=return_aux,
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
    aux: AuxRequest | None,
) -> Any:
    _check_options(kernel_options)
    lengths = _check_operands(query, key, value, enable_gqa)
    query, key, value = torch_library.autocast(query, key, value)
    key, value = (_widened(x, query) for x in (key, value))
    _check_block_mask(query, key, block_mask, lengths)
    wants_largest = aux is not None and bool(aux.max_scores)
    call = translate(
        query,
        lengths,
        Mods(score_mod, None, block_mask),
        may_compile=not wants_largest and compiles_well(query, key, value),
    )
    q, k, v = (
        x if x.stride(-1) == 1 else x.contiguous()
        for x in (query, key[:, :, : call.keys], value[:, :, : call.keys])
    )
    if k.shape[0] != q.shape[0]:
        k, v = k.expand(len(q), -1, -1, -1), v.expand(len(q), -1, -1, -1)
    order = _order_of(query)
    is_bshd = order == [0, 2, 1, 3]
    if is_bshd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    softmax_scale = (1 / math.sqrt(query.shape[-1]) if scale is None else scale) * call.scale
    options = {"softmax_scale": softmax_scale, "return_lse": wants_lse, **call.options}
    options["layout"] = "bshd" if is_bshd else "bhsd"
    with torch_library.autocast_off(q.device.type):
        if wants_largest:
            result = _with_max_scores(q, k, v, options, call.score)
        elif call.score is not None:
            result = computed(Call(q, k, v, options), call.score)
        else:
            result = cutlass_attn.attention(q, k, v, **options)
    out, *rows = result if isinstance(result, tuple) else (result,)
    out = _in_order(out.transpose(1, 2) if is_bshd else out, order)
    if aux is None and not wants_lse:
        return out
    rows = [x + call.lse_shift for x in rows]
    if aux is None:
        return out, *rows
    largest = rows.pop() if wants_largest else None
    return out, AuxOutput(lse=rows[0] if rows else None, max_scores=largest)


def _widened(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values of a narrower float dtype, copied to query's dtype, as torch allows."""
    is_narrow = x.is_floating_point() and x.dtype.itemsize < query.dtype.itemsize
    return x.to(query.dtype) if is_narrow else x


def _order_of(query: torch.Tensor) -> list[int]:
    """Dimensions in the order of query's memory, the outermost first and the columns last. Those of
    size 1 come before all: their strides say nothing."""
    rows = sorted(range(3), key=query.stride, reverse=True)
    return [*sorted(rows, key=lambda dim: query.shape[dim] != 1), 3]


def _in_order(out: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The result with its dimensions in query's order, as torch has it. A copy where that is
    neither (B, Hq, L, Ev) nor (B, L, Hq, Ev)."""
    return out.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


def _with_max_scores(q: Any, k: Any, v: Any, options: dict[str, Any], score: Graph | None) -> Any:
    """As attention(), and last the largest score of each query, (B, Hq, L)."""
    if score is not None:
        raise NotImplementedError(
            "AuxRequest(max_scores=True): no kernel returns maxima of this score_mod, which no "
            "option of attention() expresses"
        )
    result = _C.forward(q, k, v, {**options, "return_max_logit": True}, per_query=True)
    if result[-1].dim() != 3:  # through torch's dispatcher
        raise NotImplementedError("AuxRequest(max_scores=True): not under torch.func")
    return result


def _wants_lse(return_lse: bool, return_aux: AuxRequest | None) -> bool:
    if return_aux is None:
        return return_lse
    if return_lse:
        raise ValueError("return_lse and return_aux are both given; AuxRequest(lse=True) is enough")
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


def _check_block_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    block_mask: BlockMask | None,
    lengths: masks.Lengths,
) -> None:
    batch, batch_kv = len(query), len(key)
    if block_mask is None:
        if batch != batch_kv:
            raise ValueError(
                f"batch sizes of query and key differ, {batch} and {batch_kv}, without a block_mask"
            )
        return
    _block_mask.check(block_mask, lengths, query.device)
    counts = block_mask.kv_num_blocks
    if batch != batch_kv and (batch_kv != 1 or len(counts) != batch):
        raise ValueError(
            f"batch sizes of query, key and block_mask are {batch}, {batch_kv} and {len(counts)}; "
            "key may have 1 where block_mask has that of query"
        )
