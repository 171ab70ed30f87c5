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
    head_dim = case.head_dim or variant.head_dim or 64
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


# --- Errors ---------------------------------------------------------------------------------------

Q, CACHE, NEW = torch.zeros(2, 1, 4, 16), torch.zeros(2, 12, 2, 16), torch.zeros(2, 1, 2, 16)
TABLE = int32([0, 1, 1, 0]).view(2, 2)
ANGLES = torch.zeros(12, 8)
ROTARY = {"rotary_cos": ANGLES, "rotary_sin": ANGLES}


def call(q=Q, k=CACHE, v=CACHE, lengths=(5, 12), **options):
    return attention_decode(q, k.clone(), v.clone(), int32(lengths), **options)


def new(**options):
    return call(**{"k_new": NEW, "v_new": NEW, "lengths": (5, 11), **options})


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: call(lengths=(5, 13)), ValueError, r"cache_seqlens\[1\] is 13, allowed: 0 to 12"),
        (lambda: call(lengths=(-1, 3)), ValueError, r"cache_seqlens\[0\] is -1, allowed: 0 to 12"),
        (
            lambda: new(lengths=(5, 12)),
            ValueError,
            r"cache_seqlens\[1\] is 12 and there are 1 new keys, but the cache covers 12 keys",
        ),
        (lambda: call(lengths=(5,)), ValueError, r"cache_seqlens must have shape \(batch,\) = \(2"),
        (lambda: attention_decode(Q, CACHE, CACHE, 5.0), TypeError, "cache_seqlens must be an arr"),
        (lambda: call(q=Q[0]), ValueError, "q must have 4 dimensions"),
        (
            lambda: call(k=CACHE[:1], v=CACHE[:1]),
            ValueError,
            "k_cache has 1 entries and q 2; allow",
        ),
        (lambda: call(v=CACHE[:, :5]), ValueError, "k_cache and v_cache must have one shape but"),
        (lambda: call(k=CACHE.half()), ValueError, "k_cache must be torch.float32 like q"),
        (
            lambda: call(block_table=TABLE + 1),
            ValueError,
            r"block_table\[0, 0\] is 2|block_table\[1, 0\] is 2, allowed: 0 to 1",
        ),
        (
            lambda: new(block_table=TABLE, lengths=(24, 3)),
            ValueError,
            r"cache_seqlens\[0\] is 24 and there are 1 new keys, but block_table covers 24",
        ),
        (
            lambda: call(block_table=TABLE, cache_batch_idx=int32([0, 1])),
            ValueError,
            "cache_batch_idx and block_table are both given",
        ),
        (
            lambda: call(cache_batch_idx=int32([0, 2])),
            ValueError,
            r"cache_batch_idx\[1\] is 2, allowed: 0 to 1, the entries of k_cache",
        ),
        (lambda: call(k_new=NEW), ValueError, "k_new and v_new go together"),
        (lambda: new(k_new=NEW[:1], v_new=NEW[:1]), ValueError, "k_new and v_new must have the ba"),
        (lambda: new(k_new=NEW.half()), ValueError, "k_new must be torch.float32 like q"),
        (lambda: call(**ROTARY), ValueError, "rotary_cos and rotary_sin need k_new"),
        (lambda: new(rotary_cos=ANGLES), ValueError, "rotary_cos and rotary_sin go together"),
        (
            lambda: new(rotary_cos=ANGLES[:11], rotary_sin=ANGLES),
            ValueError,
            "rotary_cos has 11 positions, allowed: 12 or more",
        ),
        (
            lambda: new(rotary_cos=torch.zeros(12, 9), rotary_sin=torch.zeros(12, 9)),
            ValueError,
            "rotary_cos has 9 columns, allowed: 1 to half the head dim, 8",
        ),
        (
            lambda: new(rotary_cos=ANGLES, rotary_sin=ANGLES[:, :4]),
            ValueError,
            "must have equal numbers of columns",
        ),
        (lambda: new(**ROTARY, rotary_interleaved=1), TypeError, "rotary_interleaved must be True"),
        (
            lambda: call(tree_mask=torch.ones(2, 1, 2).bool()),
            ValueError,
            r"tree_mask must have shape \(2, 1, 1\), got \(2, 1, 2\)",
        ),
        (lambda: call(tree_mask=torch.ones(2, 1, 1)), ValueError, "tree_mask must be bool"),
        (lambda: call(tree_mask=[True]), TypeError, "tree_mask must be a torch tensor or a numpy"),
        (lambda: call(cache_leftpad=TABLE), ValueError, r"cache_leftpad must have shape \(2,\)"),
        (
            lambda: call(cache_leftpad=int32([0, -1])),
            ValueError,
            r"cache_leftpad\[1\] is -1, allowed: 0 to \d+, the keys of that sequence",
        ),
        (lambda: call(cache_leftpad=int32([99, 0])), ValueError, r"cache_leftpad\[0\] is 99"),
        (lambda: call(num_splits=-1), ValueError, "num_splits is -1, allowed: 0 to 2147483647"),
        (lambda: call(num_splits=1.5), TypeError, "num_splits must be an int, got 1.5"),
        (lambda: call(causal="no"), TypeError, "causal must be True or False"),
        (lambda: call(mask=Q), TypeError, r"attention_decode\(\) has no 'mask'"),
        (lambda: call(dropout_p=0.5), TypeError, r"attention_decode\(\) has no 'dropout_p'"),
    ],
)
def test_errors(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_a_cache_that_cannot_be_written():
    cache = np.zeros((2, 12, 2, 16), np.float32)
    cache.setflags(write=False)
    arrays = {"k_new": NEW.numpy(), "v_new": NEW.numpy()}
    with pytest.raises(ValueError, match="k_cache must be writable"):
        attention_decode(Q.numpy(), cache, cache, np.array([1, 2], np.int32), **arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_seqlens": int32([5, 13])}, "cache_seqlens with the new keys must be up to 12"),
        ({"cache_seqlens": int32([-1, 3])}, "cache_seqlens must be 0 or more"),
        ({"cache_seqlens": int32([5, 12]), "k_new": NEW}, "must be up to 12"),
        ({"block_table": TABLE, "cache_seqlens": int32([25, 3])}, "must be 0 to 24"),
        ({"block_table": TABLE + 1}, "block_table must hold pages, 0 to 1"),
        ({"cache_batch_idx": int32([0, 2])}, "cache_batch_idx must be 0 to 1"),
    ],
)
def test_checks_on_the_device(options, message):
    """What validate=True has a GPU check; on a CPU the same function raises at once."""
    good = {"cache_seqlens": int32([5, 12])}
    serving_operator.validate_decode(CACHE, **good)
    with pytest.raises(RuntimeError, match=message):
        serving_operator.validate_decode(CACHE, **{**good, **options})


