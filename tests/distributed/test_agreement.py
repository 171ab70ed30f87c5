"""Ranks that disagree raise, all of them, and go on; DTensors; what one process can see."""

import re

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import numpy as np  # noqa: E402
import processes  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cutlass_attn.distributed import ContextPlan, context_attention  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

S, H, D = 16, 2, 8


def operands(plan, heads=H):
    torch.manual_seed(1)
    return plan.shard(torch.randn(3, 1, heads, S, D).half(), 3).unbind()


def message(*args, **options):
    try:
        context_attention(*args, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def disagreements(rank, size):
    plan = ContextPlan(seqlen=S)
    q, k, v = operands(plan)
    odd = rank == 1
    found = {
        "rows": message(q[:, :, : 5 if odd else 8], k, v, plan),
        "heads": message(*(operands(plan, 4) if odd else (q, k, v)), plan),
        "causal": message(q, k, v, plan, causal=odd),
        "type": message(q.numpy() if odd else q, k, v, plan),
        "dtype": message(q, k.float() if odd else k, v, plan),
        "gradient": message(q.clone().requires_grad_(odd), k, v, plan),
        "dropout": message(q, k, v, plan, dropout_p=1.5 if odd else 0.5),
        "rng_state": message(
            q, k, v, plan, dropout_p=0.5, rng_state=torch.zeros(6 if odd else 2).long()
        ),
        "rng_state's dtype": message(q, k, v, plan, dropout_p=0.5, rng_state=torch.zeros(2)),
        "bias": message(q, k, v, plan, bias=torch.zeros(3, S)),
        "layout": message(q, k, v, plan, layout="sbhd"),
        "group heads": message(q, q[:, [0, 0, 1]], q[:, [0, 0, 1]], plan),
        "ulysses": message(q[:, :1], k[:, :1], v[:, :1], ContextPlan(seqlen=S, scheme="ulysses")),
        "ring mask": message(
            q, k, v, ContextPlan(seqlen=S, scheme="ring"), mask=torch.ones(1, S, dtype=torch.bool)
        ),
        "ring ALiBi": message(
            q, k, v, ContextPlan(seqlen=S, scheme="ring"), causal=True, alibi_slopes=torch.ones(H)
        ),
        "window": message(q, k, v, plan, window="wide" if odd else 3),
        "negative window": message(q, k, v, plan, window=(-2, 0)),
        "seqlen": message(q, k, v, ContextPlan(seqlen=S - odd)),
        "type of the mask": message(q, k, v, plan, mask=np.ones(S, bool) if odd else None),
        "unhashable": message(q, k, v, plan, softmax_scale=[1.0] if odd else None),
        "causal string": message(q, k, v, plan, causal="no" if odd else True),
        "slopes' gradient": message(
            q, k, v, plan, causal=True, alibi_slopes=torch.ones(H, requires_grad=True)
        ),
    }
    short = ContextPlan(seqlen=1, scheme="ring")  # only rank 0 has a kernel to run
    row = torch.zeros(1, H, short.local_rows, D).half()
    found["no kernel on rank 1"] = message(row, row, row, short, softcap=-1.0)
    no_batch = (x[:0] for x in (q, k, v))
    found["empty batch"] = message(*no_batch, ContextPlan(seqlen=S, scheme="ulysses")) is None
    slopes = {"causal": True, "attention_chunk": 3, "alibi_slopes": torch.ones(1, H)}
    found["slopes of one entry"] = message(q, k, v, plan, **slopes) is None
    found["window of numpy"] = message(q, k, v, plan, window=np.int64(3)) is None
    known = ContextPlan(seqlen=S, check="always")
    found["before"] = message(q, k, v, known)
    found["later"] = message(q, k, v, known, softcap=float(odd))
    found["after"] = message(q, k, v, plan)
    return found | results(plan, q, k, v)


def results(plan, q, k, v):
    """Bits of two calls, under autocast, and of the other placement of a DTensor."""
    first, lse = context_attention(q, k, v, plan, causal=True, return_lse=True)
    again = context_attention(q, k, v, plan, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = context_attention(q.float(), k.float(), v.float(), plan, causal=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    distributed = [DTensor.from_local(x, mesh, [Shard(2)]).requires_grad_() for x in (q, k, v)]
    sinks = distribute_tensor(torch.zeros(H), mesh, [Replicate()]).requires_grad_()
    of_mesh = ContextPlan(mesh["context"], S)
    options = {"causal": True, "return_lse": True}
    out, lse_of_dtensor = context_attention(*distributed, of_mesh, **options)
    with_sinks = context_attention(*distributed, of_mesh, sinks=sinks, causal=True)
    grads = torch.autograd.grad(with_sinks.sum(), [*distributed, sinks])
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    sum_of_plain = context_attention(*plain, plan, sinks=torch.zeros(H), causal=True).sum()
    due = torch.autograd.grad(sum_of_plain, plain)
    wrong = [DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k, v)]
    return {
        "repeats": torch.equal(first, again),
        "cast": cast.dtype == torch.bfloat16 and torch.allclose(cast.half(), first, atol=0.05),
        "DTensor": out.placements == (Shard(2),) and torch.equal(out.to_local(), first),
        "DTensor's lse": torch.equal(lse_of_dtensor.full_tensor(), plan_order(lse)),
        "DTensor's gradients": all(torch.equal(x.to_local(), y) for x, y in zip(grads, due)),
        "gradient of sinks": grads[3].full_tensor().shape == (H,),
        "placements": message(*wrong, of_mesh),
        "mixed": message(distributed[0], k, v, of_mesh),
    }


def plan_order(lse):
    parts = [torch.empty_like(lse) for _ in range(2)]
    dist.all_gather(parts, lse)
    return torch.cat(parts, dim=2)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(disagreements, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "name, due",
    [
        ("rows", "ValueError: rank 1: q must have 8 rows on each rank, plan.local_rows, got 5"),
        ("heads", r"q.shape is \(1, 8, 2, 8\) on rank 0 and \(1, 8, 4, 8\) on rank 1"),
        (
            "causal",
            r"mask of causal and window, as \(left, right\), is \(None, None\) on rank 0 and "
            r"\(None, 0\) on rank 1",
        ),
        ("type", "TypeError: rank 1: q must be a torch tensor, got ndarray"),
        ("dtype", "ValueError: rank 1: k must be torch.float16 on cpu like q, got torch.float32"),
        ("gradient", "q.requires_grad is False on rank 0 and True on rank 1"),
        ("dropout", "ValueError: rank 1: dropout_p is 1.5"),
        ("rng_state", r"ValueError: rank 1: rng_state must have shape \(2,\), a seed and"),
        ("rng_state's dtype", "rng_state must be int64 or uint64, got torch.float32"),
        ("bias", r"bias must broadcast to .*\(1, 2, 8, 16\), got \(3, 16\)"),
        ("layout", 'layout must be "bhsd" or "bshd", got \'sbhd\''),
        ("group heads", "heads of k, 3, must divide those of q, 2"),
        ("ulysses", "q has 1 heads, which 2 ranks cannot share equally"),
        ("ring mask", "mask needs scheme='gather' or 'ulysses'"),
        ("ring ALiBi", "alibi_slopes need scheme='gather' with causal=True"),
        ("window", "TypeError: rank 1: window must be an int, a pair of int, or None, got 'wide'"),
        ("negative window", r"window must not be below -1, got \(-2, 0\)"),
        ("seqlen", "plan.seqlen is 16 on rank 0 and 15 on rank 1"),
        ("type of the mask", "TypeError: rank 1: mask must be a torch tensor, got ndarray"),
        ("unhashable", r"TypeError: rank 1: softmax_scale must be a number, got \[1.0\]"),
        ("causal string", "TypeError: rank 1: causal must be True or False, got 'no'"),
        (
            "slopes' gradient",
            "NotImplementedError: rank 0: context_attention has no gradient of",
        ),
        ("no kernel on rank 1", "ValueError: rank 0: softcap is -1, allowed: .*rank 1: softcap"),
        ("later", "softcap is 0.0 on rank 0 and 1.0 on rank 1"),
        ("placements", r"q must be placed as S\(2\) over the ranks of the plan"),
        ("mixed", "q, k and v must all be DTensors, or none of them"),
    ],
)
def test_all_ranks_say_who_differs(found, name, due):
    for of_rank in found:
        assert of_rank[name] and re.search(due, of_rank[name]), of_rank[name]


def test_ranks_go_on_after_an_error(found):
    for of_rank in found:
        assert of_rank["before"] is None and of_rank["after"] is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "repeats",
            "cast",
            "DTensor",
            "DTensor's lse",
            "DTensor's gradients",
            "gradient of sinks",
        ),
        *("empty batch", "slopes of one entry", "window of numpy"),
    ],
)
def test_results(found, name):
    assert all(of_rank[name] for of_rank in found)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options, due",
    [
        ({"scheme": "star", "seqlen": 4}, "scheme must be one of 'gather', 'ring'.*got 'star'"),
        ({"placement": "odd", "seqlen": 4}, "placement must be one of 'zigzag', 'contiguous'"),
        ({"check": "never", "seqlen": 4}, "check must be one of 'first', 'always'"),
        ({"head_groups": 0, "seqlen": 4}, "head_groups must be at least 1, got 0"),
        ({}, "seqlen must be at least 1, or cu_seqlens be given, got None"),
        ({"cu_seqlens": [0, 4, 2]}, r"cu_seqlens must begin with 0 and not fall, got \[0, 4, 2\]"),
        ({"cu_seqlens": [0, 4], "seqlen": 3}, "cu_seqlens ends at 4, beyond seqlen 3"),
        ({"scheme": "ring+ulysses", "seqlen": 4}, "group must be a DeviceMesh with 2 dimensions"),
        ({"group": 3, "seqlen": 4}, "group must be a ProcessGroup.*got 3"),
    ],
)
def test_plans_that_are_refused(alone, options, due):
    with pytest.raises(ValueError, match=due):
        ContextPlan(**options)


