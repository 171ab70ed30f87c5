"""context_attention on 2 and 4 processes of gloo against the whole sequence in one."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import context_cases  # noqa: E402
import processes  # noqa: E402
from context_cases import CASES, Case  # noqa: E402
from cutlass_attn.distributed import (  # noqa: E402
    ContextPlan,
    _attention,
    _gather,
    context_attention,
)

SCHEMES = {
    2: ("gather", "ring", "ulysses"),
    4: ("gather+ulysses", "ring+ulysses", "gather", "ring"),
}
FEW = ("causal", "near window", "sinks", "packed causal")  # of what 2 processes have whole
GRID = [
    (size, scheme, i)
    for size, schemes in SCHEMES.items()
    for scheme in schemes
    for i, case in enumerate(CASES)
    if scheme in case.schemes and (size == 2 or "+" in scheme or case.name in FEW)
]


def outcomes(rank, size):
    return {
        (scheme, i): processes.outcome(context_cases.check, CASES[i], scheme, size)
        for of_size, scheme, i in GRID
        if of_size == size
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of all cases: a process starts once for each number of them."""
    made = {}

    def of(size):
        if size not in made:
            made[size] = processes.run(outcomes, size, tmp_path_factory.mktemp("ranks"))
        return made[size]

    return of


@pytest.mark.parametrize(
    "size, scheme, i", GRID, ids=[f"{size}-{scheme}-{CASES[i].name}" for size, scheme, i in GRID]
)
def test_exact(found, size, scheme, i):
    for rank, of_rank in enumerate(found(size)):
        assert of_rank[scheme, i] is None, f"rank {rank}: {of_rank[scheme, i]}"


def many_groups(rank, size):
    """With the default number of groups, which few calls reach: four forward, two backward."""
    case = Case("groups", {"causal": True}, heads=(16, 8), terms=("sinks",), batch=1)
    _gather._ROWS_OF_A_GROUP = case.seqlen // size * 16 // 4
    _gather._KEYS_OF_A_GROUP = case.seqlen * 16 // 2
    plan = context_cases.plan_for("gather", size, case)
    q = torch.empty(1, plan.local_rows, 16, 1)
    counts = [_gather.number_of_groups(plan, q, 8, is_backward=x) for x in (False, True)]
    shares = _attention._shares(plan, q, 8 // size)
    assert (counts, shares) == ([4, 2], [1, 2, 1])
    schemes = ("gather", "ulysses")
    return {x: processes.outcome(context_cases.check, case, x, size) for x in schemes}


def test_default_groups(tmp_path):
    for found in processes.run(many_groups, 2, tmp_path):
        assert found == {"gather": None, "ulysses": None}


def backward_passes(rank, size):
    """Gradients of q, k and v by losses and in ways of which autograd makes other graphs."""
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 8, 32, 16, dtype=torch.float64)
    results = {}
    for scheme in ("gather", "ring", "ulysses"):
        plan = ContextPlan(seqlen=32, scheme=scheme, head_groups=2)
        q, k, v = (plan.shard(x, 2).requires_grad_() for x in whole)

        def call(q, k, v, plan=plan):
            return context_attention(q, k, v, plan, causal=True, return_lse=True)

        def gradients(loss, inputs=(q, k, v), **options):
            return torch.autograd.grad(loss, inputs, **options)

        out, lse = call(q, k, v)
        due = gradients((out**2).sum() + lse.sum(), retain_graph=True)
        again = gradients((out**2).sum() + lse.sum())
        with torch.autograd.detect_anomaly(check_nan=True):
            out, lse = call(q, k, v)
            anomaly = gradients((out**2).sum() + lse.sum())
        out, lse = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
        checkpointed = gradients((out**2).sum() + lse.sum())
        of_lse = gradients(call(q, k, v)[1].sum(), allow_unused=True)
        out, lse = call(q, k, v)
        # LSE is in the loss of one rank alone: others exchange zeros.
        of_one = gradients((out**2).sum() + (lse.sum() if rank == 0 else 0))
        of_out = gradients((call(q, k, v)[0] ** 2).sum())
        results[scheme] = [due, again, anomaly, checkpointed], of_out, of_lse, of_one
    return results


def test_backward_passes(tmp_path):
    for rank, found in enumerate(processes.run(backward_passes, 2, tmp_path)):
        for scheme in ("gather", "ring", "ulysses"):
            alike, of_out, of_lse, of_one = found[scheme]
            for grads in alike[1:]:
                assert all(map(torch.equal, grads, alike[0]))
            for of_both, a, b in zip(alike[0], of_out, of_lse):
                torch.testing.assert_close(of_both, a if b is None else a + b)
            torch.testing.assert_close(of_one[0], (alike[0] if rank == 0 else of_out)[0])
