"""Which options a score_mod becomes, and when it stays a function to compile."""

import pytest

torch = pytest.importorskip("torch")

import cutlass_attn  # noqa: E402
from cutlass_attn import _modified  # noqa: E402
from cutlass_attn._mods import block_mask, scores  # noqa: E402
from cutlass_attn._mods.masks import Interval, Lengths  # noqa: E402
from cutlass_attn._mods.translate import Mods, translate  # noqa: E402

Q = torch.zeros(2, 4, 8, 16, dtype=torch.float16)
LENGTHS = Lengths(2, 4, 8, 8)
BIAS = torch.zeros(4, 8, 8, dtype=torch.float16)


def relative(score, b, h, q, k):
    return score + (q - k) * 0.01


def of_dtype(score, b, h, q, k):
    return score + BIAS[h, q, k]


@pytest.mark.parametrize("may_compile", [False, True])
def test_a_bias_that_only_slow_kernels_take_is_compiled_where_that_is_possible(may_compile):
    found = translate(Q, LENGTHS, Mods(relative), may_compile=may_compile)
    assert (found.score is not None) == may_compile
    assert ("bias" in found.options) == (not may_compile)


def test_a_bias_of_the_dtype_of_q_stays_one():
    found = translate(Q, LENGTHS, Mods(of_dtype), may_compile=True)
    assert found.score is None
    assert found.options["bias"].dtype == torch.float16


def test_a_bias_with_a_gradient_stays_one():
    table = torch.zeros(4, 8, 8, requires_grad=True)
    found = translate(Q, LENGTHS, Mods(lambda s, b, h, q, k: s + table[h, q, k]), may_compile=True)
    assert found.score is None
    assert found.options["bias"].requires_grad


class Operand:
    """What compiles_well() looks at of a CUDA tensor."""

    def __init__(self, shape=(2, 4, 8, 64), stride=(2048, 512, 64, 1), dtype=torch.float16):
        self.shape, self.dtype, self._stride = shape, dtype, stride
        self.device = torch.device("cuda", 0)

    def stride(self, dim=None):
        return self._stride if dim is None else self._stride[dim]

    def storage_offset(self):
        return 0


@pytest.mark.parametrize(
    ("more", "due"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"stride": (2048, 512, 65, 1)}, False),
        ({"stride": (2048, 512, 64, 8)}, False),
        ({"shape": (2, 4, 8, 264)}, False),
    ],
)
def test_operands_that_fast_kernels_take(more, due, monkeypatch):
    monkeypatch.setattr("cutlass_attn.jit.available", lambda index: "")
    assert _modified.compiles_well(Operand(**more), Operand(), Operand()) == due
    assert not _modified.compiles_well(Q, Q, Q)  # on a CPU


SLOPES = torch.tensor([0.5, -0.25, 1.0, -2.0])
DOCUMENT = torch.arange(1024) // 50
DISTANCES = {
    "of a number": lambda s, b, h, q, k: s + (q - k),
    "of slopes": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
}
WITHIN = {
    "documents": lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    "near": lambda b, h, q, k: abs(q - k) < 8,
    "from the diagonal on": lambda b, h, q, k: q <= k,
    "up to the diagonal": lambda b, h, q, k: q >= k,
}


def mean_error(x, exact):
    return float((x.double() - exact).abs().mean())