@pytest.mark.parametrize(
    "options, due",
    [
        ({"seqlen": 3.5}, "seqlen must be of int, got 3.5"),
        ({"seqlen": True}, "seqlen must be of int, got True"),
        ({"seqlen": "8"}, "seqlen must be of int, got '8'"),
        ({"seqlen": 4, "head_groups": 1.5}, "head_groups must be of int, got 1.5"),
        ({"cu_seqlens": [0, 3.5]}, "cu_seqlens must be of int, got 3.5"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "cu_seqlens must be of int, got tensor"),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, r"cu_seqlens must be a list of int or \(B \+ 1,"),
        ({"cu_seqlens": 5}, r"cu_seqlens must be a list of int or \(B \+ 1,\), got 5"),
    ],
)
def test_plans_of_other_types(alone, options, due):
    with pytest.raises(TypeError, match=due):
        ContextPlan(**options)


def test_meshes_without_the_dimension(alone):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "context"))
    with pytest.raises(ValueError, match=r"1 dimension for scheme='gather', got 2: shape \(1, 1\)"):
        ContextPlan(mesh, 4)
    with pytest.raises(ValueError, match="2 dimensions for scheme='gather\\+ulysses', got 1"):
        ContextPlan(mesh["context"], 4, scheme="gather+ulysses")
    assert ContextPlan(mesh["context"], 4).local_rows == 4


