"""score_mod, mask_mod and block_mask of operands with several batch dimensions."""

import math

import pytest

torch = pytest.importorskip("torch", minversion="2.9")

import cutlass_attn  # noqa: E402
from cutlass_attn.compat import flex  # noqa: E402

ENTRIES, ROWS, HQ, HKV, S, D = 2, 3, 4, 2, 20, 16


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LENGTH = torch.tensor([[5, 20, 9], [1, 7, 20]])
SLOPES = random(ENTRIES * ROWS, HQ, seed=1).abs()
TABLE = random(ENTRIES * ROWS, HQ, S, S, seed=2)
LEARNED = random(ROWS, 2 * S, seed=3).requires_grad_()


def padding(b, h, q, k):
    return k < LENGTH[b // ROWS, b % ROWS]


def causal_padding(b, h, q, k):
    return (q >= k) & (k < LENGTH.view(-1)[b])


MASKS = {
    "padding": padding,
    "causal and padding": causal_padding,
    "causal": lambda b, h, q, k: q >= k,
    "of no entry": lambda b, h, q, k: (q + k) % 3 != 1,
    None: None,
}
SCORES = {
    "softcap": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "slopes": lambda s, b, h, q, k: s - SLOPES[b, h] * abs(q - k),
    "table": lambda s, b, h, q, k: s + TABLE[b, h, q, k],
    "product": lambda s, b, h, q, k: s * (1 + b % ROWS),  # no option of a kernel
    "learned": lambda s, b, h, q, k: s + LEARNED[b % ROWS, q - k + S],
}
PER_LOGIT = {  # shapes of the bias and of the mask
    "none": (None, None),
    "of all": ((ENTRIES, ROWS, HQ, S, S), (ENTRIES, ROWS, 1, 1, S)),
    "of entries": ((ENTRIES, 1, HQ, S, S), (ENTRIES, 1, 1, 1, S)),
    "of rows": ((ROWS, HQ, S, S), (1, ROWS, 1, S, S)),
    "of heads": ((HQ, S, S), (S, S)),
}


def operands(dtype=torch.float64):
    """Transposed, as projections give them, with leaves that have gradients."""
    shapes = ((ENTRIES, ROWS, S, heads, D) for heads in (HQ, HKV, HKV))
    leaves = [random(*x, seed=5 + i).to(dtype).requires_grad_() for i, x in enumerate(shapes)]
    return leaves, [x.transpose(2, 3) for x in leaves]


def reference(q, k, v, score_mod=None, mask_mod=None, bias=None, mask=None):
    """The result and the log-sum-exp, with all batch dimensions, in torch."""
    k, v = (x.repeat_interleave(HQ // HKV, dim=2) for x in (k, v))
    score = (q @ k.mT / math.sqrt(D)).flatten(0, 1)
    index = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    if score_mod is not None:
        score = score_mod(score, *index)
    if mask_mod is not None:
        score = torch.where(mask_mod(*index), score, -torch.inf)
    score = score.view(ENTRIES, ROWS, HQ, S, S)
    if bias is not None:
        score = score + bias
    if mask is not None:
        score = torch.where(mask, score, -torch.inf)
    return torch.softmax(score, -1) @ v, torch.logsumexp(score, -1)


def compared(leaves, q, k, v, options, due_options):
    out, lse = cutlass_attn.attention(q, k, v, return_lse=True, **options)
    due, due_lse = reference(q, k, v, **due_options)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    torch.testing.assert_close(out, due)
    torch.testing.assert_close(lse, due_lse)
    weights = random(*out.shape, seed=9)
    found = torch.autograd.grad((out * weights).sum(), leaves)
    expected = torch.autograd.grad((due * weights).sum(), leaves)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_scores(score, mask):
    leaves, qkv = operands()
    mods = {"score_mod": SCORES[score], "mask_mod": MASKS[mask]}
    compared([*leaves, *([LEARNED] if score == "learned" else [])], *qkv, mods, mods)


@pytest.mark.parametrize("per_logit", PER_LOGIT)
@pytest.mark.parametrize("mask", ["padding", "causal", "of no entry"])
def test_masks(mask, per_logit):
    """With a bias and a bool mask, also of some of the batch dimensions alone."""
    leaves, qkv = operands()
    of_bias, of_mask = PER_LOGIT[per_logit]
    options = {"mask_mod": MASKS[mask]}
    if of_bias is not None:
        options["bias"] = random(*of_bias, seed=10).requires_grad_()
        options["mask"] = random(*of_mask, seed=11) > -1
        options["mask"][..., 0] = True
        leaves = [*leaves, options["bias"]]
    compared(leaves, *qkv, options, options)


@pytest.mark.parametrize("score", ["slopes", "product"])
def test_a_mask_of_some_batch_dimensions_beside_a_score(score):
    leaves, qkv = operands()
    mask = random(ENTRIES, 1, 1, S, S, seed=11) > -1
    mask[..., 0] = True
    options = {"score_mod": SCORES[score], "mask": mask}
    compared(leaves, *qkv, options, options)


@pytest.mark.parametrize("entries", [1, ENTRIES * ROWS])
def test_block_mask(entries):
    leaves, qkv = operands()
    mask_mod = padding if entries > 1 else MASKS["of no entry"]
    block_mask = flex.create_block_mask(mask_mod, entries, 1, S, S, device="cpu", BLOCK_SIZE=8)
    compared(leaves, *qkv, {"block_mask": block_mask}, {"mask_mod": mask_mod})


def test_layout_out_and_six_dimensions():
    _, qkv = operands()
    due, _ = reference(*qkv, mask_mod=padding)
    rows = [x.detach().transpose(2, 3).contiguous().unsqueeze(1) for x in qkv]
    out = torch.empty_like(rows[0])
    found = cutlass_attn.attention(*rows, mask_mod=padding, layout="bshd", out=out)
    assert found.data_ptr() == out.data_ptr() and found.shape == (ENTRIES, 1, ROWS, S, HQ, D)
    torch.testing.assert_close(found.squeeze(1).transpose(2, 3), due)


def test_dropout_of_a_mask_mod_drops_as_its_mask_does():
    q = random(ENTRIES, ROWS, HQ, S, D).float()
    options = {"dropout_p": 0.5, "rng_state": torch.tensor([3, 4])}
    mask = torch.arange(S) < LENGTH[:, :, None, None, None]
    due = cutlass_attn.attention(q, q, q, mask=mask, **options)
    assert torch.equal(cutlass_attn.attention(q, q, q, mask_mod=padding, **options), due)


def test_verify():
    q = random(ENTRIES, ROWS, HQ, S, D).half()
    out = cutlass_attn.attention(q, q, q, mask_mod=causal_padding, verify=True)
    assert torch.equal(out, cutlass_attn.attention(q, q, q, mask_mod=causal_padding))


def test_compiled():
    _, (q, k, v) = operands()
    compiled = torch.compile(cutlass_attn.attention, backend="eager")
    for mods in ({"mask_mod": padding}, {"score_mod": SCORES["product"]}):
        due = cutlass_attn.attention(q, k, v, **mods)
        assert torch.equal(compiled(q, k, v, **mods), due)


def test_explain():
    q = torch.zeros(ENTRIES, ROWS, HQ, 200, D, dtype=torch.float16)
    bias = torch.zeros(ENTRIES, 1, HQ, 200, 200, dtype=torch.float16)
    found = str(cutlass_attn.explain(q, q, q, mask_mod=padding, bias=bias, device="H100"))
    assert f"mask ({ENTRIES * ROWS}, 1, 1, 200)" in found
    assert f"bias ({ENTRIES * ROWS}, {HQ}, 200, 200)" in found


def block_mask_of(batch):
    return flex.create_block_mask(MASKS["causal"], batch, 1, S, S, device="cpu", BLOCK_SIZE=8)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"k": random(ROWS, HKV, S, D)}, ValueError, r"k has shape \(3, 2, 20, 16\); allowed: ba"),
        ({"mask": random(3, 1, 1, 1, S) > 0}, ValueError, "mask has 3 entries in its first dim"),
        ({"mask": random(2, 2, 3, 1, 1, S) > 0}, ValueError, "mask has 6 dimensions, allowed: up"),
        ({"mask_mod": None, "block_mask": block_mask_of(2)}, ValueError, "has batch size 2; q"),
        ({"mask_mod": lambda b, n, h, q, k: q >= k}, TypeError, "must have 4 positional argumen"),
        ({"seqused_k": LENGTH.int()}, ValueError, "seqused_k is given with mask_mod"),
        ({"score_mod": SCORES["table"], "bias": random(S, S)}, ValueError, "score_mod and bias"),
    ],
)  # fmt: skip
def test_errors(changes, error, said):
    _, (q, k, v) = operands()
    given = {"q": q, "k": k, "v": v, "mask_mod": padding, **changes}
    with pytest.raises(error, match=said):
        cutlass_attn.attention(**given)


def test_flex_attention_has_four_as_torchs():
    _, (q, k, v) = operands()
    with pytest.raises(NotImplementedError, match="query must have 4 dimensions, got"):
        flex.flex_attention(q, k, v, enable_gqa=True)