@pytest.mark.gpu
def test_validate_lets_good_calls_pass():
    args, options, before, new_keys, _ = append_case("cuda", 16, 1)
    expected = attention_decode(*args, **options)
    out = attention_decode(*before, **options, **new_keys, validate=True)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("more", ["", "k_new", "tree_mask", "verify", "return_lse", "out"])
def test_heads_before_rows(is_paged, more):
    """layout="bhsd" is the same call with views, whose caches are written."""
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 16, 2, 16), torch.randn(2, 16, 2, 16)
    new = {name: torch.randn(2, 3, 2, 16) for name in ("k_new", "v_new") if more == "k_new"}
    options = {"causal": False}
    if is_paged:
        options["block_table"] = torch.tensor([[1], [0]], dtype=torch.int32)
    if more == "tree_mask":
        options[more] = torch.rand(2, 3, 3) < 0.5
    elif more in ("verify", "return_lse"):
        options[more] = True
    lengths = int32((4, 11), "cpu")
    theirs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    expected = attention_decode(q, k, v, lengths, **new, **options)
    new = {name: x.transpose(1, 2) for name, x in new.items()}
    if more == "out":
        options["out"] = torch.empty_like(theirs[0])
    actual = attention_decode(*theirs, lengths, layout="bhsd", **new, **options)
    if more == "out":
        assert actual is options["out"]
    if more == "return_lse":
        (actual, lse), (expected, expected_lse) = actual, expected
        assert torch.equal(lse, expected_lse)
    assert torch.equal(actual.transpose(1, 2), expected)
    assert torch.equal(theirs[1].transpose(1, 2), k)
    if more != "k_new":
        found = cutlass_attn.explain(*theirs, cache_seqlens=lengths, layout="bhsd", **options)
        assert found.chosen.kernel == "cpu"


