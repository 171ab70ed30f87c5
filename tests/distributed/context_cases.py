"""Cases of context_attention, and what a rank does with one: the oracle is plain torch on the whole
sequence in float64, in every process."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from cutlass_attn import testing
from cutlass_attn.distributed import ContextPlan, context_attention
from torch.distributed.device_mesh import init_device_mesh


@dataclass
class Case:
    name: str
    options: dict = field(default_factory=dict)
    plan: dict = field(default_factory=dict)
    seqlen: int = 24
    heads: tuple = (4, 2)
    batch: int = 2
    dims: tuple = (16, 16)
    terms: tuple = ()  # of bias, mask, sinks, alibi_slopes
    dtype: torch.dtype = torch.float64
    schemes: tuple = ("gather", "ring", "ulysses", "gather+ulysses", "ring+ulysses")


GATHER = ("gather",)
WITHOUT_RING = ("gather", "ulysses", "gather+ulysses")
DROPOUT = ("rng_state",)  # without: as the first rank draws it
PACKED = {"cu_seqlens": [0, 5, 5, 17, 32]}
CASES = [
    Case("full"),
    Case("causal", {"causal": True}, heads=(4, 4)),
    Case("contiguous", {"causal": True}, {"placement": "contiguous"}),
    Case("padded", {"causal": True, "layout": "bshd"}, seqlen=21, terms=("sinks",)),
    Case("window", {"causal": True, "window": 5}),
    Case("window both sides", {"window": (3, 4)}, seqlen=23),
    Case("near window", {"window": (1, 0)}, {"placement": "contiguous"}, seqlen=32),
    Case("chunks", {"attention_chunk": 7}),
    Case("causal chunks", {"causal": True, "attention_chunk": 7}, batch=1),
    Case("softcap", {"causal": True, "softcap": 2.0, "softmax_scale": 0.75}, dims=(16, 8)),
    Case("sinks", {"causal": True}, terms=("sinks",)),
    Case("MQA", {"causal": True}, heads=(4, 1)),
    Case("bias", {"causal": True}, terms=("bias",), schemes=GATHER),
    Case("mask", {}, terms=("mask",), schemes=GATHER),
    Case("padding mask", {}, terms=("key mask",), schemes=WITHOUT_RING),
    Case("ALiBi", {"causal": True}, terms=("alibi_slopes",), schemes=WITHOUT_RING),
    Case("packed", {}, PACKED, seqlen=32, batch=1),
    Case("packed causal", {"causal": True}, PACKED, seqlen=32, batch=1, terms=("sinks",)),
    Case("packed window", {"window": (4, 2)}, PACKED, seqlen=32, batch=1),
    Case("packed, padded", {"causal": True}, {"cu_seqlens": [0, 6, 19]}, seqlen=19, batch=1),
    Case("one head group", {"causal": True}, {"head_groups": 1}, schemes=GATHER),
    Case(
        "head groups",
        {"causal": True},
        {"head_groups": 4},
        heads=(16, 8),
        terms=("sinks", "alibi_slopes"),
        schemes=WITHOUT_RING,
    ),
    Case(
        "head groups, no LSE",
        {"return_lse": False},
        {"head_groups": 2},
        heads=(8, 8),
        dims=(16, 8),
    ),
    Case("head groups, all", {}, {"head_groups": 2}, terms=("sinks", "bias"), schemes=GATHER),
    Case("float16", {"causal": True}, seqlen=64, dtype=torch.float16),
    # Of one device: chunks of 32 rows, with 4 ranks. The rest is not.
    Case("dropout", {"dropout_p": 0.4}, seqlen=256, heads=(8, 4), terms=DROPOUT),
    Case("dropout, causal", {"causal": True, "dropout_p": 0.4}, seqlen=253, terms=DROPOUT),
    Case("dropout, window", {"window": (70, 3), "dropout_p": 0.4}, seqlen=256, terms=DROPOUT),
    Case(
        "dropout, chunks",
        {"causal": True, "attention_chunk": 96, "dropout_p": 0.4},
        {"head_groups": 2},
        seqlen=256,
        batch=1,
        heads=(8, 4),
        terms=(*DROPOUT, "sinks"),
    ),
    Case("dropout, odd", {"dropout_p": 0.5}, seqlen=36, dims=(40, 40), terms=DROPOUT),
    Case("dropout, odd window", {"window": 9, "dropout_p": 0.5}, seqlen=36, dims=(40, 40)),
    Case("dropout, odd chunks", {"attention_chunk": 7, "dropout_p": 0.5}, batch=1, dims=(40, 40)),
    Case("dropout, packed", {"causal": True, "dropout_p": 0.5}, PACKED, 32, batch=1, dims=(40, 40)),
]


def plan_for(scheme, size, case):
    mesh = None
    if "+" in scheme:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "ulysses"))
    lengths = {} if "cu_seqlens" in case.plan else {"seqlen": case.seqlen}
    return ContextPlan(mesh, scheme=scheme, **lengths, **case.plan)


def inputs(case):
    """Of the whole sequence, (B, heads, rows, head_dim), the same in every process."""
    torch.manual_seed(7)
    heads, heads_kv = case.heads
    b, s, (d, dv) = case.batch, case.seqlen, case.dims

    def make(*shape):
        x = torch.randn(shape, dtype=torch.float64)
        return x.half().double() if case.dtype == torch.float16 else x

    given = {"q": make(b, heads, s, d), "k": make(b, heads_kv, s, d), "v": make(b, heads_kv, s, dv)}
    make_term = {
        "bias": lambda: make(b, heads, s, s),
        "mask": lambda: torch.rand(1, heads, s, s) < 0.7,
        "key mask": lambda: (torch.arange(s) < s - 3)[None, None, None],
        "sinks": lambda: make(heads),
        "alibi_slopes": lambda: torch.rand(heads),
        "rng_state": lambda: torch.tensor([2**40 + 5, 7]),
    }
    given |= {term: make_term[term]() for term in case.terms}
    return given | {"grad_out": make(b, heads, s, dv), "grad_lse": make(b, heads, s)}


def visible(case):
    """(rows, rows) bool: by documents, causal mask, window and chunks."""
    at = torch.arange(case.seqlen)
    ends = torch.tensor(case.plan.get("cu_seqlens", [0, case.seqlen]))
    document = torch.bucketize(at, ends, right=True)
    own = at - ends[document - 1]
    i, j = own[:, None], own[None]
    window = case.options.get("window")
    left, right = (window, window) if isinstance(window, int) else window or (math.inf, math.inf)
    if case.options.get("causal"):
        right = 0
    seen = (document[:, None] == document) & (i - j <= left) & (j - i <= right)
    if chunk := case.options.get("attention_chunk"):
        seen &= i // chunk == j // chunk
    return seen


def reference(case, given):
    """Output and log-sum-exp of plain torch."""
    q, k, v = given["q"], given["k"], given["v"]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale = case.options.get("softmax_scale", q.shape[-1] ** -0.5)
    logits = q @ k.mT * scale
    if cap := case.options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    if "alibi_slopes" in given:
        at = torch.arange(case.seqlen)
        distance = (at[:, None] - at).abs()
        logits = logits - given["alibi_slopes"].double()[:, None, None] * distance
    if "bias" in given:
        logits = logits + given["bias"]
    seen = visible(case)
    for name in ("mask", "key mask"):
        seen = seen & given.get(name, torch.tensor(True))
    logits = logits.masked_fill(~seen, -torch.inf)
    all_logits = logits
    if "sinks" in given:
        sinks = given["sinks"][:, None, None].expand(*logits.shape[:3], 1)
        all_logits = torch.cat([logits, sinks], dim=-1)
    lse = all_logits.logsumexp(-1)
    weights = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    if p := case.options.get("dropout_p"):
        weights = weights * given["kept"] / testing.kept_share(p)
    return weights @ v, lse


def kept_weights(case, plan, given, local, options):
    """Which weights a call with this rng_state keeps, (B, heads, rows, rows)."""
    shape = (case.batch, case.heads[0], case.seqlen, case.seqlen)
    if "cu_seqlens" not in case.plan and case.seqlen >= 250:
        p = case.options["dropout_p"]
        return torch.from_numpy(testing.dropout_mask(given["rng_state"], shape, p))
    # Other weights for each plan: with one-hot values the output is the weights.
    one_hot = torch.eye(case.seqlen, case.dims[1]).expand(*given["k"].shape[:2], -1, -1)
    x, dim = in_layout(case, one_hot.to(case.dtype))
    v = plan.shard(x, dim).to(local["q"].device)
    with torch.no_grad():
        out, _ = context_attention(local["q"], local["k"], v, plan, **options)
    kept = back(case, plan.unshard(out, dim)).cpu()[..., : case.seqlen] != 0
    seen = visible(case).expand(shape)
    count = int(seen.sum())
    assert not (kept & ~seen).any()
    assert abs(int(kept.sum()) - count / 2) < 6 * (count / 4) ** 0.5
    if seen.all():  # no two rows or columns draw the same
        for x in (kept, kept.mT):
            rows = x.reshape(-1, case.seqlen)
            assert len(rows.unique(dim=0)) == len(rows)
    return kept


DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def gradients(out, lse, grad_out, grad_lse, given):
    leaves = {name: given[name] for name in DIFFERENTIABLE if name in given}
    outputs = [out] if lse is None else [out, lse]
    found = torch.autograd.grad(
        outputs, list(leaves.values()), [grad_out, grad_lse][: len(outputs)]
    )
    return dict(zip(leaves, found))


def in_layout(case, x):
    """(B, heads, rows, n) as the call has it, and the dimension of its rows."""
    if "cu_seqlens" in case.plan:
        return x[0].transpose(0, 1), 0
    return (x.transpose(1, 2), 1) if case.options.get("layout") == "bshd" else (x, 2)


def back(case, x):
    if "cu_seqlens" in case.plan:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if case.options.get("layout") == "bshd" else x


def check(case, scheme, size, device="cpu"):
    """Raises AssertionError unless results and gradients are those of the whole sequence."""
    given = inputs(case)
    plan = plan_for(scheme, size, case)
    local = {}
    for name in ("q", "k", "v"):
        x, dim = in_layout(case, given[name].to(case.dtype))
        local[name] = plan.shard(x, dim)
    pad = plan.padded_seqlen - case.seqlen
    for name in ("bias", "mask", "key mask"):
        if name in given:
            x = torch.nn.functional.pad(given[name], (0, pad))
            local[name] = plan.shard(x, 2) if x.shape[2] > 1 else x
    for name in ("sinks", "alibi_slopes", "rng_state"):
        if name in given:
            local[name] = given[name].clone()
    if case.dtype == torch.float16:  # inputs are of that precision
        dtypes = {"bias": torch.float16, "sinks": torch.float32}
        local = {name: x.to(dtypes.get(name, x.dtype)) for name, x in local.items()}
    local = {name: x.to(device) for name, x in local.items()}
    for name in DIFFERENTIABLE:
        if name in local:
            local[name].requires_grad_()
    terms = {name.removeprefix("key "): x for name, x in local.items() if name not in "qkv"}
    options = {"return_lse": True} | case.options
    if case.options.get("dropout_p"):
        torch.manual_seed(dist.get_rank() + 3)
        given["kept"] = kept_weights(case, plan, given, local, options | terms)
        torch.manual_seed(dist.get_rank() + 3)  # so that the next call draws the same
    whole = {
        name: x.clone().requires_grad_() if name in DIFFERENTIABLE else x
        for name, x in given.items()
    }
    due_out, due_lse = reference(case, whole)
    has_lse = case.options.get("return_lse", True)
    of_lse = due_lse if has_lse else None
    due_grads = gradients(due_out, of_lse, given["grad_out"], given["grad_lse"], whole)

    found = context_attention(local["q"], local["k"], local["v"], plan, **options, **terms)
    out, lse = found if has_lse else (found, None)
    if "rng_state" in terms:  # its content was read: gradients do not depend on it
        terms["rng_state"].zero_()
    grad_out, dim = in_layout(case, given["grad_out"].to(case.dtype))
    grad_out = plan.shard(grad_out, dim).to(device)
    is_packed = "cu_seqlens" in case.plan
    dim_lse = 1 if is_packed else 2
    grad_lse = given["grad_lse"][0] if is_packed else given["grad_lse"]
    if has_lse:
        grad_lse = plan.shard(grad_lse.to(lse.dtype), dim_lse).to(device)
    grads = gradients(out, lse, grad_out, grad_lse, local)

    is_half = case.dtype == torch.float16
    tolerance = {"rtol": 0, "atol": 4e-3} if is_half else {"rtol": 1e-12, "atol": 1e-12}
    if device == "cuda":  # where cases are longer, and gradients larger
        tolerance["rtol"] = 4e-3
    assert out.dtype == case.dtype and out.shape == grad_out.shape
    padding = (plan.positions >= case.seqlen).nonzero().flatten().to(device)
    assert not out.index_select(dim, padding).any()
    if has_lse:
        assert (lse.index_select(dim_lse, padding) == -torch.inf).all()

    def compare(name, x, due):
        found = x.cpu().double()
        torch.testing.assert_close(found, due, **tolerance, msg=lambda m: f"{name}: {m}")

    compare("out", back(case, plan.unshard(out, dim)), due_out)
    if has_lse:
        found_lse = plan.unshard(lse, dim_lse)
        compare("lse", found_lse[None] if is_packed else found_lse, due_lse)
    for name, grad in grads.items():
        if name == "sinks":  # each rank has its share
            dist.all_reduce(grad)
        elif name == "bias":
            grad = plan.unshard(grad, 2)[..., : case.seqlen]
        else:
            grad = back(case, plan.unshard(grad, dim))
        compare(f"gradient of {name}", grad, due_grads[name])
