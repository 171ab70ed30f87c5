"""attention_varlen and attention_decode, a sequence at a time on `cutlass_attn.attention`.

What the compat layer passes on is tested with these where a build has no such functions, and
beside them where it has.
"""

import cutlass_attn
import pytest
import torch


def install(monkeypatch):
    """The functions that this build lacks, for one test."""
    for function in (attention_varlen, attention_decode):
        if not hasattr(cutlass_attn, function.__name__):
            monkeypatch.setattr(cutlass_attn, function.__name__, function, raising=False)


@pytest.fixture
def serving(monkeypatch):
    install(monkeypatch)


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    seqused_k=None,
    block_table=None,
    causal=False,
    window=None,
    softmax_scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    out=None,
    kernel="auto",
):
    assert (block_table is None) == (cu_seqlens_k is not None)
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale}
    options |= {"softcap": softcap, "sinks": sinks}
    result = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        if block_table is None:
            first, end = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
            keys, values = k[first:end], v[first:end]
        else:
            pages = block_table[b].clamp(0, len(k) - 1)
            keys, values = (x[pages].flatten(0, 1) for x in (k, v))
        if seqused_k is not None:
            keys, values = keys[: int(seqused_k[b])], values[: int(seqused_k[b])]
        if rows.stop == rows.start:
            continue
        slopes = alibi_slopes[b] if getattr(alibi_slopes, "ndim", 1) == 2 else alibi_slopes
        result[rows], lse[:, rows] = (
            x[0]
            for x in cutlass_attn.attention(
                q[rows][None],
                keys[None],
                values[None],
                layout="bshd",
                alibi_slopes=slopes,
                return_lse=True,
                **options,
            )
        )
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def rotate(x, cos, sin, interleaved):
    """x (S, H, D), cos and sin (S, r / 2): pairs of the first r elements are turned."""
    half = cos.shape[-1]
    cos, sin = (t.float()[:, None] for t in (cos, sin))
    turned = x.float().clone()
    pairs = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    a, b = (x.float()[..., part] for part in pairs)
    turned[..., pairs[0]], turned[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return turned.to(x.dtype)


def attention_decode(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    *,
    block_table=None,
    k_new=None,
    v_new=None,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=True,
    cache_batch_idx=None,
    cache_leftpad=None,
    tree_mask=None,
    causal=True,
    window=None,
    softmax_scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
    num_splits=0,
    return_lse=False,
):
    assert cache_seqlens.dtype == torch.int32
    out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    windowed = window is not None and any(x is not None and x >= 0 for x in window)
    for b in range(len(q)):
        length = int(cache_seqlens[b])
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])

        def place(j, row=row, b=b):
            if block_table is None:
                return row, j
            return int(block_table[b, j // k_cache.shape[1]]), j % k_cache.shape[1]

        queries = q[b]
        if rotary_cos is not None:
            steps = torch.arange(len(queries)) if causal or windowed else torch.zeros(len(queries))
            at = (steps + length - first).long()
            queries = rotate(queries, rotary_cos[at], rotary_sin[at], rotary_interleaved)
        for i in range(0 if k_new is None else k_new.shape[1]):
            key = k_new[b, i : i + 1]
            if rotary_cos is not None:
                at = torch.tensor([length - first + i])
                key = rotate(key, rotary_cos[at], rotary_sin[at], rotary_interleaved)
            k_cache[place(length + i)], v_cache[place(length + i)] = key[0], v_new[b, i]
        end = length + (0 if k_new is None else k_new.shape[1])
        keys, values = (
            torch.stack([x[place(j)] for j in range(first, end)])
            if end > first
            else x.new_empty(0, *x.shape[2:])
            for x in (k_cache, v_cache)
        )
        out[b : b + 1], lse[b : b + 1] = cutlass_attn.attention(
            queries[None],
            keys[None],
            values[None],
            layout="bshd",
            causal=causal,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=True,
        )
    return (out, lse) if return_lse else out
