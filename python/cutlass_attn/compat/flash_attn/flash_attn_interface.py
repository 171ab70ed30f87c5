"""The seven functions. B, T, S, Hq, Hkv, D: batch, tokens of a packed batch, tokens of a sequence,
query heads, key/value heads, head dim. Masks are aligned bottom-right, as everywhere here.

All of them take float16, bfloat16 and float32 on a CUDA device or a CPU. Common arguments:

- dropout_p: probability that a softmax weight becomes 0, in steps of 1/32768;
- softmax_scale: factor of the products, ``1 / sqrt(D)`` by default;
- causal: query i sees keys up to ``i + Sk - Sq``;
- window_size: (left, right), how many keys before and after that one; -1 is no limit;
- softcap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``;
- alibi_slopes: (Hq,) or (B, Hq) float32: a logit loses ``slope * abs(i + Sk - Sq - j)``;
- deterministic: gradients that are bitwise the same for the same inputs, as the result always is;
- s_aux: (Hq,), one more logit per head in the softmax's denominator, an attention sink; under the
  name that vLLM's and Hugging Face's forks have for it, and by keyword alone;
- return_attn_probs: return (out, softmax_lse, S_dmask). softmax_lse is float32, the natural log of
  each softmax's denominator, inf for a query that sees no key. S_dmask is empty without dropout.

q, k, v, what they are packed in, and s_aux may need a gradient; softmax_lse has one as well. With
block_table only the forward pass runs, and the backward pass raises NotImplementedError. Others:
TypeError and ValueError as `cutlass_attn.attention` has them, and RuntimeError that names
block_table or cache_seqlens where those contradict the cache, as far as their numbers are on the
host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cutlass_attn

from ._checks import check_appended, check_pages, lengths_of
from ._dmask import dropout_record, packed_record
from ._operands import (
    as_flash,
    int32,
    options_of,
    padded,
    random_state,
    unpacked,
    with_dense_rows,
)
from ._private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

Window = tuple[int, int]
# In flash_attn these are what torch.compile sees of the private functions.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
Result = Any  # out, or (out, softmax_lse, S_dmask)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Result:
    """Attention of q (B, Sq, Hq, D) over k, v (B, Sk, Hkv, D); Hkv divides Hq.

    float16, bfloat16 or float32. The module's docstring has the other arguments, and the errors.

    Returns out (B, Sq, Hq, D), and with return_attn_probs softmax_lse (B, Hq, Sq), float32, and
    S_dmask: with dropout (B, Hq, Sq, Sk), both lengths rounded up to 128, in q's dtype, the weights
    before normalisation, negative where they were dropped, each against the row's largest logit
    from its block of keys to the last block. It is made by plain torch code, for tests.
    """
    options = options_of(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    options |= {"layout": "bshd", "dropout_p": dropout_p, "deterministic": deterministic}
    head_dim = v.shape[-1]
    if not return_attn_probs:
        return cutlass_attn.attention(*padded(q, k, v), **options)[..., :head_dim]
    if dropout_p:
        options["rng_state"] = random_state(q.device)
    out, lse = cutlass_attn.attention(*padded(q, k, v), **options, return_lse=True)
    record = dropout_record(q.detach(), k.detach(), options) if dropout_p else q.new_empty(0)
    return out[..., :head_dim], as_flash(lse), record


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with kv (B, Sk, 2, Hkv, D): keys, then values."""
    k, v = unpacked("kv", kv, "B, S, 2, H, D")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with qkv (B, S, 3, H, D): queries, keys, values."""
    q, k, v = unpacked("qkv", qkv, "B, S, 3, H, D")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Result:
    """Sequences one after the other: q (Tq, Hq, D), k and v (Tk, Hkv, D).

    Sequence b has the queries ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]``, its keys likewise;
    both are (B + 1,) int32. With block_table (B, pages per sequence) int32, k and v are pages
    (pages, page size, Hkv, D) and cu_seqlens_k says lengths alone; pages have any size.
    max_seqlen_q and max_seqlen_k are not read but for S_dmask: lengths come from the device, so a
    CUDA graph may be replayed with others.

    Returns out (Tq, Hq, D), and with return_attn_probs softmax_lse (Hq, Tq), float32, and S_dmask:
    with dropout that of `flash_attn_func` for the longest sequences, max_seqlen_q and max_seqlen_k,
    which have to be right then.
    Raises NotImplementedError for dropout together with block_table.
    """
    if dropout_p and block_table is not None:
        raise NotImplementedError(
            f"with block_table there is no dropout: dropout_p must be 0, got {dropout_p}"
        )
    options = options_of(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    options |= {"return_lse": return_attn_probs, "deterministic": deterministic}
    if dropout_p:
        options["dropout_p"] = dropout_p
        if return_attn_probs:
            options["rng_state"] = random_state(q.device)
    offsets_k: Tensor | None = cu_seqlens_k
    if block_table is not None:
        lengths = lengths_of(cu_seqlens_k)
        check_pages(block_table, lengths, k)
        options |= {"block_table": block_table, "seqused_k": lengths}
        offsets_k = None
    head_dim = v.shape[-1]
    operands = padded(q, k, v) if block_table is None else (with_dense_rows(q), k, v)
    varlen: Any = cutlass_attn.attention_varlen
    result = varlen(*operands, cu_seqlens_q, offsets_k, **options)
    if not return_attn_probs:
        return result[..., :head_dim]
    out, lse = result
    record = q.new_empty(0)
    if dropout_p:
        longest = (int(max_seqlen_q), int(max_seqlen_k))
        offsets = (cu_seqlens_q, cu_seqlens_k)
        record = packed_record(q.detach(), k.detach(), offsets, longest, options)
    return out[..., :head_dim], as_flash(lse), record


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with kv (Tk, 2, Hkv, D): keys, then values."""
    k, v = unpacked("kv", kv, "T, 2, H, D")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with qkv (T, 3, H, D): queries, keys, values."""
    q, k, v = unpacked("qkv", qkv, "T, 3, H, D")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of new queries over a cache, into which new keys and values are written first.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (B of the cache, Smax, Hkv, D), or with block_table pages
            (pages, page size, Hkv, D), of any page size.
        k, v: (B, Snew, Hkv, D): written to the cache, in place, from position cache_seqlens on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2) in q's dtype, with k: rotates k, and q,
            whose positions count from cache_seqlens on if causal or windowed, and otherwise all are
            cache_seqlens.
        cache_seqlens: how many keys the cache holds, before k: one int or (B,) int32; all of
            them by default.
        cache_batch_idx: (B,) int32, which row of the cache each sequence has; b by default.
        cache_leftpad: (B,) int32, where each sequence's keys begin in the cache; 0 by default. Not
            with block_table.
        block_table: (B, pages per sequence) int32.
        rotary_interleaved: pairs are (0, 1), (2, 3), ...; otherwise (0, r / 2), (1, r / 2 + 1), ...
        num_splits: into how many parts the keys are split; 0: chosen. With 1 a sequence's result
            does not depend on the batch that it is in.

    Returns:
        out (B, Sq, Hq, D), with return_softmax_lse also softmax_lse (B, Hq, Sq). There is no
        gradient. It never waits for the device: lengths and tables that lie there are not checked.
    """
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given where k and v are: they are written there")
    if k is None and rotary_cos is not None:
        raise ValueError(
            "k and v must be given where rotary_cos is: cached keys are rotated already"
        )
    if cache_leftpad is not None and block_table is not None:
        raise ValueError("cache_leftpad must be None where block_table is given")
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if torch.is_grad_enabled() and x is not None and x.requires_grad:
            raise NotImplementedError(
                f"flash_attn_with_kvcache has no backward pass, but {name} requires a gradient"
            )
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = capacity if cache_seqlens is None else cache_seqlens
    on_host = lengths
    if not isinstance(lengths, torch.Tensor):  # filled there, not copied, as a CUDA graph wants it
        count, number = q.shape[0], lengths
        on_host, lengths = (
            int32("cache_seqlens", count, number, device) for device in ("cpu", q.device)
        )
    elif lengths.dim() != 1:
        raise ValueError(f"cache_seqlens must have shape (B,), got {tuple(lengths.shape)}")
    appended = 0 if k is None else k.shape[1]
    if block_table is not None:
        check_pages(block_table, on_host + appended, k_cache)
    else:
        check_appended(on_host, appended, capacity)

    s_aux = None if s_aux is None else s_aux.detach()
    options = options_of(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    decode: Any = cutlass_attn.attention_decode
    result = decode(
        with_dense_rows(q),
        k_cache,
        v_cache,
        lengths,
        block_table=block_table,
        k_new=k,
        v_new=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
        **options,
    )
    return (result[0], as_flash(result[1])) if return_softmax_lse else result
