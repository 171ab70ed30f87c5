"""PyTorch's own tests of FlexAttention that are not about one function, through compat.flex.

They are about memory orders, log-sum-exps, several calls, blocks, dtypes and errors. flex_cases.py
says which test of torch is where.
"""

import functools
import itertools

import cases
import cutlass_attn
import pytest
from cases import torch

pytest.importorskip("torch", minversion="2.10")

from cutlass_attn.compat.flex import (
    AuxRequest,
    BlockMask,
    UnsupportedModError,
    create_block_mask,
    flex_attention,
)
from flex_cases import ALL, BUILTIN, DTYPES, Case, chosen
from flex_eager import (
    check,
    eager,
    exactly,
    generator,
    identity,
    known_refusal,
    normal,
    operands,
    paged,
    scores_of,
)
from flex_mods import SCORES, Captured, causal
from torch.nn.attention.flex_attention import noop_mask
from torch.utils.checkpoint import checkpoint

on_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[cases.needs_gpu])]
)
B, H, S, D = 2, 4, 256, 64


def strides_of(batch, heads, seqlen, head_dim):
    """(strides, offset) by their names in torch's comments."""
    whole = heads * seqlen * head_dim
    return {
        "offset": ((whole, seqlen * head_dim, head_dim, 1), 997),
        "transposed": ((heads * head_dim, head_dim, batch * heads * head_dim, 1), 499),
        "heads in rows": ((whole, head_dim, heads * head_dim, 1), 0),
        "with room": (
            (seqlen * (head_dim + 1), batch * seqlen * (head_dim + 1), head_dim + 1, 1),
            293,
        ),
        "shared": ((1, head_dim, (batch + 1) * (heads + 1) * head_dim, 1), 97),
    }


NAMES = list(strides_of(1, 1, 1, 1))
KV = [("offset", "offset"), ("offset", "transposed"), ("heads in rows", "with room")]
KV += [("with room", "transposed")]
STRIDED = [
    {"q": q, "k": kv[0], "v": kv[1], "grad": grad, "heads": (H, H)}
    for q, kv, grad in itertools.product(NAMES[:2], KV, NAMES[:3])
] + [
    {"q": "of rows", "k": k, "v": v, "grad": None, "heads": heads}
    for k, v in itertools.product([NAMES[0], NAMES[1], *NAMES[3:]], repeat=2)
    for heads in ((16, 1), (8, 2), (16, 16))
]


def stored(made, shape, name):
    strides, offset = strides_of(*shape)[name]
    size = 1 + offset + sum(x * (n - 1) for x, n in zip(strides, shape))
    return torch.as_strided(normal(made, size), shape, strides, offset)


