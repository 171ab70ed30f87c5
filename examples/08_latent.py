"""A layer of latent attention (MLA), as DeepSeek has it, decodes one token for each sequence of a
batch in two ways: over expanded keys and values of every head, and absorbed, over the latents.

Run it with `python examples/08_latent.py`. It needs torch; a GPU is used if there is one.
"""

import time
from collections.abc import Callable

import cutlass_attn
import torch

BATCH, HEADS, KEYS, PAGE = 4, 16, 500, 64
LATENT, ROTATED = 512, 64  # columns of the cache: V is the first of them
NOPE, VALUE = 128, 128  # of an expanded head: columns without rotation, columns of V
SCALE = (NOPE + ROTATED) ** -0.5


class Layer:
    """The up-projections, and what a step and the cache are made of."""

    def __init__(self, device: str) -> None:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.float16, device=device)

        self.up_k = randn(HEADS, NOPE, LATENT) * LATENT**-0.5
        self.up_v = randn(HEADS, LATENT, VALUE) * LATENT**-0.5
        self.q_nope, self.q_rotated = randn(BATCH, HEADS, NOPE), randn(BATCH, HEADS, ROTATED)
        columns = -(-KEYS // PAGE)
        self.pages = randn(BATCH * columns, PAGE, 1, LATENT + ROTATED)
        order = torch.randperm(BATCH * columns, device=device, dtype=torch.int32)
        self.block_table = order.view(BATCH, columns)
        self.lengths = torch.randint(KEYS // 2, KEYS + 1, (BATCH,), device=device).int()

    def absorbed(self) -> torch.Tensor:
        """(B, H, VALUE): W_uk goes into the query, W_uv into the result."""
        q = torch.einsum("bhn,hnl->bhl", self.q_nope, self.up_k)
        out = cutlass_attn.attention_decode(
            torch.cat([q, self.q_rotated], dim=-1)[:, None],
            self.pages,
            self.pages[..., :LATENT],
            self.lengths,
            block_table=self.block_table,
            softmax_scale=SCALE,
        )
        return torch.einsum("bhl,hlv->bhv", out[:, 0], self.up_v)

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys (B, S, H, 192) and values (B, S, H, 128) of all heads."""
        rows = self.pages[self.block_table.long()].flatten(1, 2)[:, :, 0]
        latent, rotated = rows.split([LATENT, ROTATED], dim=-1)
        k = torch.einsum("bsl,hnl->bshn", latent, self.up_k)
        rotated = rotated[:, :, None].expand(-1, -1, HEADS, -1)
        return torch.cat([k, rotated], dim=-1), torch.einsum("bsl,hlv->bshv", latent, self.up_v)

    def expanded(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(B, H, VALUE), of a cache that has K and V of every head."""
        q = torch.cat([self.q_nope, self.q_rotated], dim=-1)[:, None]
        out: torch.Tensor = cutlass_attn.attention_decode(
            q, k, v, self.lengths, softmax_scale=SCALE
        )
        return out[:, 0]


def milliseconds(step: Callable[[], object], device: str, rounds: int = 5) -> float:
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
    layer = Layer(device)
    k, v = layer.expand()
    ours, right = layer.absorbed(), layer.expanded(k, v)
    difference = float((ours - right).float().norm() / right.float().norm())
    print(f"{BATCH} sequences of up to {KEYS} keys, {HEADS} heads, on {device}")
    for name, step, columns in (
        ("expanded", lambda: layer.expanded(k, v), HEADS * (NOPE + ROTATED + VALUE)),
        ("absorbed", layer.absorbed, LATENT + ROTATED),
    ):
        took = milliseconds(step, device)
        print(
            f"{name:>10}: {took:7.3f} ms, {1000 * BATCH / took:9.0f} tokens/s of one layer, "
            f"{columns * k.element_size():6} bytes of cache per token"
        )
    print(f"relative difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
