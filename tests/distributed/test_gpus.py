"""context_attention on two GPUs, through NCCL, against the whole sequence in plain torch."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import context_cases  # noqa: E402
import processes  # noqa: E402
from context_cases import Case  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# Of several tiles on each rank; lengths that the ranks do not divide.
LONG = [
    Case("long", {}, seqlen=1001, heads=(8, 4), dims=(64, 64)),
    Case("long causal", {"causal": True}, seqlen=1003, heads=(8, 8), dims=(128, 128)),
    Case("long packed", {"causal": True}, {"cu_seqlens": [0, 77, 600, 1002]}, 1002, batch=1),
    Case("long groups", {"causal": True}, {"head_groups": 4}, 600, (16, 8), terms=("sinks",)),
]
CASES = [replace(case, dtype=torch.float16) for case in (*context_cases.CASES, *LONG)]
GRID = [
    (scheme, i)
    for scheme in ("gather", "ring", "ulysses")
    for i, case in enumerate(CASES)
    if scheme in case.schemes
]


def outcomes(rank, size):
    return {
        (scheme, i): processes.outcome(context_cases.check, CASES[i], scheme, size, "cuda")
        for scheme, i in GRID
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(outcomes, 2, tmp_path_factory.mktemp("ranks"), backend="nccl")


@pytest.mark.parametrize("scheme, i", GRID, ids=[f"{scheme}-{CASES[i].name}" for scheme, i in GRID])
def test_exact(found, scheme, i):
    for rank, of_rank in enumerate(found):
        assert of_rank[scheme, i] is None, f"rank {rank}: {of_rank[scheme, i]}"
