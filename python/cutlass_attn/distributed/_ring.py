"""Ring attention: keys and values travel around the ranks; each step's results are merged in
float32 by their log-sum-exps.

In the backward pass they travel again, and their gradients follow one step behind, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

import cutlass_attn

from . import _kernels
from ._kernels import Terms
from ._plan import ContextPlan
from ._schedule import KernelCall


class Ring(torch.autograd.Function):
    """Output and log-sum-exp of this rank's q, k, v (B, rows, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: ContextPlan,
        terms: Terms,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Two results are rounded once in either dtype.
        is_rounded = sinks is None and _results_of_a_row(plan, terms, q) <= 2
        dtype = q.dtype if is_rounded else _kernels.lse_dtype(q)
        out, lse = _kernels.empty_results(q, v.shape[-1], dtype)
        written = 0  # rows before this one have a result
        for _, calls, keys, values in _steps(plan, terms, q, k, v):
            for call in calls:
                options = terms.options(call, has_sinks=False)
                is_first = call.q.start >= written
                into = out if is_first and is_rounded else None
                part, part_lse = _kernels.forward(q, keys, values, call, options, into)
                rows = slice(*call.q)
                if not is_first:
                    _merge(out[:, rows], lse[:, :, rows], part, part_lse)
                else:
                    lse[:, :, rows] = part_lse
                    if into is None:
                        out[:, rows] = part
                written = max(written, call.q.stop)
        if sinks is not None:  # added once, after the last step
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            with_sink.masked_fill_(lse == -torch.inf, -torch.inf)  # rows of padding
            out *= _weight(lse, with_sink)
            lse = with_sink
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = (plan, terms)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        plan, terms = ctx.call
        q, k, v, sinks, out, lse = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[2:])
        sums = _kernels.lse_dtype(q)
        head_dim = k.shape[-1]
        dtype = q.dtype if _results_of_a_row(plan, terms, q) <= 2 else sums
        grad_q = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        written = 0  # rows before this one have a gradient
        grad_kv = _GoingRound(plan, k, head_dim + v.shape[-1], sums)
        of_operands = wanted[:3]
        for step, calls, keys, values in _steps(plan, terms, q, k, v):
            found = [
                (
                    call,
                    _kernels.backward(
                        (q, keys, values),
                        (out, lse),
                        (grad_out, grad_lse),
                        call,
                        terms.options(call, has_sinks=False),
                        of_operands,
                    ),
                )
                for call in calls
            ]
            if of_operands[1] or of_operands[2]:
                grad_kv.arrive(step)
            for call, (of_q, of_k, of_v) in found:
                if of_q is not None and call.q.start < written:
                    grad_q[:, slice(*call.q)] += of_q
                elif of_q is not None:
                    grad_q[:, slice(*call.q)] = of_q
                written = max(written, call.q.stop)
                rows = grad_kv.sums[:, slice(*call.k)]
                if of_k is not None:
                    rows[..., :head_dim] += of_k
                if of_v is not None:
                    rows[..., head_dim:] += of_v
            if of_operands[1] or of_operands[2]:
                grad_kv.leave(step, _last_step(plan, terms, q))
        mine = grad_kv.at_home()
        return (
            None,
            None,
            grad_q.to(q.dtype) if wanted[0] else None,
            mine[..., :head_dim].to(k.dtype) if wanted[1] else None,
            mine[..., head_dim:].to(v.dtype) if wanted[2] else None,
            None,
            _grad_sinks(sinks, out, lse, grad_out, grad_lse) if wanted[4] else None,
        )


def _schedule(plan: ContextPlan, terms: Terms, q: torch.Tensor) -> list[list[KernelCall]]:
    return plan.calls_of_ring(terms.band, terms.attention_chunk, terms.joins(q.shape[0]))


def _results_of_a_row(plan: ContextPlan, terms: Terms, q: torch.Tensor) -> int:
    """The most kernel calls that have one row of q."""
    spans = [call.q for calls in _schedule(plan, terms, q) for call in calls]
    return max((sum(x.start <= at.start < x.stop for x in spans) for at in spans), default=0)


def _last_step(plan: ContextPlan, terms: Terms, q: torch.Tensor) -> int:
    return len(_schedule(plan, terms, q)) - 1


def _steps(
    plan: ContextPlan, terms: Terms, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Any:
    """Number, calls, keys and values of each step; the next step's are received meanwhile."""
    kv = torch.cat([k, v], dim=-1)
    following = torch.empty_like(kv)
    schedule = _schedule(plan, terms, q)
    for step, calls in enumerate(schedule):
        works = []
        if step + 1 < len(schedule):
            works = _exchange(plan, kv, following, distance=1, tag=0)
        yield step, calls, kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]
        for work in works:
            work.wait()
        kv, following = following, kv


def _exchange(
    plan: ContextPlan, sent: torch.Tensor, received: torch.Tensor, distance: int, tag: int
) -> list[Any]:
    """Sends to the rank `places` after this one, and receives from the one `places` before."""
    size, rank, group = plan.outer_size, plan.outer_rank, plan.outer
    to, of = ((rank + d) % size for d in (distance, -distance))
    peers = [dist.get_global_rank(group, x) for x in (to, of)]
    works: list[Any] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, peers[0], group, tag),
            dist.P2POp(dist.irecv, received, peers[1], group, tag),
        ]
    )
    return works


def _weight(lse: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
    """exp(lse - merged) as a factor of rows (B, rows, heads, 1); 0 where both are -inf."""
    weight = torch.where(merged == -torch.inf, 0.0, torch.exp(lse - merged))
    return weight.transpose(1, 2).unsqueeze(-1)


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merges a result into another, in place. A side that saw no key has weight 0."""
    part = part.to(out.dtype)
    if lse.dtype == torch.float32:
        merged, of_both = cutlass_attn.merge_states(out, lse, part, part_lse, layout="bshd")
        out.copy_(merged)
    else:
        of_both = torch.logaddexp(lse, part_lse)
        out.lerp_(part, _weight(part_lse, of_both))
    lse.copy_(of_both)


def _grad_sinks(
    sinks: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of the sinks: -p * delta summed over rows, with p the weight of the sink."""
    sums = torch.zeros_like(lse)
    if grad_out is not None:
        sums -= (out.to(lse.dtype) * grad_out).sum(-1).transpose(1, 2)
    if grad_lse is not None:
        sums += grad_lse
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, 0)
    return (weight * sums).sum((0, 2)).to(sinks.dtype)


class _GoingRound:
    """Gradients of keys and values, which travel one step behind their keys and values."""

    def __init__(self, plan: ContextPlan, k: torch.Tensor, dim: int, dtype: torch.dtype) -> None:
        self._plan = plan
        self.sums = k.new_zeros((*k.shape[:3], dim), dtype=dtype)
        self._received: torch.Tensor | None = None
        self._works: list[Any] = []

    def arrive(self, step: int) -> None:
        """Receives the sums of earlier ranks for the keys of this step."""
        if step > 0:
            self.sums = self.at_home()

    def leave(self, step: int, last: int) -> None:
        """Sends the sums to the rank that has the keys next; after the last step, to the owner."""
        if last == 0:
            return
        distance = 1 if step < last else -last
        self._received = torch.empty_like(self.sums)
        self._works = _exchange(self._plan, self.sums, self._received, distance, tag=1)

    def at_home(self) -> torch.Tensor:
        """The sums for this rank's own keys, once they have arrived."""
        for work in self._works:
            work.wait()
        self._works = []
        return self.sums if self._received is None else self._received
