"""compat.flex against torch's flex_attention, which computes eagerly on the CPU."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", minversion="2.9")

from cutlass_attn._mods import block_mask as _block_mask  # noqa: E402
from cutlass_attn._mods.masks import Interval, Lengths  # noqa: E402
from cutlass_attn._mods.translate import Mods, translate  # noqa: E402
from cutlass_attn.compat import flex  # noqa: E402
from torch.nn.attention import flex_attention as torchs  # noqa: E402

B, HQ, HKV, D, DV = 2, 4, 2, 16, 24
LENGTHS = [(37, 37), (37, 53), (53, 37), (1, 40)]
MOST = 64
BLOCK = 16


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(lengths, dtype=torch.float32, batch=B):
    seqlen_q, seqlen_k = lengths
    q = random(batch, HQ, seqlen_q, D, seed=1).to(dtype)
    k = random(B, HKV, seqlen_k, D, seed=2).to(dtype)
    return q, k, random(B, HKV, seqlen_k, DV, seed=3).to(dtype)


SLOPES = random(HQ, seed=4).abs()
TABLE = random(B, HQ, MOST, MOST, seed=5)
DOCUMENT = torch.arange(MOST) // 11
LENGTH = torch.tensor([9, 31])
GLOBAL = torch.arange(MOST) % 9 == 0
KEYS = random(B, MOST, seed=6) > 0

SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "scale": lambda s, b, h, q, k: -(s * 3) / 2,
    "subtracted": lambda s, b, h, q, k: TABLE[b, h, q, k] - 2 * s,
    "softcap": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "softcap by steps": lambda s, b, h, q, k: torch.tanh(s * 0.25).mul(5.0),
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "alibi, ratio": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HQ)),
    "alibi, split": lambda s, b, h, q, k: s + SLOPES[h] * k - SLOPES[h] * q,
    "alibi, negated": lambda s, b, h, q, k: s - 0.5 * (q - k),
    "alibi, symmetric": lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k),
    "softcap and alibi": lambda s, b, h, q, k: 2 * torch.tanh(s / 2) + SLOPES[h] * (k - q),
    "bias": lambda s, b, h, q, k: s + TABLE[b, h, q, k],
    "bias of heads": lambda s, b, h, q, k: TABLE[0, h, q, k] + s,
    "bias, transposed": lambda s, b, h, q, k: s + TABLE[1, 2, k, q],
    "bias of rows": lambda s, b, h, q, k: s + TABLE[b, 0, q, 3],
    "biases": lambda s, b, h, q, k: 2 * (s + TABLE[b, h, q, k] - 3 * TABLE[0, h, 2, k]) + 1,
    "bias times slope": lambda s, b, h, q, k: s + SLOPES[h] * TABLE[0, 0, q, k],
    "of keys": lambda s, b, h, q, k: s + torch.sin(k * 0.1) * SLOPES[h] + torch.where(h > 1, 2, k),
    "of rows": lambda s, b, h, q, k: s + torch.cos(q * 1.0) + 0.1 * q + 4,
    "masked": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")) + TABLE[b, 0, 0, k],
    "masked otherwise": lambda s, b, h, q, k: s.masked_fill(KEYS[b, k] & (k > 2), -float("inf")),
}

MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 7),
    "two-sided": lambda b, h, q, k: abs(q - k) <= 5,
    "strictly below": lambda b, h, q, k: k < q - 2,
    "above": lambda b, h, q, k: k >= q + 3,
    "bottom-right": lambda b, h, q, k: q + 16 >= k,
    "chunk": lambda b, h, q, k: (q // 8 == k // 8) & (q >= k),
    "chunks": lambda b, h, q, k: (q // 8 == k // 8) & (q // 12 == k // 12),
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "prefix": lambda b, h, q, k: (q >= k) | (k < LENGTH[b]),
    "padding": lambda b, h, q, k: k < LENGTH[b],
    "padding, causal": lambda b, h, q, k: (k < LENGTH[b]) & (k <= q),
    "key padding": lambda b, h, q, k: KEYS[b, k],
    "of heads": lambda b, h, q, k: torch.where(h == 1, q >= k, (q - k) % 3 == 0),
    "global": lambda b, h, q, k: (abs(q - k) < 3) | GLOBAL[q] | GLOBAL[k],
    "empty rows": lambda b, h, q, k: (q % 5 != 2) & (q + 2 >= k),
    "nothing": lambda b, h, q, k: q < 0,
    "everything": torchs.noop_mask,
}


def block_mask(name, lengths, b=B, h=HQ):
    return torchs.create_block_mask(MASKS[name], b, h, *lengths, device="cpu", BLOCK_SIZE=BLOCK)


def both(q, k, v, score_mod, mask, **options):
    """(out, lse) of ours and of torch's."""
    options |= {"enable_gqa": True, "return_aux": flex.AuxRequest(lse=True)}
    return [
        (out, aux.lse)
        for out, aux in (
            flex.flex_attention(q, k, v, score_mod, mask, **options),
            torchs.flex_attention(q, k, v, score_mod, mask, **options),
        )
    ]


