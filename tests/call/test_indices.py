"""attention_decode with lists of rows in place of sequences (sparse attention): every kernel that
takes them against the oracle, and what they do not go with."""

import functools
import zlib
from dataclasses import dataclass

import cases
import cutlass_attn
import numpy as np
import pytest
import reference
from cases import torch
from cutlass_attn import attention_decode, attention_varlen, testing
from cutlass_attn._call import serving_operator
from cutlass_attn.decode import decode_with_max_logits


@dataclass(frozen=True)
class Lists:
    name: str
    batch: int = 2
    queries: int = 1
    heads: int = 16
    head_dim: int = 576
    head_dim_v: int = 512
    topk: int = 70
    page: int = 64  # rows of an entry of the cache, or of a page: the same
    pages: int = 5
    lengths: tuple[int, ...] | None = None
    sinks: bool = False
    latent: bool = True

    def __str__(self):
        return self.name


CASES = [
    Lists("one_query"),
    Lists("few_heads", heads=5, page=1, pages=200),
    Lists("queries", queries=4, heads=20, sinks=True),
    Lists("lengths", batch=4, queries=2, lengths=(70, 0, 33, 1), sinks=True),
    Lists("no_list", topk=0),
    Lists("512", queries=2, head_dim=512, page=13, pages=20, sinks=True),
    Lists("320", head_dim=320, head_dim_v=256, heads=8),
    Lists("apart", heads=3, latent=False),
    Lists("small", heads=4, head_dim=64, head_dim_v=32, latent=False, queries=3),
]


def fits(variant, case):
    needs = {"latent_kv"} if case.latent else set()
    if "indices" not in variant.options or not set(variant.needs) <= needs:
        return False
    return variant.quantize is None and (
        variant.head_dim == 0
        or (case.head_dim <= variant.head_dim and case.head_dim_v <= variant.head_dim_v)
    )


