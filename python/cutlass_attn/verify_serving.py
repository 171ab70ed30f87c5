"""`verify=True` of `attention_varlen` and `attention_decode`: runs the call again with a scalar
kernel and compares each sequence separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import _C
from ._call.call import NEW_KEYS
from ._call.packed import dense_calls
from ._call.token_format import unpacked
from .verify import ROUNDING, SUMMATION, compare, confirm, largest, library_of

Run = Callable[..., Any]
# A sequence: index of its rows in the result, index of its log-sum-exp, its keys, its values.
Entry = tuple[Any, Any, np.ndarray, np.ndarray]


def verified_varlen(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """The result of `attention_varlen`; raises VerificationError by the tolerance of
    `verify.verified`."""
    if options.get("quantize") is not None:
        return _verified_in_8_bits(q, k, v, options)
    lib = library_of(q)
    options = dict(options)
    if options.get("dropout_p", 0.0) != 0.0 and options.get("rng_state") is None:
        options["rng_state"] = lib.random_state(q)  # one state for both runs

    def entries() -> Iterator[Entry]:
        rows = options["cu_seqlens_q"].tolist()
        offsets, table = options.get("cu_seqlens_k"), options.get("block_table")
        keys = rows if offsets is None else offsets.tolist()
        if options.get("indices") is not None:
            listed = lib.on_host(options["indices"].reshape(-1))
            at = listed[(listed >= 0) & (listed < k.shape[0])]
            yield slice(None), slice(None), *(lib.to_float32(lib.on_host(x)[at]) for x in (k, v))
            return
        used = [2**31] * len(rows)
        if options.get("seqused_k") is not None:
            used = options["seqused_k"].tolist()
        for b, begin in enumerate(rows[:-1]):
            own = slice(begin, rows[b + 1])
            if table is None:
                end = min(keys[b + 1], keys[b] + used[b])
                stored = [lib.to_float32(x[keys[b] : end]) for x in (k, v)]
            else:
                stored = [_of_pages(lib.to_float32, x, table, b, used[b]) for x in (k, v)]
            yield own, own, stored[0], stored[1]

    return _verified(lib, _C.varlen, _C.explain_varlen, (q, k, v), options, {}, entries)


def _verified_in_8_bits(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """`verified_varlen` with `quantize`: confirms each sequence as a dense call."""
    out, lse = _C.varlen(q, k, v, {**options, "return_lse": True})
    verdicts = _C.explain_varlen(q, k, v, {**options, "out": out}).verdicts
    tested = next(verdict.key for verdict in verdicts if verdict.chosen)
    for b, rows, call in dense_calls(q, k, v, options):
        confirm(call, f"sequence {b}: {tested}", out[None, rows], lse[None, :, rows])
    return (out, lse) if options.get("return_lse") else out


def verified_decode(q: Any, k: Any, v: Any, options: dict[str, Any], more: dict[str, Any]) -> Any:
    """The result of `attention_decode`, verified in the same way. New keys are written once; then
    attention over the updated cache is verified."""
    lib = library_of(q)
    options = dict(options)
    if options.get("k_new") is not None:
        rotated, options["cache_seqlens"] = _C.decode_append(q, k, v, options, **more)
        q = q if rotated is None else rotated
        for name in NEW_KEYS:
            options.pop(name, None)

    keys, values, to_float32 = k, v, lib.to_float32
    if options.get("kv_format") is not None:
        dtype = str(q.dtype).removeprefix("torch.")
        keys = values = unpacked(_bytes_of(lib, k), options["kv_format"], dtype)
        to_float32 = np.asarray

    def entries() -> Iterator[Entry]:
        if options.get("indices") is not None:
            for b, at in enumerate(_listed(lib, k, options)):
                yield b, b, to_float32(keys[at]), to_float32(values[at])
            return
        lengths = options["cache_seqlens"].tolist()
        table, index = options.get("block_table"), options.get("cache_batch_idx")
        places = list(range(len(lengths))) if index is None else index.tolist()
        for b, length in enumerate(lengths):
            if table is None:
                stored = [to_float32(x[places[b], :length]) for x in (keys, values)]
            else:
                stored = [_of_pages(to_float32, x, table, b, length) for x in (keys, values)]
            yield b, b, stored[0], stored[1]

    return _verified(lib, _C.decode, _C.explain_decode, (q, k, v), options, more, entries)


def _bytes_of(lib: Any, x: Any) -> np.ndarray:
    x = lib.on_host(x)
    if not isinstance(x, np.ndarray):
        import torch

        x = x.view(torch.uint8).numpy()
    return x.view(np.uint8)


def _listed(lib: Any, k: Any, options: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Page and row of the tokens in the lists of each sequence."""
    indices, lengths = options["indices"], options.get("topk_lengths")
    table, size = options.get("block_table"), k.shape[1]
    for b, lists in enumerate(indices):
        rows = lists if lengths is None else lists[:, : int(lengths[b])]
        rows = np.asarray(lib.on_host(rows.reshape(-1)))
        most = k.shape[0] * size if table is None else int(options["cache_seqlens"][b])
        rows = rows[(rows >= 0) & (rows < most)]
        pages = rows // size
        yield pages if table is None else np.asarray(lib.on_host(table[b]))[pages], rows % size