@on_devices
@pytest.mark.parametrize("case", chosen(STRIDED, 2), ids=str)
def test_strided_inputs(device, case):
    made, seqlen = generator(device), S if ALL else 40
    heads_q, heads_k = case["heads"]
    if case["q"] == "of rows":
        q = normal(made, 1, heads_q, B, D).transpose(0, 2)
    else:
        q = stored(made, (B, H, seqlen // 2, D), case["q"])
    k, v = (stored(made, (B, heads_k, seqlen, D), name) for name in (case["k"], case["v"]))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    score = SCORES["alibi"](None)
    results = [flex_attention(*leaves, score, enable_gqa=True, kernel_options={"USE_TMA": True})]
    results += [eager(*leaves, score)[0], exactly(*leaves, score)[0]]
    check(*results, 11)
    with torch.no_grad():
        mask = create_block_mask(noop_mask, B, 1, q.shape[2], seqlen, device=device, BLOCK_SIZE=16)
        cache = paged(score, mask, k, v, made)
        with known_refusal(q):
            check(flex_attention(q, *cache, enable_gqa=True), *results[1:], 21)
    if case["grad"]:
        weight = stored(made, tuple(q.shape), case["grad"])
        grads = [torch.autograd.grad(x, leaves, weight.to(x.dtype)) for x in results]
        for grad in zip(*grads, strict=True):
            check(*grad, 11)


WITHOUT_MAXIMA = {"squared"}  # no option of attention() expresses it
ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (1, 0, 3, 2)]


def order_of(x):
    """Its dimensions from the innermost out."""
    return sorted(range(x.dim()), key=x.stride)


@on_devices
@pytest.mark.parametrize("name", ["identity", "squared", "alibi"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(2, 1, 128, 16), (2, 5, 128, 16), (4, 2, 64, 16)])
def test_results_have_the_order_of_their_operands(device, shape, order, name):
    made, score = generator(device), SCORES[name](None)
    leaves = [normal(made, *shape).permute(order).requires_grad_() for _ in range(3)]
    seqlen = leaves[0].shape[2]
    mask = create_block_mask(causal, None, None, seqlen, seqlen, device=device)
    wanted = AuxRequest(lse=True, max_scores=name not in WITHOUT_MAXIMA)
    with known_refusal(leaves[0]):
        out, aux = flex_attention(*leaves, score, mask, return_aux=wanted)
    grads = torch.autograd.grad(out, leaves, normal(made, *out.shape))
    assert out.stride(-1) == 1
    exact, lse = exactly(*leaves, score, causal)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(aux.lse.double(), lse, atol=1e-4, rtol=1e-5)
    if wanted.max_scores:
        most = scores_of(*leaves[:2], score, causal).amax(-1)
        torch.testing.assert_close(aux.max_scores, most, atol=1e-4, rtol=1e-5)
    if order[-1] == 3 and 1 not in shape:
        for x, its in zip((out, *grads), (leaves[0], *leaves)):
            assert order_of(x) == order_of(its)


def test_float32_with_a_compiled_score_is_refused_on_gpus():
    q = torch.ones(1, 2, 64, 64)
    found = cutlass_attn.explain(q, q, q, score_mod=SCORES["squared"](None), device="sm_90")
    assert found.chosen is None and "does not implement score_mod" in str(found)


@on_devices
@pytest.mark.parametrize("seqlen", [16, 64])
def test_columns_apart(device, seqlen):
    made, dtype = generator(device), torch.float16
    leaves = [normal(made, 4, 8, D, seqlen, dtype=dtype).mT.requires_grad_() for _ in range(3)]
    results = flex_attention(*leaves), eager(*leaves)[0], exactly(*leaves)[0]
    check(*results, 2.1)
    weight = normal(made, 4, 8, seqlen, D, dtype=dtype)
    for grad in zip(*(torch.autograd.grad(x, leaves, weight.to(x.dtype)) for x in results)):
        check(*grad, 2.1)


@on_devices
def test_slices_of_one_projection(device):
    """The gradients of q, k and v go on to it; the result is a view of its rows."""
    made = generator(device)
    x = normal(made, 1, 128, 3 * 256).requires_grad_()
    heads = [y.unflatten(-1, (4, 64)).transpose(1, 2) for y in x.split(256, dim=2)]
    results = flex_attention(*heads), eager(*heads)[0], exactly(*heads)[0]
    check(*results, 11)
    assert results[0].transpose(1, 2).view(1, 128, 256).shape == (1, 128, 256)
    check(*(torch.autograd.grad(y.sum(), x)[0] for y in results), 11)


@on_devices
def test_keys_of_a_longer_cache(device):
    made, seqlen = generator(device), 4096 if ALL else 256
    leaves = operands(made, (1, 2, seqlen, D))
    q, k, v = leaves[0], *(x[:, :, :-128] for x in leaves[1:])
    results = flex_attention(q, k, v), eager(q, k, v)[0], exactly(q, k, v)[0]
    weight = normal(made, 1, 2, seqlen, D)
    check(*results, 11)
    for grad in zip(*(torch.autograd.grad(x, leaves, weight.to(x.dtype)) for x in results)):
        check(*grad, 11)


@on_devices
@pytest.mark.parametrize("name", BUILTIN)
def test_aux(device, name):
    made = generator(device)
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = operands(made, (2, 2, 243 if ALL else 83, 16), dtype=dtype)
    score = SCORES[name](None)
    only = flex_attention(q, k, v, score)
    for aux in (AuxRequest(), AuxRequest(lse=True)):
        out, found = flex_attention(q, k, v, score, return_aux=aux)
        assert torch.equal(out, only) and found.max_scores is None
        assert (found.lse is not None) == aux.lse
    out, lse = flex_attention(q, k, v, score, return_lse=True)
    assert torch.equal(out, only) and torch.equal(lse, found.lse)
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    wanted = AuxRequest(lse=True, max_scores=True)
    if name in WITHOUT_MAXIMA:
        with pytest.raises(NotImplementedError, match="no kernel returns maxima of this score_mod"):
            flex_attention(q, k, v, score, return_aux=wanted)
        return
    out, both = flex_attention(q, k, v, score, return_aux=wanted)
    alone = flex_attention(q, k, v, score, return_aux=AuxRequest(max_scores=True))[1]
    assert alone.lse is None and torch.equal(alone.max_scores, both.max_scores)
    limit = 5e-3 if device == "cuda" else 1e-6  # another kernel has the maxima
    torch.testing.assert_close(out, only, atol=limit, rtol=limit)
    torch.testing.assert_close(both.lse, lse, atol=limit, rtol=limit)
    most = scores_of(q, k, score, noop_mask).amax(-1)
    torch.testing.assert_close(both.max_scores, most, atol=5e-3, rtol=5e-3)
    assert not both.max_scores.requires_grad and both.max_scores.dtype == torch.float32
    assert all(x is not None for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_one_way_to_ask_for_lse():
    q = torch.ones(2, 2, 64, 16)
    with pytest.raises(ValueError, match="return_lse and return_aux are both given"):
        flex_attention(q, q, q, return_lse=True, return_aux=AuxRequest(lse=True))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast(device, dtype):
    made, seqlen = generator(device), 1024 if ALL else 128
    q, k, v = (x.detach() for x in operands(made, (1, 1, seqlen, D), dtype=getattr(torch, dtype)))
    with torch.autocast(device, torch.float16):
        due = torch.nn.functional.scaled_dot_product_attention(q.half(), k, v)
        found = flex_attention(q.half(), k, v)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, due, atol=1e-3, rtol=1e-3)


@on_devices
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("seqlen_q", [4, 1024])
def test_calls_with_several_scores(device, seqlen_q, calls, is_paged):
    made, seqlen = generator(device), 1024 if ALL else 64
    seqlen_q = min(seqlen_q, seqlen)
    mask = create_block_mask(noop_mask, 1, 1, seqlen_q, seqlen, device=device, BLOCK_SIZE=16)
    out = due = exact = normal(made, 1, 8, seqlen_q, D)
    for name in ("relative", "causal", "relative")[:calls]:
        k, v = (normal(made, 1, 8, seqlen, D) for _ in range(2))
        score = SCORES[name](None)
        given = paged(score, mask, k, v, made) if is_paged else (k, v, score)
        due = eager(due, k, v, score)[0]
        with known_refusal(out):
            out = flex_attention(out, *given)
        exact = exactly(exact, k, v, score)[0]
    check(out, due, exact, 21)


def windows(most):
    near = lambda b, h, q, k: (q >= k) & (q - k <= most)  # noqa: E731
    far = lambda b, h, q, k: (q >= k) & (q - k > most)  # noqa: E731
    return near, far


@on_devices
@pytest.mark.parametrize("seqlen", [96, 196])
def test_parts_are_merged_by_their_lse(device, seqlen):
    made = generator(device)
    leaves = operands(made, (2, 2, seqlen, D))
    outs, lses = zip(
        *(
            flex_attention(
                *leaves,
                block_mask=create_block_mask(x, None, None, seqlen, seqlen, device=device),
                return_lse=True,
            )
            for x in windows(64)
        )
    )
    weights = torch.stack(lses).softmax(0)
    out = sum(x * w[..., None] for x, w in zip(outs, weights))
    due = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    torch.testing.assert_close(out, due, atol=3e-3, rtol=2e-3)
    weight = normal(made, *out.shape)
    grads = (torch.autograd.grad(x, leaves, weight) for x in (out, due))
    for ours, right in zip(*grads, strict=True):
        torch.testing.assert_close(ours, right, atol=3e-3, rtol=2e-3)


@on_devices
def test_two_masks(device):
    made, seqlen = generator(device), 512 if ALL else 80
    leaves = operands(made, (1, 4, seqlen, D))
    both = causal, lambda b, h, q, k: (q >= k) & (q <= k + 32)
    masks = [create_block_mask(x, 1, None, seqlen, seqlen, device=device) for x in both]
    ours = sum(flex_attention(*leaves, block_mask=x) for x in masks)
    due, exact = (sum(f(*leaves, identity, x)[0] for x in both) for f in (eager, exactly))
    check(ours, due, exact, 11)
    for grad in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (ours, due, exact))):
        check(*grad, 11)


