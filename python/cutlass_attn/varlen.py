"""`attention_varlen`: attention over packed sequences, and over pages of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _C
from ._attention import Array, Window, cast, find_torch
from ._call.call import Call, P, computes
from ._call.keywords import misplaced, refusal
from .verify import require_plain
from .verify_serving import verified_varlen


def _in_cpp(described: Callable[P, Any]) -> Callable[P, Any]:
    """A function that `_C.varlen` computes; keywords that a caller leaves out never reach it."""

    @computes(described)
    def attention_varlen(
        q: Array = None,
        k: Array = None,
        v: Array = None,
        cu_seqlens_q: Array = None,
        cu_seqlens_k: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        if more or cu_seqlens_q is None:
            names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
            raise misplaced("attention_varlen", names if more else names[:4], more, options)
        options["cu_seqlens_q"] = cu_seqlens_q
        options["cu_seqlens_k"] = cu_seqlens_k
        torch = find_torch()
        if options.pop("validate", False) and getattr(q, "is_cuda", False):
            from ._call import serving_operator

            serving_operator.validate_varlen(q, k, **options)
        if torch and torch.is_compiling():
            from ._call import serving_operator

            return serving_operator.varlen(q, k, v, **options)
        try:
            if options.get("verify") is True:
                require_plain(q)
                del options["verify"]
                call = cast(Call(q, k, v))
                return verified_varlen(call.q, call.k, call.v, options)
            return _C.varlen(q, k, v, options)
        except TypeError as error:
            raise refusal("attention_varlen", options) or error from None

    return attention_varlen


@_in_cpp
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    seqused_k: Array | None = None,
    block_table: Array | None = None,
    causal: bool = False,
    window: Window = None,
    attention_chunk: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    rng_state: Array | None = None,
    deterministic: bool = False,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    kernel: str = "auto",
    quantize: str | None = None,
    verify: bool = False,
    validate: bool = False,
) -> Any:
    """Attention within each of many sequences, whose rows are packed behind each other.

    Entry b has the queries ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]`` and as many keys as
    ``cu_seqlens_k`` or ``seqused_k`` says; what `attention` says of Sq and Sk holds for each entry
    on its own. Lengths are read where the kernel runs, and nothing waits for them: a CUDA graph
    replays with the lengths that the arrays hold then. An entry may have no queries, no keys, or
    neither, and the last offset may come before the last row.

    Args:
        q: (T, Hq, D): the queries of all entries. Types, strides and devices are those of
            `attention`.
        k: (Tk, Hkv, D), the keys of all entries, of q's dtype or, with v, of float8_e4m3fn; with
            ``block_table`` pages of a cache, (P, page, Hkv, D), of any page size and strides: K and
            V may be halves of one row.
        v: shaped as k, but for its head dim Dv.
        cu_seqlens_q: (B + 1,) int32: the first row of each entry, and the end of the last one.
        cu_seqlens_k: the same for keys; None: that of the queries.
        seqused_k: (B,) int32: how many keys of an entry count, from its first on.
        block_table: (B, pages of an entry) int32: key j of entry b is row ``j % page`` of page
            ``block_table[b, j // page]``. It needs ``seqused_k``; pages beyond that may hold
            anything.
        causal: as of `attention`, within each entry.
        window: the same.
        attention_chunk: the same.
        softmax_scale: the same.
        softcap: the same.
        alibi_slopes: the same.
        sinks: the same.
        rng_state: the same.
        dropout_p: as of `attention`; the weights of an entry are those that a dense call
            drops for batch entry b.
        deterministic: as of `attention`.
        k_scale: what stored keys are multiplied by: a number, or a (Hkv,) float32 array, which
            costs less on a GPU.
        v_scale: the same for values.
        return_lse: also return the natural log of each softmax's denominator.
        out: (T, Hq, Dv): where to put the result. Rows of no entry stay as they are.
        kernel: as of `attention`.
        quantize: None, "qk", "int8" or "fp8", as of `attention`: each entry is rounded by itself,
            its keys in tiles of 64 from its first on. Without ``block_table``, scales, dropout or
            gradients; K and V of q's dtype.
        verify: as of `attention`, of each entry by itself.
        validate: check offsets, lengths and pages of CUDA tensors, on the GPU: one that is out of
            range stops the GPU's work, and the next call that waits for it raises. Without it such
            a call reads or writes what it should not. On a CPU they are always checked.

    Returns:
        (T, Hq, Dv), contiguous, in q's dtype; rows of no entry are zeros. Filling it with them is
        a pass over memory, which ``out`` saves. With ``return_lse`` also the log-sum-exp, (Hq, T)
        float32, for float64 queries float64, -inf for a query that sees no key and for rows of no
        entry.

    Raises:
        TypeError, ValueError: an argument contradicts the above, or no compiled kernel takes the
            call.
        NotImplementedError: as `attention`, also with ``quantize``; so does the backward pass of a
            call with ``block_table``, and that of one with a scale ValueError.
        RuntimeError: CUDA reported an error.
        VerificationError: see ``verify``.
    """


def explained_varlen(
    q: Array, k: Array, v: Array, options: dict[str, Any], device: Any
) -> _C.Explanation:
    """What dispatch says of a call of `attention_varlen`."""
    options = {name: x for name, x in options.items() if name not in ("verify", "validate")}
    return _C.explain_varlen(q, k, v, options, device=device)
