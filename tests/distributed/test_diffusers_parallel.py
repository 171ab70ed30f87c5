"""diffusers' context parallelism with the backend "cutlass_attn", against one process."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import processes  # noqa: E402
from cutlass_attn.compat import diffusers as compat  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

S, H, D = 20, 4, 16


def parallel(scheme, rank, size):
    """What diffusers makes of its ContextParallelConfig, of which the dispatch reads this."""
    mesh = init_device_mesh("cpu", (size,))
    config = SimpleNamespace(
        ring_degree=size if scheme == "ring" else 1,
        ulysses_degree=size if scheme == "ulysses" else 1,
        _ring_mesh=mesh,
        _ulysses_mesh=mesh,
        _ring_local_rank=rank,
        _ulysses_local_rank=rank,
        _world_size=size,
        convert_to_fp32=True,
        ring_anything=False,
        ulysses_anything=False,
    )
    return SimpleNamespace(context_parallel_config=config)


def check(scheme, masked, rank, size):
    compat.register()
    torch.manual_seed(0)
    *whole, grad_out = torch.randn(4, 2, S, H, D).half()
    mask = torch.arange(S) < torch.tensor([[S], [S - 7]]) if masked else None
    leaves = [x.double().requires_grad_() for x in whole]
    due = dispatch.dispatch_attention_fn(
        *leaves, attn_mask=None if mask is None else mask[:, None, None]
    )
    due_grads = torch.autograd.grad(due, leaves, grad_out.double())
    rows = slice(rank * S // size, (rank + 1) * S // size)
    local = [x[:, rows].clone().requires_grad_() for x in whole]
    out = dispatch.dispatch_attention_fn(
        *local,
        attn_mask=None if mask is None else mask[:, rows],
        backend=dispatch.AttentionBackendName("cutlass_attn"),
        parallel_config=parallel(scheme, rank, size),
    )
    grads = torch.autograd.grad(out, local, grad_out[:, rows])
    for x, y in zip((out, *grads), (due, *due_grads)):
        torch.testing.assert_close(x.double(), y[:, rows], atol=1e-2, rtol=0)


CASES = [("ring", False), ("ulysses", False), ("ulysses", True)]


def outcomes(rank, size):
    return {case: processes.outcome(check, *case, rank, size) for case in CASES}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(outcomes, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.skipif(
    not hasattr(dispatch, "_native_flash_attention_backward_op")
    or "query" not in dispatch._native_flash_attention_backward_op.__code__.co_varnames,
    reason="this diffusers does not pass the keys of a step to backward passes",
)
@pytest.mark.parametrize("case", CASES)
def test_exact(found, case):
    for rank, of_rank in enumerate(found):
        assert of_rank[case] is None, f"rank {rank}: {of_rank[case]}"
