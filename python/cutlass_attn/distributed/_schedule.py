"""The kernel calls of one rank, from the positions of queries and keys.

Plain integers, no torch. Positions count along the whole sequence, rows along a rank's buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

# Dropout draws the weights of 16 queries and 32 keys at once (`rng_state` of `attention`): where
# positions are multiples of this, a kernel call can draw those of one device.
DRAW = 32


class Span(NamedTuple):
    start: int
    stop: int


class Chunk(NamedTuple):
    """Positions `start` to `stop`, which are the rows from `row` on of a buffer."""

    start: int
    stop: int
    row: int


class Joins(IntEnum):
    """What one kernel call may have."""

    POSITIONS = 0  # queries of consecutive positions, and keys
    CHUNKS = 1  # queries or keys of several chunks, too
    DOCUMENTS = 2  # several documents, too, as packed sequences of one batch entry


class Band(NamedTuple):
    """The numbers of keys before and after its own position that a query sees; None: all."""

    left: int | None
    right: int | None


class _Rectangle(NamedTuple):
    q: Span  # rows
    k: Span
    first: tuple[int, int]  # positions of the first query and the first key
    band: Band  # around the diagonal that ends in the last query and the last key


@dataclass(frozen=True)
class KernelCall:
    """Rows `q` against rows `k`: one segment is a dense call, several are a packed one."""

    q: Span
    k: Span
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    window: tuple[int, int]  # aligned bottom-right, -1: unlimited
    first: tuple[int, int]  # positions of the first query and the first key

    @property
    def is_full(self) -> bool:
        return self.window == (-1, -1) and len(self.lengths_q) == 1


def place(rank: int, size: int, seqlen: int, is_zigzag: bool) -> list[Chunk]:
    """The chunks of a rank. In a zigzag of 2 * size chunks, rank r has chunk r from either end, so
    that all ranks have equal work under a causal mask. The number of chunks divides `seqlen`."""
    if not is_zigzag:
        rows = seqlen // size
        return [Chunk(rank * rows, (rank + 1) * rows, 0)]
    rows = seqlen // (2 * size)
    late = 2 * size - 1 - rank
    if late == rank + 1:
        return [Chunk(rank * rows, (late + 1) * rows, 0)]
    first = Chunk(rank * rows, (rank + 1) * rows, 0)
    return [first, Chunk(late * rows, (late + 1) * rows, rows)]


def split_documents(documents: Sequence[Span], length: int | None) -> list[Span]:
    """Pieces of `length`, counted from the start of each document: attention_chunk."""
    if length is None:
        return list(documents)
    return [
        Span(start, min(start + length, document.stop))
        for document in documents
        for start in range(document.start, document.stop, length)
    ]


def calls(
    queries: Sequence[Chunk],
    keys: Sequence[Chunk],
    documents: Sequence[Span],
    band: Band,
    joins: Joins,
) -> list[KernelCall]:
    """The kernel calls in which all queries see the keys of these buffers that they may see.

    Queries see keys of their own document, within the band.
    """
    result: list[KernelCall] = []
    for q in queries:
        for k in keys:
            group: list[_Rectangle] = []
            for document in documents:
                rectangle = _visible(_clip(q, document), _clip(k, document), band)
                if rectangle is None:
                    continue
                if group and not (joins >= Joins.DOCUMENTS and _follows(group[-1], rectangle)):
                    result.append(_call(group))
                    group = []
                group.append(rectangle)
            if group:
                result.append(_call(group))
    return _merge(result) if joins >= Joins.CHUNKS else result


def _clip(chunk: Chunk, document: Span) -> Chunk:
    start, stop = max(chunk.start, document.start), min(chunk.stop, document.stop)
    return Chunk(start, stop, chunk.row + start - chunk.start)


def _visible(q: Chunk, k: Chunk, band: Band) -> _Rectangle | None:
    """The smallest rectangle that has all visible pairs of the two chunks; None if there are none.

    The sides of its band count from the kernel's diagonal, which ends at the last query and the
    last key of the rectangle. Neither side is negative.
    """
    left, right = band
    q_start, q_stop, k_start, k_stop = q.start, q.stop, k.start, k.stop
    if right is not None:
        k_stop = min(k_stop, q_stop + right)
    if left is not None:
        k_start = max(k_start, q_start - left)
    if right is not None:
        q_start = max(q_start, k_start - right)
    if left is not None:
        q_stop = min(q_stop, k_stop + left)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    q_start = _rounded(q_start, q.start)
    k_start = _rounded(k_start, k.start)
    shift = k_stop - q_stop
    return _Rectangle(
        Span(q.row + q_start - q.start, q.row + q_stop - q.start),
        Span(k.row + k_start - k.start, k.row + k_stop - k.start),
        (q_start, k_start),
        Band(None if left is None else left + shift, None if right is None else right - shift),
    )


def _rounded(position: int, start: int) -> int:
    """The last multiple of DRAW, from the start of the chunk, up to this position. The band masks
    rows that see nothing."""
    return position - (position - start) % DRAW


def _follows(first: _Rectangle, second: _Rectangle) -> bool:
    """Whether the second can be the next segment of a packed call with the first."""
    return (first.q.stop, first.k.stop, first.band) == (second.q.start, second.k.start, second.band)


def _call(group: Sequence[_Rectangle]) -> KernelCall:
    lengths_q = tuple(x.q.stop - x.q.start for x in group)
    lengths_k = tuple(x.k.stop - x.k.start for x in group)
    left, right = group[0].band
    # A side that limits no query of any segment is none: kernels without it are faster.
    if left is not None and all(k - 1 <= left for k in lengths_k):
        left = None
    if right is not None and all(q - 1 <= right for q in lengths_q):
        right = None
    return KernelCall(
        Span(group[0].q.start, group[-1].q.stop),
        Span(group[0].k.start, group[-1].k.stop),
        lengths_q,
        lengths_k,
        (-1 if left is None else left, -1 if right is None else right),
        group[0].first,
    )


def _merge(parts: list[KernelCall]) -> list[KernelCall]:
    """Merges calls: a full one joins the neighbour that has the same rows or the same keys."""
    result: list[KernelCall] = []
    for part in parts:
        while result and (joined := _joined(result[-1], part)):
            result.pop()
            part = joined
        result.append(part)
    return result


def _joined(a: KernelCall, b: KernelCall) -> KernelCall | None:
    if not a.is_full or len(b.lengths_q) > 1:
        return None
    right = b.window[1]
    sees_all_before = right == -1 or right + b.lengths_k[0] - b.lengths_q[0] >= -1
    if a.q == b.q and a.k.stop == b.k.start and b.window[0] == -1 and sees_all_before:
        # Keys before those of b, all visible: where b's diagonal ends does not move.
        k = Span(a.k.start, b.k.stop)
        return replace(b, k=k, lengths_k=(k.stop - k.start,), first=a.first)
    if b.is_full and a.k == b.k and a.q.stop == b.q.start:
        q = Span(a.q.start, b.q.stop)
        return replace(b, q=q, lengths_q=(q.stop - q.start,), first=a.first)
    return None
