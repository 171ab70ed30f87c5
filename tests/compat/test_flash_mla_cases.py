"""The correctness cases of FlashMLA's own tests through compat.flash_mla, with their tolerances.

The parameters are those of tests/test_flash_mla_{dense_decoding,sparse_decoding,sparse_prefill}.py
in github.com/deepseek-ai/FlashMLA at 9241ae3. A run takes some cases, in which every pair of values
of two parameters occurs together, with fewer sequences, and in prefill fewer query tokens.
CUTLASS_ATTN_TEST_FLASH_MLA=all takes all, which are whole on a GPU: one process at a time, as they
take most of its memory.
"""

import itertools
import os
import random
from dataclasses import astuple, dataclass, replace

import cases
import pytest
from cases import torch
from cutlass_attn.compat.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

ALL = os.environ.get("CUTLASS_ATTN_TEST_FLASH_MLA") == "all"
DV = 512


@dataclass(frozen=True)
class Dense:
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    is_varlen: bool
    causal: bool
    some_have_no_keys: bool = False

    def small(self):
        return replace(self, batch=min(self.batch, 3))


HEADS = [
    (heads, kv_heads)
    for heads in (1, 3, 9, 63, 64, 126, 128)
    for kv_heads in (1, 2, 3, 8)
    if heads % kv_heads == 0
]
DENSE = [
    Dense(batch, queries, keys, *heads, is_varlen, causal)
    for batch in (1, 2, 6, 64)
    for queries in (1, 2, 4)
    for keys in (20, 140, 4096)
    for heads in HEADS
    for is_varlen in (False, True)
    for causal in (False, True)
]
DENSE += [
    Dense(128, 2, 4096, *heads, True, causal, some_have_no_keys=True)
    for heads in HEADS
    for causal in (False, True)
]


@dataclass(frozen=True)
class Lists:
    """Keys of a sequence, entries of a list, rows of a page."""

    keys: int
    topk: int
    page: int
    has_lengths: bool


@dataclass(frozen=True)
class Sparse:
    head_dim: int
    heads: int
    batch: int
    queries: int
    is_varlen: bool
    lists: Lists
    extra: Lists | None
    has_sink: bool = True
    are_invalid: bool = False
    some_have_no_keys: bool = False

    def small(self):
        return replace(self, batch=min(self.batch, 2))


PAGES = [(512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61)]
PAGES += [(2046, 2048, 2), (2046, 2048, 64), (2046, 2048, 576)]
CORNER_PAGES = [(512, 64, 61), (650, 576, 53)]


def sparse_cases():
    """For 576 columns one cache without lengths, for 512 every combination."""
    for head_dim, has_extra, extra_lengths, lengths in itertools.product(
        (576, 512), (False, True), (False, True), (False, True)
    ):
        if (head_dim == 576 and (has_extra or lengths)) or (extra_lengths and not has_extra):
            continue
        batches = [(4, True), (74, True), (321, True)]
        if not lengths and not extra_lengths:
            batches.append((74, False))
        for pages, corners in (
            (PAGES, [(queries, True, False, False) for queries in (1, 3)]),
            (
                CORNER_PAGES,
                [
                    (3, sink, invalid, none)
                    for invalid in (True, False)
                    for none in (True, False)
                    for sink in (True, False)
                    if sink or invalid or none
                ],
            ),
        ):
            extras = [Lists(*x, extra_lengths) for x in pages] if has_extra else [None]
            for heads, page, extra, (batch, is_varlen), (queries, *more) in itertools.product(
                (64, 128), pages, extras, batches, corners
            ):
                lists = Lists(*page, lengths)
                yield Sparse(head_dim, heads, batch, queries, is_varlen, lists, extra, *more)


@dataclass(frozen=True)
class Prefill:
    head_dim: int
    heads: int
    queries: int
    keys: int
    topk: int
    has_sink: bool = False
    has_lengths: bool = False
    some_are_invalid: bool = False

    def small(self):
        return replace(self, queries=min(self.queries, 5))


IRREGULAR = [(592, 128), (1840, 256), (1592, 384), (1521, 512)]
BEYOND = [(95, 128), (153, 256), (114, 384)]  # longer lists than there are keys


def prefill_cases():
    for model in itertools.product((512, 576), (128, 64)):
        for keys in [(128, 128), (256, 256), (512, 512), *IRREGULAR, *BEYOND]:
            for queries in (1, 62, 213):
                yield Prefill(*model, queries, *keys)
        for keys in IRREGULAR + BEYOND:
            # They have each of these twice: `have_sink_lse` is in no call.
            for queries, *options in itertools.product((62, 213), (False, True), (False, True)):
                yield Prefill(*model, queries, *keys, *options)
        for shape in ((1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048)):
            yield Prefill(*model, *shape, True, True, some_are_invalid=True)
        for queries in (1, 1024):
            for keys in ((32, 2048), (64, 8192)):
                yield Prefill(*model, queries, *keys, True, True)


