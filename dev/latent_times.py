"""Modelled times of latent decoding on GPUs that were not measured (docs/notes/ada.md).

    python -m dev.latent_times --library libcutlass_attn.so [--arch sm_89]

Counts the machine code of sm80/latent and sm80/latent_64 as dev/issue_slots.py does, asks `explain`
for the kernel and the number of splits, and adds up:

- the keys of the SM with the most blocks, each at the rate of memory or of the loop, whichever is
  slower. Memory: a copy's rate, shared by the blocks that run, and no more for one block than the
  bytes that it has in flight, each latency. The loop: without overlap within a warp; at most, with
  the clocks that a tile of an H200 took beyond that.
- the launch, and what the launch that merges results costs, as fitted to an H200.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass_attn
import torch
from cutlass_attn._build.variant_key import key_of

from .sass import disassemble as sass
from .sass.issue_slots import PARTS, Part, model_of
from .sass.serving_tiles import LatentTile, latent_tile_of

COPY = 0.9  # a copy's share of the memory's rate
LATENCY_US = 0.7
LAUNCH_US, START_US = 3.7, 1.8  # a launch; the first tile of a block
# The launch that merges: its start, up to 64 splits, and a byte of all results (LatentSplits of
# latent/params.hpp).
MERGE_LAUNCH_US, MERGE_US, RESULT_US = 4.0, 2.5, 0.018 / (32 << 10)
# Clocks of a tile of sm80/latent_64 on an H200 beyond the model: 787 us for 128 x 4096 keys.
UNEXPLAINED = 1300

SHAPES = ((128, 4096), (16, 8192), (1, 32768))
HEADS = (16, 128)


@dataclass(frozen=True)
class Call:
    """A step of decoding, one query a sequence."""

    batch: int
    keys: int
    heads: int
    splits: int


def predicted_us(
    part: Part, tile: LatentTile, tile_clocks: float, call: Call, blocks_per_sm: int = 1
) -> float:
    """Microseconds of a call. tile_clocks: of a scheduler, for a tile of keys of a block."""
    row_tiles = -(-call.heads // tile.m)
    blocks = call.batch * row_tiles * call.splits
    waves = -(-blocks // (part.sms * blocks_per_sm))
    active = min(blocks, part.sms * blocks_per_sm)
    # Row tiles of a sequence run side by side: the second one reads L2.
    from_memory = tile.token_bytes / row_tiles * active / (1000 * COPY * part.gb_per_s)
    in_flight = tile.token_bytes * LATENCY_US / tile.bytes_in_flight
    loop = tile_clocks / tile.n / (1000 * part.boost_ghz)
    each = max(from_memory, in_flight, loop * min(blocks_per_sm, -(-blocks // part.sms)))
    time = LAUNCH_US + waves * (START_US + call.keys / call.splits * each)
    if call.splits > 1:
        result_bytes = 4 * min(tile.m, call.heads) * tile.head_dim_v
        time += MERGE_LAUNCH_US + MERGE_US * -(-call.splits // 64)
        time += blocks * RESULT_US * result_bytes
    return time


def clocks_of(row: dict[str, Any], part: Part, tile: LatentTile) -> float:
    """Clocks of a scheduler for a tile, of all of its warps, without overlap within a warp."""
    on = row["parts"][part.name]
    return float(on["tensor"] / on["without_overlap"] * tile.threads / 128)


def explained(part: Part, batch: int, keys: int, heads: int) -> Any:
    """What dispatch does with a call over pages of 64 latents in bf16."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape[-1], dtype=dtype).expand(shape)  # takes no memory

    pages = empty(batch * keys // 64, 64, 1, 576)
    options = {"block_table": empty(batch, keys // 64, dtype=torch.int32)}
    options |= {"cache_seqlens": empty(batch, dtype=torch.int32)}
    q = empty(batch, 1, heads, 576)
    return cutlass_attn.explain(q, pages, pages[..., :512], **options, device=part.name)


def read_rows(library: Path, arch: str) -> dict[str, tuple[LatentTile, dict[str, Any]]]:
    """{kernel: tile, model of its machine code} for bf16 latents of 576 columns."""
    kernels = sorted({variant.kernel for variant in cutlass_attn.variants()})
    found = {}
    for name, graph in sass.control_flow(library, arch):
        symbol, score = sass.identify(name) or ("", "")
        key = key_of(symbol, kernels)
        if score == "identity" and "/bf16/d576" in key and (tile := latent_tile_of(key)):
            found[key.split("/bf16")[0]] = tile, model_of(graph, tile)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--arch", default="sm_89")
    options = parser.parse_args()
    rows = read_rows(options.library, options.arch)
    print("| sequences x keys | heads | GPU | kernel | splits | us | of a copy's rate | TFLOP/s |")
    print("| --- | ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for heads in HEADS:
        for batch, keys in SHAPES:
            for part in PARTS:
                explanation = explained(part, batch, keys, heads)
                kernel = explanation.chosen.kernel
                tile, row = rows[kernel]
                call = Call(batch, keys, heads, explanation.splits)
                clocks = clocks_of(row, part, tile)
                beyond = UNEXPLAINED if tile.m == 64 else 0
                times = [predicted_us(part, tile, clocks + x, call) for x in (0, beyond)]
                rate = batch * keys * tile.token_bytes / (1000 * COPY * part.gb_per_s)
                flop = 2 * batch * keys * heads * (tile.head_dim + tile.head_dim_v)
                cells = (
                    f"{batch} x {keys}",
                    heads,
                    part.name,
                    f"`{kernel}`",
                    call.splits,
                    " to ".join(dict.fromkeys(f"{x:.0f}" for x in times)),
                    " to ".join(dict.fromkeys(f"{rate / x:.2f}" for x in times)),
                    " to ".join(dict.fromkeys(f"{flop / x / 1e6:.0f}" for x in times)),
                )
                print("|", " | ".join(map(str, cells)), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
