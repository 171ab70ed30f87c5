"""A cache of float8_e4m3fn: what is written into it, and calls over it. tests/serving.py has the
cases that kernels are judged by."""

import cutlass_attn
import numpy as np
import pytest
from cases import needs_gpu, torch
from cutlass_attn import append_kv, attention, attention_decode, attention_varlen
from serving import int32, rotated

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FP8 = torch.float8_e4m3fn


def stored(x, scale):
    """By the definition: the nearest number, ties to even, up to 448."""
    return (x.float() * (1.0 / scale)).clamp(-448, 448).to(FP8)


def bits(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("columns", [16, 7])
def test_append_rounds_once(device, dtype, columns):
    """Numbers of all sizes, beyond 448 too, and NaN."""
    scale = torch.tensor([0.5, 0.003], device=device)
    size = torch.logspace(-5, 4, 40 * 2 * columns, device=device).view(40, 2, columns)
    k = (size * torch.randn_like(size).sign()).to(getattr(torch, dtype))
    v = k.flip(0).clone()
    v[3, 1, 2] = torch.nan
    v[4, 0, 1] = -torch.inf
    caches = [torch.zeros(3, 16, 2, columns, device=device).to(FP8) for _ in range(2)]
    slots = torch.randperm(48, device=device)[:40]
    append_kv(k, v, *caches, slots, k_scale=scale, v_scale=0.25)
    for x, cache, factor in ((k, caches[0], scale[:, None]), (v, caches[1], 0.25)):
        expected = torch.zeros_like(cache)
        bits(expected.view(48, 2, columns))[slots] = bits(stored(x, factor))
        mine, theirs = bits(cache), bits(expected)
        is_nan = cache.float().isnan()
        assert torch.equal(is_nan, expected.float().isnan())
        assert torch.equal(mine[~is_nan], theirs[~is_nan])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [None, 16])
def test_new_keys_join_in_8_bits(device, page):
    """Rotated, divided and rounded once; the call then sees what is stored."""
    torch.manual_seed(1)
    pages, size = (3, 40) if page is None else (12, page)
    table = (
        {} if page is None else {"block_table": torch.randperm(12, device=device).view(3, 4).int()}
    )
    q = torch.randn(3, 2, 4, 16, device=device)
    caches = [torch.randn(pages, size, 2, 16, device=device).to(FP8) for _ in range(2)]
    new = [torch.randn(3, 2, 2, 16, device=device) for _ in range(2)]
    angles = torch.rand(64, 8, device=device)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    lengths = int32([30, 0, 7], device)
    scales = {"k_scale": torch.tensor([0.1, 0.2], device=device), "v_scale": 0.5}
    wide = [x.float() for x in caches]
    wide[0] *= scales["k_scale"][:, None]
    wide[1] *= 0.5
    out, lse = attention_decode(
        q,
        *caches,
        lengths,
        k_new=new[0],
        v_new=new[1],
        **rotary,
        **table,
        **scales,
        return_lse=True,
    )
    # The same in float32, with the new rows rounded afterwards.
    exact = attention_decode(q, *wide, lengths, k_new=new[0], v_new=new[1], **rotary, **table)
    changed = bits(caches[0]) != bits(wide[0].div(scales["k_scale"][:, None]).to(FP8))
    assert not changed.any()
    now = [caches[0].float() * scales["k_scale"][:, None], caches[1].float() * 0.5]
    torch.testing.assert_close(out, exact, atol=0.1, rtol=0.1)
    assert not torch.equal(out, exact)
    places = (lengths[:, None] + torch.arange(2, device=device)).long()
    turned = rotated(q, angles.cos(), angles.sin(), places, True)
    stored, stored_lse = attention_decode(turned, *now, lengths + 2, **table, return_lse=True)
    torch.testing.assert_close(out, stored)
    torch.testing.assert_close(lse, stored_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nan_in_the_cache_reaches_who_sees_it(device, dtype):
    """As in any other dtype: a NaN of K its key's queries, one of V a column."""
    q = torch.randn(1, 3, 2, 64, device=device, dtype=getattr(torch, dtype))
    k, v = (torch.randn(1, 40, 2, 64, device=device).to(FP8) for _ in range(2))
    bits(k)[0, 39, 0, 5] = 0x7F
    bits(v)[0, 38, 1, 9] = 0xFF
    lengths = int32([40], device)
    out = attention_decode(q, k, v, lengths)
    assert out[0, 2, 0].isnan().all() and not out[0, :2, 0].isnan().any()
    assert out[0, 1:, 1, 9].isnan().all()
    assert not out[0, :, 1, torch.arange(64, device=device) != 9].isnan().any()


def test_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = np.random.default_rng(1).standard_normal((2, 1, 4, 16)).astype(np.float32)
    cache = np.random.default_rng(2).standard_normal((2, 30, 2, 16)).astype(ml_dtypes.float8_e4m3fn)
    lengths = np.array([30, 7], np.int32)
    out = attention_decode(q, cache, cache, lengths, k_scale=0.5)
    wide = cache.astype(np.float32)
    np.testing.assert_allclose(
        out, attention_decode(q, wide * np.float32(0.5), wide, lengths), rtol=1e-5, atol=1e-6
    )


def test_operators_take_it():
    q = torch.randn(2, 1, 4, 16)
    cache = torch.randn(2, 30, 2, 16).to(FP8)
    lengths, new = int32([20, 7]), torch.randn(2, 1, 2, 16)
    expected = attention_decode(q, cache.clone(), cache.clone(), lengths, k_new=new, v_new=new)

    def step(q, k, v, lengths, new):
        return attention_decode(q, k, v, lengths, k_new=new, v_new=new, k_scale=1.0)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, cache.clone(), cache.clone(), lengths, new), expected)


