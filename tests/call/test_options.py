"""What options mean to a caller: forms that are equal, dropout's generator, torch's machinery."""

import math

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import testing
from cutlass_attn._call.operator import ATTENTION

attention = cutlass_attn.attention
DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]
CASE = case_list.Case(
    "options",
    "",
    batch=2,
    heads=4,
    seqlen_q=33,
    seqlen_k=50,
    bias="b11k",
    mask="1hqk",
    alibi="bh",
    sinks=True,
    dropout_p=0.25,
)


def call(device="cpu", case=CASE):
    """q, k, v and the options of a case, in float16."""
    q, k, v, _ = cases.tensors(case, "float16", 64, device)
    return (q, k, v), cases.keywords(case, "float16", device)


def only(**options):
    return call(
        case=case_list.Case("only", "", batch=2, heads=4, seqlen_q=33, seqlen_k=50, **options)
    )


# --- Forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("form", ["k", "qk", "hq1", "b11k", "1h11", "1111", "bhqk"])
def test_broadcast_equals_expanded(name, form):
    (q, k, v), options = only(**{name: form})
    expanded = options[name].expand(2, 4, 33, 50)
    expected = attention(q, k, v, **{name: expanded.contiguous()})
    assert torch.equal(attention(q, k, v, **{name: options[name]}), expected)
    assert torch.equal(attention(q, k, v, **{name: expanded}), expected)


def test_mask_equals_an_infinite_bias():
    (q, k, v), options = only(mask="bhqk")
    bias = torch.zeros(options["mask"].shape).masked_fill(~options["mask"], -torch.inf)
    for a, b in zip(
        attention(q, k, v, **options, return_lse=True),
        attention(q, k, v, bias=bias, return_lse=True),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_alibi_equals_its_bias():
    (q, k, v), options = only(alibi="h")
    distance = torch.arange(50) - (torch.arange(33)[:, None] + 50 - 33)
    bias = -options["alibi_slopes"][:, None, None] * distance.abs()
    torch.testing.assert_close(attention(q, k, v, **options), attention(q, k, v, bias=bias))


def test_sink_equals_a_key_without_value():
    """A key whose logit is the sink and whose value is zero."""
    (q, k, v), options = only(sinks=True)
    bias = torch.zeros(1, 4, 1, 51)
    bias[0, :, 0, 50] = options["sinks"]
    k1, v1 = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
    out, lse = attention(q, k1, v1, bias=bias, return_lse=True)
    with_sink, with_sink_lse = attention(q, k, v, sinks=options["sinks"], return_lse=True)
    torch.testing.assert_close(with_sink, out)
    torch.testing.assert_close(with_sink_lse, lse)


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_lse_with_options(device):
    (q, k, v), options = call(device)
    out = torch.full_like(q, torch.nan)
    result, lse = attention(q, k, v, **options, out=out, return_lse=True)
    assert result is out
    assert torch.equal(out, attention(q, k, v, **options))
    without = options | {"dropout_p": 0.0}
    # On a GPU another kernel runs without dropout.
    torch.testing.assert_close(lse, attention(q, k, v, **without, return_lse=True)[1])


def test_numpy_equals_torch():
    tensors, options = call()
    arrays = [x.numpy() for x in tensors]
    as_arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    np.testing.assert_array_equal(
        attention(*arrays, **as_arrays), attention(*tensors, **options).numpy()
    )
    as_arrays["rng_state"] = as_arrays["rng_state"].view(np.uint64)
    np.testing.assert_array_equal(
        attention(*arrays, **as_arrays), attention(*tensors, **options).numpy()
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["alibi", "softcap", "alibi softcap", "chunk", "alibi chunk"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@cases.needs_gpu
def test_terms_over_several_tiles_of_rows(head_dim, terms, causal):
    """The other cases have one or two tiles of rows, where a mistake may not matter."""
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        torch.randn(1, heads, rows, head_dim, generator=generator).to("cuda", torch.bfloat16)
        for heads, rows in ((4, 700), (2, 900), (2, 900))
    )
    options = {
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.004], device="cuda")},
        "softcap": {"softcap": 2.0},  # logits are on either side of it
        "chunk": {"attention_chunk": 300},
    }
    given = {name: value for term in terms.split() for name, value in options[term].items()}
    attention(q, k, v, causal=causal, **given, verify=True)


# --- Dropout --------------------------------------------------------------------------------------