GRADCHECKED = {name: SCORES[name](None) for name in ("identity", "causal", "doubled", "squared")}
GRADCHECKED["waves"] = lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b)
GRADCHECKED["product"] = lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(b)
GRADCHECKED["factor"] = None


@pytest.mark.parametrize("which", ["out", "lse"])
@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(name, which):
    """In float64, which only a CPU computes."""
    made = generator("cpu")
    leaves = [x.detach().double().requires_grad_() for x in operands(made, (2, 2, 11, 4))]
    factor = torch.rand(2, generator=made, dtype=torch.float64)
    score = GRADCHECKED[name] or (lambda s, b, h, q, k: s * factor[h])

    def function(*x):
        return flex_attention(*x, score, return_lse=True)[which == "lse"]

    assert torch.autograd.gradcheck(function, leaves, fast_mode=not ALL)


@on_devices
def test_gradients_of_lse(device):
    made = generator(device)
    leaves, mask = operands(made, (2, 2, 128, D)), normal(made, 2, 2, 128)
    results = flex_attention(*leaves, return_lse=True), eager(*leaves), exactly(*leaves)
    totals = [out.mean() + (lse * mask).sum() for out, lse in results]
    for grad in zip(*(torch.autograd.grad(x, leaves) for x in totals)):
        check(*grad, 11)


