"""Attention over a cache of keys and values, and what fills the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from . import _C
from ._attention import Array, Window, find_torch
from ._call.call import P, computes
from ._call.foreign import converted, retried
from ._call.keywords import answered, misplaced, must_validate
from .verify import require_plain
from .verify_serving import verified_decode

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._types import A, DecodeOptions, Foreign, Lengths


def _in_cpp(described: Callable[P, Any]) -> Callable[P, Any]:
    """A function that `_C.decode` computes; keywords that a caller leaves out never reach it."""

    @computes(described)
    def attention_decode(
        q: Array = None,
        k_cache: Array = None,
        v_cache: Array = None,
        cache_seqlens: Array = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        if more or (cache_seqlens is None and options.get("indices") is None):
            names = ("q", "k_cache", "v_cache", "cache_seqlens")
            values = (q, k_cache, v_cache, cache_seqlens)
            raise misplaced("attention_decode", names, more, options, values)
        options["cache_seqlens"] = cache_seqlens
        torch = find_torch()
        is_compiling = bool(torch and torch.is_compiling())
        try:
            if is_compiling or not _NOT_OF_CPP.isdisjoint(options):
                return _more_than_cpp(q, k_cache, v_cache, options, is_compiling)
            return _C.decode(q, k_cache, v_cache, options)
        except TypeError as error:
            refused = error.with_traceback(None)  # which holds this frame
        except ValueError as error:
            if hint := _other_layout(q, k_cache, options):
                raise ValueError(f"{error}; {hint}") from None
            raise
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **options}
        return retried(attention_decode, given, refused)

    return attention_decode


def _other_layout(q: Array, k_cache: Array, options: dict[str, Any]) -> str:
    """A hint for a refused call whose numbers of heads fit the other layout alone; else empty."""
    dimension = {"bshd": 2, "bhsd": 1}  # of the heads
    layout = options.get("layout", "bshd")
    if (
        not isinstance(layout, str)
        or layout not in dimension
        or options.get("kv_format") is not None
    ):
        return ""
    if any(getattr(x, "ndim", None) != 4 for x in (q, k_cache)):
        return ""
    other = "bhsd" if layout == "bshd" else "bshd"
    (heads, kv_heads), (others, kv_others) = (
        (q.shape[dimension[x]], k_cache.shape[dimension[x]]) for x in (layout, other)
    )
    if min(kv_heads, kv_others) == 0 or heads % kv_heads == 0 or others % kv_others != 0:
        return ""
    return (
        f'q has {heads} heads and k_cache {kv_heads} by layout="{layout}", and {others} and '
        f'{kv_others} by layout="{other}"'
    )


_NOT_OF_CPP = frozenset(("tree_mask", "cache_leftpad", "validate", "verify", "layout"))


def _more_than_cpp(
    q: Array, k_cache: Array, v_cache: Array, options: dict[str, Any], is_compiling: bool
) -> Any:
    if not is_compiling and options.get("layout") == "bshd":  # the order that C++ reads
        options = {name: x for name, x in options.items() if name != "layout"}
        if _NOT_OF_CPP.isdisjoint(options):
            return _C.decode(q, k_cache, v_cache, options)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **options}
    if arrays := converted(given):
        return attention_decode(**{**given, **arrays})
    if is_compiling and isinstance(q, np.ndarray):
        return find_torch().numpy_arrays_outside_of_graph(attention_decode, given)
    if layout_of(options) == "bhsd":
        result = attention_decode(**_transposed(given))
        out = result[0] if isinstance(result, tuple) else result
        out = options["out"] if options.get("out") is not None else out.swapaxes(1, 2)
        return (out, result[1]) if isinstance(result, tuple) else out
    options = {name: x for name, x in options.items() if name != "layout"}
    tree_mask = options.pop("tree_mask", None)
    leftpad = options.pop("cache_leftpad", None)
    if must_validate(options) and getattr(q, "is_cuda", False):
        from ._call import serving_operator

        serving_operator.validate_decode(k_cache, **options)
    more = {}
    if tree_mask is not None or leftpad is not None:
        more["mask"] = _mask(q, k_cache, tree_mask, leftpad, options)
    if is_compiling:
        from ._call import serving_operator

        return serving_operator.decode(q, k_cache, v_cache, **more, **options)
    if options.get("verify") is True:
        require_plain(q)
        del options["verify"]
        return verified_decode(q, k_cache, v_cache, options, more)
    return _C.decode(q, k_cache, v_cache, options, **more)


def _transposed(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with rows before heads, of a call that has them in the other order."""
    names = ("q", "k_cache", "v_cache", "k_new", "v_new", "out")
    arrays = {name: given[name] for name in names if given.get(name) is not None}
    for name, x in arrays.items():
        check_array(name, x, like=given["q"])
        if x.ndim != 4:
            dims = "(pages, heads, page_size, head_dim)"
            if given.get("block_table") is None or name not in ("k_cache", "v_cache"):
                dims = "(batch, heads, seqlen, head_dim)"
            raise ValueError(f"{name} must have 4 dimensions, {dims}, got shape {tuple(x.shape)}")
    transposed = {name: x.swapaxes(1, 2) for name, x in arrays.items()}
    return {**given, **transposed, "layout": "bshd"}


