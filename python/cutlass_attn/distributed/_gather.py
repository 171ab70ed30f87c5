"""Every rank collects all keys and values, a group of KV heads at a time, for its own queries.

There is nothing to merge: a query meets all of its keys in one kernel, with every mask and sink.
The collective of the next group runs during the kernel of the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from . import _kernels
from ._collectives import all_gather, copy
from ._kernels import Terms
from ._plan import ContextPlan
from ._schedule import KernelCall, Span

# Rows times query heads of a group below which its kernels leave too many multiprocessors idle at
# their end: 15 tiles of 128 rows for each of 132. Backward, where tiles are of keys, 90: one group
# took 81.0 ms at 64k rows of 32 heads on two H200, two groups 83.3.
_ROWS_OF_A_GROUP, _KEYS_OF_A_GROUP = 15 * 132 * 128, 90 * 132 * 128


class Gather(torch.autograd.Function):
    """Output and log-sum-exp of this rank's q, k, v (B, rows, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: ContextPlan,
        terms: Terms,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _kernels.empty_results(q, v.shape[-1], q.dtype)
        calls = _calls(plan, terms, q)
        count = number_of_groups(plan, q, k.shape[2])
        for _, heads_q, keys, values in _groups(plan, q, k, v, count):
            mine = terms.of_heads(heads_q)
            span = slice(*heads_q)
            for call in calls:
                options = mine.options(call, has_sinks=True)
                into = out[:, :, span]
                _, part = _kernels.forward(q[:, :, span], keys, values, call, options, into)
                lse[:, span, slice(*call.q)] = part
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.call = (plan, terms)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        plan, terms = ctx.call
        q, k, v, bias, sinks, out, lse = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[2:])
        sums = _kernels.lse_dtype(q)
        grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format) if wanted[0] else None
        grad_bias = torch.zeros_like(bias, dtype=sums) if wanted[3] else None
        grad_sinks = torch.zeros_like(sinks, dtype=sums) if wanted[4] else None
        calls = _calls(plan, terms, q)
        home = _Home(plan, k, v, len(calls)) if wanted[1] or wanted[2] else None
        count = number_of_groups(plan, q, k.shape[2], is_backward=True)
        for heads, heads_q, keys, values in _groups(plan, q, k, v, count):
            if home is not None:
                home.begin(heads)
            mine = terms.of_heads(heads_q)
            span = slice(*heads_q)
            results = out[:, :, span], lse[:, span]
            grads = (
                None if grad_out is None else grad_out[:, :, span],
                None if grad_lse is None else grad_lse[:, span],
            )
            for call in calls:
                operands = q[:, :, span], keys, values
                options = mine.options(call, has_sinks=True)
                found = _kernels.backward(operands, results, grads, call, options, wanted)
                of_q, of_k, of_v, of_bias, of_sinks = (*found, None, None)[:5]
                if grad_q is not None:
                    copy(grad_q[:, slice(*call.q), span], of_q)
                if home is not None:
                    home.add(call.k, of_k, of_v)
                if grad_bias is not None:
                    at = slice(*heads_q) if bias.shape[1] > 1 else slice(None)
                    _kernels.part(grad_bias[:, at], call).add_(of_bias)
                if grad_sinks is not None:
                    grad_sinks[span] += of_sinks
            if home is not None:
                home.send(heads)
        grad_k, grad_v = home.results() if home is not None else (None, None)
        return (
            None,
            None,
            grad_q,
            grad_k if wanted[1] else None,
            grad_v if wanted[2] else None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None if grad_sinks is None else grad_sinks.to(sinks.dtype),
        )


def _calls(plan: ContextPlan, terms: Terms, q: torch.Tensor) -> list[KernelCall]:
    return plan.calls_of_gather(terms.band, terms.attention_chunk, terms.joins(q.shape[0]))


