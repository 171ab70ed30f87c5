"""The table of operations: C++ by g++ and derivatives, each against torch."""

import pytest

torch = pytest.importorskip("torch")

import on_cpu  # noqa: E402
from cutlass_attn._mods import cpp  # noqa: E402
from cutlass_attn._mods.derivative import derivative  # noqa: E402
from cutlass_attn._mods.graph import evaluate  # noqa: E402
from cutlass_attn._mods.operations import OPERATIONS  # noqa: E402
from cutlass_attn._mods.tracing import trace  # noqa: E402

B, H, SQ, SK = 2, 3, 6, 7
TABLE = torch.randn(H, SQ, SK, generator=torch.Generator().manual_seed(1))
POSITIVE = TABLE.abs() + 0.1
IDS = torch.tensor([[3, -2, 0, 5, 1, 1, 4], [2, 2, -7, 0, 1, 9, 3]])
SEEN = IDS > 1
WIDE = IDS[0] + (IDS[1] << 33)


# Each operation of the table, in floats and integers where it takes both.
SCORES = {
    "add": lambda s, b, h, q, k: s + TABLE[h, q, k],
    "sub": lambda s, b, h, q, k: 2.5 - s - q,
    "mul": lambda s, b, h, q, k: s * TABLE[h, q, k] * s,
    "div": lambda s, b, h, q, k: s / POSITIVE[h, q, k] + 1.0 / (s * s + 1),
    "div of ints": lambda s, b, h, q, k: s + (q - k) / (k + 2),
    "floordiv": lambda s, b, h, q, k: s * 2 + s // 0.3 + (q - k) // 3 + (q - k) // -2,
    "mod": lambda s, b, h, q, k: s % 0.7 + s % -0.7 + (q - k) % 3 + (q - k) % -2,
    "fmod": lambda s, b, h, q, k: torch.fmod(s, 0.7) + torch.fmod(s, -POSITIVE[h, q, k]),
    "neg": lambda s, b, h, q, k: -s + -(q - k),
    "abs": lambda s, b, h, q, k: abs(s) + torch.abs(q - k),
    "sign": lambda s, b, h, q, k: s * torch.sign(s) + torch.sign(q - k),
    "min": lambda s, b, h, q, k: torch.minimum(s, TABLE[h, q, k]) + torch.minimum(q, k),
    "max": lambda s, b, h, q, k: torch.maximum(s * s, TABLE[h, q, k]) + torch.maximum(q, k),
    "pow": lambda s, b, h, q, k: POSITIVE[h, q, k] ** s + s**2 + (s * s) ** 1.5 + 2.0**s,
    "where": lambda s, b, h, q, k: torch.where(q > k, s * s, torch.where(SEEN[b, k], 3, -s)),
    "exp": lambda s, b, h, q, k: torch.exp(s),
    "exp2": lambda s, b, h, q, k: torch.exp2(s) + torch.exp2(-((h + 1) * 8.0 / 4)),
    "expm1": lambda s, b, h, q, k: torch.expm1(s),
    "log": lambda s, b, h, q, k: torch.log(s * s + 1) * TABLE[h, q, k],
    "log2": lambda s, b, h, q, k: torch.log2(abs(s) + 1),
    "log1p": lambda s, b, h, q, k: torch.log1p(s * s),
    "sqrt": lambda s, b, h, q, k: torch.sqrt(s * s + POSITIVE[h, q, k]),
    "rsqrt": lambda s, b, h, q, k: torch.rsqrt(s * s + 1),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(3 * s),
    "tanh": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "sin": lambda s, b, h, q, k: torch.sin(s),
    "cos": lambda s, b, h, q, k: torch.cos(s),
    "tan": lambda s, b, h, q, k: torch.tan(s / 4) + torch.tan(b),
    "atan": lambda s, b, h, q, k: torch.atan(2 * s),
    "erf": lambda s, b, h, q, k: torch.erf(s),
    "floor": lambda s, b, h, q, k: s + torch.floor(2 * s),
    "ceil": lambda s, b, h, q, k: s + torch.ceil(2 * s),
    "round": lambda s, b, h, q, k: s + torch.round((q - k) / 2),
    "trunc": lambda s, b, h, q, k: s + torch.trunc(2 * s),
    "to_float": lambda s, b, h, q, k: s * (q + SEEN[b, k]),
    "to_int": lambda s, b, h, q, k: s + (3 * s).int() % 2,
    "to_bool": lambda s, b, h, q, k: s * torch.logical_and(q - k, s).float(),
    "and": lambda s, b, h, q, k: s + (q & k) + ((q > 2) & (k > 2)),
    "or": lambda s, b, h, q, k: s + (q | 5) + ((q > 2) | SEEN[b, k]),
    "xor": lambda s, b, h, q, k: s + (q ^ k) + ((q > 2) ^ (k > 2)),
    "not": lambda s, b, h, q, k: s + ~SEEN[b, k],
    "invert": lambda s, b, h, q, k: s + ~q,
    "shl": lambda s, b, h, q, k: s + (q << 3),
    "shr": lambda s, b, h, q, k: s + ((q - k) >> 1),
    "lt": lambda s, b, h, q, k: s + (q < k) * s,
    "le": lambda s, b, h, q, k: s + (q <= k) * s,
    "gt": lambda s, b, h, q, k: s + (s > TABLE[h, q, k]) * s,
    "ge": lambda s, b, h, q, k: s + (k <= 3) * s,
    "eq": lambda s, b, h, q, k: s + (IDS[b, q] == IDS[b, k]) * s,
    "ne": lambda s, b, h, q, k: s + (IDS[b, q] != 1) * s,
    "gelu": lambda s, b, h, q, k: torch.nn.functional.gelu(s),
    "gelu tanh": lambda s, b, h, q, k: torch.nn.functional.gelu(s, approximate="tanh"),
    "relu": lambda s, b, h, q, k: torch.relu(s) + torch.nn.functional.silu(s),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5) + s.clamp(min=0.1) + s.clamp_max(q),
    "leaky_relu": lambda s, b, h, q, k: torch.nn.functional.leaky_relu(s, 0.2),
    "softplus": lambda s, b, h, q, k: torch.nn.functional.softplus(s, beta=2.0),
    "isinf": lambda s, b, h, q, k: s + torch.isinf(q / k) + 2 * torch.isfinite(q / k),
    "int64, comparisons": lambda s, b, h, q, k: (
        s + (WIDE[q] == WIDE[k]) + (WIDE[q] > k) + (WIDE[q] != k) + WIDE[q].bool()
    ),
    "int64, arithmetic": lambda s, b, h, q, k: (
        s
        + (WIDE[q] - WIDE[k]) // 2**30
        + torch.sign(WIDE[q] - k)
        + (k + 2 * WIDE[q]) % -7
        + abs(WIDE[q]) % 9
        + (~WIDE[q] >> 33)
        + torch.where(q > k, WIDE[q], k) % 5
        + torch.minimum(WIDE[q], k) % 3
    ),
    "int64, index": lambda s, b, h, q, k: s + TABLE[h, WIDE[q] % SQ, k],
    "beyond float32": lambda s, b, h, q, k: (s * s + 1) * -1e39,
    "wrap": lambda s, b, h, q, k: s + TABLE[h, -q - 1, k],
}