@on_devices
@pytest.mark.parametrize("heads_k", [2, 4])
def test_queries_that_see_nothing(device, heads_k):
    made, seqlen = generator(device), S if ALL else 64
    leaves = operands(made, (B, H, seqlen, D), *[(B, heads_k, seqlen, D)] * 2)
    half = seqlen // 2
    mask = create_block_mask(lambda b, h, q, k: q < half, B, 1, seqlen, seqlen, device=device)
    out, lse = flex_attention(*leaves, block_mask=mask, return_lse=True, enable_gqa=True)
    grads = torch.autograd.grad(out.sum() + lse[:, :, :half].sum(), leaves)
    assert not out[:, :, half:].any() and (lse[:, :, half:] == -torch.inf).all()
    assert not grads[0][:, :, half:].any() and all(x.isfinite().all() for x in grads)


@on_devices
def test_one_query_and_key(device):
    leaves = [torch.ones(1, 1, 1, 16, device=device).requires_grad_() for _ in range(3)]
    out, lse = flex_attention(
        *leaves, return_lse=True, kernel_options={"FORCE_USE_FLEX_ATTENTION": True}
    )
    assert torch.equal(out, leaves[2]) and torch.equal(lse, torch.full_like(lse, 4.0))
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [float(x.sum()) for x in grads] == [0.0, 0.0, 16.0]


@on_devices
def test_no_queries(device):
    """torch compiles none of length 0."""
    q = torch.ones(8, 8, 0, D, device=device, dtype=torch.bfloat16)
    assert flex_attention(q, q, q).shape == q.shape


POISONS = {
    "not read": None,
    "1 / score": lambda s, b, h, q, k: 1 / s,
    "log": lambda s, b, h, q, k: torch.where(s > 0, torch.log(s), s),
}


