"""The schedule has each visible pair of query and key once, and no other pair."""

import itertools

import pytest

pytest.importorskip("torch", reason="cutlass_attn.distributed needs it")

from cutlass_attn.distributed import _schedule
from cutlass_attn.distributed._schedule import Band, Chunk, Joins, Span

SEQLEN = 24
DOCUMENTS = [[Span(0, 24)], [Span(0, 5), Span(5, 6), Span(6, 19), Span(19, 22)]]
BANDS = [Band(None, None), Band(None, 0), Band(3, 0), Band(0, 0), Band(2, 4), Band(None, 2)]


def positions(chunks):
    return [x for chunk in chunks for x in range(chunk.start, chunk.stop)]


def pairs(call, queries, keys):
    """Positions of what a kernel's mask, which is aligned bottom-right, shows."""
    at_q, at_k = positions(queries), positions(keys)
    q, k = call.q.start, call.k.start
    left, right = (10**6 if side == -1 else side for side in call.window)
    for rows, columns in zip(call.lengths_q, call.lengths_k):
        for i, j in itertools.product(range(rows), range(columns)):
            if -left <= j - (i + columns - rows) <= right:
                yield at_q[q + i], at_k[k + j]
        q, k = q + rows, k + columns
    assert (q, k) == (call.q.stop, call.k.stop)


@pytest.mark.parametrize("is_zigzag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("joins", Joins)
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("draw", [1, 3, 32])
def test_every_pair_once(is_zigzag, size, joins, chunk, draw, monkeypatch):
    monkeypatch.setattr(_schedule, "DRAW", draw)
    places = [_schedule.place(rank, size, SEQLEN, is_zigzag) for rank in range(size)]
    assert sorted(x for place in places for x in positions(place)) == list(range(SEQLEN))
    for documents, band in itertools.product(DOCUMENTS, BANDS):
        documents = _schedule.split_documents(documents, chunk)
        due = sorted(
            (i, j)
            for document in documents
            for i, j in itertools.product(range(*document), repeat=2)
            if (band.left is None or i - j <= band.left)
            and (band.right is None or j - i <= band.right)
        )
        for blocks in (places, [[Chunk(0, SEQLEN, 0)]]):  # of a ring, and of a gather
            calls = [
                (call, queries, keys)
                for queries, keys in itertools.product(places, blocks)
                for call in _schedule.calls(queries, keys, documents, band, joins)
            ]
            found = [pair for call in calls for pair in pairs(*call)]
            assert sorted(found) == due
            for call, *sides in calls:
                starts = [positions(x)[span.start] for x, span in zip(sides, (call.q, call.k))]
                assert call.first == tuple(starts)
                if joins == Joins.POSITIONS:
                    for x, span in zip(sides, (call.q, call.k)):
                        at = positions(x)[slice(*span)]
                        assert at == list(range(at[0], at[0] + len(at)))
                if draw == 3 and documents == [Span(0, SEQLEN)]:  # which all chunks divide by
                    assert not any(x % draw for x in starts)


def test_a_zigzag_step_is_one_call():
    """But for the first one, which has a diagonal in each chunk and no rows twice."""
    places = [_schedule.place(rank, 4, SEQLEN, True) for rank in range(4)]
    for rank, step in itertools.product(range(4), range(4)):
        keys = places[rank - step]
        found = _schedule.calls(places[rank], keys, DOCUMENTS[0], Band(None, 0), Joins.CHUNKS)
        assert len(found) == (1 if step or rank == 3 else 2)
        assert step or [x.q.start for x in found] == sorted({x.q.start for x in found})
