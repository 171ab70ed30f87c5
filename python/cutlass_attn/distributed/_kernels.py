"""One kernel call of a schedule, forward and backward. Operands are (B, rows, heads, head_dim)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

import cutlass_attn

from .. import _C
from .._call import torch_library
from ._schedule import DRAW, Band, Joins, KernelCall, Span


@dataclass(frozen=True)
class Dropout:
    """Dropout by heads and positions of the whole sequence."""

    p: float
    rng_state: torch.Tensor  # (2,), equal on all ranks
    heads: int  # query heads of the whole call
    first_head: int = 0
    # Whether kernel calls draw what one device draws. If not, a weight's number still occurs once.
    is_of_one_device: bool = True

    def options(self, call: KernelCall) -> dict[str, Any]:
        query, key = call.first
        if not self.is_of_one_device:  # whole draws apart, wherever a call begins
            query, key = query * DRAW, key * DRAW
        place = _place(self.heads, self.first_head, query, key, self.rng_state.device)
        return {"dropout_p": self.p, "rng_state": torch.cat([self.rng_state, place])}


@lru_cache(maxsize=256)
def _place(heads: int, head: int, query: int, key: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([heads, head, query, key], device=device)


@dataclass(frozen=True)
class Terms:
    """The arguments of a call other than q, k and v.

    bias and mask have four dimensions, some of size 1: rows are this rank's, keys are those of the
    whole sequence.
    """

    band: Band
    attention_chunk: int | None
    softmax_scale: float | None
    softcap: float
    deterministic: bool
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    dropout: Dropout | None = None

    def joins(self, batch: int) -> Joins:
        """What one kernel call may have."""
        if self.dropout is not None and self.dropout.is_of_one_device:
            return Joins.POSITIONS
        can_pack = batch == 1 and self.bias is None and self.mask is None
        return Joins.DOCUMENTS if can_pack else Joins.CHUNKS

    def of_heads(self, heads: Span) -> Terms:
        def cut(x: torch.Tensor | None, dim: int) -> torch.Tensor | None:
            if x is None or x.shape[dim] == 1:
                return x
            return x.narrow(dim, heads.start, heads.stop - heads.start)

        dropout = self.dropout
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + heads.start)
        return replace(
            self,
            dropout=dropout,
            bias=cut(self.bias, 1),
            mask=cut(self.mask, 1),
            alibi_slopes=cut(self.alibi_slopes, -1),
            sinks=cut(self.sinks, -1),
        )

    def options(self, call: KernelCall, *, has_sinks: bool) -> dict[str, Any]:
        """Keywords for the kernel."""
        left, right = call.window
        given = {
            "window": (left, right) if left != -1 or right > 0 else None,
            "softmax_scale": self.softmax_scale,
            "bias": None if self.bias is None else part(self.bias, call),
            "mask": None if self.mask is None else part(self.mask, call),
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks if has_sinks else None,
        }
        options = {name: x for name, x in given.items() if x is not None}
        if self.dropout is not None:
            options |= self.dropout.options(call)
        return options | {
            "causal": right == 0,
            "softcap": self.softcap,
            "deterministic": self.deterministic,
        }


def part(x: torch.Tensor, call: KernelCall) -> torch.Tensor:
    """The part of a bias, mask or gradient of them that belongs to a kernel call."""
    for dim, span in ((2, call.q), (3, call.k)):
        if x.shape[dim] > 1:
            x = x[(slice(None),) * dim + (slice(*span),)]
    return x


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of log-sum-exps and of sums over ranks."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def empty_results(
    q: torch.Tensor, head_dim_v: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp (B, heads, rows) of queries that see no key."""
    batch, rows, heads, _ = q.shape
    out = q.new_zeros((batch, rows, heads, head_dim_v), dtype=dtype)
    return out, q.new_full((batch, heads, rows), -torch.inf, dtype=lse_dtype(q))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: KernelCall,
    options: dict[str, Any],
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the call's rows of q."""
    q, k, v = q[:, slice(*call.q)], k[:, slice(*call.k)], v[:, slice(*call.k)]
    options = {**options, "return_lse": True}
    if out is not None:
        out = out[:, slice(*call.q)]
    if len(call.lengths_q) == 1:
        return cutlass_attn.attention(q, k, v, layout="bshd", out=out, **options)
    varlen: Any = cutlass_attn.attention_varlen
    into = None if out is None else out[0]
    result, lse = varlen(q[0], k[0], v[0], *_offsets(call, q.device), out=into, **options)
    return result[None], lse[None]


def backward(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    call: KernelCall,
    options: dict[str, Any],
    wanted: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """Gradients of the call's rows of q, k and v, and of its bias and sinks, as far as wanted.

    `results` are output and log-sum-exp over all keys, not of this call alone, and `grads` their
    gradients: the weights of this call are exp(logit - log-sum-exp).
    """
    rows, keys = slice(*call.q), slice(*call.k)
    q, k, v = operands[0][:, rows], operands[1][:, keys], operands[2][:, keys]
    out, lse = results[0][:, rows], results[1][:, :, rows].contiguous()
    grad_out = None if grads[0] is None else grads[0][:, rows]
    grad_lse = None if grads[1] is None else grads[1][:, :, rows].contiguous()
    if torch_library.is_deterministic():
        options = {**options, "deterministic": True}
    given = {"dispatched": True, "wanted": list(wanted)}
    if len(call.lengths_q) == 1:
        return list(
            _C.backward(
                q,
                k,
                v,
                {**options, "layout": "bshd"},
                grad_out=grad_out,
                out=out,
                softmax_lse=lse,
                grad_softmax_lse=grad_lse,
                **given,
            )
        )
    offsets_q, offsets_k = _offsets(call, q.device)
    found = _C.backward_varlen(
        q[0],
        k[0],
        v[0],
        {**options, "cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k},
        grad_out=None if grad_out is None else grad_out[0],
        out=out[0],
        softmax_lse=lse[0],
        grad_softmax_lse=None if grad_lse is None else grad_lse[0],
        **given,
    )
    return [None if x is None else x[None] if i < 3 else x for i, x in enumerate(found)]


def _offsets(call: KernelCall, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return _offsets_of(call.lengths_q, device), _offsets_of(call.lengths_k, device)


@lru_cache(maxsize=256)
def _offsets_of(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    offsets = list(accumulate(lengths, initial=0))
    return torch.tensor(offsets, dtype=torch.int32, device=device)
