"""One long sequence over several GPUs: a layer with rotary embeddings, its loss and its gradients.

    torchrun --nproc_per_node 2 examples/09_context_parallel.py

A GPU for each process is used if there are as many, with NCCL; otherwise CPUs, with gloo. Each
scheme has to give the loss and the gradients of one device.
"""

import os
import time

import cutlass_attn
import torch
import torch.distributed as dist
from cutlass_attn.distributed import ContextPlan, context_attention

HEADS, HEADS_KV, DIM = 8, 2, 64
WIDTH = 128


class Layer(torch.nn.Module):
    """Attention between two projections. Rows are tokens: only the attention mixes them, so that
    everything else works on any share of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * DIM, bias=False)
        self.out = torch.nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor, plan: ContextPlan | None) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, DIM))
        q, k, v = heads.split([HEADS, HEADS_KV, HEADS_KV], dim=2)
        q, k = rotated(q, at), rotated(k, at)
        if plan is None:
            mixed = cutlass_attn.attention(q, k, v, causal=True, layout="bshd")
        else:
            mixed = context_attention(q, k, v, plan, causal=True, layout="bshd")
        result: torch.Tensor = self.out(mixed.flatten(2))
        return result


def rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, by the position of each row in the whole sequence."""
    frequency = 10000 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    angle = (at[:, None] * frequency)[:, None]
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def main() -> None:
    processes = int(os.environ["WORLD_SIZE"])
    has_gpus = torch.cuda.device_count() >= processes
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else "cpu"
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    seqlen = 16384 if has_gpus else 501  # need not divide: the plan pads
    torch.manual_seed(0)  # the same everywhere
    layer = Layer().to(device, torch.bfloat16)
    tokens = torch.randn(1, seqlen, WIDTH).to(device, torch.bfloat16)

    loss = layer(tokens, torch.arange(seqlen, device=device), None).float().square().sum() / seqlen
    loss.backward()
    one_device = float(loss.detach())
    due = [x.grad.clone() for x in layer.parameters()]

    for scheme in ("gather", "ring", "ulysses"):
        layer.zero_grad()
        plan = ContextPlan(seqlen=seqlen, scheme=scheme)
        mine = plan.shard(tokens, 1)
        dist.barrier()
        begin = time.perf_counter()
        out = layer(mine, plan.positions.to(device), plan)
        share = out.float().square().sum() / seqlen  # rows of padding are zeros
        share.backward()
        # As for all weights: each rank has the gradient of its own rows.
        for x in layer.parameters():
            dist.all_reduce(x.grad)
        total = share.detach().clone()
        dist.all_reduce(total)
        took = time.perf_counter() - begin
        worst = max(float((x.grad - y).norm() / y.norm()) for x, y in zip(layer.parameters(), due))
        assert worst < 0.02 and abs(float(total) / one_device - 1) < 0.01, (scheme, worst, total)
        if dist.get_rank() == 0:
            print(
                f"{scheme:>8}: {plan.local_rows} rows on each of {processes} ranks, loss "
                f"{float(total):.5f}, one device {one_device:.5f}; largest relative "
                f"difference of a gradient {worst:.1e} (limit 2e-02); {1000 * took:.0f} ms"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
