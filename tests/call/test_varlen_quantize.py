"""`quantize` of attention_varlen: each sequence is rounded by itself, so that its result is bit by
bit that of a dense call of it alone, whatever it is packed with."""

import logging
import re
from dataclasses import replace

import cases
import cutlass_attn
import numpy as np
import pytest
import serving
from cases import torch
from cutlass_attn import attention, attention_varlen, explain, prequantize
from cutlass_attn._call import serving_operator
from cutlass_attn._call.packed import dense_calls
from serving import Batch, int32, offsets
from test_varlen import call_of

RAGGED = ((70, 0, 3, 131, 1, 65), (130, 4, 0, 129, 65, 1))
SHORT = ((3, 0, 20, 1, 5), (67, 4, 131, 64, 0))  # of which heads share tiles, alone and packed
# Heads share no tile, so that rows meet the same rows in a dense call.
CASES = [
    Batch("ragged", "tiles of 64 end with each sequence", *RAGGED, heads=2),
    Batch("causal", "bottom-right in each", *RAGGED, heads=2, causal=True),
    Batch("more_queries", "first rows see no key", (70, 9), (9, 3), heads=2, causal=True),
    Batch("padded", "offsets repeat", *RAGGED, heads=2, spare_rows=9, spare_entries=3),
    Batch("window", "both ends move", (160, 33), (190, 70), heads=2, window=(39, 4)),
    Batch("softcap", "needs q . shift", *RAGGED, heads=2, softcap=2.5, softmax_scale=0.3),
    Batch("sinks", "where no key is, too", *RAGGED, heads=2, sinks=True, causal=True),
    Batch("used", "NaN behind each sequence", *RAGGED, heads=2, room=3, causal=True),
    Batch("halves", "K and V interleaved", *RAGGED, heads=2, halves=True),
    Batch("gqa", "heads share tiles", *SHORT, causal=True, sinks=True, room=61),
    Batch("mqa", "one KV head", *SHORT, heads=5, heads_kv=1, spare_rows=2),
    Batch("chunk", "from each one's key 0", *RAGGED, heads=2, attention_chunk=37, causal=True),
    Batch("alibi", "a slope per entry and head", *RAGGED, heads=2, alibi="bh", causal=True),
    Batch("one", "a dense call", (130,), (200,), heads=2),
    Batch("long", "more tiles than a block rounds", (3, 5), (1100, 30), heads=2, sinks=True),
    Batch("none", "no sequences", (), ()),
    Batch("empty", "none with a row", (0, 0), (0, 0)),
    Batch("no_keys", "rows of zeros", (5, 9), (0, 0), sinks=True),
]
VARIANTS = [
    v
    for v in cases.compiled_variants(special=True)
    if v.quantize and "varlen" in v.options and v.head_dim in (0, 64, 128)
]
MODES = ["qk", "int8", "fp8"]


def dense_key(variant):
    """Of the kernel of dense calls with the same tile."""
    return variant.key.replace("_varlen", "")


def own(variant):
    return {"kernel": variant.key, "quantize": variant.quantize}


def alone(variant, args, options):
    """Each sequence in a dense call: its rows, result and log-sum-exp."""
    names = ("cu_seqlens_q", "cu_seqlens_k")
    given = {**options, **dict(zip(names, args[3:], strict=True))}
    for _, rows, one in dense_calls(*args[:3], given):
        same = {**one.options, **own(variant), "kernel": dense_key(variant)}
        out, lse = attention(one.q, one.k, one.v, **same, return_lse=True)
        yield rows, out[0], lse[0]


def pairs():
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=cases.needs(variant))
        for variant in VARIANTS
        for case in CASES
        if serving.fits(variant, case, 1, variant.quantize)
        and (variant.head_dim < 128 or case.name in ("causal", "gqa"))
    ]


@pytest.mark.parametrize(("variant", "case"), pairs())
def test_sequences_equal_dense_calls(variant, case):
    """Of memory that no sequence owns, which is NaN, nothing is there in the result."""
    args, options = call_of(case, variant.dtype, variant.head_dim or 64, variant.device)
    out, lse = attention_varlen(*args, **options, **own(variant), return_lse=True)
    rest = torch.ones(len(out), dtype=torch.bool)
    for rows, due, due_lse in alone(variant, args, options):
        assert torch.equal(out[rows], due)
        assert torch.equal(lse[:, rows], due_lse)
        rest[rows] = False
    assert (out[rest] == 0).all() and (lse[:, rest] == -torch.inf).all()
    again = attention_varlen(*args, **options, **own(variant))
    assert torch.equal(again, out)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.key)