def test_what_a_layout_is_told():
    x = torch.zeros(1, 4, 2, 16)
    with pytest.raises(ValueError, match='layout must be "bhsd" or "bshd", got \'nhd\''):
        attention_decode(x, x, x, 1, layout="nhd")
    with pytest.raises(ValueError, match=r"q must have 4 dimensions, \(batch, heads, seqlen, "):
        attention_decode(x[0], x, x, 1, layout="bhsd")
    q, cache = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 30, 16)
    text = 'q has 1 heads and k_cache 30 by layout="bshd", and 4 and 2 by layout="bhsd"$'
    with pytest.raises(ValueError, match=text):
        attention_decode(q, cache, cache, 7)
    assert attention_decode(q, cache, cache, 7, layout="bhsd").shape == q.shape
    text = 'q has 1 heads and k_cache 30 by layout="bhsd", and 4 and 2 by layout="bshd"$'
    with pytest.raises(ValueError, match=text):
        attention_decode(q.swapaxes(1, 2), *[cache.swapaxes(1, 2)] * 2, 7, layout="bhsd")


# --- What is refused before the cache is written --------------------------------------------------


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("rotary", [{}, ROTARY])
@pytest.mark.parametrize(
    "wrong",
    [
        {"kernel": "sm80/nothing"},
        {"kernel": "sm80/int8"},
        {"softcap": -1.0},
        {"softcap": 1e9},
        {"num_splits": -1},
        {"split_size": 7},
        {"out": torch.zeros(2, 1, 4, 15)},
        {"out": torch.zeros(2, 1, 4, 16).half()},
        {"out": torch.zeros(2, 1, 1, 16).expand(2, 1, 4, 16)},
        {"sinks": torch.zeros(3)},
    ],
    ids=lambda x: "-".join(x),
)
def test_a_refused_call_writes_nothing(wrong, rotary, is_verified):
    k, v = torch.zeros(2, 12, 2, 16), torch.zeros(2, 12, 2, 16)
    with pytest.raises((TypeError, ValueError)):
        attention_decode(
            Q, k, v, 3, k_new=NEW + 1, v_new=NEW + 1, verify=is_verified, **rotary, **wrong
        )
    assert not k.any() and not v.any()


def test_new_keys_go_to_memory_of_their_own():
    k, v = torch.zeros(2, 12, 2, 16), torch.zeros(2, 12, 2, 16)
    one_head = torch.zeros(2, 12, 1, 16).expand(-1, -1, 2, -1)
    mapped = {"cache_batch_idx": int32([1, 1])}
    for caches, more, message in (
        ((k, k), {}, "v_cache overlaps k_cache, which is written"),
        ((one_head, v), {}, "the rows of k_cache overlap each other"),
        ((k, one_head), {}, "the rows of v_cache overlap each other"),
        ((k, v), {"k_new": k[:, 3:4]}, "k_new overlaps k_cache, which is written"),
        ((k, v), {"v_new": k[:, 3:4]}, "v_new overlaps k_cache, which is written"),
        (
            (k, v),
            {"block_table": int32([0, 1, 0, 1]).view(2, 2)},
            "new keys of sequences 0 and 1 both go to row 3 of page 0, as block_table or",
        ),
        ((k, v), mapped, "new keys of sequences 0 and 1 both go to row 3 of page 1"),
    ):
        options = {"k_new": NEW + 1, "v_new": NEW + 1, **more}
        with pytest.raises(ValueError, match=message):
            attention_decode(Q, *caches, 3, **options)
        assert not k.any() and not v.any()
    shared = {"block_table": int32([0, 0]).view(2, 1)}  # of which each has rows of its own
    attention_decode(Q, k, v, int32([3, 8]), k_new=NEW + 1, v_new=NEW + 1, **shared)
    assert k.count_nonzero() == k[0, [3, 8]].count_nonzero() == 64