def assert_equal(ours, due, tolerance=2e-5):
    for x, y in zip(ours, due):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, lengths):
    assert_equal(*both(*operands(lengths), None, block_mask(name, lengths)))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [None, "causal", "padding, causal", "strictly below"])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, mask, lengths):
    if mask is not None:
        mask = block_mask(mask, lengths)
    assert_equal(*both(*operands(lengths), SCORES[name], mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    mask = block_mask("documents", (37, 37))
    # torch rounds the weights to 16 bits before it multiplies them with V.
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    for name in ("softcap and alibi", "bias", "of keys"):
        q, k, v = operands((37, 37), dtype)
        ours, due = both(q, k, v, SCORES[name], mask, scale=0.3)
        assert_equal(ours[:1], due[:1], tolerance)
        assert_equal((ours[1].double(),), (due[1].double(),), 1e-2 if dtype.itemsize == 2 else 1e-5)


def scores_of(q, k, score_mod, mask_mod):
    """Mods are functions of whole tensors, too, where they use nothing else."""
    k = k.repeat_interleave(HQ // HKV, dim=1)
    score = q @ k.mT / D**0.5
    index = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    if score_mod is not None:
        score = score_mod(score, *index)
    if mask_mod is not None:
        score = score.masked_fill(~mask_mod(*index), -torch.inf)
    return score


def reference(q, k, v, score_mod, mask_mod):
    """By autograd."""
    score = scores_of(q, k, score_mod, mask_mod)
    v = v.repeat_interleave(HQ // HKV, dim=1)
    return torch.softmax(score, -1) @ v, torch.logsumexp(score, -1)


@pytest.mark.parametrize("mask", [None, "causal", "empty rows", "of heads"])
@pytest.mark.parametrize(
    "name", sorted(SCORES.keys() - {"alibi, symmetric"})
)  # which no option expresses
def test_max_scores(name, mask):
    """torch's function has them on a GPU alone."""
    q, k, v = operands((37, 53))
    seen = None if mask is None else block_mask(mask, (37, 53))
    wanted = flex.AuxRequest(max_scores=True)
    out, aux = flex.flex_attention(q, k, v, SCORES[name], seen, enable_gqa=True, return_aux=wanted)
    due = scores_of(q, k, SCORES[name], MASKS.get(mask)).amax(-1)
    assert aux.lse is None and out.shape == (B, HQ, 37, DV)
    torch.testing.assert_close(aux.max_scores, due, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("score", "mask"),
    [
        ("identity", "documents"),
        ("softcap and alibi", "causal"),
        ("alibi", "two-sided"),
        ("bias", "window"),
        ("biases", "prefix"),
        ("bias times slope", "causal"),
        ("of keys", None),
        ("of rows", "chunk"),
        ("masked", None),
    ],
)
def test_gradients(score, mask):
    lengths = 37, 37
    leaves = [x.requires_grad_() for x in (*operands(lengths), TABLE)]
    weights = random(B, HQ, 37, DV, seed=7), random(B, HQ, 37, seed=8)

    def gradients(out, lse):
        total = (out * weights[0]).sum() + (lse * weights[1]).sum()
        return torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)

    try:
        bm = None if mask is None else block_mask(mask, lengths)
        out, aux = flex.flex_attention(
            *leaves[:3],
            SCORES[score],
            bm,
            enable_gqa=True,
            return_aux=flex.AuxRequest(lse=True),
        )
        due = reference(*leaves[:3], SCORES[score], MASKS.get(mask))
        for x, y in zip(gradients(out, aux.lse), gradients(*due)):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    finally:
        TABLE.requires_grad_(False)


def test_gradients_of_slopes():
    """Slopes that require one become a bias of the keys, where the term is linear."""
    slopes = SLOPES.clone().requires_grad_()

    def alibi(s, b, h, q, k):
        return s + slopes[h] * (k - q)

    q, k, v = operands((37, 37))
    mask = block_mask("causal", (37, 37))
    out = flex.flex_attention(q, k, v, alibi, mask, enable_gqa=True)
    due, _ = reference(q, k, v, alibi, MASKS["causal"])
    weight = random(*out.shape)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), slopes)[0] for x in (out, due))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def options(score=None, mask=None, lengths=(37, 37)):
    """What `attention` is called with."""
    mask = None if mask is None else block_mask(mask, lengths)
    mod = None if score is None else SCORES[score]
    mods = Mods(mod, None, mask)
    return translate(operands(lengths)[0], Lengths(B, HQ, *lengths), mods)


