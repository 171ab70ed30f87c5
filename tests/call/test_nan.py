"""NaN and infinities reach the rows that see them, and no others."""

import functools

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
import reference
from cases import torch

MASKS = {
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "none": {},
    "bool": {"mask": "qk"},
}
BAD = (float("nan"), float("inf"), float("-inf"))
SEQLEN = 75
AT = (0, 20, 63, 64, 74)  # both sides of a tile's edge, the ends


CASES = [
    case_list.Case(name, "", heads=1, heads_kv=1, seqlen_q=SEQLEN, seqlen_k=SEQLEN, **options)
    for name, options in MASKS.items()
]


@pytest.mark.parametrize(("variant", "case"), cases.all_pairs(CASES))
def test_bad_key(variant, case):
    """Only rows that see the key change, and those are bad as the definition says."""
    if variant.quantize:
        pytest.skip("with products in 8 bits other keys are bad, too: test_quantize.py")
    head_dim = variant.head_dim or 64
    q, k, v, _ = cases.tensors(case, variant.dtype, head_dim, variant.device)
    options = cases.keywords(case, variant.dtype, variant.device)
    mask = cases.arrays(case, variant.dtype).get("mask", np.ones((SEQLEN, SEQLEN), bool))
    clean, clean_lse = _attention(variant, q, k, v, options)
    for bad, key in zip(BAD * 2, AT):
        broken = k.clone()
        broken[0, 0, key, 5] = bad
        out, lse = _attention(variant, q, broken, v, options)
        sees = np.zeros(SEQLEN, bool)
        for row in range(SEQLEN):
            first, end = reference.visible_keys(row, SEQLEN, SEQLEN, case.causal, case.window)
            sees[row] = first <= key < end and mask[row, key]
        assert torch.equal(out[~sees], clean[~sees]) and torch.equal(lse[~sees], clean_lse[~sees])

        expected = _where_nan(case, variant.dtype, head_dim, bad, key)
        np.testing.assert_array_equal(out.isnan().cpu().numpy(), expected)
        if np.isnan(bad):  # an infinite key with a -inf logit merely weighs nothing
            assert out[sees].isnan().all() and sees.any()


@functools.cache  # the same for all variants
def _where_nan(case, dtype, head_dim, bad, key):
    q, k, v = cases.values(case, dtype, head_dim)
    k = k.copy()
    k[0, 0, key, 5] = bad
    mask = cases.arrays(case, dtype).get("mask")
    return np.isnan(reference.attention(q, k, v, dtype, **case.scalars, mask=mask).exact[0, 0])


def beyond(seqlen_k, gap):
    return case_list.Case(
        "beyond",
        "",
        heads=1,
        heads_kv=1,
        seqlen_q=40,
        seqlen_k=seqlen_k,
        storage="unaligned" if gap else "dense",
    )


@pytest.mark.parametrize(
    ("variant", "seqlen_k", "gap"),
    [
        pytest.param(variant, n, gap, id=f"{variant.key}-{n}-{gap}", marks=cases.needs(variant))
        for variant in cases.compiled_variants()
        for n in (1, 40, 64, 75)
        for gap in (0, 1)
        if cases.takes(variant, beyond(n, gap))
    ],
)
def test_memory_beyond_the_keys(variant, seqlen_k, gap):
    """Rows of NaN right behind the last key and value, and before the first, are never read; nor
    is a column of them between the rows, which puts these at odd addresses."""
    case = beyond(seqlen_k, 0)
    head_dim = variant.head_dim or 64
    q, k, v, _ = cases.tensors(case, variant.dtype, head_dim, variant.device)
    expected = _attention(variant, q, k, v, {})
    surrounded = []
    for x in (k, v):
        store = x.new_full((1, 1, seqlen_k + 256, head_dim + gap), torch.nan)
        surrounded.append(store[:, :, 128 : 128 + seqlen_k, gap:].copy_(x))
    for a, b in zip(_attention(variant, q, *surrounded, {}), expected):
        assert torch.equal(a, b)


def _attention(variant, q, k, v, options):
    out, lse = cutlass_attn.attention(q, k, v, **options, **cases.own(variant), return_lse=True)
    return out[0, 0], lse[0, 0]
