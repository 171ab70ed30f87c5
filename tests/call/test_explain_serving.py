"""explain() and verify=True of attention_varlen and attention_decode."""

import cutlass_attn
import pytest
import serving
import test_decode
import test_varlen
from cases import needs_gpu, torch
from cutlass_attn import attention_decode, attention_varlen, explain
from cutlass_attn.verify import VerificationError
from serving import Batch, int32

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
needs_simt = pytest.mark.skipif(
    cutlass_attn.build_info().simt == "none", reason="this build has no simt kernels"
)


# --- explain --------------------------------------------------------------------------------------


def decode_on_meta(batch, keys, dtype=torch.float16):
    q = torch.empty(batch, 1, 32, 128, device="meta", dtype=dtype)
    cache = torch.empty(batch, keys, 8, 128, device="meta", dtype=dtype)
    return q, cache, torch.empty(batch, device="meta", dtype=torch.int32)


@pytest.mark.parametrize(
    ("device", "batch", "keys", "splits"),
    [
        ("sm_89", 1, 32768, 16),  # an RTX 4090, as docs/serving.md works it out
        ("sm_89", 16, 32768, 1),
        ("sm_89", 1, 255, 1),  # 128 keys at least
        ("sm_89", 1, 256, 2),
        ("sm_90", 1, 32768, 16),  # 128 of 132 SMs
        ("sm_90", 1, 1024, 8),
        ("sm_90", 16, 8192, 1),
    ],
)
def test_splits(device, batch, keys, splits):
    q, cache, lengths = decode_on_meta(batch, keys)
    explanation = explain(q, cache, cache, cache_seqlens=lengths, device=device)
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert explanation.chosen.kernel == "sm80/decode"
    assert explanation.splits == splits
    assert (f"keys in {splits} splits" in str(explanation)) == (splits > 1)
    assert (explanation.workspace_bytes > 0) == (splits > 1)
    three = explain(q, cache, cache, cache_seqlens=lengths, num_splits=3, device=device)
    assert three.splits == 3
    # Of each split of 8 tiles: O of 16 rows in fp32, 256 columns, with row max and sum; counters.
    tiles = batch * 8
    assert three.workspace_bytes == 4 * (tiles + tiles * 3 * 16 * (256 + 2))
    assert f"in 3 splits, {three.workspace_bytes} bytes of workspace" in str(three)