@pytest.mark.parametrize(
    ("mask", "due"),
    [
        ("causal", {"causal": True}),
        ("window", {"causal": True, "window": (7, None)}),
        ("two-sided", {"window": (5, 5)}),
        ("bottom-right", {"window": (None, 16)}),
        ("chunk", {"causal": True, "attention_chunk": 8}),
        ("documents", {"causal": True, "mask": (1, 1, 37, 37)}),
        ("prefix", {"mask": (B, 1, 37, 37)}),
        ("padding", {"mask": (B, 1, 1, 37)}),
        ("padding, causal", {"causal": True, "mask": (B, 1, 1, 37)}),
        ("of heads", {"mask": (1, HQ, 37, 37)}),
        ("above", {"mask": (1, 1, 37, 37)}),
        ("strictly below", {"causal": True}),
        ("everything", {}),
    ],
)
def test_recognised_masks(mask, due):
    found = options(mask=mask)
    shapes = {x: tuple(y.shape) if x == "mask" else y for x, y in found.options.items()}
    assert shapes == due
    assert found.keys == (34 if mask == "strictly below" else 37)


@pytest.mark.parametrize(
    ("score", "mask", "due"),
    [
        ("softcap", None, {"softcap"}),
        ("alibi", "causal", {"causal", "alibi_slopes"}),
        ("alibi, split", "causal", {"causal", "alibi_slopes"}),
        ("alibi, negated", "window", {"causal", "window", "alibi_slopes"}),
        ("alibi", "two-sided", {"window", "bias"}),
        ("alibi, symmetric", None, {"alibi_slopes"}),
        ("bias", "causal", {"causal", "bias"}),
        ("masked", None, {"causal", "bias"}),
        ("of rows", None, {"bias"}),
    ],
)
def test_recognised_scores(score, mask, due):
    assert options(score, mask).options.keys() == due


