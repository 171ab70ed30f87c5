"""score_mod and mask_mod functions of the kinds that PyTorch's own tests of FlexAttention have.

Each is made by a function of `Captured`: the sizes of a case, and tensors of these sizes.
"""

import functools

from cases import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks


class Captured:
    """The tensors that the functions of a case read. `leaves`: those with a gradient."""

    def __init__(self, made, case):
        self.made, self.device, self.dtype = made, made.device, getattr(torch, case.dtype)
        self.batch, self.heads = case.batch[0], case.heads[0]
        self.q, self.k = case.lengths
        self.leaves = []

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.made, device=self.device).to(dtype)

    def whole(self, most, *shape):
        return torch.randint(most, shape, generator=self.made, device=self.device)

    def arange(self, size):
        return torch.arange(size, device=self.device, dtype=torch.int32)

    def number(self, value, dtype=torch.int32):
        return torch.tensor(value, device=self.device, dtype=dtype)

    def leaf(self, *shape, dtype=None):
        self.leaves.append(self.normal(*shape, dtype=dtype or self.dtype).requires_grad_())
        return self.leaves[-1]


NONE = -float("inf")


def documents(c):
    of = c.arange(c.k) // (c.k // 4 + 1)
    return lambda s, b, h, q, k: torch.where((q >= k) & (of[q] == of[k]), s, NONE)


def indexed(*shape):
    """shape(c): of a bias. The function that reads it is given next."""
    return lambda read: lambda c: _added(read, c.normal(*shape[0](c)))


def _added(read, bias):
    return lambda s, b, h, q, k: s + read(bias, b, h, q, k)


def all_dims(c):
    of_q, of_b, of_h = c.normal(c.q), c.normal(c.batch), c.normal(c.heads)
    return lambda s, b, h, q, k: s + of_q[q] + of_b[b] + of_h[h]


def all_dims_and_keys(c):
    own, of_k = all_dims(c), c.normal(c.k)
    return lambda s, b, h, q, k: own(s + of_k[k], b, h, q, k)


def halves(c):
    is_second = c.arange(c.k) >= c.k // 2
    return lambda s, b, h, q, k: torch.where(is_second[q] == is_second[k], s, NONE)


def two_sided_prefix(c):
    end = c.whole(c.k, c.batch).int()
    return lambda s, b, h, q, k: torch.where(((q <= end[b]) & (k <= end[b])) | (q >= k), s, NONE)


def natten(s, b, h, q, k):
    width, most = 8, 3
    far = ((q / width - k / width).abs() > most) & ((q % width - k % width).abs() > most)
    return torch.where(far, NONE, s)


