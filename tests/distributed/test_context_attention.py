"""context_attention on 2 and 4 processes of gloo against the whole sequence in one."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import context_cases  # noqa: E402
import processes  # noqa: E402
from context_cases import CASES  # noqa: E402

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