def test_error_against_what_was_given(variant):
    """Of the order that rounding explains, where each sequence's keys have a mean of their own."""
    case = Batch("biased", "", (150, 64, 9), (200, 64, 130), heads=2, causal=True)
    args, options = call_of(case, variant.dtype, variant.head_dim or 64, variant.device)
    _, k, _, cu_q, cu_k = args
    for b, shift in enumerate((8.0, -8.0, 0.0)):
        k[cu_k[b] : cu_k[b + 1]] += shift
    out = attention_varlen(*args, **options, **own(variant)).float()
    exact = attention_varlen(*(x.float() for x in args[:3]), cu_q, cu_k, **options)
    error = (out - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.001 < error < {"qk": 0.02, "int8": 0.024, "fp8": 0.05}[variant.quantize], error


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if "alibi_slopes" in v.options], ids=lambda v: v.key
)
def test_rows_that_are_not_aligned(variant):
    case = Batch("odd", "", (70, 3, 9), (130, 65, 1), causal=True)
    args, options = call_of(case, variant.dtype, variant.head_dim or 64, variant.device)
    due = attention_varlen(*args, **options, **own(variant))
    odd = [torch.cat([x, x[..., :1]], dim=2)[..., : x.shape[2]] for x in (*args[:3], due)]
    attention_varlen(*odd[:3], *args[3:], **options, **own(variant), out=odd[3].zero_())
    assert torch.equal(odd[3], due)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.key)
def test_neighbours_are_not_seen(variant):
    """Of a tile of 64 keys that reaches into the next sequence, and of rows before the first."""
    case = Batch("neighbours", "", (70, 90, 40), (50, 100, 70), heads=2)
    args, _ = call_of(case, variant.dtype, variant.head_dim or 64, variant.device)
    q, k, v, cu_q, cu_k = args
    spare = torch.full_like(k[:5], torch.nan)
    k, v = torch.cat([spare, k, spare]), torch.cat([spare, v, spare])
    out = attention_varlen(*args, **own(variant))
    cu_k = cu_k + 5
    assert torch.equal(attention_varlen(q, k, v, cu_q, cu_k, **own(variant)), out)
    for bad in (torch.nan, 60000.0):
        k[55:155], v[55:155] = bad, bad  # all of the second
        found = attention_varlen(q, k, v, cu_q, cu_k, **own(variant))
        assert torch.equal(found[:70], out[:70]) and torch.equal(found[160:], out[160:])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.key)
def test_rows_before_the_first_sequence(variant):
    """More of them than a tile has."""
    case = Batch("late", "", (70, 20), (130, 9), heads=2)
    (q, k, v, cu_q, cu_k), _ = call_of(case, variant.dtype, variant.head_dim or 64, variant.device)
    out = attention_varlen(q, k, v, cu_q, cu_k, **own(variant))
    spare = torch.full((300, 2, q.shape[2]), torch.nan).to(q)
    q, k, v = (torch.cat([spare, x]) for x in (q, k, v))
    late = torch.full_like(q, 7.0)
    attention_varlen(q, k, v, cu_q + 300, cu_k + 300, out=late, **own(variant))
    assert torch.equal(late[300:], out) and (late[:300] == 7.0).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.key)
def test_lengths_are_read_where_the_kernel_runs(variant):
    """The same arrays with other lengths: nothing of the call is of its first lengths."""
    first = Batch("first", "", (70, 0, 20), (130, 9, 61), heads=2, causal=True)
    args, options = call_of(first, variant.dtype, variant.head_dim or 64, variant.device)
    attention_varlen(*args, **options, **own(variant))
    for to, lengths in zip(args[3:], ((3, 60, 27), (1, 199, 0)), strict=True):
        to.copy_(offsets(lengths))
    options["seqused_k"] = int32([1, 190, 0], variant.device)
    out = attention_varlen(*args, **options, **own(variant))
    for rows, due, _ in alone(variant, args, options):
        assert torch.equal(out[rows], due)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alibi", [None, "h"])