@pytest.mark.parametrize("cap", [4096.0, 5000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softcap_beyond_that_of_attention_is_computed(cap, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=dtype) * 30 for _ in range(3))
    masked = lambda s, b, h, q, k: torch.where(q >= k, cap * torch.tanh(s / cap), -float("inf"))  # noqa: E731
    for score in (lambda s, b, h, q, k: cap * torch.tanh(s / cap), masked):
        assert_equal(*both(q, k, v, score, None), 1e-3)


@pytest.mark.parametrize("score", ["alibi", "alibi, symmetric"])
def test_alibi_of_other_lengths(score):
    """Slopes of `attention` count from key q + Sk - Sq, which the mask may go beyond."""
    assert options(score, "causal", (37, 53)).options.keys() == {"causal", "alibi_slopes"}
    assert options(score, "causal", (53, 37)).options.keys() == {"window", "bias"}


def test_a_bias_is_not_copied():
    assert options("bias").options["bias"].data_ptr() == TABLE.data_ptr()
    assert options("bias of heads").options["bias"].shape == (1, HQ, 37, 37)


def test_lists_say_more_than_the_function():
    """Of from_kv_blocks: only listed blocks are visible, and full ones whatever mask_mod says."""
    q, k, v = operands((40, 53))
    counts = torch.tensor([[[2, 0, 1]]])
    indices = torch.tensor([[[[0, 2, 1, 1], [9, 9, 9, 9], [1, 7, 7, 7]]]])  # some are not read
    full = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[3, 0, 0, 0], [0] * 4, [0, 0, 0, 0]]]])
    visible = torch.zeros(40, 53, dtype=torch.bool)
    for mask_mod in (None, MASKS["causal"], MASKS["global"]):
        for row, columns in ((0, (0, 2)), (2, (1,))):
            for column in columns:
                block = slice(row * 16, row * 16 + 16), slice(column * 16, column * 16 + 16)
                index = torch.arange(40)[block[0], None], torch.arange(53)[block[1]]
                visible[block] = True if mask_mod is None else mask_mod(0, 0, *index)
        visible[:16, 48:] = visible[32:, :16] = True
        bm = torchs.BlockMask.from_kv_blocks(
            counts.int(),
            indices.int(),
            *(x.int() for x in full),
            BLOCK_SIZE=16,
            mask_mod=mask_mod,
            seq_lengths=(40, 53),
            compute_q_blocks=False,
        )
        out, lse = flex.flex_attention(q, k, v, None, bm, enable_gqa=True, return_lse=True)
        due, due_lse = reference(q, k, v, None, lambda *_, seen=visible: seen)
        assert_equal((out, lse), (due.nan_to_num(0.0), due_lse))
        assert not out[:, :, 16:32].any()


def test_batch_of_one_key():
    q, k, v = operands((37, 37))
    mask = block_mask("prefix", (37, 37))
    assert_equal(*both(q, k[:1], v[:1], None, mask))


def test_strides():
    q, k, v = (x.mT.contiguous().mT for x in operands((37, 37)))
    assert_equal(*both(q, k, v, SCORES["softcap"], block_mask("causal", (37, 37))))


def test_a_mask_is_kept_with_its_block_mask():
    lengths = Lengths(B, HQ, 37, 37)
    document = DOCUMENT.clone()
    bm = torchs.create_block_mask(
        lambda b, h, q, k: document[q] == document[k], None, None, 37, 37, "cpu", BLOCK
    )
    first = _block_mask.read(bm, lengths)
    assert _block_mask.read(bm, lengths) is first
    document[20:] = 100  # counted by torch: read again
    second = _block_mask.read(bm, lengths)
    assert not torch.equal(first.dense, second.dense)
    bm.mask_mod = MASKS["two-sided"]
    assert _block_mask.read(bm, lengths).interval == Interval(-5, 5)
    gone = weakref.ref(bm)
    del bm
    gc.collect()
    assert gone() is None


def test_an_interval_that_no_kernel_has_is_kept_as_a_mask():
    mask = block_mask("above", (37, 37))
    first = _block_mask.read(mask, Lengths(B, HQ, 37, 37))
    assert torch.equal(first.dense[0, 0], torch.ones(37, 37).triu(3).bool())
    assert _block_mask.read(mask, Lengths(B, HQ, 37, 37)) is first


def test_masks_are_kept_for_few_batch_sizes():
    mask = block_mask("documents", (37, 37), None, None)
    for batch in range(1, 12):
        _block_mask.read(mask, Lengths(batch, HQ, 37, 37))
    assert len(_block_mask._kept[mask]) <= _block_mask._MOST


def test_a_method_as_mask_mod_keeps_nothing_alive():
    class Model:
        def __init__(self):
            self.block_mask = block_mask("everything", (37, 37))
            self.block_mask.mask_mod = self.visible

        def visible(self, b, h, q, k):
            return (DOCUMENT[q] == DOCUMENT[k]) | (k == 0)

    model = Model()
    lengths = Lengths(B, HQ, 37, 37)
    first = _block_mask.read(model.block_mask, lengths)
    assert _block_mask.read(model.block_mask, lengths) is first
    gone = weakref.ref(model)
    del model, first
    gc.collect()
    assert gone() is None


