"""`attention_varlen`: attention over packed sequences, and over pages of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from . import _C
from ._attention import Array, Window, cast, find_torch
from ._call.call import Call, P, computes
from ._call.foreign import converted, retried
from ._call.keywords import misplaced, must_validate
from .verify import require_plain
from .verify_serving import verified_varlen

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._types import A, Foreign, Lengths, VarlenOptions


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
            needed = names if more else names[:4]
            values = (q, k, v, cu_seqlens_q)
            raise misplaced("attention_varlen", needed, more, options, values)
        options["cu_seqlens_q"] = cu_seqlens_q
        options["cu_seqlens_k"] = cu_seqlens_k
        torch = find_torch()
        is_compiling = bool(torch and torch.is_compiling())
        if is_compiling or "validate" in options:
            again: Callable[..., Any] = attention_varlen
            given = {"q": q, "k": k, "v": v, **options}
            if arrays := converted(given):
                return again(**{**given, **arrays})
            if is_compiling and isinstance(q, np.ndarray):
                return torch.numpy_arrays_outside_of_graph(attention_varlen, given)
        if "validate" in options and must_validate(options) and getattr(q, "is_cuda", False):
            from ._call import serving_operator

            serving_operator.validate_varlen(q, k, **options)
        if is_compiling:
            from ._call import serving_operator

            return serving_operator.varlen(q, k, v, **options)
        try:
            if options.get("verify") is True:
                require_plain(q)
                call = cast(Call(q, k, v))
                rest = {name: x for name, x in options.items() if name != "verify"}
                return verified_varlen(call.q, call.k, call.v, rest)
            return _C.varlen(q, k, v, options)
        except TypeError as error:
            refused = error.with_traceback(None)  # which holds this frame
        return retried(attention_varlen, {"q": q, "k": k, "v": v, **options}, refused)

    return attention_varlen


@overload
def attention_varlen(
    q: A,
    k: A,
    v: A,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> A: ...
@overload
def attention_varlen(
    q: A,
    k: A,
    v: A,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> tuple[A, A]: ...
@overload
def attention_varlen(
    q: A,
    k: A,
    v: A,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[A, A]: ...
@overload
def attention_varlen(
    q: A,
    k: A,
    v: A,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[A, A, A]: ...
@overload
def attention_varlen(
    q: Foreign,
    k: Foreign,
    v: Foreign,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None = None,
    *,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[VarlenOptions],
) -> Any: ...
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
    indices: Array | None = None,
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
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: bool = False,
    return_max_logit: bool = False,
    out: Array | None = None,
    kernel: str = "auto",
    quantize: str | None = None,
    verify: bool = False,
    validate: bool = False,
) -> Any:
    """Attention within packed sequences of different lengths, over packed keys or a paged KV cache.

    Sequence b has the queries ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``, Sq of them, and Sk keys,
    given by ``cu_seqlens_k`` or ``seqused_k``. There is no max_seqlen: lengths are read when the
    kernel runs, nothing waits for them, and a CUDA graph replays with the lengths that the arrays
    hold then. A sequence may have no queries or no keys, and the last offset may come before the
    last row. B is the number of sequences, T and Tk the rows of all of them, P the number of pages;
    Hq and Hkv are query and KV heads. User guide: docs/serving.md.

    Args:
        q: (T, Hq, D), the queries of all sequences. A torch tensor on a CPU or CUDA device, or a
            numpy array; float16, bfloat16 (numpy: of ml_dtypes) or float32, on a CPU also float64.
            The last dimension is contiguous; the others may have any stride.
        k: (Tk, Hkv, D), the keys of all sequences; with ``block_table`` the pages of a cache, (P,
            page, Hkv, D), of any page size and strides (K and V may be halves of one row). q's
            dtype or, together with v, float8_e4m3fn. Hkv divides Hq.
        v: (Tk, Hkv, Dv), or pages (P, page, Hkv, Dv), of k's dtype.
        cu_seqlens_q: (B + 1,) int32 on q's device: the first row of each sequence, and the end of
            the last one. These are offsets, not lengths. Lists of int do as well here and below;
            they are copied to the device in each call.
        cu_seqlens_k: (B + 1,) int32: the offsets of the keys; None: those of the queries.
        seqused_k: (B,) int32, or an int for all: number of keys of each sequence that count, from
            its first one on.
        block_table: (B, pages per sequence) int32: key j of sequence b is row ``j % page`` of page
            ``block_table[b, j // page]``. Needs ``seqused_k``; entries beyond it may hold anything.
        indices: (T, topk) int32, contiguous in the last dimension: for each query the rows of k
            that it sees (sparse attention); -1, anywhere, is no row. A row that is listed twice
            counts twice. Without cu_seqlens_k, seqused_k, ``block_table``, causal, window, ALiBi,
            dropout and gradients; Hkv is 1. All T rows are computed, whatever cu_seqlens_q says.
        causal: query i of a sequence sees its keys up to ``i + Sk - Sq``: the last query sees the
            last key.
        window: sliding window around key ``i + Sk - Sq`` of the sequence: query i sees `left` keys
            before it and `right` keys after it. One int for both sides or a pair; None or -1 is
            unlimited. A causal call has no keys on the right.
        attention_chunk: chunk length, 1 to 2^28: query i sees only keys in the chunk of key
            ``i + Sk - Sq``; chunks start at key 0 of the sequence (Llama 4).
        softmax_scale: factor of q @ k^T, of any sign; None is ``1 / sqrt(D)``.
        softcap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``; 0 is off.
            Up to 4096, as the error of a logit is 1e-7 of it; in float64 any finite number.
        alibi_slopes: (Hq,) or (B, Hq) float32 (float64 queries: or float64), contiguous in the last
            dimension: subtracts ``slope * abs(j - (i + Sk - Sq))`` from the logit of query i and
            key j (ALiBi, arXiv 2108.12409).
        sinks: attention sinks: (Hq,), contiguous, float32 (float64 for float64 queries). One logit
            per query head in the softmax's denominator, without a key or a value.
        dropout_p: probability, 0 to 1, that a softmax weight becomes 0, rounded to a multiple of
            2^-15. Sequence b drops the weights that a dense call drops for batch entry b.
        rng_state: (2,) or (6,) int64 or uint64 on q's device: seed and offset of dropout; None
            draws both, as in `attention`. Queries and keys of (6,) are those of each sequence.
        deterministic: gradients have the same bits in every run.
        k_scale: factor of stored keys: a float, or (Hkv,) float32, which costs less on a GPU.
        v_scale: factor of stored values: a float, or (Hkv,) float32.
        num_splits: number of thread blocks that split the keys of a sequence, for kernels that can,
            which run up to 64 rows in all (T x Hq / Hkv); 0 chooses it for the GPU.
        split_size: keys of a split, a multiple of 64, in place of num_splits; 0 is off. As in
            `attention_decode`; a kernel has to be named for the same bits in any batch, as few
            rows run another one than many.
        return_lse: also return the log-sum-exp.
        return_max_logit: also return the largest logit of each query head, as in `attention`.
        out: (T, Hq, Dv), tensor or array for the result. Rows after the last offset stay as they
            are.
        kernel: "auto", a kernel such as "sm80/varlen", or a key of `variants()`.
        quantize: products in 8 bits: None, "qk", "int8" or "fp8". Each sequence is rounded by
            itself, its keys in tiles of 64 from its first one on. K and V of q's dtype; without
            ``block_table``, scales, dropout or gradients.
        verify: also run a scalar kernel and compare each sequence; raise VerificationError if they
            disagree by more than rounding explains. Waits for the GPU.
        validate: on a GPU, check offsets, lengths and pages first, on the device: a wrong one stops
            the GPU's work, and the next call that waits for it raises. Without it such a call reads
            or writes wrong memory. On a CPU they are always checked.

    Returns:
        (T, Hq, Dv), contiguous, in q's dtype, or `out`. Rows after the last offset are zeros; `out`
        saves the pass over memory that fills them. With ``return_lse`` a pair of it and the
        log-sum-exp, natural, (Hq, T) float32 (float64 for float64 queries): -inf for a query that
        sees no key, and for rows after the last offset. With ``return_max_logit`` the last of a
        tuple is (Hq,) of that dtype, as in `attention`.

    Raises:
        TypeError: an argument has a wrong type, is missing, or is not known.
        ValueError: an argument is out of range or contradicts another, no kernel of this build
            accepts the call, or a gradient is asked for with a scale.
        NotImplementedError: an unsupported derivative: of alibi_slopes, with `quantize`,
            ``block_table`` or ``indices``, of second order, or in forward mode.
        RuntimeError: CUDA reported an error.
        VerificationError: see `verify`.
    """


def explained_varlen(
    q: Array, k: Array, v: Array, options: dict[str, Any], device: Any
) -> _C.Explanation:
    """What dispatch says of a call of `attention_varlen`."""
    options = {name: x for name, x in options.items() if name not in ("verify", "validate")}
    return _C.explain_varlen(q, k, v, options, device=device)
