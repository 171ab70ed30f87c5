"""Ulysses (arXiv 2309.14509): from rows of all heads to all rows of some heads, and back.

The heads of a rank come in groups: the all-to-all of one group runs beside the kernels of another
one, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ._collectives import copy
from ._schedule import Span

Tensors = tuple[torch.Tensor, ...]


def by_heads(
    group: Any,
    shares: Sequence[int],
    operands: Tensors,
    compute: Callable[[int, Tensors], Tensors],
) -> Tensors:
    """The results of `compute` for all heads, as rows of this rank.

    Args:
        group: the process group.
        shares: how the heads of a rank are divided into groups, in any unit that divides the heads
            of every operand.
        operands: tensors of one dtype (B, rows, heads, n).
        compute: from a group's number and its operands (B, ranks * rows, heads of the group, n) to
            results (B, ranks * rows, heads of the group, n), each of any dtype.

    Returns:
        The results (B, rows, heads, n).
    """
    inputs = [_Exchange(group) for _ in shares]
    buffers = _Scatter.apply(inputs, shares, *operands)
    outputs: list[list[_Exchange]] = []  # of each group, one for each result
    sent: list[torch.Tensor] = []
    for i, exchange in enumerate(inputs):
        results = compute(i, _Arrive.apply(exchange, buffers[i]))
        outputs.append([_Exchange(group) for _ in results])
        sent += _Depart.apply(outputs[i], *results)
    wholes: Tensors = _Collect.apply(outputs, shares, *sent)
    return wholes


class _Exchange:
    """An all-to-all of tensors (ranks, B, rows, heads, n) of one dtype; one is under way."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._shapes: list[torch.Size] = []
        self._work: Any = None
        self.ranks = dist.get_world_size(group)

    def start(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a buffer (ranks, B, rows, n), which is not to be read before `finish`."""
        self._shapes = [x.shape for x in parts]
        if len(parts) == 1 and parts[0].is_contiguous():
            sent = parts[0].flatten(3)
        else:
            sizes = [x[-2] * x[-1] for x in self._shapes]
            sent = parts[0].new_empty((*self._shapes[0][:3], sum(sizes)))
            for to, x in zip(self._parts(sent), parts):
                copy(to, x)
        received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        if torch.is_anomaly_enabled():  # which reads what a node of autograd returns
            self._work.wait()
        return received

    def finish(self, received: torch.Tensor) -> Tensors:
        """The tensors, as views of the buffer that `start` returned."""
        self._work.wait()
        self._work = None
        return self._parts(received)

    def _parts(self, buffer: torch.Tensor) -> Tensors:
        pieces = buffer.split([x[-2] * x[-1] for x in self._shapes], dim=-1)
        return tuple(piece.unflatten(-1, x[-2:]) for piece, x in zip(pieces, self._shapes))


def _of_group(x: torch.Tensor, ranks: int, shares: Sequence[int], i: int) -> torch.Tensor:
    """A group's heads on each rank, (ranks, B, rows, heads, n), of (B, rows, heads, n)."""
    heads = x.unflatten(2, (ranks, -1))
    unit = heads.shape[3] // sum(shares)
    span = Span(sum(shares[:i]) * unit, sum(shares[: i + 1]) * unit)
    return heads[:, :, :, slice(*span)].movedim(2, 0)


def _scatter(
    exchanges: Sequence[_Exchange], shares: Sequence[int], tensors: Tensors, order: Sequence[int]
) -> Tensors:
    """Starts one exchange of all tensors for each group, in this order of groups."""
    buffers = {
        i: exchanges[i].start([_of_group(x, exchanges[i].ranks, shares, i) for x in tensors])
        for i in order
    }
    return tuple(buffers[i] for i in range(len(exchanges)))


def _collect(exchanges: Sequence[_Exchange], shares: Sequence[int], buffers: Tensors) -> Tensors:
    wholes: Tensors = ()
    for i, (exchange, buffer) in enumerate(zip(exchanges, buffers)):
        parts = exchange.finish(buffer)
        wholes = wholes or tuple(_empty_whole(x, shares) for x in parts)
        for whole, part in zip(wholes, parts):
            copy(_of_group(whole, exchange.ranks, shares, i), part)
    return wholes


def _empty_whole(first: torch.Tensor, shares: Sequence[int]) -> torch.Tensor:
    """For all heads, from the part of the first group."""
    ranks, batch, rows, heads, n = first.shape
    return first.new_empty((batch, rows, ranks * heads // shares[0] * sum(shares), n))


def _depart(exchange: _Exchange, tensors: Tensors) -> torch.Tensor:
    rows = [x.unflatten(1, (exchange.ranks, -1)).transpose(0, 1) for x in tensors]
    return exchange.start(rows)


def _arrive(exchange: _Exchange, buffer: torch.Tensor) -> Tensors:
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in exchange.finish(buffer))


# Autograd's nodes: the backward pass of each is the forward pass of its counterpart. Of the nodes
# that are ready autograd runs the one that was made last. So the backward pass goes through the
# groups in reverse, and starts the exchange of a group before the kernels of the next one.


class _Scatter(torch.autograd.Function):
    """(B, rows, heads, n) to a buffer under way for each group."""

    @staticmethod
    def forward(ctx: Any, exchanges: Any, shares: Any, *tensors: torch.Tensor) -> Any:
        ctx.given = exchanges, shares
        return _scatter(exchanges, shares, tensors, range(len(exchanges)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        exchanges, shares = ctx.given
        return None, None, *_collect(exchanges, shares, grads)


class _Collect(torch.autograd.Function):
    """The inverse, for results that have an exchange each: the buffers of all groups to (B, rows,
    heads, n). One node for all results: so ranks exchange equally often, whatever their loss is."""

    @staticmethod
    def forward(ctx: Any, exchanges: Any, shares: Any, *buffers: torch.Tensor) -> Any:
        ctx.given = of_results, shares = tuple(zip(*exchanges)), shares
        count = len(of_results)
        return tuple(
            _collect(of_result, shares, buffers[n::count])[0]
            for n, of_result in enumerate(of_results)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        of_results, shares = ctx.given
        order = range(len(shares))[::-1]  # in which they will be waited for
        buffers = [_scatter(x, shares, (grad,), order) for x, grad in zip(of_results, grads)]
        return None, None, *(buffer for of_group in zip(*buffers) for buffer in of_group)


class _Arrive(torch.autograd.Function):
    """A buffer under way to (B, ranks * rows, heads of a group, n)."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, buffer: torch.Tensor) -> Any:
        ctx.exchange = exchange
        return _arrive(exchange, buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, _depart(ctx.exchange, grads)


class _Depart(torch.autograd.Function):
    """The inverse of _Arrive, for tensors that have an exchange each."""

    @staticmethod
    def forward(ctx: Any, exchanges: list[_Exchange], *tensors: torch.Tensor) -> Any:
        ctx.exchanges = exchanges
        return tuple(_depart(exchange, (x,)) for exchange, x in zip(exchanges, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        arrived = [_arrive(exchange, grad)[0] for exchange, grad in zip(ctx.exchanges, grads)]
        return None, *arrived
