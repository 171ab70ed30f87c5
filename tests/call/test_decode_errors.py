"""attention_decode: what it refuses, and before the cache is written."""

import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import attention_decode
from cutlass_attn._call import serving_operator
from serving import int32
from test_decode import append_case

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
        (
            lambda: call(
                k=CACHE[:, :0], v=CACHE[:, :0], lengths=(0, 0), cache_batch_idx=int32([0, 2])
            ),
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
        (lambda: call(rotary_interleaved=1), TypeError, "rotary_interleaved must be True or False"),
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


LISTS = int32([[[0, 23, -1]], [[12, 99, 99]]])  # rows of 2 entries of 12 keys, for one query each


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indices": LISTS - 1}, "indices must be rows, 0 to 23, or -1"),
        ({"topk_lengths": int32([3, 2])}, "indices must be rows, 0 to 23, or -1"),
        ({"topk_lengths": None}, "indices must be rows, 0 to 23, or -1"),
        ({"topk_lengths": int32([4, 1])}, "topk_lengths must be 0 to 3"),
        ({"topk_lengths": int32([3, -1])}, "topk_lengths must be 0 to 3"),
        (
            {"block_table": TABLE, "cache_seqlens": int32([23, 24])},
            "indices must be rows of the sequence or -1",
        ),
        ({"block_table": TABLE, "cache_seqlens": int32([24, 25])}, "cache_seqlens must be 0 to 24"),
    ],
)
def test_lists_are_checked_on_the_device(options, message):
    """Entries beyond topk_lengths may hold anything, as on a CPU."""
    good = {"indices": LISTS, "topk_lengths": int32([3, 1]), "cache_seqlens": None}
    serving_operator.validate_decode(CACHE, **good)
    in_pages = {"block_table": TABLE, "cache_seqlens": int32([24, 24])}
    serving_operator.validate_decode(CACHE, **{**good, **in_pages})
    with pytest.raises(RuntimeError, match=message):
        serving_operator.validate_decode(CACHE, **{**good, **options})


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_validate_is_a_bool(layout):
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(TypeError, match="validate must be True or False, got 1"):
        attention_decode(x, x, x, 1, layout=layout, validate=1)


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