# Pages, and the splits of 16 x 8192 keys: two blocks for each SM of Hopper, if rows lie anywhere.
@pytest.mark.parametrize(
    ("device", "page", "splits"),
    [("sm_90", 1, 2), ("sm_90", 16, 2), ("sm_90", 32, 1), ("sm_89", 16, 1)],
)
def test_splits_of_pages(device, page, splits):
    q = torch.empty(16, 1, 32, 128, device="meta", dtype=torch.float16)
    cache = torch.empty(16 * 8192 // page, page, 8, 128, device="meta", dtype=torch.float16)
    table = torch.empty(16, 8192 // page, device="meta", dtype=torch.int32)
    lengths = torch.empty(16, device="meta", dtype=torch.int32)
    explanation = explain(q, cache, cache, cache_seqlens=lengths, block_table=table, device=device)
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert (explanation.chosen.kernel, explanation.splits) == ("sm80/decode", splits)


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "head_dim", "options", "kernel"),
    [
        (64, (8, 1), 8, 2048, 64, {}, "sm90"),
        (64, (8, 1), 8, 2048, 128, {"softcap": 20.0}, "sm90"),
        (64, (32, 1), 1, 2048, 128, {}, "sm90"),
        (8, (8, 4), 10, 4096, 256, {}, "sm90"),
        # One tile of 16 rows, few tiles, few keys, a number of splits, heads that TMA cannot pack.
        (64, (16, 1), 1, 2048, 128, {}, "sm80/decode"),
        (8, (8, 4), 10, 4096, 128, {}, "sm80/decode"),
        (1, (8, 1), 8, 8192, 256, {}, "sm80/decode"),
        (64, (8, 1), 8, 256, 128, {}, "sm80/decode"),
        (64, (8, 1), 8, 2048, 128, {"split_size": 512}, "sm80/decode"),
        (64, (8, 1), 8, 2048, 128, {"num_splits": 4}, "sm80/decode"),
        (64, (48, 1), 1, 2048, 128, {}, "sm80/decode"),
    ],
)
@pytest.mark.parametrize("paged", [False, True])
def test_more_than_16_rows_decode_on_wgmma(
    batch, heads, queries, keys, head_dim, options, kernel, paged
):
    q = torch.empty(batch, queries, heads[0], head_dim, device="meta", dtype=torch.float16)
    entries, rows = (batch * keys // 64, 64) if paged else (batch, keys)
    cache = torch.empty(entries, rows, heads[1], head_dim, device="meta", dtype=torch.float16)
    given = {"cache_seqlens": torch.empty(batch, device="meta", dtype=torch.int32), **options}
    if paged:
        given["block_table"] = torch.empty(batch, keys // 64, device="meta", dtype=torch.int32)
    chosen = {
        device: explain(q, cache, cache, **given, device=device).chosen
        for device in ("H200", "RTX 4090")
    }
    if chosen["H200"] is None:
        pytest.skip("this build has no GPU kernels")
    expected = kernel + ("/paged" if paged else "/varlen") * (kernel == "sm90")
    assert (chosen["H200"].kernel, chosen["RTX 4090"].kernel) == (expected, "sm80/decode")


@pytest.mark.parametrize(("seqlen", "kernel"), [(80, "sm80/varlen"), (1024, "sm90/varlen")])
def test_short_padded_sequences_do_not_run_wgmma(seqlen, kernel):
    q = torch.empty(256, 16, seqlen, 64, device="meta", dtype=torch.bfloat16)
    lengths = torch.empty(256, device="meta", dtype=torch.int32)
    chosen = explain(q, q, q, seqused_q=lengths, seqused_k=lengths, device="H200").chosen
    if chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert chosen.kernel == kernel


# (batch, heads, keys, columns of V), and the kernel and splits on an H100, or an RTX 4090.
LATENT = [
    ("sm_90", (16, 16, 8192, 512), "sm90/latent", 8),
    ("sm_90", (1, 16, 32768, 512), "sm80/latent", 128),
    ("sm_90", (8, 16, 4096, 512), "sm80/latent", 33),
    ("sm_90", (100, 16, 4096, 512), "sm90/latent", 5),
    ("sm_90", (128, 16, 4096, 512), "sm90/latent", 1),
    ("sm_90", (128, 16, 1024, 512), "sm80/latent", 2),
    ("sm_90", (128, 32, 4096, 512), "sm90/latent", 1),
    ("sm_90", (16, 32, 8192, 512), "sm90/latent", 8),
    ("sm_90", (64, 32, 1024, 512), "sm90/latent", 2),
    ("sm_90", (16, 32, 1024, 512), "sm90/latent", 7),
    ("sm_90", (8, 32, 8192, 512), "sm90/latent", 16),
    ("sm_90", (128, 128, 4096, 512), "sm90/latent", 1),
    ("sm_90", (16, 33, 8192, 512), "sm90/latent", 8),
    ("sm_90", (1, 32, 32768, 512), "sm90/latent", 128),
    ("sm_89", (16, 16, 8192, 512), "sm80/latent", 8),
    ("sm_89", (16, 32, 8192, 512), "sm80/latent", 4),
    ("sm_89", (2, 33, 100, 512), "sm80/latent_64", 1),
]


@pytest.mark.parametrize(("device", "shape", "kernel", "splits"), LATENT)
def test_which_kernel_runs_latent_attention(device, shape, kernel, splits):
    batch, heads, keys, columns = shape
    q = torch.empty(batch, 1, heads, 576, device="meta", dtype=torch.bfloat16)
    cache = torch.empty(batch, keys, 1, 576, device="meta", dtype=torch.bfloat16)
    lengths = torch.empty(batch, device="meta", dtype=torch.int32)
    given = {"cache_seqlens": lengths, "device": device}
    explanation = explain(q, cache, cache[..., :columns], **given)
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert (explanation.chosen.kernel, explanation.splits) == (kernel, splits)
    # V elsewhere, or other columns of K.
    for v in (torch.empty_like(cache)[..., :columns], cache[..., 576 - columns :]):
        assert explain(q, cache, v, **given).chosen.kernel == "scalar/minimal"


@pytest.mark.parametrize(
    ("device", "queries", "heads", "kernel"),
    [
        ("sm_89", 1, 16, "sm80/latent"),
        ("sm_89", 500, 128, "sm80/latent_64"),
        ("sm_90", 500, 128, "sm90/latent"),
        # a tile has the heads of one query
        ("sm_89", 500, 16, "sm80/latent"),
        ("sm_90", 500, 16, "sm80/latent"),
    ],
)
@pytest.mark.parametrize("wanted", [False, True])
def test_which_kernel_has_the_largest_logits_of_lists(device, queries, heads, kernel, wanted):
    q = torch.empty(queries, heads, 576, device="meta", dtype=torch.bfloat16)
    kv = torch.empty(4000, 1, 576, device="meta", dtype=torch.bfloat16)
    lists = torch.empty(queries, 64, device="meta", dtype=torch.int32)
    offsets = torch.empty(2, device="meta", dtype=torch.int32)
    given = {"cu_seqlens_q": offsets, "indices": lists, "return_max_logit": wanted}
    explanation = explain(q, kv, kv[..., :512], **given, device=device)
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert explanation.chosen.kernel == kernel
    assert explanation.score == ("maxlogit" if wanted else "identity")


@pytest.mark.parametrize(
    ("lists", "heads", "kernel"),
    [
        (500, 16, "sm90/latent"),
        (16, 16, "sm90/latent"),
        (8, 16, "sm80/latent"),
        (8, 32, "sm90/latent"),
    ],
)
def test_which_kernel_runs_lists_of_2048_keys(lists, heads, kernel):
    q = torch.empty(lists, 1, heads, 576, device="meta", dtype=torch.bfloat16)
    pages = torch.empty(1000, 64, 1, 576, device="meta", dtype=torch.bfloat16)
    given = {"indices": torch.empty(lists, 1, 2048, device="meta", dtype=torch.int32)}
    explanation = explain(q, pages, pages[..., :512], cache_seqlens=None, **given, device="sm_90")
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert explanation.chosen.kernel == kernel


@pytest.mark.parametrize(
    ("device", "cache", "queries", "options", "kernel"),
    [
        ("sm_90", torch.bfloat16, 1, {}, "sm90/wide"),
        ("sm_89", torch.bfloat16, 2, {"window": (500, 0), "softcap": 30.0}, "sm80/wide"),
        ("sm_90", torch.bfloat16, 4, {"window": (500, 0), "softcap": 30.0}, "sm90/wide"),
        ("sm_89", torch.bfloat16, 5, {"attention_chunk": 100}, "sm80/wide_64"),
        ("sm_90", torch.bfloat16, 5, {"attention_chunk": 100}, "sm90/wide"),
        ("sm_89", torch.float8_e4m3fn, 5, {}, "sm89/wide_fp8"),
        ("sm_80", torch.float8_e4m3fn, 1, {}, "sm80/wide_fp8"),
    ],
)
@pytest.mark.parametrize("columns", [264, 512])
def test_which_kernel_runs_head_dims_beyond_256(device, cache, queries, options, kernel, columns):
    columns = -(-columns // 16) * 16 if cache == torch.float8_e4m3fn else columns
    q = torch.empty(8, queries, 16, columns, device="meta", dtype=torch.bfloat16)
    k, v = (torch.empty(512, 16, 2, columns, device="meta", dtype=cache) for _ in range(2))
    table = torch.empty(8, 64, device="meta", dtype=torch.int32)
    lengths = torch.empty(8, device="meta", dtype=torch.int32)
    given = {"cache_seqlens": lengths, "block_table": table, "device": device, **options}
    chosen = explain(q, k, v, **given).chosen
    if chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert chosen.kernel == kernel


@pytest.mark.parametrize(
    ("device", "kernel"), [("sm_80", "sm80"), ("sm_89", "sm80"), ("sm_90", "sm90/wide")]
)
def test_which_kernels_run_dense_head_dims_beyond_256(device, kernel):
    q, k, v = torch.empty(3, 2, 4, 100, 328, device="meta", dtype=torch.bfloat16)
    chosen = explain(q, k, v, causal=True, device=device).chosen
    if chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert chosen.kernel == kernel
    for options, backward in (
        ({"causal": True}, "sm80/backward"),
        ({"softcap": 30.0}, "sm80/backward"),
        ({"deterministic": True}, "sm80/backward_general_ordered"),
        ({"attention_chunk": 50}, "sm80/backward_general"),
    ):
        explanation = explain(q, k, v, grad=True, device=device, **options)
        assert explanation.chosen.kernel == backward


def test_a_kernel_of_wide_heads_is_none_for_others():
    q = torch.empty(3, 2, 100, 256, device="meta", dtype=torch.bfloat16)
    bias = torch.empty(100, 100, device="meta")  # float32, which no kernel of sm90 takes
    explanation = explain(q, q, q, bias=bias, device="sm_90")
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert "sm90" in {x.kernel for x in explanation.passed_over}
    assert "sm90/wide" not in {x.kernel for x in explanation.passed_over}
    named = explain(q, q, q, device="sm_90", kernel="sm90/wide")
    assert named.chosen is None
    (verdict,) = (x for x in named.verdicts if x.variant.key.startswith("sm90/wide/bf16/"))
    assert verdict.reason.startswith("needs head_dim from 257 on, got 256")
    wider = torch.empty(3, 3, 2, 100, 264, device="meta", dtype=torch.bfloat16)
    assert explain(*wider, device="sm_90").chosen.kernel == "sm90/wide"


# (head dim, heads, rows), and what an H200 runs, not causal and causal: the fastest there, or next
# to it (docs/notes/hopper.md). Beyond some waves that is the tile with most rows.
COSTS = [
    ((64, 4, 512), "sm90/split_keys", "sm90/split_keys"),
    ((64, 12, 1024), "d64/128x128x8", "sm90/split_keys"),
    ((64, 10, 2048), "d64/192x128x12", "sm90/split_keys"),
    ((64, 24, 2048), "d64/192x128x12", "d64/192x128x12"),
    ((64, 512, 1024), "d64/192x128x12", "d64/192x128x12"),
    ((96, 256, 1024), "d96/128x128x8", "d96/128x128x8"),
    ((128, 12, 1024), "d128/128x128x8", "sm90/split_keys"),
    ((128, 256, 1024), "d128/128x128x8", "d128/128x128x8"),
    ((256, 10, 1024), "d256/128x64x8", "d256/64x64x4"),
    ((256, 128, 1024), "d256/128x64x8", "d256/128x64x8"),
]


@pytest.mark.parametrize(("shape", "plain", "causal"), COSTS)
def test_tiles_of_hopper_are_those_that_cost_least(shape, plain, causal):
    head_dim, heads, rows = shape
    q = torch.empty(1, heads, rows, head_dim, device="meta", dtype=torch.bfloat16)
    for is_causal, part in ((False, plain), (True, causal)):
        chosen = explain(q, q, q, causal=is_causal, device="sm_90").chosen
        if chosen is None or not chosen.kernel.startswith("sm90"):
            pytest.skip("this build has no kernels for Hopper, nor NVRTC")
        assert part in chosen.key


# (heads, queries, keys, head dim), the splits on the 128 SMs of an RTX 4090, and options.
DENSE = [
    ((4, 512, 512, 128), 4, {}),
    ((4, 1024, 1024, 64), 2, {"causal": True}),
    ((1, 100, 32768, 128), 40, {"softcap": 5.0}),
    ((2, 512, 512, 64), 5, {}),  # more would take longer to merge
    ((4, 512, 256, 128), 1, {}),  # too few keys
    ((4, 1024, 32768, 64), 2, {}),
    ((4, 1024, 32768, 64), 1, {"window": 100}),
    ((5, 1024, 1024, 128), 1, {}),  # 80 tiles: two blocks for each would not run at once
    ((64, 1024, 1024, 128), 1, {}),
]


@pytest.mark.parametrize(("shape", "splits", "options"), DENSE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_splits_of_dense_calls(shape, splits, options, dtype):
    heads, queries, keys, head_dim = shape
    q, k = (torch.empty(1, heads, n, head_dim, device="meta", dtype=dtype) for n in (queries, keys))
    explanation = explain(q, k, k, **options, device="sm_89")
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert explanation.splits == splits
    assert explanation.chosen.kernel == ("sm80/split_keys" if splits > 1 else "sm80")
    if splits == 1:
        reasons = {x.variant.kernel: x.reason for x in explanation if "could run" in x.reason}
        assert "sm80 is preferred for keys in 1 split" in reasons["sm80/split_keys"]


# (GPU, queries of 4 sequences each, keys of a page), and the kernel of 32 heads on 8.
PAGED = [
    ("sm_90", 512, 16, "sm90/paged"),
    ("sm_90", 512, 64, "sm90/paged"),
    ("sm_90", 512, 48, "sm90/paged"),  # the boxes are of 16 rows
    ("sm_90", 512, 256, "sm90/paged"),
    ("sm_90", 512, 13, "sm80/paged"),
    ("sm_90", 2, 16, "sm80/decode"),
    ("sm_89", 512, 16, "sm80/paged"),
]


@pytest.mark.parametrize(("device", "queries", "page", "kernel"), PAGED)
@pytest.mark.parametrize("is_packed", [False, True])
def test_pages_of_many_rows_are_read_by_wgmma_on_hopper(device, queries, page, kernel, is_packed):
    q = torch.empty(4, queries, 32, 128, device="meta", dtype=torch.bfloat16)
    cache = torch.empty(400, 2, page, 8, 128, device="meta", dtype=torch.bfloat16)
    options = {"block_table": torch.empty(4, 100, device="meta", dtype=torch.int32)}
    lengths = torch.empty(4, device="meta", dtype=torch.int32)
    if is_packed:
        q = q.flatten(0, 1)
        begins = torch.empty(5, device="meta", dtype=torch.int32)
        options |= {"cu_seqlens_q": begins, "seqused_k": lengths}
    else:
        options |= {"cache_seqlens": lengths}
    explanation = explain(q, cache[:, 0], cache[:, 1], **options, causal=True, device=device)
    reasons = {x.variant.key: x.reason for x in explanation}
    reason = reasons["sm90/paged/bf16/d128/128x128x8"]
    if "compiled" in reason:
        pytest.skip("this build has no kernels for Hopper, nor NVRTC")
    assert explanation.chosen.kernel == kernel
    assert ("needs pages of a multiple of 8 rows, got 13" in reason) == (page == 13)


# (batch, heads, queries, keys), and the kernel on the 132 SMs of an H100.
FEW_ROWS = [
    ((32, 8, 16, 1024), "sm80/decode"),  # more tiles than SMs
    ((1, 8, 16, 1024), "sm90/split_keys"),
    ((1, 8, 16, 2048), "sm80/decode"),  # many keys and few tiles
    ((1, 8, 17, 2048), "sm90/split_keys"),
    ((3, 8, 1, 8192), "sm90/split_keys"),
]


@pytest.mark.parametrize(("shape", "kernel"), FEW_ROWS)
def test_which_kernel_splits_the_keys_of_few_rows(shape, kernel):
    batch, heads, queries, keys = shape
    q, k = (torch.empty(batch, heads, n, 64, device="meta") for n in (queries, keys))
    explanation = explain(q.half(), k.half(), k.half(), device="sm_90")
    kernels = {x.variant.kernel: x.reason for x in explanation}
    if "compiled" in kernels["sm90/split_keys"]:
        pytest.skip("this build has no kernels for Hopper, nor NVRTC")
    assert explanation.chosen.kernel == kernel


def test_splits_are_for_calls_without_other_options():
    q = torch.empty(1, 4, 512, 64, device="meta", dtype=torch.float16)
    bias = torch.empty(512, 512, device="meta", dtype=torch.float16)
    explanation = explain(q, q, q, bias=bias, device="sm_89")
    reasons = {x.variant.kernel: x.reason for x in explanation}
    assert "does not implement bias" in reasons["sm80/split_keys"]


@pytest.mark.parametrize(("queries", "kernel"), [(1, "sm80/decode"), (40, "sm80/varlen")])
def test_scales_of_16_bits(queries, kernel):
    q, cache, lengths = decode_on_meta(2, 300)
    options = {"cache_seqlens": lengths, "k_scale": torch.empty(8, device="meta"), "v_scale": 0.5}
    explanation = explain(q.expand(2, queries, 32, 128), cache, cache, **options, device="sm_89")
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert explanation.chosen.kernel == kernel


def test_explain_names_the_call():
    q, cache, lengths = decode_on_meta(2, 300)
    explanation = explain(q, cache, cache, cache_seqlens=lengths, window=64, device="sm_89")
    assert explanation.call == (
        "float16, q (2, 1, 32, 128), k_cache (2, 300, 8, 128), v_cache (2, 300, 8, 128), "
        "cache_seqlens (2,), window 64"
    )
    # Of a build that has them, or can compile them.
    reasons = [x.reason for x in explanation if x.variant.kernel == "sm80"]
    expected = ("does not implement varlen", "not compiled")
    assert reasons and all(any(text in reason for text in expected) for reason in reasons)


def test_explain_of_packed_sequences():
    q = torch.randn(9, 4, 64)
    explanation = explain(q, q, q, cu_seqlens_q=int32([0, 4, 9]), causal=True)
    assert explanation.chosen.kernel == "cpu"
    assert explanation.call.startswith(
        "float32, q (9, 4, 64), k (9, 4, 64), v (9, 4, 64), cu_seqlens"
    )
    reasons = {x.variant.kernel: x.reason for x in explanation}
    assert reasons["sm80"] == "needs operands on a CUDA device, got them on the CPU"


@pytest.mark.skipif(cutlass_attn.build_info().simt != "all", reason="it has few simt kernels")
def test_splits_on_the_cpu():
    args, options = test_decode.call_of(test_decode.CASE, "float16", 64, "cpu")
    q, k, v, lengths = args
    kernel = "sm80/decode-simt"
    explanation = explain(q, k, v, cache_seqlens=lengths, kernel=kernel, num_splits=3, **options)
    assert (explanation.chosen.kernel, explanation.splits) == (kernel, 3)
    assert explanation.workspace_bytes > 0


def test_a_tree_is_a_mask():
    q, cache = torch.randn(2, 3, 4, 64), torch.randn(2, 20, 2, 64)
    options = {"cache_seqlens": int32([20, 9]), "tree_mask": torch.ones(2, 3, 3).bool()}
    explanation = explain(q.half(), cache.half(), cache.half(), **options, device="sm_89")
    reasons = {x.variant.kernel: x.reason for x in explanation}
    assert "mask" in reasons["sm80/paged"]
    assert "mask" not in reasons["sm80/decode"]


def test_explain_refuses_what_the_call_refuses():
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 20, 2, 16)
    with pytest.raises(ValueError, match="k_new and v_new go together"):
        explain(q, cache, cache, cache_seqlens=int32([1, 2]), k_new=cache[:, :1])
    with pytest.raises(ValueError, match="grad is True, allowed for attention_decode: False"):
        explain(q, cache, cache, cache_seqlens=int32([1, 2]), grad=True)
    with pytest.raises(
        TypeError, match=r"explain\(\) got an unexpected keyword argument 'dropout_p'"
    ):
        explain(q, cache, cache, cache_seqlens=int32([1, 2]), dropout_p=0.5)


# --- verify ---------------------------------------------------------------------------------------

VERIFIED = (
    *("causal", "window", "softcap", "sinks", "alibi_per_batch", "pages_all", "fp8_pages"),
    "latent_queries",
)


@needs_simt
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [x for x in serving.DECODE if x.name in VERIFIED], ids=str)
def test_decode_is_verified(device, case):
    for dtype in ("float16", "float32"):
        args, options = test_decode.call_of(case, dtype, case.head_dim or 64, device)
        out, lse = attention_decode(*args, **options, verify=True, return_lse=True)
        assert torch.equal(out, attention_decode(*args, **options))
        assert lse.shape == (case.batch, case.heads, case.seqlens_q[0])


VERIFIED_VARLEN = ("ragged_causal", "padded", "dropout", "used", "scale", "pages_mixed", "fp8")


@needs_simt
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [x for x in serving.VARLEN if x.name in VERIFIED_VARLEN], ids=str)
def test_varlen_is_verified(device, case):
    for dtype in ("float16", "float32"):
        args, options = test_varlen.call_of(case, dtype, 64, device)
        out = attention_varlen(*args, **options, verify=True)
        assert torch.equal(out, attention_varlen(*args, **options))


@needs_simt
@pytest.mark.parametrize("device", DEVICES)
def test_new_keys_are_written_once(device):
    """And seen, rotated as they are."""
    _args, options, before, new_keys, _ = test_decode.append_case(device, 16, 3)
    q, k, v, lengths = before
    k, v = k.nan_to_num(), v.nan_to_num()
    angles = torch.rand(160, 8, device=device).half()
    options |= {**new_keys, "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    out = attention_decode(q, *caches[0], lengths, **options, verify=True)
    assert torch.equal(out, attention_decode(q, *caches[1], lengths, **options))
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours, theirs)


@needs_simt
@pytest.mark.parametrize("what", ["out", "lse"])
@pytest.mark.parametrize("function", ["decode", "varlen"])
def test_a_wrong_result_is_caught(monkeypatch, function, what):
    """In one element of sequence 3; the other kernel's is right."""
    real = getattr(cutlass_attn._C, function)

    def wrong(*args, **more):
        out, lse = real(*args, **more)
        if args[3].get("kernel", "auto") == "auto":
            (out[3, 0, 1] if function == "decode" else out[-1, 1])[7] += (what == "out") * 0.01
            (lse[3, 1] if function == "decode" else lse[1])[-1] += (what == "lse") * 0.01
        return out, lse

    monkeypatch.setattr(cutlass_attn._C, function, wrong)
    case = Batch("wrong", "", (1,) * 4, serving.LENGTHS, page=16, causal=True)
    with pytest.raises(VerificationError, match=f"disagree on {what} of sequence 3 in 1 of"):
        if function == "decode":
            args, options = test_decode.call_of(case, "float32", 32, "cpu")
            attention_decode(*args, **options, verify=True)
        else:
            args, options = test_varlen.call_of(case, "float32", 32, "cpu")
            attention_varlen(*args, **options, verify=True)


def test_verify_is_refused():
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 20, 2, 16)
    with pytest.raises(TypeError, match="verify must be True or False, got 'no'"):
        attention_decode(q, cache, cache, int32([1, 2]), verify="no")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="verify=True reads results on the host"):
            attention_decode(q, cache, cache, int32([1, 2]), verify=True)
        with pytest.raises(ValueError, match="verify=True reads results on the host"):
            attention_varlen(q[0], q[0], q[0], int32([0, 1]), verify=True)