def test_inference_mode_and_gradients_share_a_mask():
    mask = block_mask("prefix", (37, 37))
    q, k, v = operands((37, 37))
    with torch.inference_mode():
        flex.flex_attention(q, k, v, None, mask, enable_gqa=True)
    flex.flex_attention(q.requires_grad_(), k, v, None, mask, enable_gqa=True).sum().backward()
    assert q.grad is not None


def test_masks_are_evaluated_in_small_blocks(monkeypatch):
    """Temporaries take less than the mask."""
    mask = block_mask("prefix", (37, 37))
    widest = []
    monkeypatch.setattr(_block_mask, "in_rows", lambda *_: (slice(i, i + 1) for i in range(37)))
    original = _block_mask.evaluate
    monkeypatch.setattr(
        _block_mask, "evaluate", lambda *a: widest.append(original(*a)) or widest[-1]
    )
    _block_mask.read(mask, Lengths(B, HQ, 37, 37))
    assert len(widest) == 37
    assert max(x.numel() for x in widest) == B * 37


def test_compiled():
    mask = block_mask("causal", (37, 37))
    q, k, v = operands((37, 37))

    def layer(q, k, v):
        return flex.flex_attention(q * 2, k, v, SCORES["softcap"], mask, enable_gqa=True) + 1

    torch.testing.assert_close(torch.compile(layer, backend="eager")(q, k, v), layer(q, k, v))
    compiled = torch.compile(flex.flex_attention, backend="eager")
    due = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert torch.equal(compiled(q, k, v, block_mask=mask, enable_gqa=True), due)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(layer, backend="eager", fullgraph=True)(q, k, v)


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_transforms(is_made_inside):
    """Of torch.func; a BlockMask that is made within one has lists that it wraps."""
    masks = [block_mask("documents", (37, 37))]

    def layer(q, k, v):
        mask = block_mask("documents", (37, 37)) if is_made_inside else masks[0]
        return flex.flex_attention(q, k, v, SCORES["softcap"], mask, enable_gqa=True)

    q, k, v = operands((37, 37))
    q.requires_grad_()
    due = layer(q, k, v)
    (grad_q,) = torch.autograd.grad(due.square().sum(), q)
    q, k, v = (x.detach() for x in (q, k, v))
    found = torch.func.grad(lambda q: layer(q, k, v).square().sum())(q)
    torch.testing.assert_close(found, grad_q)
    stacked = torch.vmap(layer)(*(torch.stack([x, x / 2]) for x in (q, k, v)))
    torch.testing.assert_close(stacked[0], due.detach())
    with pytest.raises(NotImplementedError, match=r"score_mod under torch\.func"):
        torch.vmap(lambda q: flex.flex_attention(q, q, q, lambda s, *_: torch.exp(s)))(q[None])
    lengths = torch.tensor([[37, 20], [30, 10]])

    def padded(q, lengths):
        mask = block_mask("documents", (37, 37))
        mask.mask_mod = lambda b, h, q, k: k < lengths[b]
        return flex.flex_attention(q, q, q, block_mask=mask)

    with pytest.raises(NotImplementedError, match=r"block_mask makes a mask .*vmap maps"):
        torch.vmap(padded)(torch.stack([q, q]), lengths)


def test_autocast():
    mask = block_mask("documents", (37, 37))
    q, k, v = operands((37, 37))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex.flex_attention(q, k, v, SCORES["biases"], mask, enable_gqa=True)
    due, _ = reference(q, k, v, SCORES["biases"], MASKS["documents"])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), due, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("score", ["identity", "alibi", "of keys"])