def _verified(
    lib: Any,
    run: Run,
    explain: Run,
    operands: tuple[Any, Any, Any],
    options: dict[str, Any],
    more: dict[str, Any],
    entries: Callable[[], Iterator[Entry]],
) -> Any:
    q, k, v = operands
    with_lse = {**options, "return_lse": True}
    out, lse, *max_logit = run(q, k, v, with_lse, **more)
    verdicts = explain(q, k, v, {**options, "out": out}, **more).verdicts
    tested = next(verdict.key for verdict in verdicts if verdict.chosen)
    kernel = "scalar/minimal" if getattr(q, "is_cuda", False) else "scalar/minimal-simt"
    given = {**with_lse, **more, "out": None}
    if tested.startswith(kernel + "/"):  # which no other kernel takes the place of, but the CPU's
        kernel = "cpu"
        q, k, v = (_on_cpu(x) for x in operands)
        given = {name: _on_cpu(x) for name, x in given.items()}
    mask = {name: given.pop(name) for name in more}
    expected, expected_lse, *expected_max = run(q, k, v, {**given, "kernel": kernel}, **mask)
    arrays = [lib.to_float32(x) for x in (q, out, expected, lse, expected_lse)]
    q_, out_, expected_, lse_, expected_lse_ = arrays
    scales = [_scale(lib, options.get(name), k.shape[-2]) for name in ("k_scale", "v_scale")]
    slopes = options.get("alibi_slopes")
    slope = 0.0 if slopes is None else largest(np.abs(lib.to_float32(slopes)))
    u = ROUNDING[str(q.dtype).removeprefix("torch.")]
    head_dim = q.shape[-1]
    softmax_scale = options.get("softmax_scale")
    softmax_scale = head_dim**-0.5 if softmax_scale is None else abs(softmax_scale)
    kept = max(1.0 - options.get("dropout_p", 0.0), 2.0**-16)
    largest_error = np.zeros(q.shape[-2])  # of a logit of each head
    for b, (rows, at_lse, keys, values) in enumerate(entries()):
        k_, v_ = (x * scale for x, scale in zip((keys, values), scales, strict=True))
        queries = q_[rows]
        if queries.shape[0] == 0:
            continue
        group = queries.shape[1] // max(k_.shape[1], 1)
        size_q = _largest_per_head(np.linalg.norm(queries, axis=-1))
        size_k = np.repeat(_largest_per_head(np.linalg.norm(k_, axis=-1)), group)
        size_v = np.repeat(_largest_per_head(np.abs(v_).max(axis=-1, initial=0.0)), group) / kept
        distance = queries.shape[0] + k_.shape[0]
        logit = softmax_scale * size_q * size_k + slope * distance
        error = 2.0**-21 * logit  # (Hq,)
        largest_error = np.maximum(largest_error, error)
        right = expected_[rows]
        tolerance = ((u + 2 * error) * size_v)[:, None] + 2 * u * np.abs(right)
        names = f"{tested} and {kernel}"
        order = ("query", "head", "column")
        compare(f"out of sequence {b}", names, order, out_[rows], right, tolerance)
        is_packed = isinstance(at_lse, slice)  # (Hq, T), and not (B, Hq, Sq)
        ours, theirs = ((x[:, at_lse] if is_packed else x[at_lse]).T for x in (lse_, expected_lse_))
        tolerance = error + SUMMATION * (1 + np.abs(theirs))
        compare(f"lse of sequence {b}", names, order[:2], ours, theirs, tolerance)
    if max_logit:
        one, other = (lib.to_float32(x[0]) for x in (max_logit, expected_max))
        limit = largest_error + SUMMATION * (1 + np.abs(other))
        compare("max_logit", f"{tested} and {kernel}", ("head",), one, other, limit)
    results = (lse, *max_logit) if options.get("return_lse") else max_logit
    return (out, *results) if results else out


def _on_cpu(x: Any) -> Any:
    return x.cpu() if hasattr(x, "is_cuda") else x


def _of_pages(
    to_float32: Callable[[Any], np.ndarray], x: Any, table: Any, entry: int, length: int
) -> np.ndarray:
    """The first `length` rows of an entry of a paged K or V."""
    pages = table[entry, : -(-length // x.shape[1])].tolist()
    rows = [to_float32(x[page]) for page in pages]
    return np.concatenate(rows)[:length] if rows else np.zeros((0, *x.shape[2:]), np.float32)


def _scale(lib: Any, x: Any, heads: int) -> np.ndarray:
    """(Hkv, 1)."""
    value = 1.0 if x is None else x if isinstance(x, (int, float)) else lib.to_float32(x)
    return np.broadcast_to(np.asarray(value, np.float32).reshape(-1), (heads,))[:, None]


def _largest_per_head(x: np.ndarray) -> np.ndarray:
    """Largest finite value of (rows, heads) per head; 0 if there is none."""
    return np.where(np.isfinite(x), x, 0.0).max(axis=0, initial=0.0).astype(np.float64)
