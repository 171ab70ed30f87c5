"""compat.flash_attn: the results that flash_attn documents, by an oracle of torch operations."""

import functools
import inspect

import pytest
from cutlass_attn import testing
from pairwise import pairwise

torch = pytest.importorskip("torch")

from cutlass_attn.compat import flash_attn  # noqa: E402

INF = float("inf")


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


def randn(*shape, seed=0, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle(q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, kept=None):
    """(B, S, H, D) in, out and log-sum-exp in fp64 back; kept (B, H, Sq, Sk) times 1 / (1 - p)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    rows, columns = torch.meshgrid(*map(torch.arange, logits.shape[2:]), indexing="ij")
    distance = columns - (rows + logits.shape[3] - logits.shape[2])
    if slopes is not None:
        logits = logits - slopes.double()[..., None, None] * distance.abs()
    left, right = window
    hidden = (distance > 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden | ((distance < -left) if left >= 0 else hidden)
    hidden = hidden | ((distance > right) if right >= 0 else hidden)
    logits = logits.masked_fill(hidden, -INF)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -INF, 0)[..., None])
    if kept is not None:
        weights = weights * kept
    return (weights @ v).transpose(1, 2), lse


def assert_close(result, due):
    assert result.shape == due.shape
    torch.testing.assert_close(result.double(), due, rtol=2e-3, atol=2e-3)


def as_flash(lse):
    return lse.masked_fill(lse == -INF, INF)


CASES = pairwise(
    {
        "lengths": [(9, 9), (5, 12), (12, 5), (1, 7)],
        "heads": [(2, 2), (4, 1), (4, 2)],
        "head_dim": [16, 13, 40],
        "causal": [False, True],
        "window": [(-1, -1), (3, -1), (-1, 2), (2, 1), (0, 0)],
        "softcap": [0.0, 5.0],
        "slopes": [None, "h", "bh"],
        "scale": [None, 0.2],
        "packed": ["no", "kv", "qkv"],
    },
    seed=1,
)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_dense(number):
    case = CASES[number]
    (seqlen_q, seqlen_k), (heads, heads_kv) = case["lengths"], case["heads"]
    if case["packed"] == "qkv":
        seqlen_k, heads_kv = seqlen_q, heads
    q = randn(2, seqlen_q, heads, case["head_dim"], seed=number)
    k, v = randn(2, 2, seqlen_k, heads_kv, case["head_dim"], seed=number + 1)
    slopes = {None: None, "h": torch.rand(heads), "bh": torch.rand(2, heads)}[case["slopes"]]
    options = {
        "softmax_scale": case["scale"],
        "causal": case["causal"],
        "window_size": case["window"],
        "softcap": case["softcap"],
        "alibi_slopes": slopes,
    }
    call = {
        "no": lambda **o: flash_attn.flash_attn_func(q, k, v, **o),
        "kv": lambda **o: flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **o),
        "qkv": lambda **o: flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **o),
    }[case["packed"]]
    due, lse_due = oracle(
        q, k, v, case["causal"], case["window"], case["scale"], case["softcap"], slopes
    )
    out, lse, record = call(**options, return_attn_probs=True)
    assert_close(out, due)
    assert_close(lse, as_flash(lse_due))
    assert record.numel() == 0
    assert torch.equal(call(**options), out)


TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}, *, s_aux=None",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{TAIL}, block_table=None, *, s_aux=None",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
    f"max_seqlen_k, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, "
    "*, s_aux=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    """Names, order and defaults are flash_attn's: callers pass most arguments by position. s_aux is
    no argument of flash_attn 2."""
    signature = inspect.signature(getattr(flash_attn, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"
    with pytest.raises(TypeError, match="attention_chunk"):
        getattr(flash_attn, name)(attention_chunk=2)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(9, 140, 32), (130, 150, 80)])
def test_dropout_record(seqlen_q, seqlen_k, head_dim):
    """Its signs are the weights that were dropped, its values the weights up to a factor a row."""
    q = randn(2, seqlen_q, 4, head_dim)
    k, v = randn(2, 2, seqlen_k, 2, head_dim, seed=1)
    torch.manual_seed(0)
    out, lse, record = flash_attn.flash_attn_func(
        q, k, v, dropout_p=0.25, causal=True, return_attn_probs=True
    )
    rounded = [-(-n // 128) * 128 for n in (seqlen_q, seqlen_k)]
    assert record.shape == (2, 4, *rounded)
    assert record.dtype == torch.float16
    assert (record[:, :, seqlen_q:] == 0).all()
    assert (record[:, :, :, seqlen_k:] == 0).all()
    record = record[:, :, :seqlen_q, :seqlen_k]
    kept = ~torch.signbit(record)
    assert 0.2 < 1 - kept.double().mean() < 0.3
    due, lse_due = oracle(q, k, v, causal=True, kept=kept / 0.75)
    assert_close(out, due)
    assert_close(lse, as_flash(lse_due))

    # Times exp(m - lse), a number for each row and block of keys, they are the softmax.
    keys = k.repeat_interleave(2, 2).double().transpose(1, 2)
    logits = q.double().transpose(1, 2) @ keys.mT * head_dim**-0.5
    hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(seqlen_k - seqlen_q + 1)
    logits = logits.masked_fill(hidden, -INF)
    block = 128 if head_dim <= 32 else 64
    for first in range(0, seqlen_k, block):
        m = logits[..., first:].amax(-1, keepdim=True)
        weights = record[..., first : first + block].double().abs()
        softmax = weights * torch.exp(m.masked_fill(m == -INF, 0) - lse_due[..., None])
        due = torch.exp(logits - lse_due[..., None])[..., first : first + block]
        torch.testing.assert_close(softmax, due, rtol=2e-3, atol=1e-4)


def test_dropout_record_of_a_compiled_call():
    q, k = randn(2, 7, 4, 16), randn(2, 9, 2, 16, seed=1)

    def call(q, k):
        return flash_attn.flash_attn_func(q, k, k, 0.2, return_attn_probs=True)

    out, _, record = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k)
    kept = ~torch.signbit(record[:, :, :7, :9]) / testing.kept_share(0.2)
    assert 0 < kept.count_nonzero() < kept.numel()
    assert_close(out, oracle(q, k, k, kept=kept)[0])


def test_dropout_without_record():
    q = randn(1, 8, 2, 16)
    assert (flash_attn.flash_attn_func(q, q, q, dropout_p=1.0) == 0).all()
    torch.manual_seed(3)
    first = flash_attn.flash_attn_func(q, q, q, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, flash_attn.flash_attn_func(q, q, q, 0.5))


def grads_of(out, inputs):
    """Of a sum that is no constant of the softmax."""
    return torch.autograd.grad(out.double().square().sum(), inputs)


def assert_grads_close(got, due):
    for a, b in zip(got, due, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-2, atol=1e-2)


GRADIENTS = [
    {},
    {"causal": True, "deterministic": True},
    {"window_size": (3, 1), "softcap": 2.0},
    {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "softmax_scale": 0.3},
]


@pytest.mark.parametrize("options", GRADIENTS, ids=lambda options: "-".join(options) or "none")
@pytest.mark.parametrize("head_dim", [16, 20])
def test_gradients(options, head_dim):
    """Of the dense functions, in each way of packing."""
    qkv = randn(2, 9, 3, 4, head_dim).requires_grad_()
    kv = randn(2, 9, 2, 2, head_dim, seed=1).requires_grad_()
    names = {"causal": "causal", "window_size": "window", "softcap": "softcap"}
    names |= {"alibi_slopes": "slopes", "softmax_scale": "scale"}
    due_options = {names[name]: x for name, x in options.items() if name in names}
    due = grads_of(oracle(*qkv.unbind(2), **due_options)[0], qkv)
    got = [
        flash_attn.flash_attn_qkvpacked_func(qkv, **options),
        flash_attn.flash_attn_func(*qkv.unbind(2), **options),
        flash_attn.flash_attn_func(*qkv.unbind(2), **options, return_attn_probs=True)[0],
    ]
    for out in got:
        assert_grads_close(grads_of(out, qkv), due)
    q = qkv[:, :, 0]
    due = grads_of(oracle(q, *kv.unbind(2), **due_options)[0], (qkv, kv))
    out = flash_attn.flash_attn_kvpacked_func(q, kv, **options)
    assert_grads_close(grads_of(out, (qkv, kv)), due)


@pytest.mark.parametrize("options", GRADIENTS, ids=lambda options: "-".join(options) or "none")
def test_gradients_of_packed_sequences(options):
    qkv = randn(11, 3, 4, 16).requires_grad_()
    at = offsets(4, 0, 7)
    dense = [
        flash_attn.flash_attn_func(*(x[None, a:b] for x in qkv.unbind(1)), **options)[0]
        for a, b in ((0, 4), (4, 11))
    ]
    due = grads_of(torch.cat(dense), qkv)
    got = [
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, at, 7, **options),
        flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], at, at, 7, 7, **options),
        flash_attn.flash_attn_varlen_func(*qkv.unbind(1), at, at, 7, 7, **options),
    ]
    for out in got:
        assert_grads_close(grads_of(out, qkv), [due[0]])


def test_gradients_with_dropout():
    """The weights that S_dmask says are dropped are those of the backward pass."""
    q, k, v = (randn(1, 8, 2, 16, seed=i).requires_grad_() for i in range(3))
    out, lse, record = flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True)
    kept = (record[:, :, :8, :8] > 0).double() / 0.6
    due_out, due_lse = oracle(q, k, v, kept=kept)
    got, due = (torch.cat([x.flatten(), y.flatten()]) for x, y in ((out, lse), (due_out, due_lse)))
    assert_grads_close(grads_of(got, (q, k, v)), grads_of(due, (q, k, v)))
    assert not record.requires_grad


def test_what_has_no_gradient():
    """Slopes get none, as in flash_attn; pages run forward."""
    q = randn(1, 8, 2, 16).requires_grad_()
    slopes = torch.ones(2, requires_grad=True)
    flash_attn.flash_attn_func(q, q, q, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None
    assert q.grad is not None
    with torch.no_grad():
        assert not flash_attn.flash_attn_func(q, q, q).requires_grad
    at, table = offsets(8), torch.zeros(1, 1, dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q[0], q, q, at, at, 8, 8, block_table=table)
    with pytest.raises(NotImplementedError, match="no backward pass with block_table"):
        out.sum().backward()


def test_numbers_as_tensors():
    q = randn(1, 8, 2, 16)
    window = (torch.tensor(3), torch.tensor(0))
    due = flash_attn.flash_attn_func(q, q, q, window_size=(3, 0))
    assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=window), due)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(
        q[0], q[0], q[0], offsets, offsets, torch.tensor(8), torch.tensor(8), window_size=window
    )
    assert torch.equal(out, due[0])


# --- packed sequences


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def paged(x, page, seed=0):
    """Sequences (S_i, H, D) as shuffled pages and a table; the rest of each page is NaN."""
    counts = [-(-len(part) // page) for part in x]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
    pages = x[0].new_full((len(order), page, *x[0].shape[1:]), torch.nan)
    table = torch.full((len(x), max(counts) + 1), -1, dtype=torch.int32)
    free = iter(order.tolist())
    for b, part in enumerate(x):
        for i in range(counts[b]):
            table[b, i] = next(free)
            rows = part[i * page : (i + 1) * page]
            pages[table[b, i], : len(rows)] = rows
    return pages, table


@pytest.mark.parametrize("packed", ["no", "kv", "qkv"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1), "softcap": 4.0}])
def test_varlen(packed, options):
    lengths_q, lengths_k = [5, 0, 3, 9], [7, 4, 1, 9]
    heads_kv = 2
    if packed == "qkv":
        lengths_k, heads_kv = lengths_q, 4
    q = randn(sum(lengths_q), 4, 13)
    k, v = randn(2, sum(lengths_k), heads_kv, 13, seed=1)
    at_q, at_k = offsets(*lengths_q), offsets(*lengths_k)
    if packed == "no":
        call = lambda **o: flash_attn.flash_attn_varlen_func(q, k, v, at_q, at_k, 9, 9, **o)  # noqa: E731
    elif packed == "kv":
        kv = torch.stack([k, v], 1)
        call = lambda **o: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, at_q, at_k, 9, 9, **o)  # noqa: E731
    else:
        qkv = torch.stack([q, k, v], 1)
        call = lambda **o: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, at_q, 9, **o)  # noqa: E731
    out, lse, record = call(return_attn_probs=True, **options)
    assert torch.equal(call(**options), out)
    assert out.shape == q.shape
    assert record.numel() == 0
    for b in range(4):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        window = options.get("window_size", (-1, -1))
        due, lse_due = oracle(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            options.get("causal", False),
            window,
            softcap=options.get("softcap", 0.0),
        )
        assert_close(out[None, rows], due)
        assert_close(lse[None, :, rows], as_flash(lse_due))


@pytest.mark.parametrize("page", [1, 3, 16])
def test_varlen_of_pages(page):
    lengths_q, lengths_k = [2, 3, 1], [7, 4, 16]
    q = randn(6, 4, 16)
    k, v = randn(2, 27, 2, 16, seed=1)
    at_q, at_k = offsets(*lengths_q), offsets(*lengths_k)
    pages_k, table = paged(k.split(lengths_k), page)
    pages_v, _ = paged(v.split(lengths_k), page)
    out = flash_attn.flash_attn_varlen_func(
        q, pages_k, pages_v, at_q, at_k, 3, 16, causal=True, block_table=table
    )
    due = flash_attn.flash_attn_varlen_func(q, k, v, at_q, at_k, 3, 16, causal=True)
    assert_close(out, due.double())


def test_varlen_of_pages_copies_strided_queries():
    pages = randn(4, 8, 2, 16)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    q = randn(14, 4, 32)[..., ::2]
    arguments = (pages, pages, offsets(7, 7), offsets(9, 9), 7, 9)
    call = functools.partial(flash_attn.flash_attn_varlen_func, block_table=table)
    assert torch.equal(call(q, *arguments), call(q.contiguous(), *arguments))


def test_varlen_with_dropout():
    """The record's signs are the weights that were dropped, sequence by sequence."""
    lengths_q, lengths_k = [5, 0, 130], [7, 4, 140]
    q, k = randn(135, 4, 16), randn(151, 2, 16, seed=1)
    at_q, at_k = offsets(*lengths_q), offsets(*lengths_k)
    arguments = (q, k, k, at_q, at_k, 130, 140, 0.25)
    slopes = torch.rand(3, 4)
    out, _, record = flash_attn.flash_attn_varlen_func(
        *arguments, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    assert record.shape == (3, 4, 256, 256)
    for b in (0, 2):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        own = record[b : b + 1, :, : lengths_q[b], : lengths_k[b]]
        kept = ~torch.signbit(own) / 0.75
        due, _ = oracle(
            q[None, rows], k[None, keys], k[None, keys], True, slopes=slopes[b], kept=kept
        )
        assert_close(out[None, rows], due)
        assert record[b].count_nonzero() <= own.numel()
    assert (record[1] == 0).all()
    assert flash_attn.flash_attn_varlen_func(*arguments[:7], 1.0).count_nonzero() == 0


def test_pages_without_dropout():
    pages = randn(2, 4, 2, 16)
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"dropout_p must be 0, got 0\.1"):
        flash_attn.flash_attn_varlen_func(
            pages[0], pages, pages, offsets(4), offsets(4), 4, 4, 0.1, block_table=table
        )


# --- caches


@pytest.mark.parametrize("page", [None, 1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rotary", "appended"), [(None, 0), (None, 2), (True, 2), (False, 2)])
def test_kvcache(page, causal, rotary, appended):
    lengths = torch.tensor([5, 0, 9], dtype=torch.int32)
    new = appended or 2
    q = randn(3, new, 4, 32)
    k, v = randn(2, 3, new, 2, 32, seed=1) if appended else (None, None)
    caches = [randn(3, 12, 2, 32, seed=seed) for seed in (2, 3)]
    history = [[cache[b, :n].clone() for b, n in enumerate(lengths)] for cache in caches]
    table = None
    if page:
        (k_pages, table), (v_pages, _) = (paged(list(cache), page) for cache in caches)
        caches = [k_pages, v_pages]
    cos, sin = torch.cos(randn(20, 8)), torch.sin(randn(20, 8))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        rotary_cos=None if rotary is None else cos,
        rotary_sin=None if rotary is None else sin,
        rotary_interleaved=bool(rotary),
        cache_seqlens=lengths,
        block_table=table,
        causal=causal,
        return_softmax_lse=True,
    )
    for b, length in enumerate(lengths.tolist()):
        queries, keys, values = q[b], history[0][b], history[1][b]
        if appended:
            turned = k[b]
            if rotary is not None:
                at = torch.arange(length, length + new)
                turned = rotate(turned, cos[at], sin[at], rotary)
            keys, values = torch.cat([keys, turned]), torch.cat([values, v[b]])
        if rotary is not None:
            at = torch.arange(new) * int(causal) + length
            queries = rotate(queries, cos[at], sin[at], rotary)
        due, lse_due = oracle(queries[None], keys[None], values[None], causal)
        assert_close(out[b : b + 1], due)
        assert_close(lse[b : b + 1], as_flash(lse_due))
        if page is None:
            assert torch.equal(caches[0][b, : len(keys)], keys)  # written in place


def test_kvcache_defaults():
    """No lengths: the whole cache; an int: the same for all; rows of the cache by index."""
    q, cache = randn(2, 1, 2, 16), randn(4, 6, 2, 16, seed=1)
    call = flash_attn.flash_attn_with_kvcache
    assert_close(call(q, cache[:2], cache[:2]), oracle(q, cache[:2], cache[:2])[0])
    short = cache[:2, :3]
    assert_close(call(q, cache[:2], cache[:2], cache_seqlens=3), oracle(q, short, short)[0])
    index = torch.tensor([3, 1], dtype=torch.int32)
    rows = cache[index.long()]
    assert_close(call(q, cache, cache, cache_batch_idx=index), oracle(q, rows, rows)[0])
    pad = torch.tensor([2, 2], dtype=torch.int32)
    late = cache[:2, 2:]
    assert_close(call(q, cache[:2], cache[:2], cache_leftpad=pad), oracle(q, late, late)[0])


PAGES = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
COMPILED = {
    "cache": lambda q, cache, lengths: flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, causal=True
    ),
    "cache in pages": lambda q, cache, lengths: flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, block_table=PAGES
    ),
    "packed, pages": lambda q, cache, lengths: flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), cache, cache, offsets(7, 7), offsets(9, 9), 7, 9, block_table=PAGES
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_lengths_are_read_by_compiled_calls(name):
    """Not before: values would be guards."""
    cache, lengths = randn(4, 8, 2, 16), torch.tensor([2, 3], dtype=torch.int32)
    q = randn(4 if name == "cache" else 2, 7, 4, 16)
    if name == "cache":
        lengths = lengths.repeat(2)
    compiled = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, cache, lengths), COMPILED[name](q, cache, lengths))