SPARSE, PREFILL = list(sparse_cases()), list(prefill_cases())


def test_the_cases_are_flash_mlas():
    """As many as its lists have, without those for timing and 4 of 70000 rows, not compared."""
    assert (len(DENSE), len(SPARSE)) == (2304 + 32, 3680 + 1036)
    assert len(PREFILL) == 120 + 448 // 2 + 16 + 16  # of the 448 each is there twice


def values_of(case):
    """The case's parameters by their names, those of lists too."""
    for i, x in enumerate(astuple(case)):
        yield from ((i, j, y) for j, y in enumerate(x)) if isinstance(x, tuple) else ((i, 0, x),)


def chosen(every, seed):
    if ALL:
        return every
    some, covered = [], set()
    for case in random.Random(seed).sample(every, len(every)):
        pairs = set(itertools.combinations(values_of(case), 2))
        if not pairs <= covered:
            some.append(case)
            covered |= pairs
    return some


def on_devices(every, seed):
    some = chosen(every, seed)
    small = dict.fromkeys(x.small() for x in some)
    for device, its in (("cpu", small), ("cuda", some if ALL else small)):
        marks = [cases.needs_gpu] if device == "cuda" else []
        for case in its:
            name = "-".join(str(x) for _, _, x in values_of(case))
            yield pytest.param(device, case, id=f"{device}-{name}", marks=marks)


def generator(device, case):
    return torch.Generator(device).manual_seed(hash(astuple(case)) % 2**32)


def normal(made, *shape):
    return torch.randn(shape, generator=made, device=made.device)


def apart(x, more=128):
    """The tensor in memory that has room between its rows."""
    shape = [n + (more if i == x.dim() - 1 else 1) for i, n in enumerate(x.shape)]
    stored = x.new_empty(shape)[tuple(slice(n) for n in x.shape)]
    return stored.copy_(x)


def lengths_of(made, case, keys):
    lengths = torch.full((case.batch,), keys, dtype=torch.float, device=made.device)
    if case.is_varlen:
        lengths += normal(made, case.batch) * keys / 2
    lengths = lengths.clamp(min=case.queries).int()
    if case.some_have_no_keys:
        lengths[normal(made, case.batch) > 0] = 0
    return lengths


