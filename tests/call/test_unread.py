"""What no row of a call sees is never part of its result, be it NaN or infinite: keys that a window
or chunk has left, whose pages may be another request's by now, padding, and masked keys."""

import case_list
import cases
import cutlass_attn
import pytest
import reference
import serving
import test_decode
import test_varlen
from cases import torch
from cutlass_attn import attention_decode, attention_varlen
from serving import Batch

BAD = (float("nan"), float("inf"), float("-inf"))


def spoil(x, keys):
    """Puts what is not finite at these keys of (keys, ...)."""
    bad = BAD if x.dtype != torch.float8_e4m3fn else BAD[:1]
    for i, value in enumerate(bad):
        x[torch.tensor(keys[i :: len(bad)], dtype=torch.long, device=x.device)] = value


def unseen(case, seqlen_q, seqlen_k):
    """Keys that no row sees, by the definition."""
    options = case.causal, case.window, case.attention_chunk
    rows = (reference.visible_keys(i, seqlen_q, seqlen_k, *options) for i in range(seqlen_q))
    seen = {key for first, end in rows for key in range(first, end)}
    return [key for key in range(seqlen_k) if key not in seen]


def dense(name, reason, seqlen_q, **options):
    options = {"batch": 2, "heads": 4, "seqlen_k": 150, **options}
    return case_list.Case(name, reason, seqlen_q=seqlen_q, **options)


DENSE = [
    dense("window", "its left end is inside of a tile", 3, window=(40, 0)),
    dense("window_rows", "two tiles of rows", 70, seqlen_k=200, window=(20, 3), causal=True),
    dense("window_softcap", "another score", 3, window=(40, 0), softcap=3.0),
    dense("window_alibi", "another score", 3, window=(40, 0), alibi="h"),
    dense("window_dropout", "another kernel", 3, window=(40, 0), dropout_p=0.3),
    dense("window_bias", "another kernel", 3, window=(40, 0), bias="hqk", seqlen_k=152),
    dense("chunk", "rows of one chunk", 3, attention_chunk=50, causal=True),
    dense("mask", "columns", 3, mask="qk"),
    dense("mask_rows", "columns, in two tiles of rows", 70, mask="bhqk"),
    dense("mask_window", "both", 3, mask="b1qk", window=(90, 0)),
    dense("mask_bias", "another kernel", 3, mask="qk", bias="hqk", seqlen_k=152),
    dense("mask_alibi", "another score", 20, mask="qk", alibi="h", softcap=3.0),
]


def marks(variant):
    # TMA copies whole tiles of V, which wgmma reads where they are, but of pages; sm90/wide copies
    # single rows beside 16 that are all keys. With a map, mma.sync leaves out whole tiles, too.
    of_tiles = pytest.mark.xfail(reason="reads whole tiles of V", strict=True)
    reads_tiles = variant.kernel.startswith(
        ("sm90", "sm80/mask", "sm80/bias_mask", "sm80/any_bias_mask")
    )
    reads_tiles = reads_tiles and not variant.kernel.startswith(("sm90/paged", "sm90/wide"))
    return [*cases.needs(variant), *[of_tiles] * reads_tiles]


def dense_pairs():
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=marks(variant))
        for variant in cases.compiled_variants(special=True)
        if variant.quantize is None
        for case in DENSE
        if cases.takes(variant, case)
    ]


@pytest.mark.parametrize(("variant", "case"), dense_pairs())
def test_dense(variant, case):
    head_dim = variant.head_dim or 64
    q, k, v, _ = cases.tensors(case, variant.dtype, head_dim, variant.device)
    options = cases.keywords(case, variant.dtype, variant.device)
    keys = unseen(case, case.seqlen_q, case.seqlen_k)
    if case.mask:
        columns = [*range(70), *range(90, 97), 110]
        options["mask"][..., columns] = False
        keys = sorted({*keys, *columns})
    assert keys
    expected = run(q, k, v, options, variant)
    for x in (k, v):
        for rows in x.flatten(0, 1):
            spoil(rows, keys)
    for actual, clean in zip(run(q, k, v, options, variant), expected, strict=True):
        assert torch.equal(actual, clean)


def run(q, k, v, options, variant):
    return cutlass_attn.attention(q, k, v, **options, **cases.own(variant), return_lse=True)


