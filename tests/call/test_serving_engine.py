"""Continuous batching as an engine does it: prompts in chunks beside single steps, pages of no
order, arrays of fixed sizes. In the end every token has what a dense call gives it."""

import cases
import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import append_kv, attention_decode, attention_varlen

DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]
LENGTHS, PROMPTS = (75, 33, 90, 18), (60, 1, 31, 17)
HEADS, HEADS_KV, DIM = 6, 2, 64
ROWS, ENTRIES = 64, 6  # of every call, whatever is in it
CLOSE = {"rtol": 2e-3, "atol": 2e-3}  # kernels round weights to fp16 in their own order


class Engine:
    """The keys of each sequence in pages, which it takes one by one, as vLLM lays them out."""

    def __init__(self, page, device):
        self.page, self.device = page, device
        self.free = list(np.random.default_rng(0).permutation(sum(LENGTHS) // page + 9))
        store = torch.full((len(self.free), HEADS_KV, page, 2 * DIM), torch.nan).to(device).half()
        self.k_cache, self.v_cache = (x.transpose(1, 2) for x in store.split(DIM, dim=-1))
        columns = max(LENGTHS) // page + 1
        self.table = torch.full((ENTRIES, columns), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(ENTRIES, dtype=torch.int32, device=device)

    def grow(self, sequence, rows):
        """Slots of so many new keys."""
        length = int(self.lengths[sequence])
        for j in range(length, length + rows):
            if j % self.page == 0:
                self.table[sequence, j // self.page] = int(self.free.pop())
        self.lengths[sequence] += rows
        j = torch.arange(length, length + rows, device=self.device)
        return self.table[sequence, j // self.page] * self.page + j % self.page


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [1, 16])
def test_every_token_has_what_a_dense_call_gives_it(device, page):
    torch.manual_seed(0)
    tokens = [
        [torch.randn(n, heads, DIM).half().to(device) for heads in (HEADS, HEADS_KV, HEADS_KV)]
        for n in LENGTHS
    ]
    options = {"causal": True, "window": (40, None)}
    options["sinks"] = torch.randn(HEADS, device=device)
    results = [torch.full_like(q, torch.nan) for q, _, _ in tokens]
    engine = Engine(page, device)
    is_mixed = False
    while any(engine.lengths[s] < n for s, n in enumerate(LENGTHS)):
        q, k, v = (torch.full((ROWS, h, DIM), torch.nan).to(tokens[0][0]) for h in (HEADS, 2, 2))
        slots = torch.full((ROWS,), -1, dtype=torch.int64, device=device)
        ends, parts = [0], []
        for s, (n, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
            begin = int(engine.lengths[s])
            rows = min(25, prompt - begin, ROWS - ends[-1]) if begin < prompt else int(begin < n)
            here = slice(ends[-1], ends[-1] + rows)
            for x, of_sequence in zip((q, k, v), tokens[s], strict=True):
                x[here] = of_sequence[begin : begin + rows]
            slots[here] = engine.grow(s, rows).long()
            parts.append((s, slice(begin, begin + rows), here))
            ends.append(here.stop)
        ends += ends[-1:] * (ENTRIES + 1 - len(ends))
        is_mixed |= {1, 25} <= {part.stop - part.start for _, part, _ in parts}
        append_kv(k, v, engine.k_cache, engine.v_cache, slots)
        out = torch.full_like(q, torch.nan)
        attention_varlen(
            q,
            engine.k_cache,
            engine.v_cache,
            torch.tensor(ends, dtype=torch.int32, device=device),
            seqused_k=engine.lengths,
            block_table=engine.table,
            out=out,
            **options,
        )
        for s, own, here in parts:
            results[s][own] = out[here]
    assert is_mixed
    for result, (q, k, v) in zip(results, tokens, strict=True):
        expected = cutlass_attn.attention(q[None], k[None], v[None], layout="bshd", **options)
        torch.testing.assert_close(result, expected[0], **CLOSE)

    last = torch.stack([q[-1:] for q, _, _ in tokens])
    sequences = slice(0, len(LENGTHS))
    step = attention_decode(
        last,
        engine.k_cache,
        engine.v_cache,
        engine.lengths[sequences],
        block_table=engine.table[sequences],
        **options,
    )
    torch.testing.assert_close(step, torch.stack([result[-1:] for result in results]), **CLOSE)