@functools.lru_cache(maxsize=32)
def values(case, dtype):
    """q (B, Sq, Hq, D), the cache (pages, page, D), V (pages, page, Dv), indices, lengths."""
    rng = np.random.default_rng(zlib.crc32(f"{case!r} {dtype}".encode()))
    rows = case.page * case.pages
    q = rng.standard_normal((case.batch, case.queries, case.heads, case.head_dim))
    k = rng.standard_normal((case.pages, case.page, case.head_dim))
    v = rng.standard_normal((case.pages, case.page, case.head_dim_v))
    q, k, v = (reference.round_to(x, dtype) for x in (q, k, v))
    if case.latent:
        v = k[..., : case.head_dim_v]
    # Some rows are in no list, some places hold none, and some rows are listed twice.
    indices = rng.integers(0, rows * 3 // 4, (case.batch, case.queries, case.topk))
    indices[rng.random(indices.shape) < 0.2] = -1
    indices[0, 0] = -1
    lengths = case.lengths or (case.topk,) * case.batch
    unused = np.setdiff1d(np.arange(rows), indices)
    for x in (k, v):
        x.reshape(rows, -1)[unused] = np.nan
    for b, length in enumerate(lengths):
        indices[b, :, length:] = rows - 1  # which is NaN, and not looked at
    sinks = rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None
    return q, k, v, indices.astype(np.int32), lengths, sinks


@functools.lru_cache(maxsize=32)
def expected(case, dtype):
    q, k, v, indices, lengths, sinks = values(case, dtype)
    return reference.attention_of_lists(
        q.swapaxes(1, 2),
        k.reshape(-1, case.head_dim),
        v.reshape(-1, case.head_dim_v),
        indices,
        lengths,
        dtype,
        softmax_scale=0.1,
        sinks=sinks,
    )


def call_of(case, dtype, device):
    q, k, v, indices, lengths, sinks = values(case, dtype)
    kind = getattr(torch, dtype)
    q, k, v = (torch.from_numpy(x.copy()).to(device, kind) for x in (q, k, v))
    k, v = k[:, :, None], v[:, :, None]
    if case.latent:
        v = k[..., : case.head_dim_v]
    # Lists lie apart in memory.
    stored = torch.full((*indices.shape[:2], case.topk + 3), 1 << 30, dtype=torch.int32)
    stored[..., : case.topk] = torch.from_numpy(indices)
    options = {"indices": stored.to(device)[..., : case.topk], "softmax_scale": 0.1}
    if case.lengths:
        options["topk_lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if case.sinks:
        options["sinks"] = torch.from_numpy(sinks).to(device)
    return (q, k, v, None), options


def judge(case, dtype, out, lse, max_logits=None):
    right = expected(case, dtype)
    ours = out.transpose(1, 2).float().cpu().numpy()
    accuracy = testing.judge(ours, right.exact, right.unfused, dtype)
    assert accuracy.ok, accuracy
    assert testing.Reference(*right[:4]).confirms_lse(lse.cpu().numpy())
    if max_logits is not None:
        found = max_logits.cpu().numpy()
        np.testing.assert_allclose(found, right.max_logit, atol=1e-5, rtol=1e-5)


def keeps_max_logit(variant, splits):
    """For half of the calls, so that the others run kernels that do not keep it."""
    return "return_max_logit" in variant.options and splits in (0, 3)


def pairs():
    return [
        pytest.param(variant, case, splits, id=f"{variant.key}-{case}-{splits}", marks=marks)
        for variant in cases.compiled_variants(special=True)
        for case in CASES
        if fits(variant, case)
        for splits in ((0, 1, 3, 20) if variant.needs else (0,))
        for marks in [cases.needs(variant)]
    ]


@pytest.mark.parametrize(("variant", "case", "splits"), pairs())
def test_case(variant, case, splits):
    args, options = call_of(case, variant.dtype, variant.device)
    shape = (*args[0].shape[:-1], case.head_dim_v)
    out = args[0].new_full(shape, torch.nan)
    options |= {"out": out, "return_lse": True, "kernel": variant.key, "num_splits": splits}
    if keeps_max_logit(variant, splits):
        result, lse, *more = decode_with_max_logits(*args[:3], cache_seqlens=None, **options)
        assert more[0].shape == lse.shape
    else:
        result, lse, *more = attention_decode(*args, **options)
    assert result is out
    judge(case, variant.dtype, out, lse, *more)


@pytest.mark.parametrize(
    ("variant", "case", "splits"),
    [p for p in pairs() if p.values[2] == 0 and not p.values[1].lengths],
)
def test_split_size(variant, case, splits):
    """Taken without topk_lengths too, and the bits are those of lengths that count all entries."""
    args, options = call_of(case, variant.dtype, variant.device)
    options |= {"return_lse": True, "kernel": variant.key, "split_size": 64}
    out, lse = attention_decode(*args, **options)
    judge(case, variant.dtype, out, lse)
    lengths = torch.full((case.batch,), case.topk, dtype=torch.int32, device=variant.device)
    with_lengths = attention_decode(*args, **options, topk_lengths=lengths)
    assert torch.equal(out, with_lengths[0])
    assert torch.equal(lse, with_lengths[1])


def in_pages(args, options):
    """The call with a table for each sequence, the lists as rows of it; NaN in every other page."""
    q, k, v, _ = args
    pages, page = k.shape[:2]
    device = q.device
    table = torch.stack([torch.randperm(pages, device=device) for _ in range(len(q))]).int()
    lists = options["indices"]
    inverse = table.long().argsort(1)
    moved = inverse.gather(1, (lists.clamp(0, pages * page - 1) // page).flatten(1).long())
    moved = moved.view_as(lists) * page + lists.clamp(min=0) % page
    # Entries behind the pages are none of the cache's.
    table = torch.cat([table, table.new_full((len(q), 2), -1)], dim=1)
    lengths = torch.full((len(q),), pages * page, dtype=torch.int32, device=device)
    more = {"indices": torch.where(lists < 0, lists, moved.int()), "block_table": table}
    return (q, k, v, lengths), {**options, **more}


@pytest.mark.parametrize(("variant", "case", "splits"), pairs())
def test_lists_of_positions(variant, case, splits):
    """Bitwise what lists of rows of the whole cache give."""
    args, options = call_of(case, variant.dtype, variant.device)
    more = {"return_lse": True, "kernel": variant.key, "num_splits": splits}
    right = attention_decode(*args, **options, **more)
    args, options = in_pages(args, options)
    for ours, theirs in zip(attention_decode(*args, **options, **more), right, strict=True):
        assert torch.equal(ours, theirs)


PACKED = [case for case in CASES if case.lengths is None]


@pytest.mark.parametrize(
    ("variant", "case", "splits"), [p for p in pairs() if p.values[1] in PACKED]
)
def test_packed(variant, case, splits):
    (q, k, v, _), options = call_of(case, variant.dtype, variant.device)
    rows = case.batch * case.queries
    options["indices"] = options["indices"].flatten(0, 1)
    offsets = torch.arange(0, rows + 1, case.queries, dtype=torch.int32, device=variant.device)
    wants_max = keeps_max_logit(variant, splits)
    out, lse, *more = attention_varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        offsets,
        return_lse=True,
        return_max_logit=wants_max,
        kernel=variant.key,
        num_splits=splits,
        **options,
    )
    lse = lse.view(case.heads, case.batch, case.queries).transpose(0, 1)
    judge(case, variant.dtype, out.view(case.batch, case.queries, *out.shape[1:]), lse)
    if wants_max:
        due = expected(case, variant.dtype).max_logit.max(axis=(0, 2))
        np.testing.assert_allclose(more[0].cpu().numpy(), due, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cases.needs_gpu)])
def test_packed_verify_and_operator(device):
    (q, k, v, _), options = call_of(CASES[2], "bfloat16", device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    options["indices"] = options["indices"].flatten(0, 1)
    offsets = torch.tensor([0, 3, len(q)], dtype=torch.int32, device=device)
    eager = attention_varlen(q, k, v, offsets, **options)
    assert torch.equal(attention_varlen(q, k, v, offsets, verify=True, **options), eager)
    step = torch.compile(lambda *a: attention_varlen(*a, **options), backend="aot_eager")
    assert torch.equal(step(q, k, v, offsets), eager)
    with pytest.raises(NotImplementedError, match=r"attention_varlen with indices has no deriv"):
        attention_varlen(q.requires_grad_(), k, v, offsets, **options)


def test_packed_refused():
    (q, k, v, _), options = call_of(CASES[0], "float16", "cpu")
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    lists = options["indices"].flatten(0, 1)
    offsets = torch.tensor([0, len(q)], dtype=torch.int32)
    for more, message in (
        ({"indices": lists[:1]}, r"indices must have shape \(rows of q, topk\) with rows of q = 2"),
        ({"indices": lists.long()}, "indices must be int32"),
        ({"indices": lists, "cu_seqlens_k": offsets}, "cu_seqlens_k and indices are both given"),
        ({"indices": lists, "causal": True}, "indices are given, and causal is True"),
        ({"indices": lists + 400}, r"indices\[0, 0, \d+\] is \d+, allowed: 0 to 319"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_varlen(q, k, v, offsets, **more)


DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]
LENGTHS = next(case for case in CASES if case.name == "lengths")


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_list_gives_zeros_and_minus_infinity(device):
    args, options = call_of(CASES[0], "float16", device)
    out, lse = attention_decode(*args, **options, return_lse=True)
    assert not out[0].any() and (lse[0] == -torch.inf).all()
    assert out[1].all() and lse[1].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_verify(device):
    args, options = call_of(LENGTHS, "bfloat16", device)
    result = attention_decode(*args, **options, return_lse=True, verify=True)
    judge(LENGTHS, "bfloat16", *result)


@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    args, options = call_of(LENGTHS, "float16", device)
    eager = attention_decode(*args, **options)
    compiled = torch.compile(lambda *a: attention_decode(*a, **options), backend="aot_eager")
    assert torch.equal(compiled(*args), eager)
    q, k, v, _ = args
    torch.library.opcheck(
        serving_operator.attention_decode_op,
        serving_operator._DECODE.arguments(
            q=q, k_cache=k, v_cache=v, cache_seqlens=None, causal=False, max_logits=True, **options
        ),
    )


def test_numpy_equals_torch():
    args, options = call_of(LENGTHS, "float16", "cpu")
    arrays = [None if x is None else x.numpy() for x in args]
    given = {name: x.numpy() if torch.is_tensor(x) else x for name, x in options.items()}
    theirs = attention_decode(*args, **options).numpy()
    np.testing.assert_array_equal(attention_decode(*arrays, **given), theirs)


def test_heads_first():
    args, options = call_of(LENGTHS, "float16", "cpu")
    q, k, v, _ = args
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out = attention_decode(*turned, None, **options, layout="bhsd")
    assert torch.equal(out.transpose(1, 2), attention_decode(*args, **options))


@pytest.mark.gpu
def test_rows_beyond_the_cache_are_none_on_a_gpu():
    args, options = call_of(CASES[0], "float16", "cuda")
    right = attention_decode(*args, **options)
    options["indices"] = options["indices"].masked_fill(options["indices"] < 0, 1 << 30)
    assert torch.equal(attention_decode(*args, **options), right)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lists():
    args, options = call_of(LENGTHS, "float16", "cuda")
    stored = {name: options[name].clone() for name in ("indices", "topk_lengths")}
    for x in stored.values():
        x.zero_()
    graph, given = torch.cuda.CUDAGraph(), {**options, **stored}
    attention_decode(*args, **given)
    with torch.cuda.graph(graph):
        out, lse = attention_decode(*args, **given, return_lse=True)
    for name, x in stored.items():
        x.copy_(options[name])
    graph.replay()
    judge(LENGTHS, "float16", out, lse)


# What is changed of a call that is right, and what the message says.
REFUSED = {
    "int64": ({"indices": lambda x: x.long()}, "indices must be int32, got torch.int64"),
    "dims": ({"indices": lambda x: x[0]}, r"indices must have shape \(batch, seqlen_q, topk\)"),
    "batch": ({"indices": lambda x: x[:1]}, r"seqlen_q\) = \(4, 2\), got \(1, 2, 70\)"),
    "strided": ({"indices": lambda x: x[..., ::2]}, "indices must be contiguous"),
    "too_small": ({"indices": lambda x: x - 2}, r"indices\[0, 0, 0\] is -3, allowed: 0 to 319, "),
    "too_large": ({"indices": lambda x: x + 320}, r"indices\[0, 1, \d+\] is \d+, allowed: 0 to "),
    "length": (
        {"topk_lengths": lambda x: x + 1},
        r"topk_lengths\[0\] is 71, allowed: 0 to 70, the keys of a list",
    ),
    "lengths": ({"topk_lengths": lambda x: x[:2]}, r"topk_lengths must have shape \(batch,\)"),
    "causal": ({"causal": True}, "indices are given, and causal is True; allowed: False"),
    "window": ({"window": 5}, "indices are given, and window; allowed: None"),
    "chunk": ({"attention_chunk": 5}, "indices are given, and attention_chunk; allowed: None"),
    "cache_seqlens": (
        {"cache_seqlens": torch.zeros(4, dtype=torch.int32)},
        "cache_seqlens and indices are both given",
    ),
    "block_table": (
        {"block_table": torch.zeros(4, 1, dtype=torch.int32)},
        "indices and block_table are given without cache_seqlens; allowed: all three",
    ),
    "beyond_the_sequence": (
        {
            "block_table": torch.zeros(4, 1, dtype=torch.int32),
            "cache_seqlens": torch.tensor([9, 64, 5, 0], dtype=torch.int32),
        },
        r"indices\[0, 1, \d+\] is \d+, allowed: 0 to 8, the rows of the entry, or -1 for none",
    ),
    "too_long": (
        {
            "block_table": torch.zeros(4, 1, dtype=torch.int32),
            "cache_seqlens": torch.tensor([65, 64, 5, 0], dtype=torch.int32),
        },
        r"cache_seqlens\[0\] is 65, allowed: 0 to 64, the keys that block_table covers",
    ),
    "page": (
        {
            "block_table": torch.full((4, 5), 7, dtype=torch.int32),
            "cache_seqlens": torch.full((4,), 320, dtype=torch.int32),
        },
        r"block_table\[0, 0\] is 7, allowed: 0 to 4",
    ),
    "cache_batch_idx": (
        {"cache_batch_idx": torch.zeros(4, dtype=torch.int32)},
        "cache_batch_idx and indices are both given",
    ),
    "k_new": ({"k_new": torch.zeros(4, 1, 1, 576).half()}, "k_new and indices are both given"),
    "leftpad": (
        {"cache_leftpad": torch.zeros(4, dtype=torch.int32)},
        "cache_leftpad and indices are both given; allowed: -1 in indices",
    ),
    "tree_mask": (
        {"tree_mask": torch.ones(4, 2, 2, dtype=torch.bool)},
        "tree_mask and indices are both given; allowed: -1 in indices",
    ),
    "alibi": (
        {"alibi_slopes": torch.ones(16)},
        "indices are given, and alibi_slopes; allowed: None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    (_q, k, v, lengths), options = call_of(LENGTHS, "float16", "cpu")
    given, message = REFUSED[name]
    for key, change in given.items():
        options[key] = change(options[key]) if key in ("indices", "topk_lengths") else change
    lengths = options.pop("cache_seqlens", lengths)
    with pytest.raises(ValueError, match=message):
        attention_decode(_q, k, v, lengths, **options)


def test_refused_without_lists():
    (q, k, v, _), options = call_of(LENGTHS, "float16", "cpu")
    with pytest.raises(TypeError, match="cache_seqlens"):
        attention_decode(q, k, v, None)
    lengths = torch.ones(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="topk_lengths is given without indices"):
        attention_decode(q[:, :, :1], *(x[:4] for x in (k, v)), lengths, topk_lengths=lengths)
    two_heads = [x.expand(-1, -1, 2, -1) for x in (k, v)]
    with pytest.raises(ValueError, match="num_heads_kv is 2, allowed with indices: 1"):
        attention_decode(q, *two_heads, None, **options)
    with pytest.raises(ValueError, match="indices are given, and q is float64"):
        attention_decode(*(x.double() for x in (q, k, v)), None, indices=options["indices"])


def test_explain():
    (q, k, v, lengths), options = call_of(CASES[0], "float16", "cpu")
    explanation = cutlass_attn.explain(q, k, v, cache_seqlens=lengths, **options)
    assert explanation.chosen.kernel == "cpu"
    assert "indices (2, 1, 70)" in explanation.call