def test_entries_of_unused_pages_are_not_read():
    table = torch.tensor([[0, -7], [3, 99]], dtype=torch.int32)
    pages, q = randn(6, 4, 2, 16), randn(2, 1, 2, 16)
    out = flash_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=4, block_table=table)
    assert_close(out, oracle(q, pages[[0, 3]], pages[[0, 3]])[0])


def test_sinks():
    """In the denominator alone, in all three."""
    q, k = randn(1, 5, 4, 16), randn(1, 5, 2, 16, seed=1)
    sinks = randn(4, seed=2, dtype=torch.bfloat16).requires_grad_()
    out, lse = oracle(q, k, k, causal=True)
    rest = torch.sigmoid(lse - sinks.detach().double()[:, None]).transpose(1, 2)[..., None]
    options = {"causal": True, "s_aux": sinks}
    dense = flash_attn.flash_attn_func(q, k, k, **options)
    assert_close(dense.detach(), out * rest)
    (got,) = grads_of(dense, sinks)
    (due,) = grads_of(out * torch.sigmoid(lse - sinks.double()[:, None]).mT[..., None], sinks)
    torch.testing.assert_close(got, due, rtol=2e-2, atol=2e-2)
    at = offsets(5)
    packed = flash_attn.flash_attn_varlen_func(q[0], k[0], k[0], at, at, 5, 5, **options)
    assert_close(packed[None], out * rest)
    assert_close(flash_attn.flash_attn_with_kvcache(q, k, k, **options), out * rest)
