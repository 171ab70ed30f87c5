"""Splits a call with packed sequences into dense calls, to verify them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .call import Call

# Options that each sequence's dense call keeps.
_OF_EACH = frozenset(
    (
        *("causal", "window", "attention_chunk", "softmax_scale", "softcap"),
        *("alibi_slopes", "sinks", "quantize"),
    )
)


def dense_calls(
    q: Any, k: Any, v: Any, options: dict[str, Any]
) -> Iterator[tuple[int, slice, Call]]:
    """The sequences of a call of `attention_varlen` that have queries, as dense calls.

    Yields the number of each sequence, its rows of q, and a call of `attention` that is equal to
    it. The call must not have pages, scales or dropout. Offsets are read on the host.
    """
    rows = options["cu_seqlens_q"].tolist()
    offsets, used = options.get("cu_seqlens_k"), options.get("seqused_k")
    keys = rows if offsets is None else offsets.tolist()
    most = [2**31] * len(rows) if used is None else used.tolist()
    shared = {name: x for name, x in options.items() if name in _OF_EACH}
    slopes = options.get("alibi_slopes")
    for b, begin in enumerate(rows[:-1]):
        own = slice(begin, rows[b + 1])
        if own.start >= own.stop:
            continue
        seen = slice(keys[b], min(keys[b + 1], keys[b] + most[b]))
        of_entry = {"layout": "bshd", **shared}
        if slopes is not None and slopes.ndim == 2:
            of_entry["alibi_slopes"] = slopes[b]
        yield b, own, Call(q[None, own], k[None, seen], v[None, seen], of_entry)