def number_of_groups(
    plan: ContextPlan, q: torch.Tensor, heads: int, *, is_backward: bool = False
) -> int:
    """Number of groups of `heads` KV heads. It depends on shapes only, so all ranks agree."""
    most = plan.head_groups
    if most is None:
        batch, rows, heads_q, _ = q.shape
        if is_backward:
            of_a_group, rows = _KEYS_OF_A_GROUP, plan.padded_seqlen
        else:
            of_a_group = _ROWS_OF_A_GROUP
        most = max(1, min(4, batch * rows * heads_q // of_a_group))
    return max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)


def _groups(
    plan: ContextPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int
) -> Iterator[tuple[Span, Span, torch.Tensor, torch.Tensor]]:
    """For each group: its KV heads, its query heads, and all ranks' keys and values in order."""
    if plan.outer_size == 1:
        yield Span(0, k.shape[2]), Span(0, q.shape[2]), k, v
        return
    share, share_q = k.shape[2] // count, q.shape[2] // count
    head_dim = k.shape[-1]
    spans = [Span(i * share, (i + 1) * share) for i in range(count)]
    following = _start_gather(plan, k, v, spans[0])
    for i, heads in enumerate(spans):
        received, work = following
        if i + 1 < count:  # before this group's kernels are enqueued, so that it need not wait
            following = _start_gather(plan, k, v, spans[i + 1])
        work.wait()
        kv = _by_position(plan, received)
        heads_q = Span(i * share_q, (i + 1) * share_q)
        yield heads, heads_q, kv[..., :head_dim], kv[..., head_dim:]


def _start_gather(
    plan: ContextPlan, k: torch.Tensor, v: torch.Tensor, heads: Span
) -> tuple[torch.Tensor, Any]:
    batch, rows, _, head_dim = k.shape
    mine = k.new_empty((batch, rows, heads.stop - heads.start, head_dim + v.shape[-1]))
    copy(mine[..., :head_dim], k[:, :, slice(*heads)])
    copy(mine[..., head_dim:], v[:, :, slice(*heads)])
    return all_gather(mine, plan.outer)


def _by_position(plan: ContextPlan, received: torch.Tensor) -> torch.Tensor:
    """(ranks, B, rows, heads, n) as (B, all rows in the order of positions, heads, n)."""
    pieces = [
        (chunk.start, received[rank, :, chunk.row : chunk.row + chunk.stop - chunk.start])
        for rank in range(plan.outer_size)
        for chunk in plan.chunks(rank)
    ]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda x: x[0])], dim=1)


class _Home:
    """Sends gradients of keys and values to the ranks that own these rows.

    They are sent in the operands' dtype by an all-to-all, and added in float32 in the order of
    ranks. A reduce-scatter would send as many bytes, but add in the dtype that is sent.
    """

    def __init__(self, plan: ContextPlan, k: torch.Tensor, v: torch.Tensor, calls: int) -> None:
        self._plan = plan
        self._grad_k, self._grad_v = torch.empty_like(k), torch.empty_like(v)
        # The sum of two calls is rounded once in either dtype.
        self._dtype = k.dtype if calls <= 2 else _kernels.lse_dtype(k)
        self._sums = k.new_empty(0)  # (ranks, B, rows, heads, columns of k and v)
        self._under_way: tuple[Any, ...] | None = None

    def begin(self, heads: Span) -> None:
        """Begins the sums of a group of heads."""
        batch, rows, _, head_dim = self._grad_k.shape
        columns = head_dim + self._grad_v.shape[-1]
        shape = (self._plan.outer_size, batch, rows, heads.stop - heads.start, columns)
        self._sums = self._grad_k.new_zeros(shape, dtype=self._dtype)

    def add(self, keys: Span, of_k: torch.Tensor | None, of_v: torch.Tensor | None) -> None:
        """Adds gradients (B, positions `keys`, heads of the group, columns)."""
        plan, head_dim = self._plan, self._grad_k.shape[-1]
        for x, first, end in ((of_k, 0, head_dim), (of_v, head_dim, None)):
            if x is None:
                continue
            for rank in range(plan.outer_size):
                for start, stop, row in plan.chunks(rank):
                    both = Span(max(start, keys.start), min(stop, keys.stop))
                    if both.start < both.stop:
                        rows_of_rank = slice(row + both.start - start, row + both.stop - start)
                        rows_of_x = slice(both.start - keys.start, both.stop - keys.start)
                        self._sums[rank, :, rows_of_rank, :, first:end] += x[:, rows_of_x]

    def send(self, heads: Span) -> None:
        """Sends the gradients of this group of heads."""
        sent = self._sums.to(self._grad_k.dtype)
        if self._plan.outer_size == 1:
            self._store(heads, sent[0])
            return
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._plan.outer, async_op=True)
        self._receive()
        self._under_way = heads, received, sent, work

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._receive()
        return self._grad_k, self._grad_v

    def _receive(self) -> None:
        if self._under_way is None:
            return
        heads, received, _, work = self._under_way
        work.wait()
        self._under_way = None
        self._store(heads, received.sum(0, dtype=_kernels.lse_dtype(received)))

    def _store(self, heads: Span, grad_kv: torch.Tensor) -> None:
        head_dim = self._grad_k.shape[-1]
        self._grad_k[:, :, slice(*heads)] = grad_kv[..., :head_dim]
        self._grad_v[:, :, slice(*heads)] = grad_kv[..., head_dim:]