def test_a_graph_replays_with_other_lengths(mode, alibi):
    case = Batch(
        "graph", "", (130, 5, 1), (240, 70, 9), causal=True, spare_entries=2, alibi=alibi, room=2
    )
    args, options = call_of(case, "float16", 64, "cuda")
    if mode == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 products from compute capability 8.9 on")
    options |= {"quantize": mode, "return_lse": True}
    out = torch.empty_like(args[0])
    attention_varlen(*args, **options, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attention_varlen(*args, **options, out=out)
    args[1].nan_to_num_(), args[2].nan_to_num_()
    args[3].copy_(offsets([3, 0, 20, 110, 1]))
    args[4].copy_(offsets([65, 3, 0, 250, 4]))
    options["seqused_k"].copy_(int32([64, 1, 0, 250, 4]))
    graph.replay()
    due, due_lse = attention_varlen(*args, **options)
    assert torch.equal(out[:134], due[:134]) and torch.equal(lse[:, :134], due_lse[:, :134])


# --- The argument ---------------------------------------------------------------------------------

CASE = Batch("call", "", (9, 0, 70), (70, 3, 90), causal=True)


def call(**more):
    args, options = call_of(CASE, "float16", 64, "cpu")
    return attention_varlen(*args, **{"quantize": "qk", **options, **more})


def test_errors_name_the_argument():
    (q, k, v, cu_q, cu_k), _ = call_of(CASE, "float16", 64, "cpu")
    wrong = [
        ({"quantize": "int4"}, ValueError, 'quantize must be None, "qk", "int8" or "fp8", got'),
        ({"quantize": 8}, TypeError, 'quantize must be a string such as "qk", got 8'),
        ({"dropout_p": 0.25}, ValueError, r'quantize is "qk", but dropout_p is 0\.25'),
        ({"k_scale": 2.0}, ValueError, "but k_scale or v_scale is given; allowed: none, or 1"),
        ({"kernel": "cpu"}, ValueError, 'needs quantize=None, got "qk"'),
        ({"quantize": None, "kernel": "cpu/int8"}, ValueError, 'needs quantize="int8", got None'),
    ]
    for given, error, message in wrong:
        with pytest.raises(error, match=message):
            call(**given)
    pages = torch.zeros(5, 16, 2, 64, dtype=torch.float16)
    paged = {"seqused_k": int32([9, 0, 16]), "block_table": int32([[0], [1], [2]])}
    message = r"k and v are in pages \(block_table\); allowed: .* float8_e4m3fn"
    with pytest.raises(ValueError, match=message):
        attention_varlen(q, pages, pages, cu_q, quantize="qk", **paged)
    fp8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
    with pytest.raises(ValueError, match="k and v are float8_e4m3fn; allowed: of q's dtype"):
        attention_varlen(q, *fp8, cu_q, cu_k, quantize="qk")
    kept = prequantize(k[None], v[None], quantize="int8", layout="bshd")
    message = r'PrequantizedKV, which calls of attention\(\) take; allowed .*: "int8"'
    with pytest.raises(ValueError, match=message):
        attention_varlen(q, k, v, cu_q, cu_k, quantize=kept)
    with pytest.raises(ValueError, match='quantize is "qk", but q, k and v are float32'):
        attention_varlen(q.float(), k.float(), v.float(), cu_q, cu_k, quantize="qk")
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient with quantize='qk'"):
        attention_varlen(q, k, v, cu_q, cu_k, quantize="qk")
    with torch.no_grad():
        assert torch.equal(attention_varlen(q, k, v, cu_q, cu_k, quantize="qk"), call(causal=False))


def test_a_scale_of_one_is_none():
    assert torch.equal(call(k_scale=1.0, v_scale=1), call())


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 96), (200, 256), (8, 16)])
@pytest.mark.parametrize("option", [{}, {"softcap": 3.0}, {"attention_chunk": 9}])
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_has_a_kernel(head_dim, head_dim_v, option, mode):
    case = replace(CASE, heads=4, head_dim=head_dim, head_dim_v=head_dim_v)
    args, options = call_of(case, "float16", head_dim, "cpu")
    args = [x.to("meta") for x in args]
    q, k, v, options["cu_seqlens_q"], options["cu_seqlens_k"] = args
    verdicts = explain(q, k, v, device="sm_89", quantize=mode, **{**options, **option})
    assert verdicts.quantize == mode and verdicts.predicted_error is None
    reasons = [x.reason for x in verdicts if x.variant.quantize == mode]
    lacks = ("not compiled into this build", "could run")
    assert verdicts.chosen or any(x.startswith(lacks) for x in reasons), verdicts


