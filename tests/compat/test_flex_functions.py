"""compat.flex and attention() with the kinds of functions that PyTorch's own tests and examples of
FlexAttention are about: results and gradients against autograd in float64.

Left out of PyTorch's tests: what is about its compiler, kernel options, nested tensors and devices;
functions that reduce a captured row.
"""

import math

import pytest

torch = pytest.importorskip("torch", minversion="2.9")

import cutlass_attn  # noqa: E402
from cutlass_attn._mods.graph import UnsupportedModError  # noqa: E402
from cutlass_attn.compat import flex  # noqa: E402

B, HQ, HKV, SQ, SK, D = 2, 4, 2, 33, 45, 16
MOST = 64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEADS = random(HQ, seed=1)
PER_BATCH = random(B, HQ, seed=2)
ROWS = random(B, MOST, seed=3)
PAIRS = random(HQ, MOST, MOST, seed=4)
BUCKETS = random(HQ, 2 * MOST, seed=5)
NUMBER = random(1, seed=6)[0]
SEEN = random(B, MOST, seed=7) > 0
OFFSETS = torch.tensor([3, 11])
DOCUMENT = torch.arange(MOST) // 7
ORDER = torch.randperm(MOST, generator=torch.Generator().manual_seed(8))
COORDINATES = random(B, MOST, 2, seed=9)


def bucket(distance):
    """T5's: exact near by, logarithmic beyond."""
    near = 8
    size = abs(distance)
    far = near + (torch.log(torch.clamp(size, min=1) / near) * 3).to(torch.int64)
    return torch.where(size < near, size, far.clamp(near, 15)) + torch.where(distance > 0, 16, 0)


def graphormer(s, b, h, q, k):
    dx = COORDINATES[b, q, 0] - COORDINATES[b, k, 0]
    dy = COORDINATES[b, q, 1] - COORDINATES[b, k, 1]
    return s - torch.sqrt(dx * dx + dy * dy + 0.01) * HEADS[h]


SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "sin of cos": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
    "cos times sin": lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(b),
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "causal, finite": lambda s, b, h, q, k: torch.where(q >= k, s, -1e9),
    "inverse causal": lambda s, b, h, q, k: torch.where(q <= k, s, -float("inf")),
    "relative": lambda s, b, h, q, k: s + (q - k),
    "relative, causal": lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -float("inf")),
    "alibi": lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / HQ)) * (q - k),
    "times two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "trigonometric": lambda s, b, h, q, k: torch.sin(torch.cos(s)),
    "two trigonometric": lambda s, b, h, q, k: torch.sin(s) + torch.cos(s * 0.5) * b,
    "absolute": lambda s, b, h, q, k: abs(s) - torch.minimum(s, 0 * s),
    "relu": lambda s, b, h, q, k: torch.relu(s),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) * 3,
    "gelu": lambda s, b, h, q, k: torch.nn.functional.gelu(s),
    "softcap": lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
    "head offset": lambda s, b, h, q, k: s * HEADS[h],
    "offset of batch and head": lambda s, b, h, q, k: s + PER_BATCH[b, h] * (q - k) * 0.1,
    "number": lambda s, b, h, q, k: s * NUMBER + NUMBER * k,
    "rows": lambda s, b, h, q, k: s + ROWS[b, q] * ROWS[b, k],
    "shifted rows": lambda s, b, h, q, k: s + ROWS[b, q + OFFSETS[b]],
    "pairs": lambda s, b, h, q, k: s * PAIRS[h, q, k],
    "pairs, in order": lambda s, b, h, q, k: s + PAIRS[h, ORDER[q], ORDER[k]],
    "table of distances": lambda s, b, h, q, k: s + BUCKETS[h, q - k + MOST],
    "T5": lambda s, b, h, q, k: s + BUCKETS[h, bucket(k - q)],
    "decay": lambda s, b, h, q, k: s - 0.02 * (q - k) ** 2,
    "decay of squares": lambda s, b, h, q, k: s * torch.exp(-((q - k) ** 2) / 50.0),
    "mix": lambda s, b, h, q, k: torch.where(h % 2 == 0, 2 * torch.tanh(s + ROWS[b, k]), s / 2),
    "where both": lambda s, b, h, q, k: torch.where(q % 3 == k % 3, s, s * s * 0.1),
    "masked by table": lambda s, b, h, q, k: torch.where(SEEN[b, k], s * s, -float("inf")),
    "graphormer": graphormer,
    "no score": lambda s, b, h, q, k: 0.1 * k * HEADS[h],
    "no score, of tables": lambda s, b, h, q, k: torch.sin(PAIRS[h, q, k]),
    "constant": lambda s, b, h, q, k: torch.sin((q - k).double()),
    "nothing visible": lambda s, b, h, q, k: s - float("inf"),
    "beyond float32": lambda s, b, h, q, k: torch.where(q >= k, s * s, -1e300),
    "biases": lambda s, b, h, q, k: s + PAIRS[h, q, k] + PAIRS[0, k, q] + ROWS[b, k],
    "negated": lambda s, b, h, q, k: -torch.where(k < 40, s, -0.5) * 2,
}

