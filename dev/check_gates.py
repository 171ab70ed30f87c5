"""Gates on the machine code of the GPU kernels, read off the library without a GPU.

    python -m dev.check_gates --library libcutlass_attn.so [--arch sm_89] [--tier core]

For every compiled GPU row of the manifest and every score, the thresholds of gates/gates.toml for
machine code: registers, local memory, and for sm80 rows shared memory, which is not in the code and
follows from the tile. For sm80 rows also:

- registers few enough for the blocks per SM that the kernel requires;
- exactly as many HMMA (and HMMA with fp16 accumulation), LDSM, LDSM.T and LDGSTS as the tile
  implies. More mean that the compiler duplicated a loop body or that copies got narrower, fewer
  that work was lost;
- with the identity score, a main loop that does the tile's work: its issue slots, of which
  `python -m dev.issue_slots` prints a table.

Needs cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from . import repository  # noqa: F401, puts the next ones within reach

# isort: split
import manifest_reader
import manifest_rows

from .gates.thresholds import FAIL, PASS, load_gates
from .sass import disassemble as sass
from .sass.issue_slots import model_of
from .sass.loops import SassError
from .sass.serving_tiles import code_of, latent_tile_of
from .sass.tiles import backward_tile_of, tile_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--arch", default="sm_89")
    parser.add_argument("--tier", default="core")
    options = parser.parse_args()

    rows = manifest_reader.load()
    build = manifest_rows.Build(tier=options.tier, simt="none")
    resources = sass.read_resources(options.library, options.arch)
    loops = {
        (row.symbol, "identity"): tile
        for row in rows
        if (
            tile := tile_of(row.key, "identity")
            or backward_tile_of(row.key)
            or latent_tile_of(row.key)
        )
    }
    counts: dict[tuple[str, str], Counter[str]] = {}
    slots: dict[tuple[str, str], int | SassError] = {}
    for name, graph in sass.control_flow(options.library, options.arch):
        if kernel := sass.identify(name):
            counts[kernel] = sass.count(graph)
            if tile := loops.get(kernel):
                try:
                    slots[kernel] = model_of(graph, tile)["clocks"]["issue"]
                except SassError as error:
                    slots[kernel] = error
    failures = 0

    def gate(what: str, measured: object, holds: bool, allowed: str) -> None:
        nonlocal failures
        failures += not holds
        print(f"  {'ok  ' if holds else 'FAIL'} {what:<13} {measured!s:>5}  allowed: {allowed}")

    checked = [row for row in rows if row.device == "cuda" and build.compiles(row)]
    for row in checked:
        for score in build.scores(row):
            print(f"{row.key} {score}")
            kernel = (row.entry_symbol(score), score)
            if kernel not in resources or kernel not in counts:
                gate("code", "none", False, f"one kernel for {options.arch}")
                continue
            used, code = resources[kernel], code_of(row.key, score)
            smem = code.smem_bytes if code else None
            figures = sass.static_figures(used, counts[kernel], smem)
            head_dim = row.head_dims.qk if row.head_dims else 0
            for judged in load_gates().judge(row.kernel.name, head_dim, "", figures):
                if judged.verdict in (PASS, FAIL):
                    name, holds = judged.gate.name, judged.verdict == PASS
                    gate(name, int(figures[name]), holds, str(judged.threshold))
            if kernel in slots:
                is_found = isinstance(slots[kernel], int)
                gate("issue slots", slots[kernel], is_found, "a loop that does the tile's work")
            if code is None:
                continue
            limit = code.register_limit()
            gate("by blocks", used["REG"], used["REG"] <= limit, f"<= {limit} registers")
            for operation, count in code.counts().items():
                measured = counts[kernel][operation]
                gate(operation, measured, measured == count, str(count))
    print(f"{len(checked)} rows, {failures} gates failed")
    return 1 if failures or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
