"""The same call gives the same bits, whatever was in the output before."""

import cases
import pytest
from cases import torch
from cutlass_attn._call import launch, make_request
from cutlass_attn._options import make_options

CASES = [
    cases.Case("plain", "", seqlen_q=65, seqlen_k=70, heads=1, heads_kv=1, causal=True),
    cases.Case(
        "options",
        "",
        seqlen_q=65,
        seqlen_k=70,
        heads=1,
        heads_kv=1,
        bias="qk",
        mask="k",
        alibi="h",
        sinks=True,
        dropout_p=0.3,
    ),
]
POISON = (float("nan"), float("inf"), 0.0, -1.0, 65504.0)


@pytest.mark.parametrize(("variant", "case"), cases.all_pairs(CASES))
def test_twenty_runs(variant, case):
    from cutlass_attn import _torch

    head_dim = variant.head_dim or 64
    q, k, v, out = cases.tensors(case, variant.dtype, head_dim, variant.device)
    request = make_request(
        _torch, q, k, v, case.causal, None, None, 0.0, "bhsd", variant.accumulate
    )
    names = ("bias", "mask", "alibi_slopes", "sinks", "dropout_p", "rng_state")
    keywords = cases.keywords(case, variant.dtype, variant.device)
    options = make_options(_torch, request, q, *(keywords.get(name) for name in names))
    results = []
    for run in range(20):
        poison = POISON[run % len(POISON)]
        out.fill_(poison)
        lse = torch.full(request.lse_shape, poison, device=variant.device)
        launch(_torch, request, q, k, v, options, out, lse, variant.key)
        results.append((out.clone(), lse))
    first_out, first_lse = results[0]
    assert first_out.isfinite().all() and first_lse.isfinite().all()
    for out, lse in results[1:]:
        assert torch.equal(out, first_out) and torch.equal(lse, first_lse)