def kept_weights(dropout_p, rng_state=None, shape=(2, 3, 40, 64), device="cpu"):
    """Which weights were kept: with q = 0 and one-hot values, O is softmax's uniform weights."""
    q = torch.zeros(shape, device=device)
    v = torch.eye(64, device=device).expand(shape[0], shape[1], 64, 64)
    out = attention(q, v, v, softmax_scale=0.0, dropout_p=dropout_p, rng_state=rng_state)
    kept = out > 0
    share = testing.kept_share(dropout_p)
    torch.testing.assert_close(out[kept] * 64 * share, torch.ones_like(out[kept]))
    return kept


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_mask_tells_which_weights(device):
    state = torch.tensor([-123456789123, 2**40 + 5], device=device)
    for dropout_p in (1e-3, 0.25, 0.75):
        kept = kept_weights(dropout_p, state, device=device)
        expected = testing.dropout_mask(state.tolist(), (2, 3, 40, 64), dropout_p)
        np.testing.assert_array_equal(kept.cpu().numpy(), expected)
    assert kept_weights(1.0, state, device=device).sum() == 0


def test_philox_known_answers():
    """Vectors of Random123, the reference implementation: philox4x32 of 10 and of 7 rounds."""
    ones, pi = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for rounds, counter, key, expected in (
        (10, (0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, (ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, pi, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
        (7, (0,) * 4, (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, (ones,) * 4, (ones, ones), "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, pi, (0xA4093822, 0x299F31D0), "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ):
        words = testing.philox4x32(counter, key, rounds)
        assert " ".join(f"{int(word):08x}" for word in words) == expected


@pytest.mark.parametrize("dropout_p", [0.0, 1e-5, 1e-3, 0.1, 0.5, 0.6, 0.999, 1.0])
def test_kept_share_is_what_was_asked_for(dropout_p):
    """To half a step of 2^-15; with it, the expectation of a weight is exact."""
    share = testing.kept_share(dropout_p)
    assert share * 2**15 == round(share * 2**15)
    assert abs(share - (1 - dropout_p)) <= 2**-16 or dropout_p == share == 1.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_part_drops_what_the_whole_call_drops(device, dtype):
    """Heads, queries and keys from some on: their outputs merge to those of the whole call."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 6, 96, 32, device=device, dtype=dtype) for _ in range(3))
    whole = {"dropout_p": 0.4, "rng_state": torch.tensor([3, 9], device=device)}
    due = attention(q, k, v, **whole)[:, 2:5, 48:]
    parts = []
    for keys in (slice(0, 64), slice(64, 96)):
        place = torch.tensor([6, 2, 48, keys.start], device=device)
        state = torch.cat([whole["rng_state"], place])
        given = q[:, 2:5, 48:], k[:, 2:5, keys], v[:, 2:5, keys]
        parts.append(attention(*given, dropout_p=0.4, rng_state=state, return_lse=True))
    (out, lse), (more, lse_of_more) = parts
    weight = torch.sigmoid(lse - lse_of_more)[..., None]
    found = out * weight + more * (1 - weight)
    atol = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(found, due.float(), atol=atol, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_that_begins_within_a_draw(device):
    """Refused where its place is on the host; GPU kernels begin with the draw, as the mask does."""
    state, shape = [3, 9, 6, 2, 55, 70], (1, 2, 20, 40)
    mask = testing.dropout_mask(state, shape, 0.5)
    assert (mask == testing.dropout_mask([3, 9, 6, 2, 48, 64], shape, 0.5)).all()
    q = torch.zeros(1, 2, 20, 40, device=device)
    given = q, q.new_zeros(1, 2, 40, 40), torch.eye(40, device=device).repeat(1, 2, 1, 1)
    options = {"dropout_p": 0.5, "rng_state": torch.tensor(state, device=device)}
    if device == "cpu":
        with pytest.raises(ValueError, match=r"rng_state\[4\] is 55, allowed: a multiple of 16"):
            attention(*given, **options)
    else:
        assert ((attention(*given, **options) != 0).cpu().numpy() == mask).all()


def test_dropout_mask_takes_the_states_of_a_call():
    """Signed or not, of torch or numpy; and refuses other shapes as a call does."""
    shape = (1, 2, 3, 40)
    due = testing.dropout_mask((5, 2**64 - 1), shape, 0.5)
    state = torch.tensor([5, 2**64 - 1], dtype=torch.uint64)
    for given in (state, state.numpy(), torch.tensor([5, -1])):
        assert (testing.dropout_mask(given, shape, 0.5) == due).all()
    for given in (torch.tensor([[5, 7]]), [5], 5):
        with pytest.raises(ValueError, match=r"rng_state must have shape \(2,\), a seed and"):
            testing.dropout_mask(given, shape, 0.5)


@pytest.mark.parametrize("dropout_p", [1e-3, 0.1, 0.5, 0.9])
def test_dropout_statistics(dropout_p):
    """Rates over everything, per key and per query, and of neighbours, within 5 sigma; how often a
    group of 16 neighbours has so many dropped, as chi-square has it of a binomial.
    """
    n, heads, queries, keys = 2, 8, 256, 256
    kept = testing.dropout_mask((7, 11), (n, heads, queries, keys), dropout_p)
    p = 1 - dropout_p

    def check(sample, mean):
        sigma = np.sqrt(mean * (1 - mean) / sample.size)
        assert abs(sample.mean() - mean) < 5 * sigma

    check(kept, p)
    # The tail of the binomial that has less than 20 groups is one class.
    groups = (~kept).reshape(-1, 16).sum(1)
    chance = [math.comb(16, i) * p ** (16 - i) * dropout_p**i for i in range(17)]
    expected = groups.size * np.array(chance)
    found = np.bincount(groups, minlength=17)
    rare = expected < 20
    classes = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(found[~rare], found[rare].sum())
    chi_square = ((counts - classes) ** 2 / classes).sum()
    degrees = len(classes) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 10
    for key in range(64):
        check(kept[..., key], p)
        check(kept[:, :, key], p)
    for dimension in range(4):
        after = np.roll(kept, 1, axis=dimension)
        if kept.shape[dimension] > 2:  # with two entries every pair would count twice
            check(kept & after, p * p)
    for offset in (1, 8, 16, 32):  # of keys that share a word, numbers, a draw, a block
        check(kept[..., offset:] & kept[..., :-offset], p * p)
    for offset in (8, 16):  # of queries that share numbers, or nothing
        check(kept[:, :, offset:] & kept[:, :, :-offset], p * p)
    assert (testing.dropout_mask((7, 12), kept.shape, dropout_p) != kept).any()
    assert (testing.dropout_mask((8, 11), kept.shape, dropout_p) != kept).any()


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_anew_and_follows_manual_seed(device):
    torch.manual_seed(5)
    first, second = (kept_weights(0.5, device=device) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(kept_weights(0.5, device=device), first)


def test_dropout_of_numpy_arrays_draws_anew():
    q = np.zeros((1, 1, 8, 64), np.float32)
    v = np.ones_like(q)
    results = [attention(q, v, v, dropout_p=0.5) for _ in range(2)]
    assert (results[0] != results[1]).any()


def test_rng_state_is_ignored_without_dropout():
    (q, k, v), _ = only()
    assert torch.equal(attention(q, k, v, rng_state=torch.zeros(2).long()), attention(q, k, v))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.key, marks=cases.needs(variant))
        for variant in cases.compiled_variants()
        if "bias" in variant.options and variant.head_dim in (0, 64)
    ],
)
def test_a_low_bias_is_a_mask(variant):
    """-1e9, as many models write it: before keys that are seen, and before none."""
    generator = torch.Generator().manual_seed(3)
    dtype = getattr(torch, variant.dtype)
    q, k, v = (
        torch.randn(2, 2, rows, 64, generator=generator).to(variant.device, dtype)
        for rows in (3, 150, 150)
    )
    seen = torch.zeros(2, 1, 1, 150, dtype=torch.bool)
    seen[0, ..., 70:] = True
    bias = torch.where(seen, 0.0, -1e9).to(variant.device)
    out = attention(q, k, v, bias=bias, **cases.own(variant))
    masked = attention(q, k, v, mask=seen.to(variant.device), **cases.own(variant))
    torch.testing.assert_close(out[0], masked[0], atol=1e-3, rtol=2e-2)
    average = v[1].float().mean(1, keepdim=True).expand(2, 3, 64)
    atol = 2e-2 if variant.quantize in ("int8", "fp8") else 2e-3  # V in 8 bits
    torch.testing.assert_close(out[1].float(), average, atol=atol, rtol=1e-2)


HALVES = torch.zeros(800).half()


@pytest.mark.skipif(cutlass_attn.build_info().simt != "all", reason="it has few simt kernels")
@pytest.mark.parametrize(
    ("bias", "reason"),
    [
        (
            HALVES[:630].view(9, 70),
            "bias's query stride is 70 elements, allowed: multiples of 8 from",
        ),
        (HALVES[:648].view(72, 9).T, "bias's key stride is 9 elements, allowed: 1"),
        (HALVES[1:649].view(9, 72), "bias's address is not a multiple of 16 bytes"),
        (HALVES[:648].view(9, 72).float(), "needs a bias of float16, got float32"),
        (HALVES[:648].view(9, 72), ""),
        (HALVES[:720].view(9, 80)[:, :70], ""),
    ],
)
def test_what_keeps_tma_from_a_bias(bias, reason):
    q, k = (torch.zeros(1, 1, rows, 64).half() for rows in bias.shape)
    verdicts = cutlass_attn.explain(q, k, k, bias=bias, kernel="sm90/bias-simt").verdicts
    [found] = [x.reason for x in verdicts if x.variant.key == "sm90/bias-simt/f16/d64/128x128x8"]
    assert found.startswith(reason) and bool(found) == bool(reason)


@cases.needs_gpu
def test_graph_replays_draw_anew():
    q = torch.zeros(1, 2, 64, 64, device="cuda", dtype=torch.float16)
    v = torch.eye(64, device="cuda", dtype=torch.float16).expand_as(q)
    out = torch.empty_like(q)
    attention(q, v, v, dropout_p=0.5, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, v, v, dropout_p=0.5, out=out)
    seen = []
    torch.manual_seed(9)
    for _ in range(3):
        graph.replay()
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    torch.manual_seed(9)
    graph.replay()
    assert torch.equal(out, seen[0])


# --- torch's machinery, verify, explain -----------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_compile_with_options(device, dynamic):
    (q, k, v), options = call(device)

    def model(q, k, v, **options):
        return attention(q * 2, k, v, return_lse=True, **options)

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for a, b in zip(compiled(q, k, v, **options), model(q, k, v, **options), strict=True):
        assert torch.equal(a, b)


def test_compile_draws_dropout_anew():
    (q, k, v), options = only(dropout_p=0.5)
    del options["rng_state"]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = (compiled(q, k, v, **options) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(compiled(q, k, v, **options), first)


@pytest.mark.parametrize("device", DEVICES)
def test_operator_with_options(device):
    tensors, options = call(device)
    args = ATTENTION.schema.arguments(**dict(zip("qkv", tensors)), **options, return_lse=True)
    torch.library.opcheck(ATTENTION.forward, args)


def test_fake_tensors_with_options():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        (q, k, v), options = call()
        fake = {n: mode.from_tensor(x) for n, x in options.items() if isinstance(x, torch.Tensor)}
        out = attention(*map(mode.from_tensor, (q, k, v)), **options | fake)
        assert out.shape == q.shape and isinstance(out, type(fake["bias"]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_a_bias():
    (q, k, v), options = only(bias="bhqk")
    stacked = torch.stack([options["bias"], -options["bias"]])
    out = torch.vmap(lambda bias: attention(q, k, v, bias=bias))(stacked)
    for result, bias in zip(out, stacked, strict=True):
        assert torch.equal(result, attention(q, k, v, bias=bias))


def test_lazily_negated_bias():
    q = torch.randn(1, 2, 20, 16)
    bias = torch.randn(20, 20)
    expected = attention(q, q, q, bias=-bias)
    assert torch.equal(attention(q, q, q, bias=torch._neg_view(bias)), expected)


def test_verify_takes_options_into_account():
    if cutlass_attn.build_info().simt == "none":
        pytest.skip("on the CPU the scalar baseline is a simt kernel")
    (q, k, v), options = call()
    assert torch.equal(attention(q, k, v, **options, verify=True), attention(q, k, v, **options))
    del options["rng_state"]  # both kernels get the one that is drawn
    attention(q, k, v, **options, verify=True)


def test_explain_names_options():
    (q, k, v), options = call()
    explanation = cutlass_attn.explain(q, k, v, **options)
    assert explanation.chosen.kernel == "cpu"
    assert (
        "bias (2, 1, 1, 50), mask (1, 4, 33, 50), alibi_slopes (2, 4), sinks (4,), dropout_p 0.25"
        in str(explanation)
    )
    del options["rng_state"]
    assert cutlass_attn.explain(q, k, v, **options).chosen.kernel == "cpu"


def test_explain_takes_options_without_memory():
    """An option on the "meta" device must not pass for an absent one."""
    (q, k, v), options = call()
    options["attention_chunk"] = 3
    meta = {n: x.to("meta") for n, x in options.items() if isinstance(x, torch.Tensor)}
    tensors = (x.to("meta") for x in (q, k, v))
    with_options = cutlass_attn.explain(*tensors, **options | meta, device="sm_89")
    on_gpu = (x for x in with_options if x.variant.device == "cuda")
    reasons = {x.variant.kernel: x.reason for x in on_gpu}
    assert reasons
    for kernel, taken in cases.OPTIONS.items():
        if kernel in reasons:
            for option in cases.ALL_OPTIONS - taken:
                assert option in reasons[kernel]
