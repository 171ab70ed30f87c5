"""attention_varlen: every kernel that knows the views, against the oracle, sequence by sequence."""

import itertools

import cases
import cutlass_attn
import numpy as np
import pytest
import serving
from cases import torch
from cutlass_attn import attention_varlen
from cutlass_attn._call import serving_operator
from serving import Batch, int32, offsets

# Stated here, so that a kernel cannot leave the tests.
TAKES_ALL = ["cpu", "scalar/minimal", "scalar/minimal-simt"]
DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]


def call_of(case, dtype, head_dim, device):
    """Arguments and keywords of the call."""
    dtype = getattr(torch, dtype)
    q = serving.packed_queries(case, dtype, head_dim, device)
    options = serving.keywords(case, device)
    cu_q = offsets(case.seqlens_q, case.spare_entries, device)
    used = int32([*case.seqlens_k, *[0] * case.spare_entries], device)
    if case.page:
        k, v, table = serving.pages(case, dtype, head_dim, device)
        return (q, k, v, cu_q), {**options, "block_table": table, "seqused_k": used}
    k, v, cu_k = serving.packed_keys(case, dtype, head_dim, device)
    if case.room:
        options["seqused_k"] = used
    return (q, k, v, cu_q, cu_k), options


def pairs():
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=cases.needs(variant))
        for variant in cases.compiled_variants(special=True)
        for case in serving.VARLEN
        if serving.fits(variant, case, sum(case.seqlens_q) + case.spare_rows)
    ]


def test_kernels_that_take_all():
    for variant in cutlass_attn.variants():
        if variant.kernel in TAKES_ALL:
            assert set(variant.options) >= serving.VIEWS, variant


@pytest.mark.parametrize(("variant", "case"), pairs())
def test_case(variant, case):
    head_dim = cases.head_dim_of(variant, case)
    args, options = call_of(case, variant.dtype, head_dim, variant.device)
    rows = sum(case.seqlens_q)
    out = torch.full((args[0].shape[0], case.heads, case.head_dim_v or head_dim), 7.0).to(args[0])
    result, lse = attention_varlen(*args, **options, out=out, return_lse=True, kernel=variant.key)
    assert result is out
    assert (out[rows:] == 7.0).all()
    assert lse.shape == (case.heads, args[0].shape[0])
    assert (lse[:, rows:] == -torch.inf).all()
    begins = np.cumsum([0, *case.seqlens_q])
    parts = [slice(*ends) for ends in itertools.pairwise(begins)]
    serving.judge(
        case,
        variant.dtype,
        head_dim,
        [serving.to_numpy(out[part].transpose(0, 1)) for part in parts],
        [lse[:, part].cpu().numpy() for part in parts],
    )


CASE = Batch("options", "", *serving.RAGGED, causal=True, spare_rows=4, sinks=True)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_no_sequence_are_zero_in_a_new_result(device):
    args, options = call_of(CASE, "float16", 64, device)
    out, lse = attention_varlen(*args, **options, return_lse=True)
    rows = sum(CASE.seqlens_q)
    assert (out[rows:] == 0).all()
    assert (lse[:, rows:] == -torch.inf).all()


@pytest.mark.parametrize("kernel", ["cpu", "scalar/minimal-simt"])
def test_sequences_equal_dense_calls(kernel):
    """Bit by bit: a sequence is computed alike, whatever it is packed with."""
    if kernel.endswith("-simt") and cutlass_attn.build_info().simt == "none":
        pytest.skip("this build has no simt kernels")
    (q, k, v, cu_q, cu_k), options = call_of(CASE, "float32", 32, "cpu")
    out = attention_varlen(q, k, v, cu_q, cu_k, **options, kernel=kernel)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for b in range(CASE.batch):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        alone = cutlass_attn.attention(
            q[None, rows], k[None, keys], v[None, keys], layout="bshd", **options, kernel=kernel
        )
        assert torch.equal(out[rows], alone[0])


