"""What a mod may do, and how it is told what it may not."""

import functools
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cutlass_attn._mods.graph import UnsupportedModError, evaluate, loads, ordered  # noqa: E402
from cutlass_attn._mods.symbols import FUNCTIONS  # noqa: E402
from cutlass_attn._mods.tracing import trace  # noqa: E402

T = torch.arange(24.0).reshape(4, 6)
STARTS = torch.tensor([[0, 2], [3, 5]])
SCALE = torch.tensor(2.0)
calls = 0


def score(function):
    return trace(function, "score_mod")


def mask(function):
    return trace(function, "mask_mod")


def value(graph, **variables):
    tensors = {name: torch.as_tensor(x) for name, x in variables.items()}
    return evaluate(graph, graph.result, tensors)


def test_equal_nodes_are_one():
    graph = mask(lambda b, h, q, k: (T[b, q] == T[b, k]) & (T[b, q] > 0))
    assert len(loads(graph.result)) == 2
    assert len(graph.captures) == 1


def test_depends():
    graph = mask(lambda b, h, q, k: (STARTS[b, 0] <= q) & (k < 3))
    by_op = {x.op: x for x in ordered(graph.result)}
    assert by_op["load"].depends == {"b"}
    assert by_op["lt"].depends == {"k"}
    assert graph.result.depends == {"b", "q", "k"}


def test_rows_are_indexed_in_steps():
    graph = mask(lambda b, h, q, k: (STARTS[b][0] <= q) & (q < STARTS[:, 1][b]))
    assert value(graph, b=1, q=4).item()
    assert not value(graph, b=0, q=4).item()
    first, last = None, None

    def unpacks(b, h, q, k):
        first, last = STARTS[b]
        return (first <= q) & (q < last)

    graph = mask(unpacks)
    assert value(graph, b=1, q=4).item()
    assert first is last is None


def test_what_it_may_be():
    class Causal:
        def __call__(self, b, h, q, k):
            return q >= k

    def shifted(b, h, q, k, offset=3):
        return q + offset >= k

    def windowed(width, b, h, q, k):
        return q - k < width

    assert mask(Causal()).result.op == "ge"
    assert mask(shifted).result.op == "ge"
    assert mask(functools.partial(windowed, 5)).result.op == "lt"
    assert mask(lambda *index: index[2] >= index[3]).result.op == "ge"


def test_tensors_and_numbers_of_any_library():
    np = pytest.importorskip("numpy")
    graph = score(lambda s, b, h, q, k: s * SCALE + np.float32(0.5) * (np.int64(3) + q))
    assert value(graph, score=1.0, q=1).item() == 4.0


def test_creation_and_conversion():
    graph = mask(lambda b, h, q, k: b.new_ones((), dtype=torch.bool) & ~torch.zeros_like(q).bool())
    assert value(graph, b=0, q=0).item()
    graph = score(lambda s, b, h, q, k: s.to(torch.float32) + T[h, q].to(s.dtype).to("cpu"))
    assert value(graph, score=1.0, h=1, q=2).item() == 9.0


def test_the_device_is_that_of_the_call():
    def where_it_is(s, b, h, q, k):
        assert s.device == q.device == torch.device("meta")
        return s

    trace(where_it_is, "score_mod", torch.device("meta"))


def test_branches():
    def branches(b, h, q, k):
        return q >= k if h == 0 else k >= q

    with pytest.raises(UnsupportedModError, match=r"(?s)test_tracing.py:\d+: .*torch.where.*if h"):
        mask(branches)
    for function in (
        lambda b, h, q, k: 0 <= q - k < 5,
        lambda b, h, q, k: q >= k and k > 2,
        lambda b, h, q, k: min(q, k) > 2,
        lambda b, h, q, k: not (q >= k),
    ):
        with pytest.raises(UnsupportedModError, match="branches on a traced value"):
            mask(function)


def _writes_to_a_tensor(s, b, h, q, k):
    T[0, 0] = 1.0
    return s


def _writes_by_a_method(s, b, h, q, k):
    T.add_(1)
    return s


def _writes_to_the_score(s, b, h, q, k):
    return s.add_(1)


def _adds_in_place(s, b, h, q, k):
    table = T
    table += 1
    return s


def _counts_calls(s, b, h, q, k):
    global calls
    calls += 1
    return s


def _writes_by_out(s, b, h, q, k):
    torch.add(T, 1, out=T)
    return s + T[h, q]


def _writes_in_place(s, b, h, q, k):
    return s + torch.nn.functional.relu(T - 1, inplace=True)[h, q]


def _counts_calls_within(s, b, h, q, k):
    def count():
        global calls
        calls += 1

    count()
    return s


def _counter():
    count = 0

    def mod(s, b, h, q, k):
        def within():
            nonlocal count
            count += 1

        within()
        return s

    return mod


@pytest.mark.parametrize(
    "function",
    [
        _writes_to_a_tensor,
        _writes_by_a_method,
        _writes_to_the_score,
        _adds_in_place,
        _counts_calls,
        _writes_by_out,
        _writes_in_place,
        _counts_calls_within,
        _counter(),
    ],
)
def test_side_effects(function):
    before = T.clone()
    with pytest.raises(UnsupportedModError, match="side effect"):
        score(function)
    assert torch.equal(T, before)
    assert calls == 0


