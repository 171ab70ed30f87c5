"""The correctness cases of PyTorch's own tests of FlexAttention through compat.flex.

A run takes some cases: on a CPU every pair of values of two parameters occurs together, on a GPU,
where functions are compiled first, every value. CUTLASS_ATTN_TEST_FLEX=all takes all. On a CPU
lengths are an eighth of torch's or less. The limit is torch's: a factor of its eager function's own
distance from float64.
"""

import itertools
import zlib
from dataclasses import asdict

import cases
import pytest
from cases import torch

pytest.importorskip("torch", minversion="2.10")

import test_flex_calls
from cutlass_attn.compat.flex import (
    AuxRequest,
    create_block_mask,
    flex_attention,
)
from flex_cases import (
    DECODING,
    DECODING_ELSEWHERE,
    DECODING_NOT_APPLICABLE,
    DECODING_REFUSED,
    ELSEWHERE,
    FLEX,
    NOT_APPLICABLE,
    REFUSED,
    Case,
    chosen,
)
from flex_eager import (
    check,
    eager,
    exactly,
    generator,
    known_refusal,
    normal,
    operands,
    paged,
)
from flex_mods import MASKS, SCORES, Captured


def test_every_test_of_torch_has_a_place():
    """123 tests of flex_attention, 28 of BlockMask, 6 of paged attention, 22 of learned biases, and
    54 of decoding."""
    places = (
        (FLEX, ELSEWHERE, REFUSED, NOT_APPLICABLE),
        (
            DECODING,
            DECODING_ELSEWHERE,
            DECODING_REFUSED,
            DECODING_NOT_APPLICABLE,
        ),
    )
    numbers = []
    for cases_of, *words in places:
        names = [list(cases_of), *(" ".join(x.values()).split() for x in words)]
        every = list(itertools.chain(*names))
        assert len(every) == len(set(every))
        assert all(f in globals() or hasattr(test_flex_calls, f) for x in words[:2] for f in x)
        numbers.append([len(names[0]) + len(names[1]), *map(len, names[2:])])
    assert numbers == [[125, 3, 51], [48, 1, 5]]
    assert sum(numbers[0]) == 123 + 28 + 6 + 22 and sum(numbers[1]) == 54


def every_case():
    lists = itertools.chain(*FLEX.values(), *DECODING.values())
    every = [asdict(x) for x in dict.fromkeys(lists)]
    for device, together in (("cpu", 2), ("cuda", 1)):
        its = [Case(**x) for x in chosen(every, 1, together)]
        if device == "cpu":
            its = dict.fromkeys(x.small() for x in its)
        marks = [cases.needs_gpu] if device == "cuda" else []
        for case in its:
            name = "-".join(str(x) for x in asdict(case).values())
            yield pytest.param(device, case, id=f"{device}-{name}", marks=marks)


def factor_of(case, is_learned):
    if is_learned:  # the square of torch's, which applies it twice
        return 1.35**2 * (100 if case.dtype == "float32" else 1)
    if case.dtype != "float32":
        return 2.1
    return 21 if case.paged else 11


@pytest.mark.parametrize(("device", "case"), list(every_case()))
def test_case(device, case):
    made = generator(device, zlib.crc32(repr(case).encode()))
    captured = Captured(made, case)
    score, mask = SCORES[case.score](captured), MASKS.get(case.mask, MASKS["noop"])(captured)
    (batch_q, batch_k), (heads_q, heads_k) = case.batch, case.heads
    (seqlen_q, seqlen_k), (head_dim, head_dim_v) = case.lengths, case.head_dims
    q, k, v = operands(
        made,
        (batch_q, heads_q, seqlen_q, head_dim),
        (batch_k, heads_k, seqlen_k, head_dim),
        (batch_k, heads_k, seqlen_k, head_dim_v),
        dtype=captured.dtype,
    )
    block_mask = create_block_mask(
        mask,
        batch_q,
        heads_q if case.mask == "heads" else 1,
        *case.lengths,
        device=device,
        BLOCK_SIZE=case.block,
    )
    options = {"enable_gqa": heads_q != heads_k, "return_aux": AuxRequest(lse=True)}
    mods = getattr(score, "for_vmap", score), mask
    of_torch, exact = eager(q, k, v, *mods), exactly(q, k, v, *mods)
    factor, is_learned = factor_of(case, captured.leaves), bool(captured.leaves)
    used = None if case.mask == "none" else block_mask
    with torch.set_grad_enabled(not case.paged), known_refusal(q):
        given = paged(score, used, k, v, made) if case.paged else (k, v, score, used)
        out, aux = flex_attention(q, *given, **options)
    check(out, of_torch[0], exact[0], factor, is_learned)
    limit = 3e-3 if case.dtype == "float32" else 2e-2
    torch.testing.assert_close(aux.lse, exact[1].float(), atol=limit, rtol=limit)
    if case.paged or not case.backward:
        return
    weight = normal(made, *out.shape, dtype=out.dtype)
    leaves = [q, k, v, *captured.leaves]
    grads = [
        torch.autograd.grad(x, leaves, weight.to(x.dtype)) for x in (out, of_torch[0], exact[0])
    ]
    for i, (ours, its, right) in enumerate(zip(*grads, strict=True)):
        # Of a captured tensor: on a CPU it has few numbers, whose errors do not average out; on a
        # GPU weights are rounded to q's dtype first.
        more = 2 if i > 2 else 1
        check(ours, its, right, factor * more, is_learned)
    if is_learned:  # test_relative_1d_bias_only_grad
        out = flex_attention(*(x.detach() for x in (q, k, v)), score, used, enable_gqa=True)
        alone = torch.autograd.grad(out, captured.leaves, weight)
        for ours, with_others in zip(alone, grads[0][3:], strict=True):
            torch.testing.assert_close(ours, with_others, atol=2e-2, rtol=2e-2)
