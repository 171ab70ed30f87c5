"""Splits of a fixed number of keys: right, and the same bits for a sequence whatever it is with."""

import cases
import cutlass_attn
import pytest
import serving
import test_decode
import test_varlen
from cases import torch
from cutlass_attn import attention_decode, attention_varlen
from serving import Batch, int32

CASE = Batch("step", "", (3,) * 4, (200, 1, 0, 331), page=16, causal=True, room=16)
SPLITTING = [v for v in cases.compiled_variants(special=True) if v.max_rows]


def parameters(which):
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=cases.needs(variant))
        for variant in SPLITTING
        for case in which
        if serving.fits(variant, case, case.seqlens_q[0])
    ]


@pytest.mark.parametrize(("variant", "case"), parameters([*serving.DECODE, CASE]))
def test_against_the_oracle(variant, case):
    head_dim = case.head_dim or variant.head_dim
    args, options = test_decode.call_of(case, variant.dtype, head_dim, variant.device)
    out, lse = attention_decode(
        *args, **options, return_lse=True, kernel=variant.key, split_size=64
    )
    serving.judge(
        case,
        variant.dtype,
        head_dim,
        [serving.to_numpy(x.transpose(0, 1)) for x in out],
        [x.cpu().numpy() for x in lse],
    )


# Windows and chunks that begin inside of a tile of keys, and span several splits.
MASKS = {
    "causal": {},
    "window": {"window": (150, 0)},
    "window_both": {"causal": False, "window": (70, 9)},
    "chunk": {"attention_chunk": 90},
    "chunk_both": {"causal": False, "attention_chunk": 90},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, id=v.key, marks=cases.needs(v)) for v in SPLITTING if not v.needs],
)
def test_the_same_bits_in_any_batch_and_any_cache(variant, name):
    args, options = test_decode.call_of(CASE, variant.dtype, variant.head_dim, variant.device)
    table = options.pop("block_table")
    options |= {"split_size": 64, "kernel": variant.key, "return_lse": True, **MASKS[name]}
    together = attention_decode(*args, **options, block_table=table)
    whole = attention_decode(*args, **{**options, "split_size": 0}, block_table=table, num_splits=1)
    q, k, v, lengths = args
    for b in range(CASE.batch):
        one = slice(b, b + 1)
        used = max(1, -(-int(lengths[b]) // 16))
        for own in (table[one], table[one, :used]):
            alone = attention_decode(q[one], k, v, lengths[one], **options, block_table=own)
            for x, y, z in zip(alone, together, whole, strict=True):
                assert torch.equal(x[0], y[b])
                torch.testing.assert_close(y[b], z[b], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, id=v.key, marks=cases.needs(v)) for v in SPLITTING if not v.needs],
)
@pytest.mark.parametrize("options", [{"split_size": 64}, {"num_splits": 3}])
def test_packed_sequences(variant, options):
    case = Batch("few", "", (3, 0, 1, 2), (200, 4, 0, 331), page=16, causal=True)
    args, more = test_varlen.call_of(case, variant.dtype, variant.head_dim, variant.device)
    out = attention_varlen(*args, **more, **options, kernel=variant.key)
    ends = args[3].tolist()
    expected = serving.expected(case, variant.dtype, variant.head_dim)
    for b, x in enumerate(expected):
        rows = out[ends[b] : ends[b + 1]].transpose(0, 1)[None].float().cpu()
        torch.testing.assert_close(rows.double(), torch.from_numpy(x.exact), rtol=4e-3, atol=4e-3)


def test_what_explain_says():
    q, cache = torch.zeros(3, 1, 8, 64).half(), torch.zeros(3, 1000, 2, 64).half()
    call = {"cache_seqlens": int32([1, 2, 3]), "device": "sm_89"}
    explanation = cutlass_attn.explain(q, cache, cache, **call, split_size=128)
    if explanation.chosen is None:
        pytest.skip("this build has no GPU kernels")
    assert explanation.chosen.kernel == "sm80/decode"
    assert explanation.splits == 8 and "keys in 8 splits" in str(explanation)
    windowed = cutlass_attn.explain(q, cache, cache, **call, split_size=128, window=(255, 0))
    assert windowed.splits == 3  # as a window may begin anywhere


def test_verify_and_compile():
    args, options = test_decode.call_of(CASE, "float16", 64, "cpu")
    expected = attention_decode(*args, **options, split_size=128)
    actual = attention_decode(*args, **options, split_size=128, verify=True)
    assert torch.equal(actual, expected)
    torch.compiler.reset()
    step = torch.compile(attention_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(*args, **options, split_size=128), expected)

    packed = torch.randn(9, 2, 16, requires_grad=True)
    offsets = int32([0, 4, 9])
    attention_varlen(packed, packed, packed, offsets, split_size=64).sum().backward()
    assert packed.grad is not None  # a backward pass has no splits


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split_size": 100}, ValueError, "split_size is 100, allowed: 0, or a multiple of 64"),
        ({"split_size": -64}, ValueError, "split_size is -64, allowed: 0 to 2147483647"),
        ({"split_size": 64.0}, TypeError, "split_size must be an int, got 64.0"),
        (
            {"split_size": 64, "num_splits": 2},
            ValueError,
            "split_size is 64 and num_splits 2; allowed: one of them",
        ),
        (
            {"split_size": 64},
            ValueError,
            "split_size is 64, so that up to 20032 keys are 313 splits; allowed: up to 256 splits, "
            "a split_size of 128 or more",
        ),
    ],
)
def test_errors(options, error, message):
    rows = 20_001 if len(options) == 1 and options["split_size"] == 64 else 40
    cache = torch.zeros(1, 1, 1, 16).expand(2, rows, 1, 16)
    with pytest.raises(error, match=message):
        attention_decode(torch.zeros(2, 1, 1, 16), cache, cache, 5, **options)
    with pytest.raises(TypeError, match="'split_size'"):
        cutlass_attn.attention(*[torch.zeros(1, 1, 4, 16)] * 3, split_size=64)


LATENT = [
    v
    for v in cases.compiled_variants(special=True)
    if "/latent" in v.kernel and "ds_mla" not in v.kernel
]


@pytest.mark.parametrize(
    "variant", [pytest.param(v, id=v.key, marks=cases.needs(v)) for v in LATENT]
)
def test_latents_have_the_same_bits_in_any_batch(variant):
    """Whose splits are merged in groups, and then the groups."""
    columns = variant.head_dim
    dtype, device = getattr(torch, variant.dtype), variant.device
    kv = torch.randn(3, 1400, 1, columns, dtype=dtype, device=device)
    q = torch.randn(3, 2, 16, columns, dtype=dtype, device=device)
    lengths = [1400, 130, 333]
    options = {"causal": True, "softmax_scale": 0.05, "kernel": variant.key}

    def run(at, split_size):
        k = kv[at, : max(lengths[at])]
        used = int32(lengths[at], device)
        return attention_decode(q[at], k, k[..., :512], used, split_size=split_size, **options)

    together = run(slice(None), 64)
    ulp = torch.finfo(dtype).eps  # two roundings of nearly equal numbers differ by one at most
    torch.testing.assert_close(together, run(slice(None), 0), rtol=ulp, atol=4e-3)
    for b in range(3):
        assert torch.equal(run(slice(b, b + 1), 64)[0], together[b])