def test_a_function_may_write_to_its_own_variables():
    def mod(s, b, h, q, k):
        total = s

        def add(x):
            nonlocal total
            total = total + x

        add(q)
        add(k)
        return total

    assert value(score(mod), score=1.0, q=2, k=3).item() == 6.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda s, b, h, q, k: torch.cumsum(s, 0), "torch.cumsum is not supported"),
        (lambda s, b, h, q, k: s.softmax(-1), "Tensor.softmax is not supported"),
        (lambda s, b, h, q, k: s + math.exp(s), "Python number. Use torch's functions"),
        (lambda s, b, h, q, k: s + T[h].sum(), "sum of a row of a captured tensor"),
        (lambda s, b, h, q, k: s + T, r"shape \(4, 6\) is used without an index"),
        (lambda s, b, h, q, k: s + T[h], r"a row of a captured tensor of shape \(4, 6\)"),
        (lambda s, b, h, q, k: s + T[h, q, k], "too many indices"),
        (lambda s, b, h, q, k: s + T[h, 1:][0], "something else than integers"),
        (lambda s, b, h, q, k: s + T[s, q], "something else than integers"),
        (lambda s, b, h, q, k: s.to(torch.float16), "conversion to torch.float16"),
        (lambda s, b, h, q, k: s + torch.rand(()), "drawn once for all logits"),
        (lambda s, b, h, q, k: s + torch.rand_like(T)[h, q], "drawn once for all logits"),
        (lambda s, b, h, q, k: s + torch.dropout(T, 0.5, True)[h, q], "drawn once"),
        (lambda s, b, h, q, k: s + torch.nn.functional.dropout1d(T)[h, q], "drawn once"),
        (lambda s, b, h, q, k: s | 1, "or of float is not supported"),
        (lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="trunc"), "these arguments"),
        (lambda s, b, h, q, k: s + "1", "str in an expression"),
        (lambda s, b, h, q, k: s + q.item(), "Python number"),
        (lambda s, b, h, q, k: s[0], "has no elements"),
        (lambda s, b, h, q, k: s + T[[h, q]], r"by a list of traced values: write t\[q, k\]"),
        (lambda s, b, h, q, k: s + q.size(0), r"size\(0\) of a traced value"),
        (lambda s, b, h, q, k: s + [1, 2][h], "make the list a tensor"),
        (lambda s, b, h, q, k: s + {0: 1}[h], "looked up in a dict or a set"),
        (lambda s, b, h, q, k: s + f"{q:d}", "str in an expression"),
        (lambda s, b, h, q, k: s + q * 2**100, "beyond 64 bits"),
        (lambda s, b, h, q, k: s + torch.full_like(q, math.inf), "these arguments"),
        (lambda s, b, h, q, k: s + T.to_sparse()[q, k], "layout torch.sparse_coo"),
        (
            lambda s, b, h, q, k: s + torch.nn.functional.embedding(q, T, max_norm=1.0)[h],
            "these arguments",
        ),
    ],
)
def test_unsupported(function, said):
    """Names the operation, the line and the way out."""
    with pytest.raises(UnsupportedModError, match=said) as caught:
        score(function)
    assert "test_tracing.py:" in str(caught.value)
    assert "bias= or mask= of cutlass_attn.attention" in str(caught.value)


def test_an_array_of_numpy_is_refused():
    array = pytest.importorskip("numpy").arange(4)
    with pytest.raises(UnsupportedModError, match="make the array a tensor"):
        score(lambda s, b, h, q, k: s + array[h])


def test_infinite_exponents():
    assert value(score(lambda s, b, h, q, k: s**math.inf), score=0.5).item() == 0.0
    assert math.isnan(value(score(lambda s, b, h, q, k: s**math.nan), score=0.5).item())


def test_the_docs_list_all_functions():
    text = (Path(__file__).parents[2] / "docs" / "flex.md").read_text(encoding="utf-8")
    public = {name for name in FUNCTIONS if hasattr(torch, name) or hasattr(torch.Tensor, name)}
    assert [x for x in sorted(public) if not x.startswith("_") and f"`{x}`" not in text] == []


def test_embedding():
    graph = score(lambda s, b, h, q, k: s + torch.nn.functional.embedding(h, T)[q])
    assert value(graph, score=1.0, h=1, q=2).item() == 9.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda b, h, q: q > 0, "must have 4 positional arguments, got 3"),
        (lambda s, b, h, q, k: s, "must have 4 positional arguments, got 5"),
        (lambda b, h, q, k: q, "must return bool, got int"),
        (lambda b, h, q, k: None, "returned None"),
        (lambda b, h, q, k: (q, k), r"mask_mod returned a tuple.* \(test_tracing.py:\d+\)"),
        (lambda b, h, q, k: "q", "returned a str"),
        (lambda b, h, q, k: T[q], r"returned a row of a captured tensor of shape \(4, 6\)"),
        (lambda b, h, q, k: T, r"returned a tensor of shape \(4, 6\)"),
        (T, "mask_mod must be a function, got Tensor"),
    ],
)
def test_wrong_functions(function, said):
    with pytest.raises(TypeError, match=said):
        mask(function)


def test_loads_stay_inside():
    graph = score(lambda s, b, h, q, k: s + T[0, q])
    found = evaluate(
        graph, graph.result, {"score": torch.zeros(4), "q": torch.tensor([0, 5, 9, -1])}
    )
    assert found.tolist() == [0.0, 5.0, 5.0, 5.0]
