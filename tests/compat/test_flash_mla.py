"""compat.flash_mla against the oracle, with FlashMLA's conventions: the log-sum-exp is without the
sink, and +inf where no key is."""

import inspect

import cases
import numpy as np
import pytest
import reference
from cases import torch
from cutlass_attn import append_kv, testing
from cutlass_attn._call.token_format import unpacked
from cutlass_attn.compat.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]
HEADS, D, DV, PAGE = 16, 576, 512, 64


def make(device, queries, lengths, seed=0):
    """q, the cache, which is NaN where no sequence has keys, the table, and all of it in numpy."""
    rng = np.random.default_rng(seed)
    needed = [-(-n // PAGE) for n in lengths]
    numbers = rng.permutation(sum(needed) + 2)
    q = reference.round_bfloat16(rng.standard_normal((len(lengths), queries, HEADS, D)))
    cache = np.full((len(numbers), PAGE, D), np.nan, np.float32)
    table = np.full((len(lengths), max([1, *needed])), -1, np.int32)
    at = 0
    for b, length in enumerate(lengths):
        table[b, : needed[b]] = numbers[at : at + needed[b]]
        at += needed[b]
        for j in range(length):
            cache[table[b, j // PAGE], j % PAGE] = reference.round_bfloat16(rng.standard_normal(D))
    tensors = [torch.from_numpy(x).to(device) for x in (q, cache, table)]
    return tensors[0].bfloat16(), tensors[1].bfloat16()[:, :, None], tensors[2], (q, cache, table)


def judge(out, lse, expected, without_sink):
    """out (B, Sq, Hq, Dv), lse (B, Hq, Sq)."""
    ours = out.transpose(1, 2).float().cpu().numpy()
    # The sink's share is multiplied into a rounded result.
    accuracy = testing.judge(ours, expected.exact, expected.unfused, "bfloat16")
    assert accuracy.ok or np.abs(ours - expected.exact).max() < 2**-6, accuracy
    right = np.where(without_sink.lse == -np.inf, np.inf, without_sink.lse)
    np.testing.assert_allclose(lse.cpu().numpy(), right, rtol=1e-5, atol=1e-5)


def of_sequences(arrays, lengths, **options):
    q, cache, table = arrays
    results = []
    for b, length in enumerate(lengths):
        keys = cache[table[b]].reshape(-1, D)[:length][None, None]
        one = q[b : b + 1].swapaxes(1, 2)
        results.append(reference.attention(one, keys, keys[..., :DV], "bfloat16", **options))
    return reference.Expected(*(np.concatenate([x[i] for x in results]) for i in range(4)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("sink", [None, "random", "inf"])
def test_paged(device, queries, sink):
    lengths = (130, 1, 0, 64)
    q, cache, table, arrays = make(device, queries, lengths)
    sinks = None
    if sink:
        sinks = np.random.default_rng(1).standard_normal(HEADS).astype(np.float32)
        sinks[1] = -np.inf
    options = {"softmax_scale": 192**-0.5, "causal": True}
    expected = of_sequences(arrays, lengths, sinks=sinks, **options)
    given = None if sinks is None else torch.from_numpy(sinks).to(device)
    if sink == "inf":
        given[0] = torch.inf  # takes all weight
        expected.exact[:, 0] = expected.unfused[:, 0] = 0
    out, lse = flash_mla_with_kvcache(
        q,
        cache,
        table,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        DV,
        *get_mla_metadata(),
        **options,
        attn_sink=given,
    )
    judge(out, lse, expected, of_sequences(arrays, lengths, **options))


def make_lists(device, shape, rows):
    rng = np.random.default_rng(3)
    indices = rng.integers(0, rows, shape).astype(np.int32)
    indices[rng.random(shape) < 0.2] = -1
    indices[0, 0] = -1
    return indices, torch.from_numpy(indices).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_indices(device):
    q, cache, table, arrays = make(device, 2, (PAGE, 2 * PAGE))
    pages = np.sort(arrays[2][arrays[2] >= 0])
    indices, given = make_lists(device, (2, 2, 40), len(pages) * PAGE)
    moved = np.where(indices < 0, -1, pages[indices // PAGE] * PAGE + indices % PAGE)
    given.copy_(torch.from_numpy(moved))
    lengths = np.int32([40, 9])
    out, lse = flash_mla_with_kvcache(
        q,
        cache,
        table,
        None,
        DV,
        get_mla_metadata()[0],
        indices=given,
        topk_length=torch.from_numpy(lengths).to(device),
    )
    rows = arrays[1].reshape(-1, D)
    expected = reference.attention_of_lists(
        arrays[0].swapaxes(1, 2), rows, rows[:, :DV], moved, lengths, "bfloat16"
    )
    judge(out, lse, expected, expected)


def stored(kv_format, device, pages, page, seed):
    """A cache of tokens in 8 bits, and its rows as bf16 numbers."""
    columns, token = {"ds_mla": (576, 656), "ds_mla_v4": (512, 584)}[kv_format]
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.standard_normal((pages * page, 1, columns))).bfloat16()
    cache = torch.zeros(pages, page, 1, token, dtype=torch.uint8)
    append_kv(rows, None, cache, None, torch.arange(pages * page), kv_format=kv_format)
    numbers = unpacked(cache.numpy(), kv_format, "bfloat16").reshape(-1, columns)
    return cache.to(device).view(torch.float8_e4m3fn), numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [16, 64])
def test_fp8_sparse(device, heads):
    cache, rows = stored("ds_mla", device, 3, PAGE, 1)
    q = np.random.default_rng(2).standard_normal((2, 2, heads, D))
    q = reference.round_bfloat16(q)
    indices, given = make_lists(device, (2, 2, 40), len(rows))
    out, lse = flash_mla_with_kvcache(
        torch.from_numpy(q).to(device).bfloat16(),
        cache,
        None,
        None,
        DV,
        get_mla_metadata()[0],
        is_fp8_kvcache=True,
        indices=given,
    )
    expected = reference.attention_of_lists(
        q.swapaxes(1, 2), rows, rows[:, :DV], indices, (40, 40), "bfloat16"
    )
    judge(out, lse, expected, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_with_a_second_cache(device):
    """DeepSeek V4: a window and compressed tokens, in one softmax with a sink."""
    cache, rows = stored("ds_mla_v4", device, 2, PAGE, 3)
    extra, more = stored("ds_mla_v4", device, 40, 2, 4)
    q = np.random.default_rng(5).standard_normal((2, 1, 64, 512))
    q = reference.round_bfloat16(q)
    indices, given = make_lists(device, (2, 1, 50), len(rows))
    extra_indices, extra_given = make_lists(device, (2, 1, 30), len(more))
    lengths, extra_lengths = np.int32([50, 7]), np.int32([0, 30])
    sinks = np.random.default_rng(6).standard_normal(64).astype(np.float32)
    out, lse = flash_mla_with_kvcache(
        torch.from_numpy(q).to(device).bfloat16(),
        cache,
        None,
        None,
        DV,
        None,
        is_fp8_kvcache=True,
        indices=given,
        attn_sink=torch.from_numpy(sinks).to(device),
        extra_k_cache=extra,
        extra_indices_in_kvcache=extra_given,
        topk_length=torch.from_numpy(lengths).to(device),
        extra_topk_length=torch.from_numpy(extra_lengths).to(device),
    )
    for b in range(2):
        indices[b, :, lengths[b] :] = -1
        extra_indices[b, :, extra_lengths[b] :] = -1
    both = np.concatenate([rows, more])
    moved = np.where(extra_indices < 0, -1, extra_indices + len(rows))
    lists = np.concatenate([indices, moved], axis=-1)
    expected, without_sink = (
        reference.attention_of_lists(
            q.swapaxes(1, 2), both, both, lists, (80, 80), "bfloat16", sinks=x
        )
        for x in (sinks, None)
    )
    judge(out, lse, expected, without_sink)


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_prefill(device):
    rng = np.random.default_rng(5)
    q, kv = (reference.round_bfloat16(rng.standard_normal((n, D))) for n in (9 * HEADS, 50))
    q = q.reshape(9, HEADS, D)
    indices, _ = make_lists(device, (9, 1, 33), 50)
    indices[3, 0, 5] = 1 << 20  # beyond kv: none
    lengths = rng.integers(1, 34, 9).astype(np.int32)
    sinks = rng.standard_normal(HEADS).astype(np.float32)
    operands = (torch.from_numpy(x).to(device).bfloat16() for x in (q, kv[:, None]))
    args = (*operands, torch.from_numpy(indices).to(device), 0.1)
    options = {"attn_sink": sinks, "topk_length": lengths}
    options = {name: torch.from_numpy(x).to(device) for name, x in options.items()}
    out, most, lse = flash_mla_sparse_fwd(*args, **options)
    assert out.shape == (9, HEADS, DV) and most.shape == lse.shape == (9, HEADS)
    lists = np.where(indices >= 50, -1, indices)
    expected, without_sink = (
        reference.attention_of_lists(
            q[:, :, None], kv, kv[:, :DV], lists, lengths, "bfloat16", softmax_scale=0.1, **more
        )
        for more in ({"sinks": sinks}, {})
    )
    judge(out[:, None], lse[..., None], expected, without_sink)
    # In natural units, scaled, without the sink, and -inf where no key is.
    due = without_sink.max_logit[..., 0]
    assert (due[0] == -np.inf).all()
    np.testing.assert_allclose(most.cpu().numpy(), due, rtol=1e-5, atol=1e-5)
    step = torch.compile(flash_mla_sparse_fwd, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(x, y) for x, y in zip(step(*args, **options), (out, most, lse)))


def test_refused():
    q, cache, table, _ = make("cpu", 1, (5,))
    lengths = torch.tensor([5], dtype=torch.int32)
    args = (q, cache, table, lengths, DV, None)
    with pytest.raises(ValueError, match="is_fp8_kvcache is True, with 576 bytes a token and head"):
        flash_mla_with_kvcache(*args, is_fp8_kvcache=True)
    with pytest.raises(ValueError, match="extra_k_cache goes with extra_indices_in_kvcache and"):
        flash_mla_with_kvcache(*args, extra_k_cache=cache)
    with pytest.raises(ValueError, match="extra_topk_length is given without extra_k_cache"):
        flash_mla_with_kvcache(*args, extra_topk_length=lengths)
    with pytest.raises(ValueError, match="topk_length is the length of indices"):
        flash_mla_with_kvcache(*args, topk_length=lengths)
    with pytest.raises(ValueError, match=r"attn_sink must have shape \(16,\), got \(3,\)"):
        flash_mla_with_kvcache(*args, attn_sink=torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(T, Hq, D\), \(Tk, 1, D\) and \(T, 1, topk\), got"):
        flash_mla_sparse_fwd(q, cache, table, 1.0)
    with pytest.raises(ValueError, match="head_dim_v is 577, allowed: 1 to 576, as K has columns"):
        flash_mla_with_kvcache(q, cache, table, lengths, 577)
    x, indices = torch.zeros(3, 1, 64), torch.zeros(3, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="d_v is 512, allowed: 1 to 64, as K has columns"):
        flash_mla_sparse_fwd(x, x, indices, 1.0)


def test_signatures():
    """In the order of FlashMLA, whose callers pass many arguments by position."""
    assert [*inspect.signature(flash_mla_with_kvcache).parameters] == [
        *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"),
        *("tile_scheduler_metadata", "num_splits", "softmax_scale", "causal", "is_fp8_kvcache"),
        *("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache"),
        *("topk_length", "extra_topk_length"),
    ]
    assert [*inspect.signature(flash_mla_sparse_fwd).parameters] == [
        *("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length")
    ]
