"""Masks that models use: one line each, what a kernel skips, and on a GPU what each costs.

Each mask of MASKS is a call of `cutlass_attn.attention` with options, or with a bool `mask`. The
program

1. compares each with PyTorch's attention over the dense mask;
2. counts tiles of 64 queries and 64 keys: empty tiles are skipped, full tiles need no mask, and
   only partial tiles read it;
3. on a GPU times each beside the call without a mask;
4. draws the masks and their tiles in masks.png, if matplotlib is there.

Run it with `python examples/07_masks.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass_attn
import torch

TILE = 64  # queries and keys of a tile that is counted
BATCH = 2


@dataclass(frozen=True)
class Mask:
    """Options of a call, and the mask that they mean for `length` queries and keys."""

    title: str
    options: Callable[[int, Any], dict[str, Any]]  # of the length and a device
    visible: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
    # of the batch entry, query and key, broadcasting (B, Sq, Sk), and the length


def _indices(length: int, device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    i = torch.arange(length, device=device)
    return torch.arange(BATCH, device=device)[:, None, None], i[:, None], i


def dense(mask: Mask, length: int, device: Any) -> torch.Tensor:
    """(B, 1, Sq, Sk) bool."""
    visible = mask.visible(*_indices(length, device), length)
    return visible.expand(BATCH, length, length)[:, None]


def as_mask(visible: Callable[..., torch.Tensor]) -> Callable[[int, Any], dict[str, Any]]:
    """The bool mask itself, of size 1 where it does not depend on the batch entry."""

    def options(length: int, device: Any) -> dict[str, Any]:
        mask = visible(*_indices(length, device), length)
        return {"mask": mask[:, None] if mask.dim() == 3 else mask[None, None]}

    return options


def _prefix(b, q, k, n):
    """A prefix that all see in full, then causal: prefix-LM, PaliGemma."""
    return (k <= q) | (k < n // 4)


def _image(b, q, k, n):
    """Causal, but tokens of one image see each other: Gemma 3."""
    spans = (((1 * n) // 8, (2 * n) // 8), ((5 * n) // 8, (6 * n) // 8))
    result = k <= q
    for begin, end in spans:
        result = result | ((q >= begin) & (q < end) & (k >= begin) & (k < end))
    return result


def _documents(b, q, k, n):
    """Documents in one sequence, each causal."""
    ends = torch.tensor([0.1, 0.25, 0.3, 0.55, 0.8], device=q.device) * n
    number = torch.bucketize(k.float(), ends, right=True)
    return (number[:, None] == number) & (k <= q)


def _neighborhood(b, q, k, n):
    """Pixels of a square image in rows, each sees those at most 4 away: NATTEN."""
    side = int(n**0.5)
    return ((q // side - k // side).abs() <= 4) & ((q % side - k % side).abs() <= 4)


def _dilated(b, q, k, n):
    """Every fourth key of the last 256, causal."""
    return (k <= q) & (q - k < 256) & ((q - k) % 4 == 0)


def _padding(b, q, k, n):
    """Keys beyond each entry's length: all keys of the first one, half of the second one."""
    return (k < n // (b + 1)) & (q >= 0)


def _window(n: int) -> int:
    return max(1, n // 8)


def _padding_options(length, device):
    lengths = length // torch.arange(1, BATCH + 1, device=device)
    return {"mask": (torch.arange(length, device=device) < lengths[:, None])[:, None, None]}


MASKS = {
    "causal": Mask("causal", lambda n, d: {"causal": True}, lambda b, q, k, n: k <= q),
    "window": Mask(
        "sliding window",
        lambda n, d: {"causal": True, "window": (_window(n), None)},
        lambda b, q, k, n: (k <= q) & (q - k <= _window(n)),
    ),
    "chunk": Mask(
        "chunks (Llama 4)",
        lambda n, d: {"causal": True, "attention_chunk": n // 4},
        lambda b, q, k, n: (k <= q) & (q // (n // 4) == k // (n // 4)),
    ),
    "padding": Mask("padding", _padding_options, _padding),
    "documents": Mask("causal documents", as_mask(_documents), _documents),
    "prefix": Mask("prefix-LM", as_mask(_prefix), _prefix),
    "image": Mask("image spans (Gemma 3)", as_mask(_image), _image),
    "neighborhood": Mask("neighborhood (NATTEN)", as_mask(_neighborhood), _neighborhood),
    "dilated": Mask("dilated window", as_mask(_dilated), _dilated),
}


@dataclass(frozen=True)
class Tiles:
    """Shares of all tiles, and of all logits."""

    empty: float
    partial: float
    full: float
    visible: float


def classes(mask: torch.Tensor) -> torch.Tensor:
    """Of each tile of a (B, 1, Sq, Sk) mask, (B, Sq / 64, Sk / 64): 0 empty, 1 partial, 2 full."""
    tiles = mask[:, 0].unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
    return tiles.any((2, 4)).int() + tiles.all(4).all(2).int()


def count(mask: torch.Tensor) -> Tiles:
    found = classes(mask).float()
    shares = [(found == kind).float().mean().item() for kind in range(3)]
    return Tiles(*shares, mask.float().mean().item())


def error(q, k, v, mask: Mask) -> float:
    """The largest difference from PyTorch's attention in float32 over the dense mask."""
    given = cutlass_attn.attention(q, k, v, **mask.options(q.shape[2], q.device))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q, k, v)), attn_mask=dense(mask, q.shape[2], q.device)
    )
    return (given.float() - expected).abs().max().item()


def microseconds(call: Callable[[], Any]) -> float:
    """On the GPU, the median of 20 calls after one to warm up; before each, L2 is overwritten."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def draw(path: Path, length: int) -> bool:
    """Masks, darkest where tiles are skipped; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
    except ImportError:
        return False
    columns = 3
    rows = -(-len(MASKS) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(9, 3.2 * rows), layout="constrained")
    colors = ListedColormap(["#e8e8e8", "#e8b04a", "#3b7a57"])
    for axis, mask in zip(axes.flat, MASKS.values()):
        there = dense(mask, length, "cpu")
        tiles = count(there)
        axis.imshow(
            classes(there)[-1].numpy(), cmap=colors, vmin=0, vmax=2, extent=(0, length, length, 0)
        )
        # A masked logit of a tile that is not skipped.
        masked = there[-1, 0].float().where(there[-1, 0], torch.nan)
        axis.imshow(masked.numpy(), cmap="gray", alpha=0.25, extent=(0, length, length, 0))
        axis.set_title(f"{mask.title}\n{tiles.visible:.0%} visible, {tiles.empty:.0%} skipped")
        axis.set_xlabel("key")
        axis.set_ylabel("query")
    for axis in axes.flat[len(MASKS) :]:
        axis.axis("off")
    figure.suptitle("Tiles of 64 queries and 64 keys: grey skipped, yellow partial, green full")
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for masks.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, help="queries and keys, a multiple of 64")
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    length = options.length or (4096 if on_gpu else 512)
    if length % TILE:
        parser.error(f"--length must be a multiple of {TILE}, got {length}")
    heads = 16 if on_gpu else 2

    q, k, v = torch.randn(3, BATCH, heads, length, 128, device=options.device, dtype=torch.bfloat16)
    plain = 0.0
    if on_gpu:
        plain = microseconds(lambda: cutlass_attn.attention(q, k, v))
        print(f"without a mask {plain:.0f} us")
    good = True
    for mask in MASKS.values():
        tiles = count(dense(mask, length, options.device))
        difference = error(q, k, v, mask)
        good &= difference < 2e-2
        line = (
            f"{mask.title:22} {tiles.visible:6.1%} visible; tiles: {tiles.empty:6.1%} skipped, "
            f"{tiles.partial:6.1%} partial, {tiles.full:6.1%} full; largest difference "
            f"{difference:.1e}"
        )
        if on_gpu:
            call_options = mask.options(length, options.device)
            us = microseconds(lambda given=call_options: cutlass_attn.attention(q, k, v, **given))
            line += f"; {us:.0f} us, {us / plain:.2f} of the call without a mask"
        print(line)
    picture = options.out / "masks.png"
    if draw(picture, min(length, 1024)):
        print(f"{picture} shows the masks")
    else:
        print("no picture: pip install matplotlib")
    print("results as PyTorch's" if good else "RESULTS DIFFER FROM PyTorch's")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
