"""PyTorch's context parallelism with the kernels of register_flash_impl: a ring of torch's own,
whose steps call aten operators. On CPUs it knows no attention, so that here the operators are
called on DTensors, as scaled_dot_product_attention does on GPUs."""

import pytest

torch = pytest.importorskip("torch")
ring = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")

import processes  # noqa: E402
from cutlass_attn.compat import _flash_impl  # noqa: E402
from cutlass_attn.distributed import _schedule  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(ring, "_enable_context_parallel_dispatcher")
    or "_flash_attention_forward_no_dropout_inplace" not in _flash_impl.known_operators(),
    reason="tested with torch 2.12 and later",
)
S, H, D = 32, 4, 16


def check(is_causal, method, rank, size):
    ring.set_rotate_method(method)
    ring._cp_options.enable_load_balance = is_causal  # which it refuses without
    torch.manual_seed(0)
    *whole, grad_out = torch.randn(4, 2, H, S, D).half()
    leaves = [x.double().requires_grad_() for x in whole]
    due = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    due_grads = torch.autograd.grad(due, leaves, grad_out.double())
    chunks = _schedule.place(rank, size, S, is_causal)
    rows = torch.cat([torch.arange(x.start, x.stop) for x in chunks])
    mesh = init_device_mesh("cpu", (size,))

    def place(x):
        return DTensor.from_local(x[:, :, rows].contiguous(), mesh, [Shard(2)])

    local = [place(x).requires_grad_() for x in whole]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out = flash(*local, 0.0, is_causal)[0]
    grads = torch.autograd.grad(out, local, place(grad_out))
    for x, y in zip((out, *grads), (due, *due_grads)):
        torch.testing.assert_close(x.to_local().double(), y[:, :, rows], atol=1e-2, rtol=0)


CASES = [(is_causal, method) for is_causal in (False, True) for method in ("allgather", "alltoall")]


def outcomes(rank, size):
    handle = _flash_impl._activate("CPU")
    ring._enable_context_parallel_dispatcher()
    try:
        return {case: processes.outcome(check, *case, rank, size) for case in CASES}
    finally:
        ring._disable_context_parallel_dispatcher()
        handle.remove()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(outcomes, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_exact(found, case):
    for rank, of_rank in enumerate(found):
        assert of_rank[case] is None, f"rank {rank}: {of_rank[case]}"