def test_dense_calls_are_for_other_kernels():
    q, k, v = cases.qkv(head_dim=64)
    with pytest.raises(ValueError, match="runs only calls with varlen"):
        attention(q, k, v, quantize="qk", kernel="sm80/int8_qk_varlen-simt")


# --- torch's machinery, verify, explain -----------------------------------------------------------


def test_opcheck_and_compile():
    args, options = call_of(CASE, "float16", 64, "cpu")
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given = {**dict(zip(names, args, strict=True)), **options, "quantize": "int8"}
    for more in ({}, {"return_lse": True}):
        arguments = serving_operator._VARLEN.arguments(**given, **more)
        torch.library.opcheck(serving_operator.attention_varlen_op, arguments)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*args, **options):
        return attention_varlen(*args, **options)

    assert torch.equal(compiled(*args, **options, quantize="int8"), call(quantize="int8"))
    kept = prequantize(args[1][None], args[2][None], quantize="int8", layout="bshd")
    with pytest.raises(Exception, match=r"under torch\.compile"):
        compiled(*args, **options, quantize=kept)
    torch.compiler.reset()


def test_numpy_is_the_same():
    args, options = call_of(CASE, "float16", 64, "cpu")
    found = attention_varlen(*(x.numpy() for x in args), **options, quantize="fp8")
    np.testing.assert_array_equal(found, call(quantize="fp8").numpy())


@pytest.mark.skipif(cutlass_attn.build_info().simt == "none", reason="verify runs a simt kernel")
@pytest.mark.parametrize("mode", MODES)
def test_verify_confirms_each_sequence(mode, caplog, monkeypatch):
    case = Batch("verify", "", *SHORT, causal=True, alibi="bh", sinks=True, room=3, spare_rows=4)
    args, options = call_of(case, "float16", 64, "cpu")
    options["quantize"] = mode
    due, due_lse = attention_varlen(*args, **options, return_lse=True)
    with caplog.at_level(logging.INFO, logger="cutlass_attn"):
        out, lse = attention_varlen(*args, **options, return_lse=True, verify=True)
    assert torch.equal(out, due) and torch.equal(lse, due_lse)
    said = [re.match(r"sequence (\d): cpu/int8\S*, quantize", x.message) for x in caplog.records]
    assert [int(x[1]) for x in said] == [0, 2, 3, 4]  # sequence 1 has no queries

    real = cutlass_attn.verify_serving._C.varlen

    def wrong(*args, **kwargs):
        out, lse = real(*args, **kwargs)
        out[22, 1] = -out[22, 1] + 1  # the last row of sequence 2
        return out, lse

    monkeypatch.setattr(cutlass_attn.verify_serving._C, "varlen", wrong)
    with pytest.raises(cutlass_attn.VerificationError, match=r"sequence 2: cpu/int8.* disagree on"):
        attention_varlen(*args, **options, verify=True)


@pytest.mark.parametrize("mode", MODES)
def test_explain_predicts_the_error(mode):
    """The largest of any sequence."""
    args, options = call_of(CASE, "float16", 64, "cpu")
    q, k, v, cu_q, cu_k = args
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **options, "quantize": mode}
    found = explain(q, k, v, **given)
    each = [one for _, _, one in dense_calls(q, k, v, given)]
    due = [explain(x.q, x.k, x.v, **x.options).predicted_error for x in each]
    assert len(due) == 2 and found.predicted_error == max(due)
    assert found.quantize == mode and found.chosen.quantize == mode
    assert "is predicted from q, k and v" in str(found)
    nothing = {**given, "cu_seqlens_q": cu_q * 0}
    assert explain(q, k, v, **nothing).predicted_error == 0
    assert explain(q, k, v, **{**given, "quantize": None}).predicted_error is None