def test_every_operation_is_tested():
    assert not OPERATIONS.keys() - SCORES.keys()


def operands():
    score = torch.randn(B, H, SQ, SK, generator=torch.Generator().manual_seed(2))
    return score, *torch.meshgrid(*map(torch.arange, (B, H, SQ, SK)), indexing="ij")


def by_torch(function, score, *index):
    """The function of all logits at once: torch's operations are those of one element."""
    return function(score, *index).expand(score.shape)


def variables(score, *index):
    return dict(zip(("score", "b", "h", "q", "k"), (score, *index)))


@pytest.mark.parametrize("name", SCORES)
def test_evaluation(name):
    due = by_torch(SCORES[name], *operands())
    graph = trace(SCORES[name], "score_mod")
    result = evaluate(graph, graph.result, variables(*operands()))
    torch.testing.assert_close(result.expand(due.shape), due, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_derivative(name):
    score, *index = operands()
    table = [x.requires_grad_() for x in (score, TABLE)]
    # torch has no derivative of //, which is 0 almost everywhere.
    function = {"floordiv": lambda s, b, h, q, k: s * 2}.get(name, SCORES[name])
    due = torch.autograd.grad(
        by_torch(function, score, *index).sum(), table, materialize_grads=True
    )
    graph = trace(SCORES[name], "score_mod")
    captures = [i for i, x in enumerate(graph.captures) if x is TABLE]
    found = derivative(graph, captures)
    with torch.no_grad():
        of_score = evaluate(graph, found.score, variables(score, *index)).expand(score.shape)
        torch.testing.assert_close(of_score, due[0], rtol=1e-4, atol=1e-4)
        of_table = torch.zeros_like(TABLE)
        for load, gradient in found.loads:
            at = [
                evaluate(graph, x, variables(score, *index)).expand(score.shape) for x in load.args
            ]
            value = evaluate(graph, gradient, variables(score, *index)).expand(score.shape)
            of_table.index_put_(tuple(at), value.contiguous(), accumulate=True)
        torch.testing.assert_close(of_table, due[1], rtol=1e-4, atol=1e-4)
    TABLE.requires_grad_(False)


def test_derivative_at_ties_is_torchs():
    score = torch.tensor([-1.0, 0.0, 0.5, 1.0], requires_grad=True)
    zero = torch.zeros((), dtype=torch.long)
    for function in (
        lambda s, b, h, q, k: torch.maximum(s, 0.0 * s),
        lambda s, b, h, q, k: torch.relu(s) + s.clamp(0, 1) + abs(s),
    ):
        (due,) = torch.autograd.grad(function(score, *[zero] * 4).sum(), score)
        graph = trace(function, "score_mod")
        found = derivative(graph)
        result = evaluate(graph, found.score, {"score": score.detach()})
        torch.testing.assert_close(result, due)


def masked(b, h, q, k):
    return (IDS[b, q] == IDS[b, k]) & (q // 3 >= k // 3)


def beyond(s, b, h, q, k):
    return s + TABLE[h, q * 3 - 9, k - 20] + TABLE[h, WIDE[q], k]


MODS = {**SCORES, "beyond": beyond, "masked": masked}


def graph_and_source(name):
    number = list(MODS).index(name)
    graph = trace(MODS[name], "mask_mod" if name == "masked" else "score_mod")
    functions = {"apply": graph.result}
    if name != "masked":
        functions["grad"] = derivative(graph).score
    return graph, cpp.source(graph, functions, f"Mod{number}"), functions


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    shape, parts = (B, H, SQ, SK), []
    for n, name in enumerate(MODS):
        parts += [graph_and_source(name)[1].text]
        if name == "masked":
            arguments, body = f"bool* out, Mod{n} const* mod", "out[i] = mod->apply(b, h, q, k);"
            parts += [on_cpu.for_logits(f"run{n}", arguments, shape, body)]
        else:
            parts += [on_cpu.values(n, shape)]
    return on_cpu.library(tmp_path_factory.mktemp("mods"), parts)


def run(library, name):
    """(result, gradient) by C++ and by torch's evaluation of the graph."""
    graph, source, functions = graph_and_source(name)
    score, *index = operands()
    found = on_cpu.run_values(library, list(MODS).index(name), source, score)
    due = (evaluate(graph, x, variables(score, *index)) for x in functions.values())
    return found, [x.expand(score.shape) for x in due]


@on_cpu.needs_gxx
@pytest.mark.parametrize("name", SCORES)
def test_cpp(name, library):
    (out, gradient), (_, of_score) = run(library, name)
    due = by_torch(SCORES[name], *operands()).float()
    torch.testing.assert_close(out, due, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, of_score, rtol=1e-4, atol=1e-4)


@on_cpu.needs_gxx
def test_cpp_reads_nothing_beyond_a_tensor(library):
    (out, _), (due, _) = run(library, "beyond")
    assert torch.equal(out, due)


@on_cpu.needs_gxx
def test_cpp_of_a_mask(library):
    out = torch.empty(B, H, SQ, SK, dtype=torch.bool)
    graph, source, _ = graph_and_source("masked")
    function = getattr(library, f"run{list(MODS).index('masked')}")
    function(on_cpu.pointer(out), cpp.packed(source))
    score, *index = operands()
    due = evaluate(graph, graph.result, variables(score, *index))
    assert torch.equal(out, due.expand(out.shape))
    assert torch.equal(out, masked(*index))


def test_numbers_are_no_part_of_the_text():
    def text(window, offset):
        graph = trace(lambda b, h, q, k: (q - k < window) & (k + offset <= q), "mask_mod")
        return cpp.source(graph, {"apply": graph.result})

    first, second = text(5, 300), text(1000, 7)
    assert first.text == second.text
    assert (first.ints, second.ints) == ((5, 300), (1000, 7))


def test_nan_is_no_part_of_the_text():
    graph = trace(lambda s, b, h, q, k: s ** float("nan"), "score_mod")
    found = cpp.source(graph, {"apply": graph.result})
    assert "nan" not in found.text and str(found.floats) == "(nan,)"


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_captured_tensor_has_no_last_entry(shape):
    empty = torch.zeros(shape)
    graph = trace(lambda s, b, h, q, k: s * empty[(q, k)[: len(shape)]], "score_mod")
    with pytest.raises(NotImplementedError, match="kernels read sizes of 1"):
        cpp.packed(cpp.source(graph, {"apply": graph.result}))


def test_equal_expressions_are_computed_once():
    graph = trace(
        lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (IDS[b, q] > 0) & (IDS[b, k] > 0), "mask_mod"
    )
    assert cpp.source(graph, {"apply": graph.result}).text.count("t0(") == 2