MASKS = {
    None: None,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 9),
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "prefix": lambda b, h, q, k: (q >= k) | (k < OFFSETS[b]),
    "sparse": lambda b, h, q, k: ((q + k) % 3 == 0) & (q % 5 != 2),
    "natten": lambda b, h, q, k: (abs(q // 6 - k // 6) <= 1) & (abs(q % 6 - k % 6) <= 1),
}
TABLES = (HEADS, PER_BATCH, ROWS, PAIRS, BUCKETS, NUMBER, COORDINATES)


def operands(dtype=torch.float64):
    shapes = (B, HQ, SQ, D), (B, HKV, SK, D), (B, HKV, SK, D)
    return [random(*shape, seed=10 + i).to(dtype) for i, shape in enumerate(shapes)]


def reference(q, k, v, score_mod, mask_mod, sinks=None):
    k, v = (x.repeat_interleave(HQ // HKV, dim=1) for x in (k, v))
    score = q @ k.mT / math.sqrt(D)
    index = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    if score_mod is not None:
        score = score_mod(score, *index).expand(score.shape)
    if mask_mod is not None:
        score = torch.where(mask_mod(*index), score, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[:, None, None].expand(B, HQ, SQ, 1)], -1)
    is_empty = (score == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(torch.where(is_empty, 0.0, score), -1)[..., :SK]
    lse = torch.logsumexp(torch.where(is_empty, 0.0, score), -1)
    return torch.where(is_empty, 0.0, weights @ v), torch.where(is_empty[..., 0], -torch.inf, lse)


def attention(q, k, v, score_mod, mask_mod, **options):
    return cutlass_attn.attention(
        q, k, v, score_mod=score_mod, mask_mod=mask_mod, return_lse=True, **options
    )


def drop_in(q, k, v, score_mod, mask_mod):
    mask = None
    if mask_mod is not None:
        mask = flex.create_block_mask(mask_mod, B, HQ, SQ, SK, device="cpu", BLOCK_SIZE=16)
    return flex.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)


@pytest.fixture
def tables():
    for x in TABLES:
        x.requires_grad_()
    yield TABLES
    for x in TABLES:
        x.requires_grad_(False)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", [None, "causal", "sparse"])
def test_scores(name, mask):
    due = reference(*operands(), SCORES[name], MASKS[mask])
    for function in (attention, drop_in):
        for x, y in zip(function(*operands(), SCORES[name], MASKS[mask]), due, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["squared", "T5", "mix", "graphormer"])
def test_dtypes(name, dtype):
    q, k, v = operands(dtype)
    due, lse = reference(q.double(), k.double(), v.double(), SCORES[name], MASKS["causal"])
    out, own = attention(q, k, v, SCORES[name], MASKS["causal"])
    assert (out.dtype, own.dtype) == (dtype, torch.float32)
    unit = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(out.double(), due, rtol=unit, atol=unit)
    torch.testing.assert_close(own.double(), lse, rtol=1e-5, atol=1e-5)


def test_sums_of_biases_are_float64_like_q():
    due, _ = reference(*operands(), SCORES["biases"], None)
    found, _ = attention(*operands(), SCORES["biases"], None)
    torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    due = reference(*operands(), None, MASKS[mask])
    for function in (attention, drop_in):
        for x, y in zip(function(*operands(), None, MASKS[mask]), due, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", [None, "sparse"])
@pytest.mark.parametrize("name", SCORES)
def test_gradients(name, mask, tables):
    leaves = [x.requires_grad_() for x in operands()]
    weights = random(B, HQ, SQ, D, seed=20), random(B, HQ, SQ, seed=21)

    def gradients(out, lse):
        lse = torch.where(lse.isinf(), 0.0, lse)
        total = (out * weights[0]).sum() + (lse * weights[1]).sum()
        return torch.autograd.grad(
            total, [*leaves, *tables], materialize_grads=True, allow_unused=True
        )

    results = attention(*leaves, SCORES[name], MASKS[mask])
    due = gradients(*reference(*leaves, SCORES[name], MASKS[mask]))
    for x, y in zip(gradients(*results), due, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    if name in ("T5", "pairs, in order"):
        again = gradients(*attention(*leaves, SCORES[name], MASKS[mask]))
        first = gradients(*attention(*leaves, SCORES[name], MASKS[mask]))
        assert all(map(torch.equal, first, again))


def test_rows_are_computed_in_blocks(monkeypatch):
    """What a call keeps does not grow with its rows; results and gradients are the same."""
    from cutlass_attn._mods import interpreter

    leaves = [x.requires_grad_() for x in operands()]

    def all_of_it():
        out, lse = attention(*leaves, SCORES["T5"], MASKS["causal"])
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), leaves)

    due = all_of_it()
    monkeypatch.setattr(interpreter, "_BLOCK", 4 * B * HQ * SQ)  # as many keys are visible
    sizes = []
    original = interpreter.evaluate
    monkeypatch.setattr(
        interpreter,
        "evaluate",
        lambda *a: sizes.append(original(*a)) or sizes[-1],
    )
    for x, y in zip(all_of_it(), due, strict=True):
        torch.testing.assert_close(x, y)
    assert {x.shape[2] for x in sizes} == {4, 1}


def test_with_other_options():
    sinks = random(HQ, seed=30)
    q, k, v = operands()
    mod = SCORES["squared"]
    shift = SK - SQ
    cases = (
        ({"causal": True}, lambda b, h, q, k: k <= q + shift),
        ({"window": (4, 2)}, lambda b, h, q, k: (k <= q + shift + 2) & (k >= q + shift - 4)),
        ({"window": 3}, lambda b, h, q, k: abs(k - q - shift) <= 3),
        (
            {"attention_chunk": 8, "causal": True},
            lambda b, h, q, k: (k // 8 == (q + shift) // 8) & (k <= q + shift),
        ),
        ({"mask": SEEN[:, None, None, :SK]}, lambda b, h, q, k: SEEN[b, k]),
        ({"mask": SEEN[0, :SK]}, lambda b, h, q, k: SEEN[0, k]),
    )
    for options, mask_mod in cases:
        for function in (None, MASKS["causal"], MASKS["sparse"]):

            def both(b, h, q, k, function=function, mask_mod=mask_mod):
                return mask_mod(b, h, q, k) & (function is None or function(b, h, q, k))

            for of_score in (mod, None, SCORES["softcap"]):
                due = reference(q, k, v, of_score, both, sinks)
                found = attention(q, k, v, of_score, function, sinks=sinks, **options)
                for x, y in zip(found, due, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_a_row_constant_counts_beside_sinks():
    """A term of a row alone cancels in softmax, but not beside a sink."""
    sinks = random(HQ, seed=31)
    mod = lambda s, b, h, q, k: s + 0.1 * q  # noqa: E731
    due = reference(*operands(), mod, None, sinks)
    for x, y in zip(attention(*operands(), mod, None, sinks=sinks), due, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["squared", "softcap"])
def test_layout_and_out(name):
    q, k, v = operands()
    due, lse = attention(q, k, v, SCORES[name], MASKS["window"])
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = torch.empty(B, SQ, HQ, D, dtype=torch.float64)
    found, own = attention(*turned, SCORES[name], MASKS["window"], layout="bshd", out=out)
    assert found is out
    assert torch.equal(found.transpose(1, 2), due) and torch.equal(own, lse)


def test_block_mask_beside_a_mask_mod():
    q, k, v = operands()
    block_mask = flex.create_block_mask(MASKS["prefix"], B, HQ, SQ, SK, device="cpu", BLOCK_SIZE=16)
    found = attention(q, k, v, None, MASKS["sparse"], block_mask=block_mask)
    both = lambda *index: MASKS["prefix"](*index) & MASKS["sparse"](*index)  # noqa: E731
    for x, y in zip(found, reference(q, k, v, None, both), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_the_mask_of_a_function_is_kept():
    from cutlass_attn._mods.block_mask import read_function
    from cutlass_attn._mods.masks import Lengths

    table, limit = torch.arange(MOST) // 5, [3]

    def function(b, h, q, k):
        return (table[q] == table[k]) | (k < limit[0])

    lengths = Lengths(B, HQ, SQ, SK)
    first = read_function(function, lengths, q_device := torch.device("cpu"))
    assert read_function(function, lengths, q_device) is first
    assert read_function(function, Lengths(1, HQ, SQ, SK), q_device) is not first
    limit[0] = 7  # a number that the trace sees
    second = read_function(function, lengths, q_device)
    assert second is not first and not torch.equal(second.dense, first.dense)
    table[0] = 1  # a write that torch counts
    assert not torch.equal(read_function(function, lengths, q_device).dense, second.dense)
    table.data = torch.arange(MOST) // 2
    third = read_function(function, lengths, q_device)
    assert torch.equal(
        third.dense[0, 0], function(0, 0, torch.arange(SQ)[:, None], torch.arange(SK))
    )
    first_table = table  # lives, so that both are compared
    table = torch.zeros(MOST, dtype=torch.long)  # another tensor in the closure
    assert read_function(function, lengths, q_device).dense.all()
    table = first_table
    assert torch.equal(read_function(function, lengths, q_device).dense, third.dense)


def test_compiled():
    """The graph breaks at the call, and goes on after it."""
    q, k, v = (x.float() for x in operands())
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    def model(q):
        return attention(q * 2, k, v, SCORES["squared"], MASKS["causal"])[0] + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(q), model(q))
    assert len(seen) == 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, fullgraph=True, backend="eager")(q)


def test_explain():
    """It is about the call that the functions become."""
    q, k, v = operands(torch.float32)
    found = cutlass_attn.explain(q, k, v, score_mod=SCORES["softcap"], mask_mod=MASKS["sparse"])
    assert found.chosen.key == "cpu/f32"
    assert "softcap 3.0" in str(found) and "mask (1, 1, 33, 45)" in str(found)
    assert cutlass_attn.explain(q, k, v, mask_mod=None).chosen.key == "cpu/f32"
    gpu = cutlass_attn.explain(
        *operands(torch.float16), mask_mod=MASKS["causal"], device="sm_90", grad=True
    )
    assert "window (None, -12)" in str(gpu) or "causal" in str(gpu)
    with pytest.raises(ValueError, match="torch evaluates it on a CPU"):
        cutlass_attn.explain(q, k, v, score_mod=SCORES["squared"])


def wrong(**changes):
    q, k, v = operands(torch.float32)
    return cutlass_attn.attention(q, k, v, **{"score_mod": SCORES["squared"], **changes})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"score_mod": 3}, TypeError, "score_mod must be a function, got int"),
        ({"score_mod": lambda s, b, h, q: s}, TypeError, "4; allowed: score, b, h, q_idx, kv_idx"),
        ({"mask_mod": lambda b, h, q, k: q - k}, TypeError, "mask_mod must return bool, got int"),
        ({"block_mask": torch.ones(3)}, TypeError, "got Tensor; a bool tensor is the option mask"),
        ({"softcap": 3.0}, ValueError, "score_mod and softcap are both given"),
        ({"bias": torch.zeros(SK)}, ValueError, "score_mod and bias are both given"),
        ({"dropout_p": 0.5}, ValueError, "dropout_p is .*torch evaluates this"),
        ({"quantize": "qk"}, ValueError, "quantize"),
        (
            {"seqused_k": torch.zeros(B, dtype=torch.int32)},
            ValueError,
            r"seqused_k is given, but torch evaluates .* allowed with it: acc",
        ),
        (
            {"rng_state": torch.zeros(2, dtype=torch.int64)},
            ValueError,
            "rng_state is .*torch evaluates this",
        ),
        (
            {"score_mod": SCORES["biases"], "seqused_k": torch.ones(B, dtype=torch.int32)},
            ValueError,
            "seqused_k is given with score_mod, which is computed as bias",
        ),
        (
            {
                "score_mod": None,
                "mask_mod": MASKS["sparse"],
                "leftpad_k": torch.ones(B, dtype=torch.int32),
            },
            ValueError,
            "leftpad_k is given with mask_mod, which is computed as mask",
        ),
        (
            {
                "score_mod": None,
                "mask_mod": lambda b, h, q, k: q >= k,
                "seqused_k": torch.ones(B, dtype=torch.int32),
            },
            ValueError,
            "seqused_k is given with mask_mod, which is computed as causal",
        ),
        ({"kernel": "scalar/tiled-simt"}, ValueError, "kernel is 'scalar/tiled-simt'"),
        ({"verify": True}, ValueError, "there is no second kernel"),
        ({"score_mode": 1}, TypeError, "did you mean 'score_mod'"),
        (
            {"score_mod": lambda s, b, h, q, k: s if k > 2 else s * 2},
            UnsupportedModError,
            r"test_flex_functions.py:\d+: the function branches on a traced value",
        ),
        (
            {"mask_mod": lambda b, h, q, k: torch.sum(SEEN[b, k]) > 2},
            UnsupportedModError,
            r"test_flex_functions.py:\d+: torch.sum is not supported",
        ),
    ],
)
def test_errors(changes, error, said):
    with pytest.raises(error, match=said):
        wrong(**changes)


