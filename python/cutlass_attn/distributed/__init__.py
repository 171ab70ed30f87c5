"""Context parallel attention: one sequence over several GPUs, on torch.distributed.

    from cutlass_attn.distributed import ContextPlan, context_attention

    plan = ContextPlan(group, seqlen, scheme="gather")
    q, k, v = (plan.shard(x, dim=2) for x in (q, k, v))  # the rows of this rank
    out = context_attention(q, k, v, plan, causal=True)  # with gradients

docs/several-gpus.md is the user's page. Needs torch; `import cutlass_attn` does not import this.
"""

from ._attention import context_attention
from ._plan import ContextPlan

__all__ = ["ContextPlan", "context_attention"]