@overload
def attention_decode(
    q: A,
    k_cache: A,
    v_cache: A,
    cache_seqlens: int | Lengths | None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> A: ...
@overload
def attention_decode(
    q: A,
    k_cache: A,
    v_cache: A,
    cache_seqlens: int | Lengths | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[A, A]: ...
@overload
def attention_decode(
    q: Foreign,
    k_cache: Foreign,
    v_cache: Foreign,
    cache_seqlens: int | Lengths | None,
    *,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Any: ...
@_in_cpp
def attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    cache_seqlens: Array | None,
    *,
    block_table: Array | None = None,
    kv_format: str | None = None,
    indices: Array | None = None,
    topk_lengths: Array | None = None,
    k_new: Array | None = None,
    v_new: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = True,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    tree_mask: Array | None = None,
    causal: bool = True,
    window: Window = None,
    attention_chunk: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bshd",
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: bool = False,
    out: Array | None = None,
    kernel: str = "auto",
    verify: bool = False,
    validate: bool = False,
) -> Any:
    """Attention of a few queries per sequence over a KV cache, contiguous or paged.

    Split-KV decoding. New keys, if given, are appended to the cache first. Lengths are read when
    the kernel runs, nothing waits for them, and a CUDA graph replays with the lengths that the
    arrays hold then. B is the number of sequences, S the length of a cache entry, P the number of
    pages, Sk the keys that a sequence has after new ones are appended; Hq and Hkv are query and KV
    heads. User guide: docs/serving.md.

    Args:
        q: (B, Sq, Hq, D), the last queries of each sequence. A torch tensor on a CPU or CUDA
            device, or a numpy array; float16, bfloat16 (numpy: of ml_dtypes) or float32, on a CPU
            also float64. The last dimension is contiguous; the others may have any stride.
        k_cache: (B, S, Hkv, D); with ``block_table`` pages, (P, page, Hkv, D), of any page size and
            strides (K and V may be halves of one row). q's dtype or, together with v_cache,
            float8_e4m3fn. Hkv divides Hq.
        v_cache: (B, S, Hkv, Dv), or pages (P, page, Hkv, Dv), of k_cache's dtype. A view of its
            first columns, ``k_cache[..., :Dv]``, is latent attention (MLA), which reads it once.
            With ``kv_format`` the same array as k_cache.
        cache_seqlens: (B,) int32: number of keys of each sequence in the cache before this call.
            Not changed. An int stands for all sequences. Like a list, it is copied to the device
            in each call. With ``indices`` None, unless there is a ``block_table``.
        block_table: (B, pages per sequence) int32: key j of sequence b is row ``j % page`` of page
            ``block_table[b, j // page]``. Entries beyond its length may hold anything.
        kv_format: how k_cache stores latent tokens in 8 bits, which are converted on the way:
            "ds_mla", (P, page, 1, 656), or "ds_mla_v4", (P, page, 1, 584), uint8 or float8_e4m3fn,
            the rows of a page next to each other. None: k_cache holds numbers. D is 576 and Dv 512;
            of "ds_mla_v4" both are 512. docs/latent.md has the formats byte by byte.
        indices: (B, Sq, topk) int32, contiguous in the last dimension: for each query the rows of
            the whole cache that it sees (sparse attention), row ``indices % S`` of entry, or page,
            ``indices // S``. With ``block_table`` and cache_seqlens: rows of the sequence, below
            its cache_seqlens. -1, anywhere, is no row. A row that is listed twice counts twice.
            Without causal, window, masks, ALiBi and new keys; Hkv is 1.
        topk_lengths: (B,) int32: how many entries of a sequence's lists count, the first ones;
            None: all.
        k_new: (B, Snew, Hkv, D): keys to append to the cache before attention; not float64.
        v_new: (B, Snew, Hkv, Dv): their values. None with ``kv_format``.
        rotary_cos: (positions, rotary_dim / 2) in q's dtype: cosines of rotary embeddings (RoPE,
            arXiv 2104.09864). New key i of sequence b is rotated by position
            ``cache_seqlens[b] + i``; query i by that of new key i if the call is causal or has a
            window, else by ``cache_seqlens[b]``. Needs k_new.
        rotary_sin: sines, shaped as rotary_cos.
        rotary_interleaved: True rotates columns (0, 1), (2, 3), ...; False columns j and
            ``j + rotary_dim / 2``.
        cache_batch_idx: (B,) int32: the cache entry of each sequence; the cache may have more than
            B entries. Not with ``block_table``.
        cache_leftpad: (B,) int32: number of keys at the beginning of each sequence to mask; from 0
            to the number of keys, which is checked where it is on the host.
        tree_mask: (B, Sq, Sq) bool, for speculative decoding: True where a query sees one of the
            last Sq keys. It sees all keys before these. Applies on top of the other masks.
        causal: query i sees keys up to ``i + Sk - Sq``: the last query sees the last key. The
            default differs from `attention`'s, as queries are the newest tokens of a sequence
            here. With one query it changes nothing. With ``indices`` it is False.
        window: sliding window around key ``i + Sk - Sq`` of the sequence: query i sees `left` keys
            before it and `right` keys after it. One int for both sides or a pair; None or -1 is
            unlimited. A causal call has no keys on the right.
        attention_chunk: chunk length, 1 to 2^28: query i sees only keys in the chunk of key
            ``i + Sk - Sq``; chunks start at key 0 of the sequence (Llama 4).
        softmax_scale: factor of q @ k^T, of any sign; None is ``1 / sqrt(D)``.
        softcap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``; 0 is off.
            Up to 4096, as the error of a logit is 1e-7 of it; in float64 any finite number.
        layout: order of the dimensions of q, caches, new keys and values, ``out`` and the result:
            "bshd", in which programs store caches, or "bhsd", (B, H, S, D), with pages (P, Hkv,
            page, D) (FlashInfer's HND). Views are made, nothing is copied; a result of "bhsd" is
            a view of one in the other order.
        alibi_slopes: (Hq,) or (B, Hq) float32 (float64 queries: or float64), contiguous in the last
            dimension: subtracts ``slope * abs(j - (i + Sk - Sq))`` from the logit of query i and
            key j (ALiBi, arXiv 2108.12409).
        sinks: attention sinks: (Hq,), contiguous, float32 (float64 for float64 queries). One logit
            per query head in the softmax's denominator, without a key or a value.
        k_scale: factor of stored keys, and divisor of new ones: a float, or (Hkv,) float32, which
            costs less on a GPU.
        v_scale: factor of stored values, and divisor of new ones: a float, or (Hkv,) float32.
        num_splits: number of thread blocks that split the keys of a sequence, for kernels that can;
            0 chooses it for the GPU. With 1 a sequence gives the same bits in any batch.
        split_size: keys of a split, a multiple of 64, in place of num_splits; 0 is off. A sequence
            gives the same bits in any batch and any cache, with kernels that split keys and those
            that do not. Up to 256 splits of all keys that a cache entry or block_table has room
            for, or that a window or chunk leaves.
        return_lse: also return the log-sum-exp.
        out: (B, Sq, Hq, Dv), tensor or array for the result; must not overlap an input.
        kernel: "auto", a kernel such as "sm80/decode", or a key of `variants()`.
        verify: also run a scalar kernel, and raise VerificationError if the results disagree by
            more than rounding explains; new keys are written once. Waits for the GPU.
        validate: on a GPU, check lengths, pages and indices first, on the device: a wrong one stops
            the GPU's work, and the next call that waits for it raises. Without it, keys beyond the
            cache are not written, wrong pages are read, and indices beyond the cache are no rows.
            On a CPU they are always checked.

    Returns:
        (B, Sq, Hq, Dv), contiguous, in q's dtype, or `out`. With ``return_lse`` a pair of it and
        the log-sum-exp, natural, (B, Hq, Sq) float32 (float64 for float64 queries): -inf for a
        query that sees no key.

    Raises:
        TypeError: an argument has a wrong type, is missing, or is not known.
        ValueError: an argument is out of range or contradicts another, or no kernel of this build
            accepts the call.
        NotImplementedError: an input needs a gradient.
        RuntimeError: CUDA reported an error.
        VerificationError: see `verify`.
    """


def decode_with_max_logits(q: Array, k_cache: Array, v_cache: Array, **options: Any) -> Any:
    """`attention_decode` of torch tensors, for `compat`, with the largest logit of each query last,
    (B, Hq, Sq): natural, without sinks, -inf for a query that sees no key."""
    torch = find_torch()
    if torch and torch.is_compiling():
        from ._call import serving_operator

        return serving_operator.decode_with_max_logits(q, k_cache, v_cache, **options)
    return _C.decode(q, k_cache, v_cache, options, return_max_logit=True)


def explained_decode(
    q: Array, k: Array, v: Array, options: dict[str, Any], device: Any
) -> _C.Explanation:
    """What dispatch says of a call of `attention_decode`."""
    if layout_of(options) == "bhsd":
        given = _transposed({"q": q, "k_cache": k, "v_cache": v, **options})
        q, k, v = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
        options = given
    not_read = ("verify", "validate", "layout")
    options = {name: x for name, x in options.items() if name not in not_read}
    tree_mask, leftpad = options.pop("tree_mask", None), options.pop("cache_leftpad", None)
    more = {}
    if tree_mask is not None or leftpad is not None:
        more["mask"] = _mask(q, k, tree_mask, leftpad, options)
    return _C.explain_decode(q, k, v, options, device=device, **more)


def _mask(q: Array, k_cache: Array, tree_mask: Any, leftpad: Any, options: dict[str, Any]) -> Array:
    """(B, 1, Sq, keys that an entry can have): what tree_mask and cache_leftpad leave visible."""
    if options.get("indices") is not None:
        name = "cache_leftpad" if tree_mask is None else "tree_mask"
        raise ValueError(f"{name} and indices are both given; allowed: -1 in indices for no key")
    block_table, k_new = options.get("block_table"), options.get("k_new")
    for name, x, ndim in (
        ("q", q, 4),
        ("k_cache", k_cache, 4),
        *(
            (n, x, d)
            for n, x, d in (("block_table", block_table, 2), ("k_new", k_new, 4))
            if x is not None
        ),
    ):
        check_array(name, x, like=q)
        if x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(x.shape)}")
    batch, seqlen_q = q.shape[:2]
    pages = 1 if block_table is None else block_table.shape[1]
    check_like("cache_seqlens", options["cache_seqlens"], (batch,), "int32", like=q, is_needed=True)
    check_like("cache_leftpad", leftpad, (batch,), "int32", like=q)
    check_like("tree_mask", tree_mask, (batch, seqlen_q, seqlen_q), "bool", like=q)
    is_numpy = isinstance(q, np.ndarray)
    lengths = options["cache_seqlens"] + (0 if k_new is None else k_new.shape[1])
    if leftpad is not None:
        _check_leftpad(leftpad, lengths)
    rows = pages * k_cache.shape[1]
    keys: Any
    if is_numpy:
        keys = np.arange(rows, dtype=np.int32)
    else:
        import torch

        keys = torch.arange(rows, dtype=torch.int32, device=q.device)
    visible = keys[None, None, None] >= 0
    if leftpad is not None:
        visible = (keys >= leftpad[:, None])[:, None, None]
    if tree_mask is not None:
        new = keys - (lengths - seqlen_q)[:, None]  # number of the key among the last ones
        at = new.clip(0, max(seqlen_q - 1, 0))[:, None]
        if is_numpy:
            seen = np.take_along_axis(tree_mask, np.broadcast_to(at, (batch, seqlen_q, rows)), 2)
        else:
            seen = tree_mask.gather(2, at.long().expand(batch, seqlen_q, rows))
        visible = visible & (seen | (new < 0)[:, None])[:, None]
    return visible


def _check_leftpad(leftpad: Array, lengths: Array) -> None:
    """Raises ValueError for a number out of range, if the numbers are on the host."""
    if not isinstance(leftpad, np.ndarray):
        import torch

        if leftpad.device.type != "cpu" or torch.compiler.is_compiling():
            return
    for b, (pad, length) in enumerate(zip(leftpad.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= pad <= length:
            raise ValueError(
                f"cache_leftpad[{b}] is {pad}, allowed: 0 to {length}, the keys of that sequence"
            )


def layout_of(options: dict[str, Any], default: str = "bshd") -> str:
    """Raises ValueError."""
    layout = options.get("layout", default)
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        raise ValueError(f'layout must be "bhsd" or "bshd", got {layout!r}')
    return layout


def check_array(name: str, x: Any, like: Any) -> None:
    """Raises TypeError unless both are numpy arrays, or both torch tensors."""
    if not isinstance(x, np.ndarray):
        torch = find_torch()
        if torch and isinstance(x, torch.ARRAY) and isinstance(like, torch.ARRAY):
            return
    elif isinstance(like, np.ndarray):
        return
    raise TypeError(
        f"{name} must be a torch tensor or a numpy array, as the others are, got {type(x).__name__}"
    )


def check_like(
    name: str, x: Any, shape: tuple[int, ...], dtype: str, like: Any, is_needed: bool = False
) -> None:
    if x is None and not is_needed:
        return
    check_array(name, x, like)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if str(x.dtype).removeprefix("torch.") != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}")
    if getattr(x, "device", None) != getattr(like, "device", None):
        raise ValueError(f"{name} must be on {like.device} like q, got {x.device}")


@answered
def append_kv(
    k: Array,
    v: Array | None,
    k_cache: Array,
    v_cache: Array | None,
    slot_mapping: Array,
    *,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    kv_format: str | None = None,
) -> None:
    """Write keys and values into the pages of a paged KV cache, in place.

    T is the number of tokens, P the number of pages, Hkv the number of KV heads. k, v and the two
    caches must not overlap. A call that raises TypeError or ValueError writes nothing.

    Args:
        k: (T, Hkv, D), one row per token: a torch tensor on a CPU or CUDA device, or a numpy array;
            float16, bfloat16 or float32. The last dimension is contiguous.
        v: (T, Hkv, Dv), of k's dtype and device.
        k_cache: (P, page, Hkv, D), of any page size and strides. k's dtype or, together with
            v_cache, float8_e4m3fn: rounded to nearest even, saturated at 448; NaN stays NaN.
        v_cache: (P, page, Hkv, Dv), of k_cache's dtype.
        slot_mapping: (T,) int64: token t is written to row ``slot % page`` of page
            ``slot // page``. A negative slot skips the token. With fewer than T entries the last
            rows of k and v are skipped. If two tokens have one slot, either of them is left there.
        k_scale: divisor of k before it is rounded to the cache's dtype: a float, or (Hkv,) float32.
            Pass the same to `attention_decode` and `attention_varlen`, which multiply by it.
        v_scale: divisor of v: a float, or (Hkv,) float32.
        kv_format: "ds_mla" or "ds_mla_v4": k_cache holds latent tokens in that format, (P, page, 1,
            bytes of a token), as in `attention_decode`; k is (T, 1, 576), or 512 columns, and v and
            v_cache are None. The scale of a group of columns is the least power of two that is no
            less than amax / 448 and 1e-4.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range or contradicts another; on a CPU also a slot beyond
            the cache, which a GPU skips.
        NotImplementedError: an input needs a gradient.
        RuntimeError: CUDA reported an error.
    """
    of_slots = {"slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale}
    if kv_format is not None:
        if v_cache is not None:
            raise ValueError("v_cache is given; allowed with kv_format: None, as V is in k_cache")
        of_slots["kv_format"] = kv_format
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **of_slots}
    options = {"v_new": v, **of_slots}
    torch = find_torch()
    if torch and torch.is_compiling():
        if arrays := converted(given):
            return append_kv(**{**given, **arrays})
        if isinstance(k, np.ndarray):
            return torch.numpy_arrays_outside_of_graph(append_kv, given)
        from ._call import serving_operator

        return serving_operator.append(k, k_cache, v_cache, **options)
    try:
        _C.append(k, k_cache, k_cache if kv_format is not None else v_cache, options)
        return None
    except TypeError as error:
        refused = error.with_traceback(None)  # which holds this frame
    retried(append_kv, given, refused)
    return None
