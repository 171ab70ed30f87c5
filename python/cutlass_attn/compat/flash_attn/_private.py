"""The private functions of flash_attn 2.8 that ring-flash-attention, yunchang (USP), Transformer
Engine and diffusers call: forward passes with the log-sum-exp, and backward passes from what such
libraries merged of several of them.

They are plain functions with these argument names, which callers read by introspection. Arguments
are those of the public functions; dropout_p below 2^-16 is 0, as some pass 1e-30 for the sake of
the log-sum-exp. None of them is differentiable.

Forward passes return (out, softmax_lse, S_dmask, rng_state): softmax_lse is +inf for a query that
sees no key, S_dmask empty unless there is dropout and return_softmax, rng_state (2,) int64, which
the backward pass of a call with dropout needs.

Backward passes write dq, dk and dv, as far as they are not None, and of packed operands only the
rows of sequences. out and softmax_lse may be those of more keys than k: weights are
exp(logit - softmax_lse). They return softmax_d, without elements: no caller reads it, and filling
it would be a pass over out and dout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cutlass_attn

from ... import _C
from ..._call import torch_library
from ._checks import check_pages, lengths_of
from ._dmask import dropout_record, packed_record
from ._operands import as_flash, options_of, padded, random_state

_LEAST_DROPOUT = 2.0**-16


@torch.no_grad()
def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, options: dict[str, Any], function: Any
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Output, log-sum-exp, the state of dropout, and whether there is any."""
    has_dropout = dropout_p >= _LEAST_DROPOUT
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if has_dropout:
        rng_state = random_state(q.device)
        options |= {"dropout_p": dropout_p, "rng_state": rng_state}
    out, lse = function(q, k, v, **options, return_lse=True)
    return out, as_flash(lse), rng_state, has_dropout


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D); softmax_lse is (B, Hq, Sq) float32."""
    window = (window_size_left, window_size_right)
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes, None)
    options["layout"] = "bshd"
    given: Any = (dropout_p, options, cutlass_attn.attention)
    out, lse, rng_state, has_dropout = _forward(*padded(q, k, v), *given)
    record = dropout_record(q, k, options) if has_dropout and return_softmax else q.new_empty(0)
    return out[..., : v.shape[-1]], lse, record, rng_state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (Tq, Hq, D), k and v (Tk, Hkv, D) or pages; softmax_lse is (Hq, Tq) float32. zero_tensors
    and num_splits change nothing: rows of no sequence are zeros. leftpad_k is refused."""
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k must be None: cutlass_attn has it for caches alone")
    window = (window_size_left, window_size_right)
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes, None)
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    operands = (q, k, v)
    if block_table is not None:
        lengths = lengths_of(cu_seqlens_k) if seqused_k is None else seqused_k
        check_pages(block_table, lengths, k)
        options |= {"block_table": block_table, "seqused_k": lengths, "cu_seqlens_k": None}
    else:
        operands = padded(q, k, v)
        if seqused_k is not None:
            options["seqused_k"] = seqused_k
    varlen: Any = cutlass_attn.attention_varlen
    out, lse, rng_state, has_dropout = _forward(*operands, dropout_p, options, varlen)
    record = q.new_empty(0)
    if has_dropout and return_softmax:
        offsets = (cu_seqlens_q, cu_seqlens_k)
        record = packed_record(q, k, offsets, (int(max_seqlen_q), int(max_seqlen_k)), options)
    return out[..., : v.shape[-1]], lse, record, rng_state


@torch.no_grad()
def _backward(
    function: Any,
    operands: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    dout: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dropout_p: float,
    rng_state: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    if dropout_p >= _LEAST_DROPOUT:
        if rng_state is None:
            raise ValueError(
                f"rng_state must be that of the forward pass where dropout_p is, got None with "
                f"dropout_p {dropout_p}"
            )
        options |= {"dropout_p": dropout_p, "rng_state": rng_state}
    if torch_library.is_deterministic():
        options["deterministic"] = True
    # Of padded head dims buffers are copies, with what the rows of no sequence hold.
    of_padded = [None if grad is None else padded(grad)[0] for grad in grads]
    dout, out = padded(dout, out)
    function(
        *padded(*operands),
        options,
        grad_out=dout,
        out=out,
        softmax_lse=torch.where(softmax_lse == torch.inf, -torch.inf, softmax_lse).contiguous(),
        grad_softmax_lse=None,
        **dict(zip(("grad_q", "grad_k", "grad_v"), of_padded)),
    )
    for grad, made in zip(grads, of_padded):
        if grad is not None and made is not None and made is not grad:
            grad.copy_(made[..., : grad.shape[-1]])
    return softmax_lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv, like q, k and v."""
    window = (window_size_left, window_size_right)
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes, None)
    options |= {"layout": "bshd", "deterministic": bool(deterministic)}
    given = (dout, out, softmax_lse, dropout_p, rng_state, options)
    return _backward(_C.backward, (q, k, v), (dq, dk, dv), *given)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes the rows of sequences of dq, dk and dv, like q, k and v."""
    window = (window_size_left, window_size_right)
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes, None)
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options["deterministic"] = bool(deterministic)
    given = (dout, out, softmax_lse, dropout_p, rng_state, options)
    return _backward(_C.backward_varlen, (q, k, v), (dq, dk, dv), *given)
