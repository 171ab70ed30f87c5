"""attention_decode: every kernel that knows the views against the oracle; new keys, trees."""

import cases
import cutlass_attn
import numpy as np
import pytest
import serving
from cases import torch
from cutlass_attn import append_kv, attention_decode, merge_states
from cutlass_attn._call import serving_operator
from serving import Batch, int32, rotated

DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]


def call_of(case, dtype, head_dim, device):
    """Arguments and keywords of a call over a cache that has all keys."""
    dtype = getattr(torch, dtype)
    rows = case.seqlens_q[0]
    q = serving.packed_queries(case, dtype, head_dim, device)
    q = q.view(case.batch, rows, case.heads, head_dim)
    options = serving.keywords(case, device)
    options.setdefault("causal", False)
    lengths = int32(case.seqlens_k, device)
    if case.page:
        k, v, options["block_table"] = serving.pages(case, dtype, head_dim, device)
    else:
        k, v = serving.cache(case, dtype, head_dim, device)
    return (q, k, v, lengths), options


def pairs():
    """Every kernel with every case; those that split keys, with some splits more than there are
    blocks of keys."""
    return [
        pytest.param(
            variant, case, splits, id=f"{variant.key}-{case}-{splits}", marks=cases.needs(variant)
        )
        for variant in cases.compiled_variants(special=True)
        for case in serving.DECODE
        if serving.fits(variant, case, case.seqlens_q[0])
        for splits in ((0, 1, 3, 20) if variant.max_rows or "latent" in variant.kernel else (0,))
    ]


@pytest.mark.parametrize(("variant", "case", "splits"), pairs())
def test_case(variant, case, splits):
    head_dim = cases.head_dim_of(variant, case)
    args, options = call_of(case, variant.dtype, head_dim, variant.device)
    out = args[0].new_full((*args[0].shape[:-1], args[2].shape[-1]), torch.nan)
    result, lse = attention_decode(
        *args, **options, out=out, return_lse=True, kernel=variant.key, num_splits=splits
    )
    assert result is out
    serving.judge(
        case,
        variant.dtype,
        head_dim,
        [serving.to_numpy(x.transpose(0, 1)) for x in out],
        [x.cpu().numpy() for x in lse],
    )


CASE = Batch("step", "", (3,) * 4, serving.LENGTHS, page=16, causal=True, room=16)


