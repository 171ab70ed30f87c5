"""Decoding a batch whose sequences begin with the same prompt: its keys are read once for all.

Run it with `python examples/05_shared_prefix.py`. It needs torch; a GPU is used if there is one.
"""

import time
from collections.abc import Callable

import cutlass_attn
import torch

BATCH, HEADS, HEADS_KV, DIM = 16, 8, 2, 64
PROMPT, OWN = 4000, 60  # keys that all share; most keys that a sequence has of its own


def milliseconds(step: Callable[[], object], device: str, rounds: int = 10) -> float:
    """The fastest of some rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return min(times)


def main() -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float16, device=device)

    q = randn(BATCH, 1, HEADS, DIM)
    prompt_k, prompt_v = randn(2, 1, PROMPT, HEADS_KV, DIM)
    own_k, own_v = randn(2, BATCH, OWN, HEADS_KV, DIM)
    lengths = torch.randint(1, OWN + 1, (BATCH,), dtype=torch.int32, device=device)
    prompt_length = torch.tensor([PROMPT], dtype=torch.int32, device=device)

    # Each sequence with a cache of its own, which has the prompt, too.
    full_k, full_v = (
        torch.cat([prompt.expand(BATCH, -1, -1, -1), own], dim=1)
        for prompt, own in ((prompt_k, own_k), (prompt_v, own_v))
    )

    def apart() -> torch.Tensor:
        out: torch.Tensor = cutlass_attn.attention_decode(q, full_k, full_v, lengths + PROMPT)
        return out

    def shared() -> torch.Tensor:
        # All queries see all of the prompt: one sequence of BATCH queries, without a causal mask.
        as_one = q.view(1, BATCH, HEADS, DIM)
        out, lse = cutlass_attn.attention_decode(
            as_one, prompt_k, prompt_v, prompt_length, causal=False, return_lse=True
        )
        own = cutlass_attn.attention_decode(q, own_k, own_v, lengths, return_lse=True)
        lse = lse.view(HEADS, BATCH, 1).transpose(0, 1)
        merged: torch.Tensor
        merged, _ = cutlass_attn.merge_states(out.view(q.shape), lse, *own, layout="bshd")
        return merged

    difference = float((apart() - shared()).abs().max())
    row = 2 * HEADS_KV * DIM * q.element_size()  # of K and V
    keys = BATCH * PROMPT + int(lengths.sum())
    print(f"{BATCH} sequences, a prompt of {PROMPT} keys, up to {OWN} of their own, on {device}")
    for name, step, read in (
        ("apart", apart, keys),
        ("shared", shared, keys - (BATCH - 1) * PROMPT),
    ):
        took = milliseconds(step, device)
        print(f"{name:>8}: {took:7.2f} ms, {read * row / 1e6:6.1f} MB of keys and values")
    print(f"largest difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