def nested(c):
    """Causal in each of three sequences, by positions in them."""
    starts = c.number([0, c.k // 2, c.k // 4 * 3])
    of = (c.arange(c.k)[:, None] >= starts[1:]).sum(1)
    return lambda s, b, h, q, k: torch.where(q - starts[of[q]] >= k - starts[of[k]], s, NONE)


def padded(c):
    most = c.arange(c.batch) + 1
    return lambda s, b, h, q, k: torch.where((s <= most[b]) & (q >= k), s, NONE)


def captured_number(c):
    one = c.number(1)
    return lambda s, b, h, q, k: s + one


def captured_factor(c):
    one = c.number(1)
    return lambda s, b, h, q, k: s * one


def decomposed(c):
    of_blocks = c.normal(c.batch, c.heads, c.q, c.k // 8 + 1, dtype=c.dtype)
    return lambda s, b, h, q, k: s + of_blocks[b, h, q, k // 8]


def regrouped(c):
    bias = 2 * c.normal(c.batch, c.q, c.k, c.heads, dtype=c.dtype)
    bias = bias.view(c.batch, c.heads, c.q, c.k)
    return lambda s, b, h, q, k: s + bias[b, h, q, k]


def made_in_the_call(c):
    doubled = c.normal(c.q) * 2
    return lambda s, b, h, q, k: s + doubled[q]


def log_of_mass(c):
    mass = torch.ones(1, dtype=torch.float16, device=c.device)
    return lambda s, b, h, q, k: s + torch.log(mass[0])


def offsets(c):
    of_q, of_k = (c.normal(n, dtype=torch.bfloat16) for n in (c.q, c.k))
    return lambda s, b, h, q, k: s + of_q[q] + of_k[k]


def offset_of_keys(c):
    of_k = c.normal(c.k, dtype=torch.bfloat16)
    return lambda s, b, h, q, k: s + of_k[k]


def query_factor(c):
    factor = c.normal(c.q, dtype=torch.bfloat16)
    return lambda s, b, h, q, k: s * factor[q]


def of_heads(c):
    offset = c.normal(c.heads, dtype=c.dtype)
    return lambda s, b, h, q, k: s + offset[h]


def added_bool(c):
    seen = c.whole(2, c.batch, 1, c.q, c.k).bool()
    return lambda s, b, h, q, k: s + seen[b, h.new_zeros(h.shape), q, k]


def gated_positions(c):
    """Continuous position bias with learned gates, not for the first 2 positions."""
    first = c.number(2, torch.int64)
    of, rows = c.whole(9, c.q, c.k), c.normal(9, c.heads)
    gate, mu = torch.sigmoid(c.normal(c.heads)), c.normal(c.batch, c.heads, 2, c.k)
    of_q, of_k = mu.unbind(2)

    def score_mod(s, b, h, q, k):
        is_gated = (q >= first) & (k >= first)
        weight = gate[h] * (of_q[b, h, q] + of_k[b, h, k])
        return s + is_gated.to(s.dtype) * weight * rows[of[q, k], h]

    return score_mod


def by_distance(c):
    """Of points in space. torch's test has a sum of the row, compat.flex a sum of its elements."""
    at, scale = c.normal(c.k, 3), c.normal(c.heads).abs()

    def score_mod(s, b, h, q, k):
        return s * torch.exp(
            -torch.sqrt(sum((x - y) ** 2 for x, y in zip(at[q], at[k]))) / scale[h]
        )

    def for_vmap(s, b, h, q, k):
        return s * torch.exp(-(at[q] - at[k]).pow(2).sum(-1).sqrt() / scale[h])

    score_mod.for_vmap = for_vmap
    return score_mod


def windowed(c):
    more = c.k * 1000 // 2048
    return lambda s, b, h, q, k: torch.where(q + more >= k, s, NONE)


def learned(shape, read, dtype=None):
    return lambda c: _added(read, c.leaf(*shape(c), dtype=dtype))


def learned_factor(shape, factor, dtype=None):
    def made(c):
        table = c.leaf(*shape(c), dtype=dtype)
        return lambda s, b, h, q, k: s * factor(table, h, q)

    return made


def indirect(c):
    table, at = c.leaf(c.q), c.whole(c.q, c.q)
    return lambda s, b, h, q, k: s + table[at[q]]


def fixed_index(c):
    table, which = c.leaf(c.batch, c.heads, 4, c.q), c.number(0, torch.int64)
    return lambda s, b, h, q, k: s + table[b, h, which, q]


def distinct(c):
    of_q, of_k = c.leaf(c.q), c.leaf(c.k, dtype=torch.float32)
    return lambda s, b, h, q, k: s + of_q[q] + of_k[k]


def in_two_steps(c):
    table = c.leaf(c.q, c.k)

    def score_mod(s, b, h, q, k):
        return s + table[q][k]

    score_mod.for_vmap = lambda s, b, h, q, k: s + table[q, k]  # which has only these indices
    return score_mod


def of_a_product(c):
    """The table is not a leaf: its gradient goes on to one."""
    own = c.leaf(c.batch, c.k)
    table = own[:, :, None] + own[:, None]
    return lambda s, b, h, q, k: s + table[b, q, k]


FLOAT32 = torch.float32
SCORES = {
    "identity": lambda c: lambda s, b, h, q, k: s,
    "doubled": lambda c: lambda s, b, h, q, k: s * 2,
    "squared": lambda c: lambda s, b, h, q, k: s * s,
    "causal": lambda c: lambda s, b, h, q, k: torch.where(q >= k, s, NONE),
    "inverse causal": lambda c: lambda s, b, h, q, k: torch.where(q <= k, s, NONE),
    "relative": lambda c: lambda s, b, h, q, k: s + (q - k),
    "relative causal": lambda c: lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), NONE),
    "alibi": lambda c: lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 8)),
    "windowed": windowed,
    "documents": documents,
    "in two steps": indexed(lambda c: (c.batch, c.q))(lambda t, b, h, q, k: t[b][q]),
    "of an index": indexed(lambda c: (4, c.batch, c.heads, c.q))(
        lambda t, b, h, q, k: t[0][b, h][q]
    ),
    "of a captured index": indexed(lambda c: (c.batch, c.heads, 4, c.q))(
        lambda t, b, h, q, k: t[b][h][torch.zeros((), dtype=torch.int64, device=t.device), q]
    ),
    "even keys": lambda c: lambda s, b, h, q, k: torch.where(k % 2 == 0, s, NONE),
    "composed": lambda c: lambda s, b, h, q, k: torch.where(q <= k, s + (q - k), NONE),
    "all dims": all_dims,
    "all dims and keys": all_dims_and_keys,
    "halves": halves,
    "bias (q, k)": indexed(lambda c: (c.q, c.k))(lambda t, b, h, q, k: t[q, k]),
    "bias (b, q, k)": indexed(lambda c: (c.batch, c.q, c.k))(lambda t, b, h, q, k: t[b, q, k]),
    "bias (b, h, q, k)": indexed(lambda c: (c.batch, c.heads, c.q, c.k))(
        lambda t, b, h, q, k: t[b, h, q, k]
    ),
    "relative table": indexed(lambda c: (2 * c.k,))(lambda t, b, h, q, k: t[(q - k) + len(t) // 2]),
    "two-sided prefix": two_sided_prefix,
    "natten": lambda c: natten,
    "silu": lambda c: lambda s, b, h, q, k: torch.nn.functional.silu(s),
    "padded": padded,
    "captured number": captured_number,
    "captured factor": captured_factor,
    "nested": nested,
    "decomposed": decomposed,
    "regrouped": regrouped,
    "made in the call": made_in_the_call,
    "a size": lambda c: lambda s, b, h, q, k: s + c.batch,
    "log of mass": log_of_mass,
    "offsets": offsets,
    "offset of keys": offset_of_keys,
    "query factor": query_factor,
    "of heads": of_heads,
    "added bool": added_bool,
    "gated positions": gated_positions,
    "by distance": by_distance,
    "learned |q - k|": learned(lambda c: (2 * c.q,), lambda t, b, h, q, k: t[torch.abs(q - k)]),
    "learned (q, k)": learned(lambda c: (c.q, c.k), lambda t, b, h, q, k: t[q, k]),
    "learned (q)(k)": in_two_steps,
    "learned (k, q)": learned(lambda c: (c.k, c.q), lambda t, b, h, q, k: t[k, q]),
    "learned (h, q, k)": learned(lambda c: (c.heads, c.q, c.k), lambda t, b, h, q, k: t[h, q, k]),
    "learned (h, k, q)": learned(lambda c: (c.heads, c.k, c.q), lambda t, b, h, q, k: t[h, k, q]),
    "learned (b, h, q, k)": learned(
        lambda c: (c.batch, c.heads, c.q, c.k), lambda t, b, h, q, k: t[b, h, q, k]
    ),
    "learned (q + k)": learned(lambda c: (2 * c.q,), lambda t, b, h, q, k: t[q + k]),
    "learned (q) + (k)": learned(lambda c: (c.q,), lambda t, b, h, q, k: t[q] + t[k]),
    "learned window": learned(
        lambda c: (17,), lambda t, b, h, q, k: t[torch.clamp(q - k + 8, 0, 16)], FLOAT32
    ),
    "learned (k)": learned(lambda c: (c.k,), lambda t, b, h, q, k: t[k], FLOAT32),
    "learned (h)": learned(lambda c: (c.heads,), lambda t, b, h, q, k: t[h]),
    "learned (1)": learned(lambda c: (1,), lambda t, b, h, q, k: t[0]),
    "learned factor (q)": learned_factor(lambda c: (c.q,), lambda t, h, q: t[q]),
    "learned factor (h)": learned_factor(lambda c: (c.heads,), lambda t, h, q: t[h]),
    "learned gate (h)": learned_factor(
        lambda c: (c.heads,), lambda t, h, q: torch.sigmoid(t[h]), FLOAT32
    ),
    "learned, indirect": indirect,
    "learned, fixed index": fixed_index,
    "learned, distinct": distinct,
    "learned, of a product": of_a_product,
}


def causal(b, h, q, k):
    return q >= k


def anticausal(b, h, q, k):
    return q < k


def same(of, b, h, q, k):
    return of[q] == of[k]


def mask_of_documents(c):
    return functools.partial(same, c.arange(c.k) // (c.k // 8))


def mask_of_clamped_documents(c):
    of = c.whole(5, c.k).sort().values
    last = len(of) - 1
    return lambda b, h, q, k: of[q.clamp(0, last)] == of[k.clamp(0, last)]


def mask_of_batch_documents(c):
    of = (c.arange(c.k) >= c.k // 2).int().expand(c.batch, -1).contiguous()
    return lambda b, h, q, k: of[b, q] == of[b, k]


def mask_of_heads(c):
    is_causal = c.arange(c.heads) != 0
    return lambda b, h, q, k: is_causal[h] & (q >= k)


def mask_after(c):
    first = c.number(c.k // 2 - 3)
    return lambda b, h, q, k: k >= q + first


def mask_until(c):
    more = c.number(c.k * 192 // 2048)
    return lambda b, h, q, k: (more + q) >= k


def mask_of_sizes(c):
    frame = 8
    most = (c.q // frame + c.k // frame) * frame // 2
    return lambda b, h, q, k: q < most


def mask_of_padding(c):
    def visible(b, h, q, k, lengths):
        return (q < lengths[b]) & (k < lengths[b])

    return functools.partial(visible, lengths=c.whole(c.k, c.batch))


def mask_of_queries(c):
    is_hidden = c.whole(2, c.batch, c.q).bool()
    return lambda b, h, q, k: ~is_hidden[b, q]


def mask_read_by_zeros(c):
    seen = torch.ones(c.batch, 1, c.q, c.k, dtype=torch.bool, device=c.device).tril()
    return lambda b, h, q, k: seen[b, h.new_zeros(h.shape), q, k]


def near(b, h, q, k, most):
    return (q - k).abs() < most


MASKS = {
    "noop": lambda c: noop_mask,
    "causal": lambda c: causal,
    "inverse causal": lambda c: lambda b, h, q, k: q <= k,
    "causal window": lambda c: and_masks(causal, lambda b, h, q, k: q - k <= c.k // 4),
    "causal or not": lambda c: or_masks(causal, anticausal),
    "nothing": lambda c: and_masks(causal, anticausal),
    "first half": lambda c: lambda b, h, q, k: q < c.q // 2,
    "documents": mask_of_documents,
    "clamped documents": mask_of_clamped_documents,
    "documents of a batch": mask_of_batch_documents,
    "heads": mask_of_heads,
    "after": mask_after,
    "until": mask_until,
    "windowed": lambda c: lambda b, h, q, k: q + c.k * 1000 // 2048 >= k,
    "sizes": mask_of_sizes,
    "partial": lambda c: functools.partial(lambda b, h, q, k, more: q + more >= k, more=31),
    "partial with a tensor": lambda c: functools.partial(near, most=c.number(5.5, FLOAT32)),
    "padding": mask_of_padding,
    "queries": mask_of_queries,
    "read by zeros": mask_read_by_zeros,
}