def test_numpy_is_refused():
    arrays = [x.float().numpy() for x in operands()]
    with pytest.raises(TypeError, match="q is a ndarray, allowed for a call with mask_mod"):
        cutlass_attn.attention(*arrays, mask_mod=MASKS["causal"])


def test_none_is_no_mod():
    q, k, v = operands(torch.float32)
    due = cutlass_attn.attention(q, k, v)
    found = cutlass_attn.attention(q, k, v, score_mod=None, mask_mod=None, block_mask=None)
    assert torch.equal(found, due)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["seqused_q", "seqused_k", "leftpad_q", "leftpad_k"])
def test_lengths_of_0_are_not_ignored(name, batch):
    q, k, v = (x[:batch].float() for x in operands())
    lengths = torch.zeros(batch, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{name} is .*torch evaluates this score_mod"):
        cutlass_attn.attention(q, k, v, score_mod=SCORES["squared"], **{name: lengths})


@pytest.mark.parametrize("sizes", [(0, SK, B), (SQ, 0, B), (SQ, SK, 0)], ids=str)
@pytest.mark.parametrize("mask", [None, "causal", "sparse"])
@pytest.mark.parametrize("name", ["squared", "alibi", "causal"])
def test_empty_operands(name, mask, sizes):
    seqlen_q, seqlen_k, batch = sizes
    q, k, v = (x.requires_grad_() for x in operands())
    out, lse = attention(
        q[:batch, :, :seqlen_q],
        *(x[:batch, :, :seqlen_k] for x in (k, v)),
        SCORES[name],
        MASKS[mask],
    )
    assert out.shape == (batch, HQ, seqlen_q, D) and lse.shape == out.shape[:3]
    assert not out.any()
    assert not any(x.any() for x in torch.autograd.grad(out.sum() + lse.exp().sum(), (q, k, v)))


@pytest.mark.parametrize("name", ["squared", "softcap"])
def test_second_order_is_refused(name):
    """Also where the gradient that comes in requires none: of a penalty on a gradient."""
    q, k, v = (x.requires_grad_() for x in operands())
    for function in (torch.sin, torch.clone):
        out, _ = attention(q, k, v, SCORES[name], None)
        (grad,) = torch.autograd.grad(function(out).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="attention has no second derivative"):
            grad.pow(2).sum().backward()