@pytest.mark.parametrize("name", POISONS)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        *[pytest.param("cuda", x, marks=cases.needs_gpu) for x in ("float16", "bfloat16")],
    ],
)
def test_poison(device, dtype, name):
    made, seqlen = generator(device), 1025 if ALL and name == "not read" else 257 if ALL else 65
    table = normal(made, 2, 1, seqlen, seqlen)
    table[1:] = torch.nan
    score = POISONS[name] or (lambda s, b, h, q, k: s + table[b, h, q, k])
    leaves = operands(made, (1, 1, seqlen, 16), dtype=getattr(torch, dtype))
    mask = create_block_mask(causal, 1, 1, seqlen, seqlen, device=device)
    out = flex_attention(*leaves, score, mask)
    grad_q, _, grad_v = torch.autograd.grad(out.sum(), leaves)
    assert all(x.isfinite().all() for x in (out, grad_q, grad_v))


@on_devices
def test_lists_of_blocks(device):
    """from_kv_blocks, with and without the lists of queries, which torch needs for gradients."""
    made, blocks = generator(device), 4
    count = torch.arange(blocks, device=device, dtype=torch.int32) + 1
    at = torch.arange(blocks, device=device, dtype=torch.int32).expand(blocks, -1)
    leaves = operands(made, (1, 2, 64, D), dtype=torch.float16)
    results = [eager(*leaves, identity, causal)[0], exactly(*leaves, identity, causal)[0]]
    grads = [torch.autograd.grad(x.sum(), leaves) for x in results]
    for has_lists in (True, False):
        mask = BlockMask.from_kv_blocks(
            count[None, None],
            at[None, None],
            BLOCK_SIZE=16,
            mask_mod=causal,
            compute_q_blocks=has_lists,
        )
        out = flex_attention(*leaves, block_mask=mask)
        check(out, *results, 2.1)
        for ours, its, right in zip(torch.autograd.grad(out.sum(), leaves), *grads):
            check(ours, its, right, 2.1)


@on_devices
def test_a_row_of_a_mask(device):
    """A slice with mask_mod and lengths of its own: a step of decoding."""
    made, seqlen, at = generator(device), 512 if ALL else 64, 40
    q, k, v = operands(made, (4, 8, 1, D), *[(4, 8, seqlen, D)] * 2)
    base = create_block_mask(causal, 4, None, seqlen, seqlen, device=device, BLOCK_SIZE=16)
    row, offset = base[:, :, at // 16], torch.tensor(at, device=device)
    row.mask_mod = lambda b, h, q, k: causal(b, h, q + offset, k)
    row.seq_lengths = 1, seqlen
    due = torch.nn.functional.scaled_dot_product_attention(q, *(x[:, :, : at + 1] for x in (k, v)))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=row), due, atol=1e-3, rtol=1e-3)


@on_devices
@pytest.mark.parametrize("seqlen_q", [8, 1024])
@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "float16"])
def test_narrow_keys_and_values(device, narrow, seqlen_q):
    """Of float8, with a scale of each head that the score_mod applies."""
    made, seqlen = generator(device), 1024 if ALL else 128
    dtype = torch.float32 if narrow == "float16" else torch.bfloat16
    q, k, v = (
        torch.rand((1, 4, n, D), generator=made, device=device).mul(18).sub(9).to(dtype)
        for n in (min(seqlen_q, seqlen), seqlen, seqlen)
    )
    narrow = getattr(torch, narrow)
    scales = [x.abs().amax((-2, -1)).float() / min(torch.finfo(narrow).max, 448) for x in (k, v)]
    stored = [(x / s[..., None, None]).to(narrow) for x, s in zip((k, v), scales)]
    with known_refusal(q):
        out = flex_attention(q, *stored, lambda s, b, h, q, k: s * scales[0][b, h])
    assert out.dtype == q.dtype
    due = flex_attention(q, k, v)
    noise = (out * scales[1][..., None, None] - due).norm()
    assert 20 * torch.log10(due.norm() / noise) > 10


def test_wide_keys_are_refused():
    q = torch.ones(1, 1, 16, 16)
    for k, v in ((q, q.double()), (q.double(), q)):
        with pytest.raises(ValueError, match="q, k and v must have one dtype"):
            flex_attention(q, k, v)