SERVING = [
    Batch("window", "its left end is inside of a tile", (3, 2, 1), (150, 70, 9), window=(17, 0)),
    Batch("rows", "tiles of rows", (3, 90, 70), (150, 200, 131), window=(21, 2), causal=True),
    Batch("chunk", "rows of one chunk", (3, 2, 1), (150, 70, 9), attention_chunk=50, causal=True),
    Batch("softcap", "another score", (2, 2), (150, 70), window=(17, 0), softcap=2.0),
    Batch("alibi", "another score", (2, 2), (150, 70), window=(17, 0), alibi="h"),
    Batch("dropout", "the general score", (2, 2), (150, 70), window=(17, 0), dropout_p=0.3),
    Batch("scales", "of K and V", (2, 2), (150, 70), window=(17, 0), scales="heads"),
]
STORES = {
    "packed": {"room": 3},
    "pages_13": {"page": 13, "room": 20},
    "pages_16": {"page": 16, "halves": True, "room": 20},
    "fp8": {"page": 16, "fp8": True, "room": 20},
}


def in_stores(which):
    return [
        Batch(**{**vars(case), "name": f"{case.name}_{store}", **options})
        for case in which
        for store, options in STORES.items()
    ]


def rows_of(case, options, begins, b, keys):
    """Where those keys of a sequence are: indices of k and v."""
    keys = torch.tensor(keys, dtype=torch.long)
    if case.page:
        table = options["block_table"][b].cpu()
        return table[keys // case.page].long(), keys % case.page
    return (begins[b] + keys,) if begins else (torch.full_like(keys, b), keys)


def spoil_unseen(case, options, begins, k, v, unseen_of):
    """Puts what is not finite where no row of a sequence looks, and where no sequence has keys."""
    found = 0
    for b in range(case.batch):
        keys = unseen_of(b)
        found += len(keys)
        at = rows_of(case, options, begins, b, keys)
        for x in (k, v):
            values = x[at]
            spoil(values, range(len(keys)))
            x[at] = values
    assert found


def varlen_pairs():
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=marks(variant))
        for variant in cases.compiled_variants(special=True)
        for case in in_stores(SERVING)
        if serving.fits(variant, case, sum(case.seqlens_q))
    ]


@pytest.mark.parametrize(("variant", "case"), varlen_pairs())
def test_packed_or_in_pages(variant, case):
    args, options = test_varlen.call_of(case, variant.dtype, variant.head_dim or 64, variant.device)
    begins = None if case.page else args[4].tolist()

    def call():
        return attention_varlen(*args, **options, return_lse=True, kernel=variant.key)

    expected = call()
    lengths = list(zip(case.seqlens_q, case.seqlens_k, strict=True))
    spoil_unseen(case, options, begins, *args[1:3], lambda b: unseen(case, *lengths[b]))
    for actual, clean in zip(call(), expected, strict=True):
        assert torch.equal(actual, clean)


LEFTPAD = (37, 5, 0)
DECODE = [
    *(case for case in SERVING if case.name not in ("rows", "dropout")),
    Batch("leftpad", "padding in front", (3, 3, 3), (150, 70, 9), causal=True),
    Batch("leftpad_window", "and a window", (3, 3, 3), (150, 70, 9), causal=True, window=(130, 0)),
    Batch("leftpad_sinks", "and sinks", (3, 3, 3), (150, 70, 9), sinks=True, softcap=2.0),
]


def decode_pairs():
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=marks(variant))
        for variant in cases.compiled_variants(special=True)
        for case in map(with_equal_queries, in_stores(DECODE))
        if serving.fits(variant, case, case.seqlens_q[0])
        and ("mask" in variant.options or "leftpad" not in case.name)
    ]


def with_equal_queries(case):
    return Batch(**{**vars(case), "seqlens_q": case.seqlens_q[:1] * case.batch})


@pytest.mark.parametrize(("variant", "case"), decode_pairs())
def test_cache(variant, case):
    dim = variant.head_dim or 64
    args, options = test_decode.call_of(case, variant.dtype, dim, variant.device)
    padding = LEFTPAD if "leftpad" in case.name else (0,) * case.batch
    if any(padding):
        options["cache_leftpad"] = serving.int32(padding, variant.device)

    def call():
        return attention_decode(*args, **options, return_lse=True, kernel=variant.key)

    def unseen_of(b):
        keys = unseen(case, case.seqlens_q[b], case.seqlens_k[b])
        return sorted({*keys, *range(padding[b])})

    expected = call()
    spoil_unseen(case, options, None, *args[1:3], unseen_of)
    for actual, clean in zip(call(), expected, strict=True):
        assert torch.equal(actual, clean)