# Queries of each sequence, query and KV heads, head dim, sequences, keys; the kernel on an H100.
FEW_TOKENS = [
    ("packed", (32, 16, 16, 64, 256, 0), "sm80/varlen"),  # 32 of 192 rows of a tile
    ("packed", (96, 16, 16, 128, 256, 0), "sm90/varlen"),
    ("packed", (512, 16, 16, 64, 4, 0), "sm90/varlen"),
    ("pages", (16, 32, 8, 128, 4, 4096), "sm90/paged"),  # a third of the SMs
    ("pages", (16, 96, 2, 128, 4, 4096), "sm80/paged"),  # a copy cannot pack 48 heads
    ("pages", (512, 96, 2, 128, 4, 8192), "sm90/paged"),  # nor need it
]


@pytest.mark.parametrize(("kind", "shape", "kernel"), FEW_TOKENS)
def test_which_kernel_runs_few_tokens(kind, shape, kernel):
    queries, heads, kv_heads, d, batch, keys = shape

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, device="meta", dtype=dtype)

    q = empty(batch * queries, heads, d)
    offsets = empty(batch + 1, dtype=torch.int32)
    if kind == "packed":
        kv = empty(batch * queries, kv_heads, d)
        given = {"cu_seqlens_k": offsets}
    else:
        kv = empty(batch * keys // 16, 16, kv_heads, d)
        given = {
            "seqused_k": empty(batch, dtype=torch.int32),
            "block_table": empty(batch, keys // 16, dtype=torch.int32),
        }
    chosen = explain(q, kv, kv, cu_seqlens_q=offsets, causal=True, **given, device="sm_90").chosen
    if chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert chosen.kernel == kernel
    if kernel == "sm80/varlen":
        assert chosen.tile == "64x64x4"


@pytest.mark.parametrize(
    ("d", "options", "kernel"),
    [
        (64, {}, "sm90/split_keys"),
        (192, {}, "sm90"),
        (256, {}, "sm90"),
        (64, {"bias": (1, 4, 256, 256)}, "sm90/bias"),
        (128, {"mask": (1, 1, 256, 256)}, "sm90/mask"),
        (128, {"dropout_p": 0.1}, "sm90/dropout"),
    ],
)
def test_which_kernel_runs_few_tiles(d, options, kernel):
    """Two tiles of rows for each of four heads, on a GPU of 132 SMs."""
    q = torch.empty(1, 4, 256, d, device="meta", dtype=torch.bfloat16)
    given = dict(options)
    if "bias" in given:
        given["bias"] = torch.empty(given["bias"], device="meta", dtype=torch.bfloat16)
    if "mask" in given:
        given["mask"] = torch.empty(given["mask"], device="meta", dtype=torch.bool)
    explanation = explain(q, q, q, **given, device="sm_90")
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert explanation.chosen.kernel == kernel
