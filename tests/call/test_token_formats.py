"""attention_decode and append_kv on caches of latent tokens in 8 bits (kv_format): every kernel
that takes them against the oracle, which decodes the bytes by itself, and what is refused."""

import functools
import zlib
from dataclasses import dataclass

import cases
import cutlass_attn
import numpy as np
import pytest
import reference
from cases import torch
from cutlass_attn import append_kv, attention_decode, testing
from cutlass_attn._call import serving_operator
from cutlass_attn.decode import decode_with_max_logits

DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]
# Columns of K, in e4m3, of a scale; bytes of a token, and where its bf16 begins.
LAYOUTS = {"ds_mla": (576, 512, 128, 656, 528), "ds_mla_v4": (512, 448, 64, 584, 448)}


def encoded(kv_format, e4m3, scales, rest):
    """A cache (pages, page, 1, bytes): e4m3 (pages, page, columns) uint8, scales float32, the other
    columns float32 that are bf16 numbers. Byte by byte, as engines have it."""
    _, columns, _, token, at = LAYOUTS[kv_format]
    pages, page = e4m3.shape[:2]
    bf16 = np.ascontiguousarray((rest.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    bf16 = bf16.view(np.uint8)
    padded = -(-page * token // 576) * 576 if kv_format == "ds_mla_v4" else page * token
    memory = np.full((pages, padded), 0xFF, np.uint8)
    for p in range(pages):
        for r in range(page):
            if kv_format == "ds_mla":
                row = memory[p, r * token : (r + 1) * token]
                row[512:528] = np.ascontiguousarray(scales[p, r].astype("<f4")).view(np.uint8)
            else:
                row = memory[p, r * 576 : (r + 1) * 576]
                behind = page * 576 + r * 8
                exponents = np.where(np.isnan(scales[p, r]), 255, np.log2(scales[p, r]) + 127)
                memory[p, behind : behind + 7] = exponents.astype(np.uint8)
            row[:columns] = e4m3[p, r]
            row[at:] = bf16[p, r]
    return torch.from_numpy(memory)[:, : page * token].unflatten(1, (page, 1, token))


def decoded(kv_format, cache, dtype):
    """(pages, page, columns) float32 of the bytes, rounded to dtype."""
    _, columns, group, token, at = LAYOUTS[kv_format]
    pages, page = cache.shape[:2]
    memory = cache.reshape(pages, page * token)
    if kv_format == "ds_mla":
        rows = memory.unflatten(1, (page, token))
        scales = rows[..., 512:528].contiguous().view(torch.float32)
    else:
        rows = memory[:, : page * 576].unflatten(1, (page, 576))
        scales = memory[:, page * 576 :].unflatten(1, (page, 8))[..., :7]
        scales = scales.contiguous().view(torch.float8_e8m0fnu).float()
    first = rows[..., :columns].contiguous().view(torch.float8_e4m3fn).float()
    first = first * scales.repeat_interleave(group, dim=-1)
    rest = rows[..., at:].contiguous().view(torch.bfloat16).float()
    return torch.cat([first, rest], dim=-1).to(getattr(torch, dtype)).float().numpy()


@dataclass(frozen=True)
class Tokens:
    name: str
    kv_format: str = "ds_mla"
    batch: int = 3
    queries: int = 1
    heads: int = 16
    page: int = 64
    lengths: tuple[int, ...] = (150, 1, 64)
    topk: int = 0  # lists in place of whole sequences
    in_pages: bool = True  # lists of rows of a sequence, through its pages
    sinks: bool = False
    exact: bool = True  # scales are powers of two

    def __str__(self):
        return self.name

    @property
    def columns(self):
        return LAYOUTS[self.kv_format][0]


CASES = [
    Tokens("one_query"),
    Tokens("queries", queries=4, heads=5, sinks=True, lengths=(150, 4, 70)),
    Tokens("many_rows", queries=2, heads=40, page=16),
    Tokens("any_scale", exact=False, lengths=(90, 33, 0)),
    Tokens("page_of_2", kv_format="ds_mla_v4", page=2, lengths=(31, 1, 2)),
    Tokens("v4", kv_format="ds_mla_v4", queries=2, sinks=True, lengths=(130, 2, 64)),
    Tokens("v4_many_rows", kv_format="ds_mla_v4", heads=64),
    Tokens("lists", topk=70, in_pages=False, lengths=(70, 0, 33), queries=2),
    Tokens("lists_v4", kv_format="ds_mla_v4", topk=70, in_pages=False, heads=64),
    Tokens("lists_in_pages", topk=70, queries=2, lengths=(150, 3, 64)),
    Tokens("lists_in_pages_v4", kv_format="ds_mla_v4", topk=33, page=13, lengths=(50, 3, 64)),
]


@functools.lru_cache(maxsize=32)
def values(case):
    """q in float64, the cache, table, lists; the cache is NaN where no sequence has a token."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    columns, fp8, group, *_ = LAYOUTS[case.kv_format]
    needed = [-(-max(n, 1) // case.page) for n in case.lengths]
    pages = sum(needed) + 2
    order = rng.permutation(pages).astype(np.int32)
    table = np.full((case.batch, max(needed) + 1), pages - 1, np.int32)
    for b, n in enumerate(needed):
        table[b, :n] = order[sum(needed[:b]) :][:n]
    shape = (pages, case.page)
    e4m3 = torch.from_numpy(rng.standard_normal((*shape, fp8)) * 20).to(torch.float8_e4m3fn)
    e4m3 = e4m3.view(torch.uint8).numpy().copy()
    scales = 2.0 ** rng.integers(-7, -3, (*shape, fp8 // group))
    if not case.exact:
        scales = scales * rng.uniform(0.5, 1, scales.shape)
    rest = reference.round_bfloat16(rng.standard_normal((*shape, columns - fp8)))
    is_token = np.zeros((pages * case.page,), bool)
    for b, length in enumerate(case.lengths):
        at = np.arange(length)
        is_token[table[b, at // case.page] * case.page + at % case.page] = True
    lists = None
    if case.topk:
        most = [max(n, 1) for n in case.lengths]
        lists = np.stack([rng.integers(0, n, (case.queries, case.topk)) for n in most])
        lists[rng.random(lists.shape) < 0.2] = -1
        if not case.in_pages:
            rows = lists.copy()
            for b in range(case.batch):
                rows[b] = table[b, lists[b] // case.page] * case.page + lists[b] % case.page
            lists = np.where(lists < 0, -1, rows)
        for b, length in enumerate(case.lengths):
            lists[b][lists[b] >= 0] = -1 if length == 0 else lists[b][lists[b] >= 0]
    absent = ~is_token.reshape(shape)
    e4m3[absent], scales[absent], rest[absent] = 0x7F, np.nan, np.nan
    q = rng.standard_normal((case.batch, case.queries, case.heads, columns))
    sinks = rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None
    cache = encoded(case.kv_format, e4m3, scales.astype(np.float32), rest)
    return q, cache, table, lists, sinks


@functools.lru_cache(maxsize=32)
def expected(case, dtype):
    q, cache, table, lists, sinks = values(case)
    q = reference.round_to(q, dtype).swapaxes(1, 2)
    rows = decoded(case.kv_format, cache, dtype).reshape(-1, case.columns)
    options = {"softmax_scale": 0.05, "sinks": sinks}
    if case.topk:
        at = lists
        if case.in_pages:
            at = np.stack(
                [t[x // case.page] * case.page + x % case.page for t, x in zip(table, lists)]
            )
            at = np.where(lists < 0, -1, at)
        lengths = (case.topk,) * case.batch
        return reference.attention_of_lists(q, rows, rows[:, :512], at, lengths, dtype, **options)
    results = []
    for b, length in enumerate(case.lengths):
        at = np.arange(length)
        keys = rows[table[b, at // case.page] * case.page + at % case.page][None, None]
        one = reference.attention(
            q[b : b + 1], keys, keys[..., :512], dtype, causal=True, **options
        )
        results.append(one)
    return reference.Expected(*(np.concatenate([x[i] for x in results]) for i in range(4)))


def call_of(case, dtype, device):
    q, cache, table, lists, sinks = values(case)
    q = torch.from_numpy(reference.round_to(q, dtype)).to(device, getattr(torch, dtype))
    # Not .to(): the copy of a cache has to keep the stride of its pages.
    moved = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1)).to(device)
    moved = moved.as_strided(cache.shape, cache.stride())
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    options = {"kv_format": case.kv_format, "softmax_scale": 0.05}
    if case.topk:
        options["indices"] = torch.from_numpy(lists.astype(np.int32)).to(device)
    if not case.topk or case.in_pages:
        options["block_table"] = torch.from_numpy(table).to(device)
    else:
        lengths = None
    if case.sinks:
        options["sinks"] = torch.from_numpy(sinks).to(device)
    return (q, moved, moved, lengths), options


def judge(case, dtype, out, lse, max_logits=None):
    right = expected(case, dtype)
    ours = out.transpose(1, 2).float().cpu().numpy()
    accuracy = testing.judge(ours, right.exact, right.unfused, dtype)
    assert accuracy.ok, accuracy
    assert testing.Reference(*right[:4]).confirms_lse(lse.cpu().numpy())
    if max_logits is not None:
        found = max_logits.cpu().numpy()
        np.testing.assert_allclose(found, right.max_logit, atol=1e-5, rtol=1e-5)


def pairs():
    return [
        pytest.param(variant, case, splits, id=f"{variant.key}-{case}-{splits}", marks=marks)
        for variant in cases.compiled_variants(special=True)
        for case in CASES
        if {case.kv_format, *(["indices"] if case.topk else [])} <= set(variant.options)
        if set(variant.needs) <= {"latent_kv", case.kv_format}
        if variant.needs != () or variant.head_dim == 0
        for splits in ((0, 1, 3) if variant.needs else (0,))
        for marks in [cases.needs(variant)]
        if not (variant.needs and case.kv_format == "ds_mla_v4" and case.page % 2)  # not aligned
    ]


@pytest.mark.parametrize(("variant", "case", "splits"), pairs())
def test_case(variant, case, splits):
    args, options = call_of(case, variant.dtype, variant.device)
    out = args[0].new_full((*args[0].shape[:-1], 512), torch.nan)
    options |= {"out": out, "return_lse": True, "kernel": variant.key, "num_splits": splits}
    if case.topk and splits in (0, 3):
        q, k, v, lengths = args
        result, lse, *more = decode_with_max_logits(q, k, v, cache_seqlens=lengths, **options)
    else:
        result, lse, *more = attention_decode(*args, **options)
    assert result is out
    judge(case, variant.dtype, out, lse, *more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_verify(case, device):
    args, options = call_of(case, "bfloat16", device)
    judge(case, "bfloat16", *attention_decode(*args, **options, return_lse=True, verify=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[9]], ids=str)
def test_operator(case, device):
    args, options = call_of(case, "bfloat16", device)
    eager = attention_decode(*args, **options)
    compiled = torch.compile(lambda *a: attention_decode(*a, **options), backend="aot_eager")
    assert torch.equal(compiled(*args), eager)
    q, k, _, lengths = args
    v = k.new_empty((0,))
    causal = {"causal": False} if case.topk else {}
    torch.library.opcheck(
        serving_operator.attention_decode_op,
        serving_operator._DECODE.arguments(
            q=q, k_cache=k, v_cache=v, cache_seqlens=lengths, **causal, **options
        ),
    )


def test_numpy_and_float8_equal_uint8():
    args, options = call_of(CASES[0], "float16", "cpu")
    right = attention_decode(*args, **options)
    q, cache, _, lengths = args
    as_float8 = cache.view(torch.float8_e4m3fn)
    assert torch.equal(attention_decode(q, as_float8, as_float8, lengths, **options), right)
    given = {name: x.numpy() if torch.is_tensor(x) else x for name, x in options.items()}
    ours = attention_decode(q.numpy(), cache.numpy(), cache.numpy(), lengths.numpy(), **given)
    np.testing.assert_array_equal(ours, right.numpy())


def test_a_contiguous_cache_is_a_page_an_entry():
    for kv_format, (columns, *_) in LAYOUTS.items():
        case = Tokens("entries", kv_format=kv_format, page=80, lengths=(70, 80, 3))
        (q, cache, _, lengths), options = call_of(case, "bfloat16", "cpu")
        right = attention_decode(q, cache, cache, lengths, **options)
        table = options.pop("block_table")
        entries = cache[table[:, 0].long()]
        assert q.shape[-1] == columns
        assert torch.equal(attention_decode(q, entries, entries, lengths, **options), right)
        options["cache_batch_idx"] = table[:, 0].contiguous()
        assert torch.equal(attention_decode(q, cache, cache, lengths, **options), right)


def quantized(kv_format, rows):
    """The bytes of rows (T, columns), each a page, by the rule of FlashMLA's quantiser."""
    _, fp8, group, *_ = LAYOUTS[kv_format]
    groups = rows[:, :fp8].float().unflatten(1, (-1, group))
    amax = groups.abs().nan_to_num(nan=0).amax(-1)
    scales = torch.pow(2, (amax / 448).clamp_min(1e-4).log2().ceil())
    e4m3 = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    e4m3 = e4m3.view(torch.uint8).flatten(1).numpy()
    rest = rows[:, fp8:].bfloat16().float().numpy()
    return encoded(kv_format, e4m3[:, None], scales.numpy()[:, None], rest[:, None])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_format", LAYOUTS)
def test_append(kv_format, dtype, device):
    columns, _, _, token, _ = LAYOUTS[kv_format]
    page, pages = 4, 5
    torch.manual_seed(0)
    rows = torch.randn(9, columns) * torch.logspace(-6, 3, 9)[:, None]
    rows[2] = 0
    rows[3, 7] = torch.nan
    rows = rows.to(dtype)
    slots = torch.tensor([3, 0, 19, -1, 7, 8, 12, 13, 18])
    cache = torch.full((pages, page, 1, token), 0x5A, dtype=torch.uint8, device=device)
    append_kv(rows[:, None].to(device), None, cache, None, slots.to(device), kv_format=kv_format)
    right = torch.full((pages, page, 1, token), 0x5A, dtype=torch.uint8)
    flat = right.view(pages, -1)
    for row, slot in zip(quantized(kv_format, rows).reshape(9, -1), slots.tolist(), strict=True):
        if slot < 0:
            continue
        at, of_page = slot % page, flat[slot // page]
        if kv_format == "ds_mla":
            of_page[at * token : (at + 1) * token] = row
        else:
            of_page[at * 576 : (at + 1) * 576] = row[:576]
            behind = page * 576 + at * 8
            of_page[behind : behind + 7] = row[576:583]
    same = cache.cpu() == right
    assert same.all(), same.logical_not().nonzero()[:5]
    nan = torch.full((1, 1, columns), torch.nan, dtype=dtype, device=device)
    append_kv(nan, None, cache, None, slots[:1].to(device), kv_format=kv_format)
    assert np.isnan(decoded(kv_format, cache.cpu(), "bfloat16")[0, 3]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", LAYOUTS)
def test_new_tokens(kv_format, device):
    case = Tokens("new", kv_format=kv_format, queries=2, lengths=(150, 1, 64))
    (q, cache, _, lengths), options = call_of(case, "bfloat16", device)
    new = torch.randn(3, 2, 1, case.columns, dtype=torch.bfloat16, device=device)
    by_hand, compiled_cache = cache.clone(), cache.clone()
    table = options["block_table"]
    places = [
        int(table[b, (n + i) // 64]) * 64 + (n + i) % 64
        for b, n in enumerate(case.lengths)
        for i in range(2)
    ]
    slots = torch.tensor(places, device=device)
    append_kv(new.flatten(0, 1), None, by_hand, None, slots, kv_format=kv_format)
    right = attention_decode(q, by_hand, by_hand, lengths + 2, **options)
    out = attention_decode(q, cache, cache, lengths, k_new=new, **options)
    assert torch.equal(out, right) and torch.equal(cache, by_hand)
    step = torch.compile(
        lambda q, k, new: attention_decode(q, k, k, lengths, k_new=new, **options),
        backend="aot_eager",
    )
    assert torch.equal(step(q, compiled_cache, new), right)
    assert torch.equal(compiled_cache, by_hand)
    torch.compile(
        lambda k, new: append_kv(new, None, k, None, slots, kv_format=kv_format),
        backend="aot_eager",
    )(compiled_cache.zero_(), new.flatten(0, 1))
    assert compiled_cache.any()


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    case = CASES[0]
    (q, cache, _, lengths), options = call_of(case, "bfloat16", "cuda")
    stored = torch.zeros_like(lengths)
    attention_decode(q, cache, cache, stored, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_decode(q, cache, cache, stored, return_lse=True, **options)
    stored.copy_(lengths)
    graph.replay()
    judge(case, "bfloat16", out, lse)


# What is changed of a call that is right, and what the message says.
REFUSED = {
    "name": ({"kv_format": "fp8"}, 'kv_format is "fp8", allowed: "ds_mla", "ds_mla_v4"'),
    "other": (
        {"kv_format": "ds_mla_v4"},
        r'k_cache must have shape \(pages, page_size, 1, 584\) with kv_format "ds_mla_v4", got ',
    ),
    "dtype": ({"cache": lambda x: x.view(torch.int8)}, "k_cache must be uint8 or float8_e4m3fn"),
    "without": ({"kv_format": None}, "q and k_cache must have one head dim, got 576 and 656"),
    "columns": (
        {"q": lambda x: x[..., :512]},
        'q has 512 columns, allowed with kv_format "ds_mla"',
    ),
    "strided": (
        {"cache": lambda x: x.repeat_interleave(2, 1)[:, ::2]},
        "k_cache's stride between the rows of a page is 1312, allowed",
    ),
    "v": ({"v_cache": lambda x: x.clone()}, "v_cache is not k_cache, allowed with kv_format"),
    "k_scale": ({"k_scale": 2.0}, "k and v are ds_mla, and k_scale or v_scale is given"),
    "float64": ({"q": lambda x: x.double()}, "k and v are ds_mla, allowed with q of float64"),
    "v_new": (
        {"k_new": torch.zeros(3, 1, 1, 576), "v_new": torch.zeros(3, 1, 1, 512)},
        "v_new is given; allowed with kv_format: None",
    ),
    "rotary": (
        {
            "k_new": torch.zeros(3, 1, 1, 576).half(),
            "rotary_cos": torch.ones(500, 32).half(),
            "rotary_sin": torch.ones(500, 32).half(),
        },
        "k_cache is ds_mla, and rotary_cos is given; allowed: None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    (q, cache, _, lengths), options = call_of(CASES[0], "float16", "cpu")
    changes, message = REFUSED[name]
    changes = dict(changes)
    q = changes.pop("q", lambda x: x)(q)
    cache = changes.pop("cache", lambda x: x)(cache)
    v_cache = changes.pop("v_cache", lambda x: x)(cache)
    before = cache.clone()
    with pytest.raises((ValueError, TypeError), match=message):
        attention_decode(q, cache, v_cache, lengths, **{**options, **changes})
    assert torch.equal(cache, before)


def test_append_refused():
    cache = torch.zeros(2, 4, 1, 656, dtype=torch.uint8)
    k, slots = torch.zeros(3, 1, 576), torch.zeros(3, dtype=torch.int64)
    for more, message in (
        ((k, cache, None, slots), "v is given; allowed with kv_format: None"),
        ((None, cache, cache, slots), "v_cache is given; allowed with kv_format: None"),
        ((None, cache[..., :584], None, slots), r"k_cache must have shape \(pages, page_size, 1, "),
        ((None, cache, None, slots + 8), r"slot_mapping\[0\] is 8, allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            append_kv(k, *more, kv_format="ds_mla")
    with pytest.raises(ValueError, match="k has 512 columns, allowed with kv_format"):
        append_kv(k[..., :512], None, cache, None, slots, kv_format="ds_mla")
    with pytest.raises(ValueError, match="k_scale is given; allowed: None"):
        append_kv(k, None, cache, None, slots, kv_format="ds_mla", k_scale=2.0)


def test_explain():
    (q, cache, _, lengths), options = call_of(CASES[0], "bfloat16", "cpu")
    call = {"cache_seqlens": lengths, **options}
    explanation = cutlass_attn.explain(q, cache, cache, **call)
    assert explanation.chosen.kernel == "cpu"
    assert "kv_format ds_mla" in explanation.call
    on_gpu = cutlass_attn.explain(q, cache, cache, **call, device="sm_90")
    reasons = {x.variant.kernel: x.reason or "" for x in on_gpu.verdicts}
    assert "ds_mla" in reasons["sm80/latent"]
    assert "runs only calls with ds_mla_v4" in reasons["sm80/latent_ds_mla_v4"]