class Masked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score, mask):
        return torch.where(mask, score, -torch.inf)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, score):
        return torch.round(score)

    @staticmethod
    def backward(ctx, grad):
        return grad


def without_gradient(s, b, h, q, k):
    with torch.no_grad():
        factor = s * 2
    return s * factor


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: Masked.apply(s, q <= k),
        lambda s, b, h, q, k: StraightThrough.apply(s),
        without_gradient,
    ],
)
def test_gradients_that_are_not_traced_are_refused(score):
    q, k, v = operands(generator("cpu"), (1, 2, 16, 16))
    with pytest.raises(UnsupportedModError, match=r"whose backward\(\) is not traced"):
        flex_attention(q, k, v, score)


def test_without_gradients_they_are_not():
    q, k, v = operands(generator("cpu"), (1, 2, 16, 16))
    with torch.no_grad():
        out = flex_attention(q, k, v, lambda s, b, h, q, k: StraightThrough.apply(s))
        torch.testing.assert_close(out, eager(q, k, v, lambda s, *_: torch.round(s))[0])


def row_sum(c):
    rows = c.normal(c.batch, 8)
    return lambda s, b, h, q, k: s + rows[b].sum(dim=-1)


@pytest.mark.parametrize("made", [row_sum, lambda c: SCORES["by distance"](c).for_vmap])
def test_reductions_are_refused(made):
    """The error names the way to write them. torch compiles them for rows of 3, not of 256."""
    case = Case(lengths=(16, 16))
    q, k, v = operands(generator("cpu"), (2, 4, 16, 16))
    with pytest.raises(UnsupportedModError, match=r"row of a captured tensor.*for x, y in zip"):
        flex_attention(q, k, v, made(Captured(generator("cpu"), case)))


def test_lengths_and_devices_are_checked():
    q, k, v = (x.detach() for x in operands(generator("cpu"), (1, 8, 128, D)))
    for seqlen in (64, 127):
        mask = create_block_mask(causal, None, None, seqlen, seqlen, device="cpu")
        with pytest.raises(ValueError, match=r"block_mask is of lengths .*query and key have"):
            flex_attention(q, k, v, block_mask=mask)
    mask = create_block_mask(causal, 1, 1, 128, 128, device="cpu")
    with pytest.raises(ValueError, match="a slice of a BlockMask keeps the lengths"):
        flex_attention(q[:, :, :1], k, v, block_mask=mask[:, :, 0])
    with pytest.raises(RuntimeError, match="block_mask is on meta; query is on cpu"):
        flex_attention(q, k, v, block_mask=mask.to("meta"))
    with pytest.raises(ValueError, match="key is on meta; query is on cpu"):
        flex_attention(q, k.to("meta"), v)


@cases.needs_gpu
def test_captured_on_another_device():
    q, k, v = operands(generator("cuda"), (1, 8, 64, D))
    scale = torch.ones(8)
    with pytest.raises((ValueError, UnsupportedModError), match="is on cpu"):
        flex_attention(q, k, v, lambda s, b, h, q, k: s * scale[h])


@on_devices
def test_checkpoint(device):
    made = generator(device)
    leaves = operands(made, (2, 4, 64, D))
    both = [
        torch.autograd.grad(function(*leaves).sum(), leaves)
        for function in (
            flex_attention,
            functools.partial(checkpoint, flex_attention, use_reentrant=False),
        )
    ]
    assert all(torch.equal(*x) for x in zip(*both))


@cases.needs_gpu
def test_more_heads_than_a_dimension_of_a_grid():
    made = generator("cuda")
    leaves = operands(made, (22720, 3, 64, 32), dtype=torch.float16)
    results = [
        f(*leaves) for f in (flex_attention, torch.nn.functional.scaled_dot_product_attention)
    ]
    torch.testing.assert_close(*results, atol=3e-3, rtol=3e-3)
    weight = normal(made, *results[0].shape, dtype=torch.float16)
    for ours, right in zip(*(torch.autograd.grad(x, leaves, weight) for x in results)):
        torch.testing.assert_close(ours, right, atol=2e-2, rtol=2e-2)