@pytest.mark.parametrize("mask", WITHIN)
@pytest.mark.parametrize("score", DISTANCES)
def test_distances_are_as_exact_as_torchs(score, mask):
    """Not rounded by the size of the positions: results and gradients at 1024 keys."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, weights = torch.randn(4, 1, 4, 1024, 16, generator=generator)
    mods = DISTANCES[score], WITHIN[mask]

    def formula(q, k, v):
        s = q @ k.mT / 4
        index = torch.meshgrid(*map(torch.arange, s.shape), indexing="ij")
        s = torch.where(mods[1](*index), mods[0](s, *index).to(s.dtype), -torch.inf)
        return torch.softmax(s, -1) @ v

    def ours(q, k, v):
        return cutlass_attn.attention(q, k, v, score_mod=mods[0], mask_mod=mods[1])

    def computed(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(dtype))]

    dtypes = (ours, torch.float32), (formula, torch.float32), (formula, torch.float64)
    for found, of_torch, exact in zip(*(computed(*x) for x in dtypes), strict=True):
        assert mean_error(found, exact) <= 4 * mean_error(of_torch, exact)  # up to 2.9 on a CPU


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("options", "sees"),
    [
        ({"causal": True}, lambda q, k: k <= q + 16),
        ({"window": (5, 0)}, lambda q, k: (k <= q + 16) & (k >= q + 11)),
        ({"window": (0, 9)}, lambda q, k: (k >= q + 16) & (k <= q + 25)),
        ({"causal": True, "window": 6}, lambda q, k: (k <= q + 16) & (k >= q + 10)),
    ],
)
def test_the_calls_own_mask_makes_distances_slopes(options, sees, sign, dtype):
    q, k = torch.zeros(1, 4, 8, 16, dtype=dtype), torch.zeros(1, 4, 24, 16, dtype=dtype)
    row, key = torch.arange(8)[:, None], torch.arange(24)
    mods = dict.fromkeys(_modified.MODS) | {
        "score_mod": lambda s, b, h, q, k: s + sign * SLOPES[h] * (k - q)
    }
    call, found = _modified.options_of(_modified.Call(q, k, k, options), mods)
    assert call.options.keys() == {*options, "alibi_slopes"} and found.score is None
    v = torch.randn(1, 4, 24, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    term = sign * SLOPES[:, None, None] * (key - row)
    weights = torch.where(sees(row, key), term, -torch.inf)
    out, lse = cutlass_attn.attention(q, k, v, **options, **mods, return_lse=True)
    limit = 1e-3 if dtype == torch.float16 else 1e-5
    due = torch.softmax(weights, -1) @ v.float()
    torch.testing.assert_close(out.float(), due, rtol=limit, atol=limit)
    torch.testing.assert_close(lse[0], weights.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("visible", "due"),
    [
        (Interval(high=0), "alibi_slopes"),
        (Interval(low=0), "alibi_slopes"),
        (Interval(low=0, high=0), "alibi_slopes"),
        (Interval(low=-1), "bias"),
        (Interval(low=-3, high=3), "bias"),
        (Interval(), "bias"),
    ],
)
def test_slopes_where_no_key_before_or_after_the_diagonal_is_visible(visible, due):
    found = translate(Q, LENGTHS, Mods(relative), given=visible)
    assert found.options.keys() == {due}


def test_a_bias_of_distances_is_not_large(monkeypatch):
    """In 16 bits, and beyond a size, it is one of the keys."""
    shape = translate(Q.float(), LENGTHS, Mods(relative)).options["bias"].shape
    assert shape == (1, 1, 8, 8)
    found = translate(Q, LENGTHS, Mods(relative))
    assert found.options["bias"].shape == (1, 1, 1, 8)
    monkeypatch.setattr(scores, "_LARGEST", 63)
    beyond = translate(Q.float(), LENGTHS, Mods(relative))
    assert beyond.options["bias"].shape == (1, 1, 1, 8)
    assert torch.equal(beyond.lse_shift + 0, found.lse_shift + 0)


# --- torch.func -----------------------------------------------------------------------------------

PART = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
TABLE = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 2, 2, 8, 16, generator=torch.Generator().manual_seed(1))
attention = cutlass_attn.attention


def causal(b, h, q, k):
    return q >= k


def same_part(b, h, q, k):
    return PART[q] == PART[k]


def log_sum_exp(x):
    table = 2 * TABLE  # that a transform wraps
    return attention(x, x, x, score_mod=lambda s, b, h, q, k: s + table[h, q, k], return_lse=True)


TRANSFORMED = {
    "causal": lambda x: attention(x, x, x, mask_mod=causal),
    "bool mask": lambda x: attention(x, x, x, mask_mod=same_part, causal=True),
    "scale": lambda x: attention(x, x, x, score_mod=lambda s, b, h, q, k: s * 2),
    "bias": lambda x: attention(x, x, x, score_mod=lambda s, b, h, q, k: s + TABLE[h, q, k]),
    "bias of the input": lambda x: attention(
        x, x, x, score_mod=lambda s, b, h, q, k: s + x[b, h, q, k]
    ),
    "log-sum-exp": lambda x: log_sum_exp(x)[1],
    "masked score": lambda x: attention(
        x, x, x, score_mod=lambda s, b, h, q, k: torch.where(TABLE[h, q, k] > -1, s, -torch.inf)
    ),
}


def gradient(function, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).square().sum(), x)[0]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_mods_that_become_options_work_under_transforms(name):
    function = TRANSFORMED[name]

    def loss(x):
        return function(x).square().sum()

    one, entries = gradient(function, X[0]), torch.stack([gradient(function, x) for x in X])
    torch.testing.assert_close(torch.func.grad(loss)(X[0]), one)
    out, pullback = torch.func.vjp(loss, X[0])
    torch.testing.assert_close(pullback(torch.ones_like(out))[0], one)
    torch.testing.assert_close(torch.vmap(function)(X), torch.stack([function(x) for x in X]))
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(X), entries)
    whole = torch.func.grad(lambda x: torch.vmap(function)(x).square().sum())(X)
    torch.testing.assert_close(whole, entries)


def test_a_mask_that_is_kept_is_none_of_a_transform():
    def mask_mod(b, h, q, k):
        return PART[q] == PART[k]

    def call(x):
        return attention(x, x, x, mask_mod=mask_mod)

    torch.func.grad(lambda x: call(x).sum())(X[0])
    (kept,) = block_mask._functions[mask_mod].values()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept.mask.dense)
    mask = PART[:, None] == PART
    assert torch.equal(call(X[0]), attention(X[0], X[0], X[0], mask=mask))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_score_mod_that_is_no_option_is_refused_under_transforms(transform):
    def call(x):
        return attention(x, x, x, score_mod=lambda s, b, h, q, k: torch.sigmoid(s))

    run = torch.vmap(call) if transform == "vmap" else torch.func.grad(lambda x: call(x).sum())
    with pytest.raises(NotImplementedError, match=r"score_mod under torch\.func .*torch\.autograd"):
        run(X)


@pytest.mark.parametrize("option", ["score_mod", "mask_mod"])
def test_a_mask_that_vmap_maps_is_refused_by_name(option):
    def call(x):
        if option == "mask_mod":
            return attention(x, x, x, mask_mod=lambda b, h, q, k: x[b, h, q, k] > 0)
        mods = {option: lambda s, b, h, q, k: torch.where(x[b, h, q, k] > 0, s, -torch.inf)}
        return attention(x, x, x, **mods)

    with pytest.raises(NotImplementedError, match=rf"{option} makes a mask .*vmap maps; allowed"):
        torch.vmap(call)(X)