def test_autocast_casts_operands_alone(score):
    mask, aux = block_mask("two-sided", (37, 37)), flex.AuxRequest(lse=True, max_scores=True)
    options = {"enable_gqa": True, "return_aux": aux}
    q, k, v = operands((37, 37))
    due = flex.flex_attention(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), SCORES[score], mask, **options
    )
    narrow = k.to(torch.float8_e4m3fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = flex.flex_attention(q, k, v, SCORES[score], mask, **options)
        of_narrow = flex.flex_attention(q, narrow, v, SCORES[score], mask, **options)
        as_wide = flex.flex_attention(q, narrow.float(), v, SCORES[score], mask, **options)
    for x, y in ((found, due), (of_narrow, as_wide)):
        assert torch.equal(x[0], y[0]) and torch.equal(x[1].lse, y[1].lse)
        assert torch.equal(x[1].max_scores, y[1].max_scores)


def test_results():
    q, k, v = operands((37, 37))
    gqa = {"enable_gqa": True}
    out = flex.flex_attention(q, k, v, **gqa)
    assert isinstance(out, torch.Tensor)
    pair = flex.flex_attention(q, k, v, return_lse=True, **gqa)
    assert [tuple(x.shape) for x in pair] == [(B, HQ, 37, DV), (B, HQ, 37)]
    out, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(), **gqa)
    assert aux == flex.AuxOutput(None, None)
    q.requires_grad_()
    wanted = flex.AuxRequest(lse=True, max_scores=True)
    out, aux = flex.flex_attention(q, k, v, return_aux=wanted, **gqa)
    assert out.requires_grad and aux.lse.requires_grad and not aux.max_scores.requires_grad
    assert aux.lse.shape == aux.max_scores.shape == (B, HQ, 37)
    flex.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "bwd_BLOCK_N1": 32}, **gqa)


def wrong(**changes):
    q, k, v = operands((37, 37))
    call = {"query": q, "key": k, "value": v, "enable_gqa": True} | changes
    return flex.flex_attention(**call)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"enable_gqa": False}, ValueError, "query has 4 heads and key 2: that needs enable_gqa"),
        ({"query": torch.ones(2, 37, D)}, NotImplementedError, "query must have 4 dimensions"),
        ({"query": torch.ones(2, 3, 37, D)}, ValueError, "3 heads, which 2 of key do not divide"),
        ({"query": torch.ones(2, 4, 37, 8)}, ValueError, "head dims of query and key differ"),
        ({"query": torch.ones(1, 4, 37, D)}, ValueError, "without a block_mask"),
        ({"return_lse": True, "return_aux": flex.AuxRequest()}, ValueError, "both given"),
        (
            {
                "return_aux": flex.AuxRequest(max_scores=True),
                "score_mod": lambda s, b, h, q, k: torch.sin(s),
            },
            NotImplementedError,
            "maxima",
        ),
        ({"kernel_options": {"BLOCKM": 1}}, ValueError, "kernel_options has no 'BLOCKM'"),
        ({"block_mask": torch.ones(37, 37)}, TypeError, "must be a BlockMask, got Tensor"),
        ({"block_mask": block_mask("causal", (36, 37))}, ValueError, r"lengths \(36, 37\)"),
        (
            {"block_mask": block_mask("causal", (53, 37))[:, :, :3]},
            ValueError,
            r"lengths \(53, 37\).*_adjust\(37, 37\); a slice",
        ),
        ({"block_mask": block_mask("causal", (37, 37), b=3)}, ValueError, "batch size 3"),
        ({"block_mask": block_mask("causal", (37, 37), h=2)}, ValueError, "number of heads 2"),
        ({"block_mask": block_mask("causal", (37, 37))[:1]}, RuntimeError, "sliced BlockMask"),
    ],
)
def test_errors(changes, error, said):
    with pytest.raises(error, match=said):
        wrong(**changes)


def test_a_number_beyond_a_captured_tensor_reads_the_last_entry():
    q, k, v = operands((37, 37))
    for number, due in ((99, MOST - 1), (-99, 0), (-1, MOST - 1)):
        found, of_due = (
            flex.flex_attention(
                q, k, v, lambda s, b, h, q, k, x=x: s + TABLE[b, h, x, k], enable_gqa=True
            )
            for x in (number, due)
        )
        assert torch.equal(found, of_due)


def test_captured_tensors_of_other_sizes():
    small = torch.ones(HQ, 20, 37)
    with pytest.raises(ValueError, match=r"\(4, 20, 37\) has 20 entries .* of q; the call has 37"):
        wrong(score_mod=lambda s, b, h, q, k: s + small[h, q, k])
