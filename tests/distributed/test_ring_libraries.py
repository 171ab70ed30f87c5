"""ring-flash-attention and yunchang (USP) over the private functions of compat.flash_attn: forward
and gradients, on 4 processes of gloo, against the whole sequence in one. In float16: in float32 the
libraries' sums overwrite each other (ring-flash-attn 0.1.8)."""

import importlib
import importlib.util
import itertools
import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import cutlass_attn  # noqa: E402
import processes  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cutlass_attn.distributed import _schedule  # noqa: E402

S, H, HKV, D = 64, 4, 2, 16
CU_SEQLENS = [0, 24, 64]
NEEDED = {"ring_flash_attn": "ring-flash-attn", "yunchang": "yunchang"}
CASES = [
    ("ring_flash_attn", "ring_flash_attn_func", "contiguous"),
    ("ring_flash_attn", "zigzag_ring_flash_attn_func", "zigzag"),
    ("ring_flash_attn", "stripe_flash_attn_func", "stripe"),
    ("ring_flash_attn", "llama3_flash_attn_varlen_func", "contiguous"),
    ("ring_flash_attn", "zigzag_ring_flash_attn_varlen_func", "packed zigzag"),
    ("yunchang", "LongContextAttention", "yunchang"),
]


def rows(order, rank, size):
    if order == "stripe":
        return torch.arange(rank, S, size)
    if order == "yunchang":  # zigzag of 2 rings, in each of which 2 ranks share the rows
        return rows_of(rank // 2, 2, 0, S).chunk(2)[rank % 2]
    if order == "packed zigzag":
        parts = itertools.pairwise(CU_SEQLENS)
        return torch.cat([rows_of(rank, size, begin, end) for begin, end in parts])
    if order == "zigzag":
        return rows_of(rank, size, 0, S)
    return torch.arange(S).chunk(size)[rank]


def rows_of(rank, size, begin, end):
    chunks = _schedule.place(rank, size, end - begin, True)
    return begin + torch.cat([torch.arange(x.start, x.stop) for x in chunks])


def call(package, function, rank, size, q, k, v):
    """(B, rows, heads, head_dim), causal; where packed, of one row of the batch."""
    f = getattr(package, function)
    at = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    if function.startswith("llama3"):
        *lengths, keys = package.llama3_flash_attn_prepare_cu_seqlens(at, True, rank, size)
        options = {"heads_k_stride": 1, "local_k_slice": keys, "causal": True}
        return f(q[0], k[0], v[0], *lengths, **options)[None]
    if "varlen" in function:
        return f(q[0], k[0], v[0], at // size, 40 // size, causal=True)[None]
    if function == "LongContextAttention":
        package.set_seq_parallel_pg(2, 2, rank, size)
        layer = f(ring_impl_type="zigzag", attn_type=package.kernels.AttnType.FA)
        return layer(q, k, v, causal=True)
    return f(q, k, v, causal=True)


def check(package_name, function, order, rank, size):
    package = importlib.import_module(package_name)
    torch.manual_seed(0)
    make = (torch.randn(1, S, heads, D).half() for heads in (H, HKV, HKV, H))
    *whole, grad_out = (x.contiguous() for x in make)
    is_packed = "varlen" in function
    leaves = [x.double().requires_grad_() for x in whole]
    ends = CU_SEQLENS if is_packed else [0, S]
    due = torch.cat(
        [
            cutlass_attn.attention(*(x[:, a:b] for x in leaves), causal=True, layout="bshd")
            for a, b in itertools.pairwise(ends)
        ],
        dim=1,
    )
    due_grads = torch.autograd.grad(due, leaves, grad_out.double())
    mine = rows(order, rank, size)
    local = [x[:, mine].clone().requires_grad_() for x in whole]
    out = call(package, function, rank, size, *local)
    grads = torch.autograd.grad(out, local, grad_out[:, mine])
    for x, y in zip((out, *grads), (due, *due_grads)):
        torch.testing.assert_close(x.double(), y[:, mine], atol=1e-2, rtol=0)


def outcomes(rank, size):
    from cutlass_attn.compat import flash_attn

    flash_attn.install()
    # Of transformers before 5, whose names it imports: it has nothing to do with the kernels.
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    found = {}
    for case in CASES:
        if importlib.util.find_spec(case[0]):
            found[case] = processes.outcome(check, *case, rank, size)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(outcomes, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=[case[1] for case in CASES])
def test_exact(request, case):
    if importlib.util.find_spec(case[0]) is None:
        pytest.skip(f"{NEEDED[case[0]]} is not installed")
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed, and would run instead")
    for rank, of_rank in enumerate(request.getfixturevalue("found")):
        assert of_rank[case] is None, f"rank {rank}: {of_rank[case]}"
