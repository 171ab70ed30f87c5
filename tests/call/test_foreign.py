"""Lists of lengths, one length for all sequences, and arrays of other libraries by DLPack."""

import gc
import weakref

import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import (
    append_kv,
    attention,
    attention_decode,
    attention_varlen,
    explain,
    merge_states,
    prequantize,
)

Q, K, V = (torch.randn(1, 2, rows, 16) for rows in (5, 9, 9))
ROWS = torch.randn(9, 2, 16)
CACHE = torch.randn(3, 8, 2, 16)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


class Foreign:
    """A tensor as a library shows it that this one does not know."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class Closed(Foreign):
    def __dlpack__(self, **options):
        raise BufferError("not today")


WRAPS = {"another library's": Foreign, "numpy's": lambda x: x.numpy()}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_arrays_of_other_libraries(wrap):
    mask = torch.rand(5, 9) < 0.7
    expected = attention(Q, K, V, mask=mask)
    for operands in ((Q, K, V), (wrap(Q), K, V), (Q, wrap(K), wrap(V))):
        assert torch.equal(attention(*operands, mask=wrap(mask)), expected)
        assert torch.equal(attention(*operands, mask=wrap(mask), verify=True), expected)
    out = torch.empty_like(Q)
    assert attention(Q, K, V, mask=mask, out=wrap(out)).data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


def test_calls_without_a_tensor():
    q, k, v = Foreign(Q), Foreign(K), Foreign(V)
    out, lse = attention(q, k, v, return_lse=True)
    assert isinstance(out, torch.Tensor)
    expected = attention(Q, K, V, return_lse=True)
    assert torch.equal(out, expected[0])
    assert explain(q, k, v).chosen == explain(Q, K, V).chosen
    half = [Foreign(x.half()) for x in (K, V)]
    assert isinstance(prequantize(*half, quantize="qk").k, torch.Tensor)
    merged = merge_states(*map(Foreign, (out, lse, out, lse)))
    assert torch.equal(merged[0], merge_states(out, lse, out, lse)[0])


def test_serving_calls_of_other_libraries():
    ends = int32(0, 4, 9)
    expected = attention_varlen(ROWS, ROWS, ROWS, ends)
    given = [Foreign(x) for x in (ROWS, ROWS, ROWS, ends)]
    assert torch.equal(attention_varlen(*given), expected)
    assert torch.equal(attention_varlen(ROWS, ROWS, ROWS, ends.numpy()), expected)
    q, lengths = CACHE[:, :1], int32(3, 8, 0)
    expected = attention_decode(q, CACHE, CACHE, lengths)
    given = [Foreign(x) for x in (q, CACHE, CACHE, lengths)]
    assert torch.equal(attention_decode(*given), expected)
    pages = [torch.zeros(2, 8, 2, 16) for _ in range(2)]
    append_kv(ROWS, Foreign(ROWS), Foreign(pages[0]), pages[1], list(range(9)))
    assert all(torch.equal(x.view(16, 2, 16)[:9], ROWS) for x in pages)


def test_arrays_of_numpy_stay_numpys():
    assert isinstance(attention(Q.numpy(), K.numpy(), V.numpy()), np.ndarray)
    rows = ROWS.numpy()
    assert isinstance(attention_varlen(rows, rows, rows, [0, 4, 9]), np.ndarray)


def test_what_torch_does_not_take_is_named():
    with pytest.raises(TypeError, match=r"k is a test_foreign\.Closed that .*: not today"):
        attention(Q, Closed(K), V)
    with pytest.raises(TypeError, match="causal must be True or False, got"):
        attention(Q, K, V, causal=np.ones(2))


@pytest.mark.parametrize("array", [torch.Tensor.numpy, torch.Tensor.clone], ids=["numpy", "torch"])
def test_lists_of_offsets_and_lengths(array):
    rows, ends, used = array(ROWS), array(int32(0, 4, 9)), array(int32(3, 5))
    expected = attention_varlen(rows, rows, rows, ends, ends, seqused_k=used)
    actual = attention_varlen(rows, rows, rows, [0, 4, 9], (0, 4, 9), seqused_k=[3, 5])
    assert type(actual) is type(expected)
    assert (actual == expected).all()
    cache = array(CACHE)
    expected = attention_decode(cache[:, :2], cache, cache, array(int32(5, 5, 5)))
    for lengths in (5, np.int64(5), [5, 5, 5]):
        assert (attention_decode(cache[:, :2], cache, cache, lengths) == expected).all()
        verified = attention_decode(cache[:, :2], cache, cache, lengths, verify=True)
        assert (verified == expected).all()
    explained = explain(cache[:, :2], cache, cache, cache_seqlens=5)
    assert explained.chosen.kernel == "cpu"


def test_a_call_with_a_list_keeps_nothing_alive():
    gc.disable()
    try:
        rows, cache = ROWS.clone(), CACHE.clone()
        alive = [weakref.ref(rows), weakref.ref(cache)]
        attention_varlen(rows, rows, rows, [0, 4, 9])
        attention_decode(cache[:, :1], cache, cache, 5)
        attention(rows[None], rows[None].numpy(), rows[None])
        del rows, cache
        assert [x() for x in alive] == [None, None]
    finally:
        gc.enable()


def test_compiled_calls_take_lists():
    @torch.compile(backend="eager", fullgraph=True)
    def call(rows, cache):
        packed = attention_varlen(rows, rows, rows, [0, 4, 9])
        return packed, attention_decode(cache[:, :1], cache, cache, 5)

    packed, decoded = call(ROWS, CACHE)
    assert torch.equal(packed, attention_varlen(ROWS, ROWS, ROWS, int32(0, 4, 9)))
    assert torch.equal(decoded, attention_decode(CACHE[:, :1], CACHE, CACHE, int32(5, 5, 5)))


MASK = np.arange(9) % 3 < 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_calls_take_an_int_that_changes(dynamic):
    """From the second number on it is a symbol, for which one more graph is compiled."""

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def call(cache, q, lengths):
        return (
            attention_decode(cache[:, :1], cache, cache, lengths),
            attention(q, q, q, seqused_q=lengths, seqused_k=lengths),
            attention(q, K, V, seqused_k=lengths),
            attention(q, K, V, mask=MASK, softmax_scale=lengths),
        )

    q = Q[:, :, :5]
    for length in (3, 4, 5):
        results = call(CACHE, q, length)
        due = int32(*[length] * 3)
        assert torch.equal(results[0], attention_decode(CACHE[:, :1], CACHE, CACHE, due))
        due = due[:1]
        assert torch.equal(results[1], attention(q, q, q, seqused_q=due, seqused_k=due))
        assert torch.equal(results[2], attention(q, K, V, seqused_k=due))
        assert torch.equal(results[3], attention(q, K, V, mask=MASK, softmax_scale=length))


NUMPY_CALLS = {
    "attention": lambda x: attention(x[None], x[None], x[None]),
    "attention_varlen": lambda x: attention_varlen(x, x, x, [0, 4, 9]),
    "attention_decode": lambda x: attention_decode(x[None, :1], x[None], x[None], 5),
}


@pytest.mark.parametrize("function", NUMPY_CALLS)
def test_compiled_calls_with_numpy_arrays_break_the_graph(function):
    def call(x):
        return torch.from_numpy(NUMPY_CALLS[function]((x + 1).numpy())) * 2

    torch.compiler.reset()
    assert torch.equal(torch.compile(call, backend="aot_eager")(ROWS), call(ROWS))
    torch.compiler.reset()
    with pytest.raises(Exception, match="numpy_arrays_outside_of_graph"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(ROWS)


def test_compiled_append_takes_numpy_arrays():
    pages = np.zeros((2, 2, 4, 2, 8), np.float32)
    k = np.random.default_rng(0).standard_normal((2, 2, 8), np.float32)
    append = torch.compile(append_kv, backend="aot_eager")
    append(k, k, pages[0], pages[1], slot_mapping=[6, 1])
    assert (pages.reshape(2, 8, 2, 8)[:, [6, 1]] == k).all()


def test_compiled_append_takes_a_list():
    pages = torch.zeros(2, 2, 4, 2, 8)

    @torch.compile(backend="aot_eager")
    def call(k, pages):
        cutlass_attn.append_kv(k, k, pages[0], pages[1], slot_mapping=[6, 1])

    k = torch.randn(2, 2, 8)
    call(k, pages)
    assert torch.equal(pages.flatten(1, 2)[:, [6, 1]], torch.stack([k, k]))


LENGTHS = {"as a list": list, "as a tensor": lambda x: int32(*x), "as an array": np.int32}


@pytest.mark.parametrize("lengths", [[4, 5], [5, 4], [9], [2, 7, 0]], ids=str)
@pytest.mark.parametrize("kind", LENGTHS)
def test_lengths_in_place_of_offsets_are_noticed(kind, lengths):
    rows = ROWS.numpy() if kind == "as an array" else ROWS
    given = LENGTHS[kind](lengths)
    with pytest.raises(
        ValueError, match=r"cu_seqlens_q .*lengths.* sum up to the 9 rows of q; all"
    ):
        attention_varlen(rows, rows, rows, given)
    offsets = LENGTHS[kind]([0] * len(lengths) + [9])
    with pytest.raises(
        ValueError, match=r"cu_seqlens_k .*lengths.* sum up to the 9 rows of k; all"
    ):
        attention_varlen(rows, rows, rows, offsets, LENGTHS[kind]([*lengths, 0]))


def test_offsets_may_begin_and_end_within_the_rows():
    expected = attention_varlen(ROWS[2:5], ROWS[2:5], ROWS[2:5], [0, 1, 3])
    assert torch.equal(attention_varlen(ROWS, ROWS, ROWS, [2, 3, 5])[2:5], expected)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([0, 4.5], TypeError, "cu_seqlens_q must be a list of int or an int32 array, got .* 4.5"),
        ([0, True], TypeError, "cu_seqlens_q must be a list of int"),
        ([0, 2**31], ValueError, "cu_seqlens_q has 2147483648, allowed: numbers of 32 bits"),
        ([0, 10], ValueError, r"cu_seqlens_q\[1\] is 10, but q has 9 rows"),
        ([], ValueError, r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(0,\)"),
        (9, TypeError, "cu_seqlens_q must be an array of the same library as q, got int"),
    ],
    ids=str,
)
def test_wrong_lists(given, error, message):
    with pytest.raises(error, match=message):
        attention_varlen(ROWS, ROWS, ROWS, given)


def test_a_length_beyond_the_cache_is_named():
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] is 9, allowed: 0 to 8"):
        attention_decode(CACHE[:, :1], CACHE, CACHE, 9)
    with pytest.raises(TypeError, match=r"cache_seqlens must be an array.*bool"):
        attention_decode(CACHE[:, :1], CACHE, CACHE, True)


def test_no_sequence_has_any_length():
    q = CACHE[:0, :1]
    assert cutlass_attn.attention_decode(q, CACHE[:0], CACHE[:0], 5).shape == (0, 1, 2, 16)