def append_case(device, page, new, dtype="float16"):
    """A call over a cache with all keys, the same with the last `new` ones as new keys, and where
    these are in the cache."""
    case = Batch("append", "", (3,) * 3, (70, new, 131), page=page, causal=True, room=16)
    args, options = call_of(case, dtype, 32, device)
    q, k, v, lengths = args
    before = lengths - new
    places = [
        (
            b if page is None else int(options["block_table"][b, j // page]),
            j if page is None else j % page,
        )
        for b, length in enumerate(before.tolist())
        for j in range(length, length + new)
    ]
    at = tuple(torch.tensor(x, device=device) for x in zip(*places, strict=True))
    k_new, v_new = (x[at].view(3, new, *x.shape[2:]).clone() for x in (k, v))
    empty_k, empty_v = k.clone(), v.clone()
    for x in (empty_k, empty_v):
        x[at] = torch.nan
    return args, options, (q, empty_k, empty_v, before), {"k_new": k_new, "v_new": v_new}, at


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("page", [None, 1, 13, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_new_keys_join_first(device, new, page, dtype):
    args, options, before, new_keys, _ = append_case(device, page, new, dtype)
    lengths = before[3].clone()
    expected = attention_decode(*args, **options, return_lse=True)
    actual = attention_decode(*before, **options, **new_keys, return_lse=True)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)
    for x, y in zip(before[1:3], args[1:3], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)  # nothing else is written
    assert torch.equal(before[3], lengths)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": False}, {"window": (50, None)}])
@pytest.mark.parametrize(("page", "columns"), [(None, 16), (16, 8)])
def test_rotary(device, interleaved, mask, page, columns):
    _args, options, before, new_keys, at = append_case(device, page, 3, "float32")
    q, _, _, lengths = before
    angles = torch.rand(160, columns, device=device) * 6
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    options = {**options, "causal": False, **mask}
    out = attention_decode(*before, **options, **new_keys, **tables, rotary_interleaved=interleaved)
    i = torch.arange(3, device=device)
    positions = lengths[:, None].long() + i
    k_new = rotated(new_keys["k_new"], *tables.values(), positions, interleaved)
    torch.testing.assert_close(before[1][at].view_as(k_new), k_new)
    assert torch.equal(before[2][at].view_as(k_new), new_keys["v_new"])
    moves = mask != {"causal": False}
    q = rotated(q, *tables.values(), positions if moves else positions[:, :1], interleaved)
    expected = attention_decode(q, before[1], before[2], lengths + 3, **options)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_entries_of_a_larger_cache(device):
    args, options, before, new_keys, _ = append_case(device, None, 2)
    index = int32([4, 0, 2], device)
    larger = [torch.full((5, *x.shape[1:]), torch.nan).to(x) for x in before[1:3]]
    for x, y in zip(larger, before[1:3], strict=True):
        x[index.long()] = y
    expected = attention_decode(*args, **options)
    q, _, _, lengths = before
    out = attention_decode(q, *larger, lengths, **options, **new_keys, cache_batch_idx=index)
    assert torch.equal(out, expected)
    assert torch.equal(larger[0][index.long()].nan_to_num(), args[1].nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["entries", "cache_batch_idx", "block_table"])
@pytest.mark.parametrize("appends", [False, True])
def test_a_cache_without_rows(device, where, appends):
    """Its entries have no memory, and its tables of positions no row to rotate queries by."""
    q = torch.randn(2, 3, 4, 16, device=device)
    cache = q.new_zeros(2, 0, 2, 16)
    options = {}
    if where == "cache_batch_idx":
        options = {where: int32([1, 0], device)}
    elif where == "block_table":
        cache = q.new_zeros(2, 8, 2, 16)
        options = {where: int32([], device).view(2, 0)}
    if appends:
        new, angles = q.new_zeros(2, 0, 2, 16), q.new_zeros(0, 8)
        options |= {"k_new": new, "v_new": new, "rotary_cos": angles, "rotary_sin": angles}
    out, lse = attention_decode(
        q, cache, cache.clone(), int32([0, 0], device), return_lse=True, **options
    )
    assert not out.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [None, 16])
def test_keys_left_of_a_sequence_are_not_seen(device, page):
    case = Batch("leftpad", "", (2,) * 3, (70, 5, 40), page=page, causal=True)
    args, options = call_of(case, "float32", 16, device)
    pad = int32([9, 5, 0], device)
    out, lse = attention_decode(*args, **options, cache_leftpad=pad, return_lse=True)
    for b, (q, k, v) in enumerate(serving.values(case, "float32", 16)):
        q, k, v = (torch.from_numpy(x)[None].to(device) for x in (q, k, v))
        skip = int(pad[b])
        alone, alone_lse = cutlass_attn.attention(
            q, k[:, :, skip:], v[:, :, skip:], causal=True, return_lse=True
        )
        torch.testing.assert_close(out[b].transpose(0, 1), alone[0])
        torch.testing.assert_close(lse[b], alone_lse[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [None, 13])
@pytest.mark.parametrize("causal", [False, True])
def test_tree_mask(device, page, causal):
    """Over the last keys alone, on top of the other masks."""
    args, options, before, new_keys, _ = append_case(device, page, 3, "float32")
    options["causal"] = causal
    tree = torch.tensor(
        [
            [[1, 0, 0], [1, 1, 0], [1, 0, 1]],  # two branches behind one
            [[1, 0, 0], [0, 1, 0], [0, 0, 1]],  # three
            [[1, 1, 1], [0, 0, 0], [0, 1, 1]],  # none at all; not a tree
        ],
        device=device,
    ).bool()
    out = attention_decode(*before, **options, **new_keys, tree_mask=tree)
    rows = args[3].tolist()
    packed, options_packed = [], {k: v for k, v in options.items() if k != "block_table"}
    for b, length in enumerate(rows):
        keys = [
            x[options["block_table"][b].long().clamp(min=0)].flatten(0, 1) if page else x[b]
            for x in args[1:3]
        ]
        k, v = (x[None, :length] for x in keys)
        mask = torch.ones(1, 1, 3, length, dtype=torch.bool, device=device)
        mask[0, 0, :, length - 3 :] = tree[b]
        packed.append(
            cutlass_attn.attention(
                args[0][b : b + 1], k, v, layout="bshd", mask=mask, **options_packed
            )
        )
    torch.testing.assert_close(out, torch.cat(packed))


@pytest.mark.parametrize(
    "variant",
    cases.all_variants(
        lambda v: v.dtype == "float16" and v.head_dim in (0, 64) and serving.fits(v, CASE, 3)
    ),
)
def test_one_split_gives_a_sequence_the_same_bits_in_any_batch(variant):
    args, options = call_of(CASE, "float16", 64, variant.device)
    table = options.pop("block_table")
    options |= {"num_splits": 1, "kernel": variant.key}
    together = attention_decode(*args, **options, block_table=table)
    q, k, v, lengths = args
    for b in range(CASE.batch):
        one = slice(b, b + 1)
        alone = attention_decode(q[one], k, v, lengths[one], **options, block_table=table[one])
        assert torch.equal(alone[0], together[b])


def test_numpy_equals_torch():
    _args, options, before, new_keys, _ = append_case("cpu", 13, 3, "float32")
    angles = torch.rand(200, 8)
    more = {
        **new_keys,
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
        "tree_mask": torch.rand(3, 3, 3) > 0.5,
        "cache_leftpad": int32([2, 0, 100]),
    }
    arrays = [x.numpy().copy() for x in before]
    as_arrays = {
        n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in {**options, **more}.items()
    }
    ours = attention_decode(*before, **options, **more)
    np.testing.assert_array_equal(attention_decode(*arrays, **as_arrays), ours.numpy())
    np.testing.assert_array_equal(arrays[1], before[1].numpy())


@pytest.mark.gpu
def test_streams_side_by_side():
    """Each has counters of its own; a call leaves them as it found them."""
    case = Batch("streams", "", (1,) * 4, serving.LENGTHS, page=16, room=400)
    args, options = call_of(case, "float16", 64, "cuda")
    expected = attention_decode(*args, **options, num_splits=5)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(attention_decode(*args, **options, num_splits=5))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    _, options, before, new_keys, _ = append_case("cuda", 16, 1)
    q, k, v, lengths = before
    k, v = k.nan_to_num(), v.nan_to_num()
    out = torch.empty_like(q)
    attention_decode(q, k, v, lengths, **options, **new_keys, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_decode(q, k, v, lengths, **options, **new_keys, out=out)
    lengths.copy_(int32([33, 0, 90]))
    graph.replay()
    assert torch.equal(out, attention_decode(q, k, v, lengths + 1, **options))


# --- torch's machinery ----------------------------------------------------------------------------


def test_opcheck():
    _args, options, before, new_keys, _ = append_case("cpu", 16, 3, "float32")
    before = [x.nan_to_num() if x.is_floating_point() else x for x in before]
    names = ("q", "k_cache", "v_cache", "cache_seqlens")
    angles = torch.rand(160, 8)
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    given = dict(zip(names, before, strict=True))
    table = {"block_table": options["block_table"]}
    for more in ({}, tables):
        torch.library.opcheck(
            serving_operator.decode_append_op,
            serving_operator._DECODE_APPEND.arguments(**given, **table, **new_keys, **more),
        )
    mask = torch.rand(3, 1, 3, options["block_table"].shape[1] * 16) > 0.3
    for more in ({}, {"return_lse": True, "mask": mask}):
        torch.library.opcheck(
            serving_operator.attention_decode_op,
            serving_operator._DECODE.arguments(**given, **table, **more),
        )
    rows = torch.randn(3, 2, 32)
    slots = torch.tensor([0, -1, 5])
    torch.library.opcheck(
        serving_operator.append_kv_op,
        (rows, rows, before[1], before[2], slots, None, torch.ones(1), None),
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("page", [None, 16])
def test_compiles_without_breaks(dynamic, page):
    torch.compiler.reset()

    def step(q, k_cache, v_cache, lengths, options):
        out, lse = attention_decode(q, k_cache, v_cache, lengths, **options, return_lse=True)
        flat = [x if page else x.flatten(0, 1)[:, None] for x in (k_cache, v_cache)]
        rows = options["k_new"][:, 0]
        append_kv(rows, rows, *flat, lengths.long())
        return merge_states(out, lse, out, lse, layout="bshd")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    _, options, before, new_keys, _ = append_case("cpu", page, 3)
    angles = torch.rand(160, 8).half()
    options |= {**new_keys, "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    options["tree_mask"] = torch.rand(3, 3, 3) > 0.3
    q, k, v, lengths = before
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    for ours, theirs in zip(
        compiled(q, *caches[0], lengths, options),
        step(q, *caches[1], lengths, options),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_dispatch_modes_see_operators():
    """Plain calls go past them. K and V as halves of one row: both are written."""

    names = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    case = Batch("seen", "", (1,) * 2, (9, 4), page=4, halves=True, causal=True, room=4)
    (q, k, _, lengths), options = call_of(case, "float32", 16, "cpu")
    base = k._base.clone()
    new = torch.randn(2, 1, 2, 16)
    results = []
    for mode in (torch.no_grad(), Seen()):
        store = base.clone()
        cache = [x.transpose(1, 2) for x in store.split(16, dim=-1)]
        with mode:
            append_kv(new[:, 0], new[:, 0], *cache, torch.tensor([-1, 20]))
            out = attention_decode(q, *cache, lengths - 1, k_new=new, v_new=new, **options)
        results.append((out, store.nan_to_num()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(results[0][1], base.nan_to_num())
    assert [name.split(".")[1] for name in names if name.startswith("cutlass_attn")] == [
        "append_kv",
        "decode_append",
        "attention_decode",
    ]


def test_meta_tensors_give_shapes():
    q = torch.empty(3, 1, 4, 16, device="meta")
    cache = torch.empty(3, 20, 2, 16, device="meta")
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = attention_decode(q, cache, cache[..., :8], lengths, return_lse=True)
    assert out.shape == (3, 1, 4, 8)
    assert lse.shape == (3, 4, 1)