def test_one_rank_is_attention(alone):
    import cutlass_attn

    plan = ContextPlan(seqlen=S)
    q, k, v = torch.randn(3, 1, H, S, D).half()
    out = context_attention(q, k, v, plan, causal=True)
    assert torch.equal(out, cutlass_attn.attention(q, k, v, causal=True))
    options = {"dropout_p": 0.5, "rng_state": torch.tensor([3, 4])}
    out = context_attention(q, k, v, plan, causal=True, **options)
    assert torch.equal(out, cutlass_attn.attention(q, k, v, causal=True, **options))
    with pytest.raises(TypeError, match="plan must be a ContextPlan, got NoneType"):
        context_attention(q, k, v, None)
    with pytest.raises(ValueError, match="x must have 16 rows"):
        plan.shard(q, 1)
    with pytest.raises(TypeError, match="q must be a torch tensor, got ndarray"):
        context_attention(np.zeros((1, H, S, D)), k, v, plan)


def test_unshard_takes_the_rows_of_a_rank(alone):
    plan = ContextPlan(seqlen=6)
    x = torch.randn(1, 8, 6, 2)
    assert torch.equal(plan.unshard(plan.shard(x, 2), 2), x)
    due = r"x must have 6 rows, plan.local_rows, in dimension {}, got shape \({}, 2\)"
    with pytest.raises(ValueError, match=due.format(1, "1, 8, 6")):
        plan.unshard(x, 1)
    for rows in (5, 8):
        with pytest.raises(ValueError, match=due.format(-2, f"1, 8, {rows}")):
            plan.unshard(torch.randn(1, 8, rows, 2), -2)


def test_positions_are_on_the_host_whatever_the_default_device(alone):
    plan = ContextPlan(seqlen=6)
    with torch.device("meta"):
        assert plan.positions.tolist() == [0, 1, 2, 3, 4, 5]