def table_of(made, lengths, page, multiple):
    """Pages in random order, as many for each sequence: (B, pages)."""
    most = -(-int(lengths.max()) // (page * multiple)) or 1
    pages = len(lengths) * most * multiple
    order = torch.randperm(pages, generator=made, device=made.device)
    return order.int().view(len(lengths), -1)


def sink_of(made, heads):
    sink, which = normal(made, 2, heads)
    sink[which < -0.5], sink[which > 0.5] = -torch.inf, torch.inf
    return sink


def attend(q, rows, visible, scale, sink=None):
    """q (Sq, H, D), rows (Sq, keys, D), visible (Sq, keys): out, lse and largest logits (Sq, H), in
    float32; the sink's share as FlashMLA's docstring defines it."""
    logits = torch.einsum("shd,skd->shk", q.float(), rows) * scale
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    is_none = lse.isinf()
    out = torch.exp(logits - lse.masked_fill(is_none, 0)[..., None]) @ rows[..., :DV]
    if sink is not None:
        out *= torch.sigmoid(lse - sink).nan_to_num(0)[..., None]
    most = logits.amax(-1) if rows.shape[1] else lse
    return out, lse.masked_fill(is_none, torch.inf), most


def check(ours, right, atol, rtol, cosine=1e-7):
    """FlashMLA's comparison: infinities at the same places, each number within one of the limits,
    and all of them within a distance that is 0 for a multiple of 1."""
    ours, right = ours.float(), right.float()
    for special in (torch.inf, -torch.inf):
        assert torch.equal(ours == special, right == special)
    assert not ours.isnan().any()
    ours, right = (x.double().masked_fill(right.isinf(), 0) for x in (ours, right))
    error = (ours - right).abs()
    is_near = (error < atol) | (error / (right.abs() + 1e-6) < rtol)
    assert is_near.all(), f"{int((~is_near).sum())} of {is_near.numel()}, up to {error.max():.2e}"
    if (right**2).sum() > 1e-12:
        distance = float(1 - 2 * (ours * right).sum() / (ours**2 + right**2).sum())
        assert distance < cosine


@pytest.mark.parametrize(("device", "case"), on_devices(DENSE, 1))
def test_dense_decoding(device, case):
    made, page, head_dim = generator(device, case), 64, 576
    lengths = lengths_of(made, case, case.keys)
    table = table_of(made, lengths, page, 4)
    q = (normal(made, case.batch, case.queries, case.heads, head_dim) / 10).clamp(-1, 1).bfloat16()
    cache = (normal(made, table.numel(), page, case.kv_heads, head_dim) / 10).clamp(-1, 1)
    cache = cache.bfloat16()
    results = []
    for b, length in enumerate(lengths.tolist()):
        used = -(-length // page)
        cache[table[b, used:]] = torch.nan
        if length % page:
            cache[table[b, used - 1], length % page :] = torch.nan
        rows = cache[table[b, :used]].flatten(0, 1)[:length].float()
        table[b, used:] = 2147480000
        at = torch.arange(length, device=device)
        last = torch.arange(case.queries, device=device) + length - case.queries
        visible = at <= last[:, None] if case.causal else (at >= 0).expand(case.queries, -1)
        each = case.heads // case.kv_heads
        groups = [
            attend(
                q[b, :, h * each : (h + 1) * each],
                rows[None, :, h].expand(case.queries, -1, -1),
                visible,
                head_dim**-0.5,
            )
            for h in range(case.kv_heads)
        ]
        results.append([torch.cat(x, dim=1) for x in zip(*groups, strict=True)])
    out, lse = flash_mla_with_kvcache(
        q, cache, table, lengths, DV, *get_mla_metadata(), causal=case.causal
    )
    right, right_lse, _ = (torch.stack(x) for x in zip(*results, strict=True))
    check(out, right.bfloat16(), 8e-4, 2.01 / 128, 5e-6)
    check(lse, right_lse.transpose(1, 2), 1e-6, 8.01 / 65536)


# Columns in e4m3, those of a scale; bytes of a token, and of its data before the scales.
FORMATS = {576: (512, 128), 512: (448, 64)}


def quantised(rows, is_nan):
    """Rows (pages, page, D) as FlashMLA stores them, and the numbers that they are then. NaN where
    is_nan."""
    pages, page, head_dim = rows.shape
    columns, group = FORMATS[head_dim]
    groups = rows[..., :columns].unflatten(-1, (-1, group))
    scales = 2 ** (groups.abs().amax(-1) / 448).clamp(min=1e-4).log2().ceil()
    numbers = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    rotated = rows[..., columns:].bfloat16()
    stored = (numbers.float() * scales[..., None]).flatten(-2)
    stored = torch.cat([stored, rotated.float()], dim=-1).bfloat16()
    numbers, rotated = (x.contiguous().view(torch.uint8) for x in (numbers.flatten(-2), rotated))
    if head_dim == 576:
        parts = numbers, scales.float().contiguous().view(torch.uint8), rotated
        cache = rows.new_empty((pages, page + 1, 656), dtype=torch.uint8)[:, :page]
        cache.copy_(torch.cat(parts, dim=-1))[is_nan] = 255
    else:
        data = torch.cat([numbers, rotated], dim=-1)
        exponents = torch.nn.functional.pad(scales.log2() + 127, (0, 1)).to(torch.uint8)
        data[is_nan] = exponents[is_nan] = 255
        cache = rows.new_empty((pages, -(-page * 584 // 576) * 576), dtype=torch.uint8)
        cache = cache[:, : page * 584]
        cache.copy_(torch.cat([data.flatten(1), exponents.flatten(1)], dim=-1))
        cache = cache.view(pages, page, 584)
    return cache[:, :, None].view(torch.float8_e4m3fn), stored


def one_cache(made, case, lists):
    """The cache, its numbers (rows, D), lists of rows and their lengths or None."""
    lengths = lengths_of(made, case, lists.keys)
    table = table_of(made, lengths, lists.page, 4)
    shape = (case.batch, case.queries, max(int(lengths.max()), lists.topk))
    order = torch.rand(shape, generator=made, device=made.device)
    at = torch.arange(shape[-1], device=made.device)
    order[(at >= lengths[:, None, None]).expand(shape)] = -1
    found, positions = order.topk(lists.topk, dim=-1)
    pages = (
        table.long()
        .flatten(1)
        .gather(1, (positions // lists.page).clamp(max=table.shape[1] - 1).flatten(1))
    )
    indices = pages.view_as(positions) * lists.page + positions % lists.page
    indices = indices.masked_fill(found < 0, -1).int()
    if case.are_invalid:
        indices.fill_(-1)
    counts, counted = None, indices
    if lists.has_lengths:
        counts = torch.randint(
            lists.topk + 1, (case.batch,), generator=made, device=made.device, dtype=torch.int32
        )
        entry = torch.arange(lists.topk, device=made.device)
        counted = indices.masked_fill(entry >= counts[:, None, None], -1)
    is_nan = torch.ones(table.numel() * lists.page, dtype=torch.bool, device=made.device)
    is_nan[counted[counted >= 0].long()] = False
    rows = (normal(made, table.numel(), lists.page, case.head_dim) / 10).clamp(-1, 1).bfloat16()
    cache, numbers = quantised(rows.float(), is_nan.view(-1, lists.page))
    return cache, numbers.flatten(0, 1), apart(indices), counts, counted


@pytest.mark.parametrize(("device", "case"), on_devices(SPARSE, 2))
def test_sparse_decoding(device, case):
    made = generator(device, case)
    q = normal(made, case.batch, case.queries, case.heads, case.head_dim).clamp(-1, 1).bfloat16()
    sink = sink_of(made, case.heads) if case.has_sink else None
    scale = case.head_dim**-0.55
    stores = [one_cache(made, case, x) for x in (case.lists, case.extra) if x is not None]
    (cache, _, indices, counts, _), (more, _, more_indices, more_counts, _) = (
        *stores,
        *[(None,) * 5] * (2 - len(stores)),
    )
    out, lse = flash_mla_with_kvcache(
        apart(q),
        cache,
        None,
        None,
        DV,
        *get_mla_metadata(),
        scale,
        False,
        True,
        indices,
        sink,
        more,
        more_indices,
        counts,
        more_counts,
    )
    for b in range(case.batch):
        rows = [numbers[its[b].clamp(min=0).long()] for _, numbers, *_, its in stores]
        visible = torch.cat([its[b] >= 0 for *_, its in stores], dim=-1)
        right, right_lse, _ = attend(q[b], torch.cat(rows, dim=1).float(), visible, scale, sink)
        # The results of two caches are rounded before they are merged. FlashMLA has 5e-6 for both.
        distance = 5e-6 if case.extra is None else 5.5e-6
        check(out[b], right.bfloat16(), 1e-3, 2.01 / 128, distance)
        check(lse[b], right_lse.T, 1e-6, 8.01 / 65536)


INVALID = (-2147483648, -123456, -1, None, 114514, 1919810, 2147480000, 2147483647)


@pytest.mark.parametrize(("device", "case"), on_devices(PREFILL, 3))
def test_sparse_prefill(device, case):
    made = generator(device, case)
    middles = torch.rand(2, generator=made, device=device) / 10 - 0.05
    q = (normal(made, case.queries, case.heads, case.head_dim) / 10 + middles[0]).bfloat16()
    kv = (normal(made, case.keys, 1, case.head_dim) / 10 + middles[1]).bfloat16()
    none = [case.keys if x is None else x for x in INVALID]
    none = torch.tensor(none, dtype=torch.int32, device=device)
    which = torch.randint(len(none), (case.queries, case.topk), generator=made, device=device)
    order = torch.rand((case.queries, max(case.keys, case.topk)), generator=made, device=device)
    order[:, case.keys :] = -1
    found, indices = order.topk(case.topk, dim=-1)
    indices = torch.where(found < 0, none[which], indices.int())
    if case.some_are_invalid:
        indices[normal(made, case.queries) < -2] = none[4]
        indices[0] = none[0]
    counts, counted = None, indices
    if case.has_lengths:
        counts = torch.randint(
            max(case.topk + 1, 64), (case.queries,), generator=made, device=device
        )
        counts = counts.clamp(max=case.topk).int()
        entry = torch.arange(case.topk, device=device)
        counted = indices.masked_fill(entry >= counts[:, None], -1)
    sink = sink_of(made, case.heads) if case.has_sink else None
    out, most, lse = flash_mla_sparse_fwd(
        apart(q), apart(kv), apart(indices[:, None]), 0.5, attn_sink=sink, topk_length=counts
    )
    visible = (counted >= 0) & (counted < case.keys)
    for rows in torch.arange(case.queries, device=device).split(64):
        keys = kv[counted[rows].masked_fill(~visible[rows], 0).long(), 0].float()
        right, right_lse, right_most = attend(q[rows], keys, visible[rows], 0.5, sink)
        check(out[rows], right, 8e-4, 3.01 / 128, 7e-6)
        check(most[rows], right_most, 1e-6, 2.01 / 65536)
        check(lse[rows], right_lse, 1e-6, 2.01 / 65536)