def reasons(explanation, kernel):
    """Why each variant of the kernel does not run the call; "" of one that does."""
    found = [x.reason for x in explanation if x.variant.kernel == kernel]
    assert found
    return found


@pytest.mark.parametrize("key", ["sm89/decode_fp8", "sm80/decode_fp8", "sm80/paged_fp8"])
def test_which_kernel(key):
    """By rows of a call, and by what the GPU has."""
    q = torch.empty(2, 40 if "paged" in key else 1, 8, 128, device="meta", dtype=torch.float16)
    k = torch.empty(50, 16, 2, 128, device="meta", dtype=FP8)
    options = {
        "cache_seqlens": torch.empty(2, device="meta", dtype=torch.int32),
        "block_table": torch.empty(2, 20, device="meta", dtype=torch.int32),
        "k_scale": torch.empty(2, device="meta"),
    }
    device = "sm_80" if key == "sm80/decode_fp8" else "sm_89"
    explanation = cutlass_attn.explain(q, k, k, **options, device=device)
    assert all("does not implement fp8_kv" in x for x in reasons(explanation, "sm80/decode"))
    dense = cutlass_attn.explain(
        q, k.half(), k.half(), device=device, **{**options, "k_scale": None}
    )
    assert all("runs only calls with fp8_kv" in x for x in reasons(dense, key))
    # Nothing of the call keeps it from running, but perhaps the build, if it leaves it out.
    given = reasons(explanation, key)
    assert "" in given or any("not compiled" in x for x in given)
    if cutlass_attn.build_info().cuda and "" in given:
        assert explanation.chosen.kernel == key


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda q, k, h: attention_decode(q, k, h, int32([1])),
            "k_cache must be torch.float16 like q"
            ", or float8_e4m3fn if it is that of v_cache, got torch.float8_e4m3fn",
        ),
        (lambda q, k, h: attention_decode(q, h, k, int32([1])), "v_cache must be torch.float16"),
        (lambda q, k, h: attention_decode(k, k, k, int32([1])), "q must be float16, bfloat16"),
        (lambda q, k, h: attention(q, k, k), "q, k and v must have one dtype"),
        (lambda q, k, h: append_kv(k[0], k[0], k, k, torch.tensor([0])), "k must be float16"),
        (
            lambda q, k, h: append_kv(h[0], h[0], k, h, torch.tensor([0])),
            "k_cache must be torch.float16",
        ),
        (
            lambda q, k, h: attention_decode(q, k, k, int32([1]), k_new=k[:, :1], v_new=k[:, :1]),
            "k_new must be torch.float16 like q",
        ),
        (
            lambda q, k, h: attention_decode(q.double(), k, k, int32([1])),
            "k and v are float8_e4m3fn, allowed with q of float64: float64 like q",
        ),
    ],
)
def test_errors(wrong, message):
    q = torch.zeros(1, 1, 2, 16).half()
    half = torch.zeros(1, 9, 2, 16).half()
    with pytest.raises((ValueError, TypeError), match=message):
        wrong(q, half.to(FP8), half)


def test_no_gradient():
    q = torch.randn(5, 2, 16, requires_grad=True)
    k = torch.randn(5, 2, 16).to(FP8)
    out = attention_varlen(q, k, k, int32([0, 5]))
    with pytest.raises(ValueError, match="k and v are float8_e4m3fn, allowed in a backward pass"):
        out.sum().backward()


def test_one_split_gives_the_same_bits():
    """Of the kernel for a cache in 8 bits, as of others."""
    keys = [
        x.key
        for x in cutlass_attn.variants()
        if x.kernel == "sm80/decode_fp8-simt" and x.compiled and x.head_dim == 64
    ]
    if not keys:
        pytest.skip("this build has no simt kernels")
    q = torch.randn(3, 1, 4, 64)
    k, v = (torch.randn(3, 300, 2, 64).to(FP8) for _ in range(2))
    lengths = int32([300, 17, 0])
    for key in keys:
        dtype = torch.float16 if "/f16/" in key else torch.bfloat16
        together = attention_decode(q.to(dtype), k, v, lengths, kernel=key, num_splits=1)
        for b in range(3):
            one = slice(b, b + 1)
            alone = attention_decode(
                q[one].to(dtype), k[one], v[one], lengths[one], kernel=key, num_splits=1
            )
            assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("dims", [(48, 32), (16, 64), (112, 80)])
@pytest.mark.parametrize("kernel", ["sm80/decode_fp8-simt", "sm80/paged_fp8-simt"])
def test_rows_narrower_than_the_kernels(kernel, dims):
    """Whole pieces of 16 bytes; others are refused."""
    if cutlass_attn.build_info().simt != "all":
        pytest.skip("this build has few simt kernels")
    q = torch.randn(2, 2 if "decode" in kernel else 40, 4, dims[0]).half()
    k, v = (torch.randn(20, 16, 2, dim).to(FP8) for dim in dims)
    options = {
        "block_table": torch.randperm(20).view(2, 10).int(),
        "k_scale": torch.tensor([0.3, 2.0]),
        "v_scale": torch.tensor([0.5, 1.5]),
    }
    lengths = int32([150, 41])
    ours, theirs = (
        attention_decode(q, k, v, lengths, **options, kernel=name) for name in (kernel, "cpu")
    )
    torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.01)
    odd = k[..., :8], v[..., :8]
    with pytest.raises(ValueError, match="needs head_dim a multiple of 16 up to 64, got 8"):
        attention_decode(q[..., :8], *odd, lengths, **options, kernel=kernel)