def test_keys_are_packed_as_queries_by_default():
    q = torch.randn(9, 2, 16)
    cu = offsets([4, 5])
    expected = attention_varlen(q, q, q, cu, cu, causal=True)
    assert torch.equal(attention_varlen(q, q, q, cu, causal=True), expected)


def test_pages_equal_packed():
    case = Batch("both", "", *serving.RAGGED, page=16, causal=True)
    (q, k, v, cu_q), options = call_of(case, "bfloat16", 64, "cpu")
    packed = serving.packed_keys(case, torch.bfloat16, 64, "cpu")
    out = attention_varlen(q, k, v, cu_q, **options)
    assert torch.equal(out, attention_varlen(q, *packed[:2], cu_q, packed[2], causal=True))


def test_numpy_equals_torch():
    case = Batch("numpy", "", *serving.RAGGED, page=13, causal=True, scales="heads", alibi="h")
    args, options = call_of(case, "float32", 24, "cpu")
    arrays = [x.numpy() for x in args]
    as_arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    for theirs, ours in zip(
        attention_varlen(*arrays, **as_arrays, return_lse=True),
        attention_varlen(*args, **options, return_lse=True),
        strict=True,
    ):
        np.testing.assert_array_equal(theirs, ours.numpy())


def test_dropout_is_drawn_by_the_generator():
    case = Batch("dropout", "", (20, 9), (30, 9), dropout_p=0.5)
    args, options = call_of(case, "float32", 16, "cpu")
    del options["rng_state"]
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(attention_varlen(*args, **options))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("kernel", ["cpu", "scalar/minimal-simt", "sm80/varlen-simt"])
def test_rows_before_the_first_sequence(kernel):
    """More of them than a tile has: they are no sequence's, and stay as they are."""
    if kernel.endswith("-simt") and cutlass_attn.build_info().simt != "all":
        pytest.skip("this build has few simt kernels")
    args, _ = call_of(Batch("late", "", (70, 20), (130, 9)), "float16", 64, "cpu")
    expected = attention_varlen(*args, kernel=kernel)
    spare = (torch.full_like(x[:1], torch.nan).expand(300, -1, -1) for x in args[:3])
    q, k, v = (torch.cat(parts) for parts in zip(spare, args[:3], strict=True))
    out = torch.full_like(q, 7.0)
    attention_varlen(q, k, v, *(x + 300 for x in args[3:]), out=out, kernel=kernel)
    assert torch.equal(out[300:], expected) and (out[:300] == 7.0).all()


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    case = Batch("graph", "", (30, 5, 1), (40, 70, 9), page=16, causal=True, spare_entries=2)
    args, options = call_of(case, "float16", 64, "cuda")
    out = torch.empty_like(args[0])
    attention_varlen(*args, **options, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_varlen(*args, **options, out=out)
    args[3].copy_(offsets([0, 20, 11, 1], 1))
    options["seqused_k"].copy_(int32([17, 33, 9, 0, 0]))
    graph.replay()
    assert torch.equal(out[:32], attention_varlen(*args, **options)[:32])  # of the entries


# --- torch's machinery ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", [None, 16])
def test_opcheck(page):
    case = Batch("op", "", (5, 0, 3), (9, 4, 3), page=page, causal=True, sinks=True, alibi="h")
    args, options = call_of(case, "float32", 16, "cpu")
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given = dict(zip(names, args, strict=False))
    for more in ({}, {"return_lse": True, "window": [3, -1]}):
        torch.library.opcheck(
            serving_operator.attention_varlen_op,
            serving_operator._VARLEN.arguments(**given, **{**options, **more}),
        )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("page", [None, 16])
def test_compiles_without_breaks(dynamic, page):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *args, **options: attention_varlen(*args, **options),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    case = Batch("compiled", "", *serving.RAGGED, page=page, causal=True, scales="number")
    args, options = call_of(case, "float16", 32, "cpu")
    for window in (None, 9):
        options["window"] = window
        expected = attention_varlen(*args, **options)
        assert torch.equal(compiled(*args, **options), expected)
        out = torch.empty_like(expected)
        assert compiled(*args, **options, out=out) is out
        assert torch.equal(out, expected)


def test_meta_tensors_give_shapes():
    q = torch.empty(9, 4, 16, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = attention_varlen(q, q, q[..., :8], cu, return_lse=True)
    assert out.shape == (9, 4, 8)
    assert lse.shape == (4, 9)


# --- Errors ---------------------------------------------------------------------------------------

Q, K = torch.zeros(8, 4, 16), torch.zeros(12, 2, 16)
PAGES = torch.zeros(5, 4, 2, 16)
TABLE = int32([0, 1, 2, 3, 4, 0]).view(2, 3)


def call(q=Q, k=K, v=None, cu_q=(0, 3, 8), cu_k=(0, 7, 12), **options):
    cu_q, cu_k = (int32(x) if isinstance(x, tuple) else x for x in (cu_q, cu_k))
    return attention_varlen(q, k, k if v is None else v, cu_q, cu_k, **options)


def paged(used=(9, 12), table=TABLE, k=PAGES, **options):
    used = int32(used) if isinstance(used, tuple) else used
    return call(k=k, cu_k=None, seqused_k=used, block_table=table, **options)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: call(cu_q=(0, 5, 3)), ValueError, r"cu_seqlens_q\[2\] is 3, allowed: 5 or more"),
        (lambda: call(cu_q=(-1, 5, 8)), ValueError, r"cu_seqlens_q\[0\] is -1, allowed: 0 or more"),
        (lambda: call(cu_q=(0, 5, 9)), ValueError, r"cu_seqlens_q\[2\] is 9, but q has 8 rows"),
        (lambda: call(cu_k=(0, 5, 13)), ValueError, r"cu_seqlens_k\[2\] is 13, but k has 12 rows"),
        (lambda: call(cu_k=(0, 12)), ValueError, r"cu_seqlens_k must have shape .* \(3,\), got"),
        (lambda: call(cu_k=None), ValueError, "without cu_seqlens_k.* k has 12 rows and q 8"),
        (lambda: call(cu_q=Q), ValueError, r"cu_seqlens_q must have shape \(batch \+ 1,\), got"),
        (lambda: call(cu_q=None), TypeError, "needs q, k, v, cu_seqlens_q"),
        (lambda: call(cu_q=torch.tensor([0, 8])), ValueError, "cu_seqlens_q must be int32"),
        (lambda: call(cu_q=int32([0, 1] * 3)[::2]), ValueError, "cu_seqlens_q must be contiguous"),
        (lambda: call(cu_q={0, 3, 8}), TypeError, "cu_seqlens_q must be an array.*set"),
        (
            lambda: call(seqused_k=int32([7, 6])),
            ValueError,
            r"seqused_k\[1\] is 6, but cu_seqlens_k has 5 rows for that entry",
        ),
        (lambda: call(seqused_k=int32([7])), ValueError, r"seqused_k must have shape \(batch,\)"),
        (lambda: call(q=Q[None]), ValueError, r"q must have 3 dimensions, \(rows, heads, head_d"),
        (lambda: call(k=PAGES), ValueError, "k must have 3 dimensions.* without block_table"),
        (lambda: call(v=K[:5]), ValueError, "k and v must have one shape but for the head dim"),
        (lambda: call(k=K[..., :8]), ValueError, "q and k must have one head dim, got 16 and 8"),
        (
            lambda: call(k=K.half()),
            ValueError,
            "k must be torch.float32 like q, or float8_e4m3fn if it is that of v, got .*float16",
        ),
        (lambda: call(k=K.to("meta")), ValueError, "k must be on cpu like q, got meta"),
        (lambda: call(q=Q.int()), TypeError, "q must be float16, bfloat16, float32 or float64"),
        (lambda: call(q=Q[:, :3]), ValueError, "num_heads_q is 3, allowed: a multiple of num_he"),
        (lambda: paged(used=(9, 13)), ValueError, r"seqused_k\[1\] is 13, but block_table has 12"),
        (lambda: paged(used=(-1, 2)), ValueError, r"seqused_k\[0\] is -1"),
        (lambda: paged(used=None), ValueError, "with block_table, seqused_k.* must be given"),
        (lambda: paged(table=TABLE + 1), ValueError, r"block_table\[1, 1\] is 5, allowed: 0 to 4"),
        (lambda: paged(table=TABLE - 1), ValueError, r"block_table\[0, 0\] is -1, allowed: 0 to 4"),
        (lambda: paged(table=TABLE[:1]), ValueError, "block_table must have shape.*batch = 2, got"),
        (lambda: paged(table=TABLE.long()), ValueError, "block_table must be int32"),
        (lambda: paged(k=K), ValueError, "k must have 4 dimensions.* with block_table, got"),
        (lambda: paged(k=PAGES[:, :0]), ValueError, "k has pages of 0 keys"),
        (
            lambda: call(k=PAGES, seqused_k=int32([1, 1]), block_table=TABLE),
            ValueError,
            "with block_table, .*cu_seqlens_k must be None",
        ),
        (lambda: call(k_scale="big"), TypeError, "k_scale must be a number, got 'big'"),
        (lambda: call(v_scale=-1.0), ValueError, "v_scale is -1.0, allowed: a finite number > 0"),
        (lambda: call(k_scale=torch.ones(3)), ValueError, r"k_scale .*\(2,\) or \(1,\), got \(3,"),
        (lambda: call(k_scale=torch.ones(2).double()), ValueError, "k_scale must be float32"),
        (lambda: call(out=Q[:5]), ValueError, r"out must have shape \(8, 4, 16\), got"),
        (lambda: call(out=Q), ValueError, "out overlaps q"),
        (lambda: call(bias=Q), TypeError, r"attention_varlen\(\) has no 'bias'"),
        (lambda: call(layout="bshd"), TypeError, r"attention_varlen\(\) has no 'layout'"),
        (lambda: call(num_splits=-1), ValueError, "num_splits is -1, allowed: 0 to 2147483647"),
        (lambda: call(split_size=7), ValueError, "split_size is 7, allowed: 0, or a multiple of 6"),
        (lambda: call(validate=1), TypeError, "validate must be True or False, got 1"),
        (lambda: call(rotary_interleaved=True), TypeError, r"attention_varlen\(\) got an unexpe"),
        (lambda: call(dispatched=True), TypeError, r"attention_varlen\(\) got an unexpected"),
        (lambda: call(kernel="scalar/tiled-simt"), ValueError, "does not implement varlen"),
    ],
)
def test_errors(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens_q": int32([0, 5, 3])}, "cu_seqlens_q must not decrease"),
        ({"cu_seqlens_q": int32([0, 5, 9])}, "cu_seqlens_q must end at the last row, 8"),
        ({"cu_seqlens_k": int32([-1, 5, 9])}, "cu_seqlens_k must begin with 0 or more"),
        ({"seqused_k": int32([8, 0])}, "seqused_k must be 0 to the length of an entry"),
        ({"seqused_k": int32([8, 13]), "block_table": TABLE}, "seqused_k must be 0 to 12"),
        ({"seqused_k": int32([8, 8]), "block_table": TABLE + 2}, "block_table must hold pages"),
    ],
)
def test_checks_on_the_device(options, message):
    """What validate=True has a GPU check; on a CPU the same function raises at once."""
    good = {"cu_seqlens_q": int32([0, 3, 8])}
    if "block_table" in options:
        k, good = PAGES, {**good, "seqused_k": int32([9, 12]), "block_table": TABLE}
    else:
        k, good = K, {**good, "cu_seqlens_k": int32([0, 7, 12])}
    serving_operator.validate_varlen(Q, k, **good)
    with pytest.raises(RuntimeError, match=message):
        serving_operator.validate_varlen(Q, k, **{**good, **options})


@pytest.mark.gpu
def test_validate_lets_good_calls_pass():
    args, options = call_of(serving.VARLEN[-1], "float16", 64, "cuda")
    expected = attention_varlen(*args, **options)
    assert torch.equal(attention_varlen(*args, **options, validate=True), expected)
    torch.cuda.synchronize()
