"""Issue slots of the mma.sync kernels' main loop on Ada (docs/notes/ada.md).

    python -m dev.issue_slots --library libcutlass_attn.so [--arch sm_89] [--json FILE]

For every sm80 row with the identity score and any accumulator: the instructions that a warp
executes for one tile of keys that all its queries see, or for one step of a backward row's loop,
and the time on each unit by the model of sass/issue_slots.py. A .cubin of nvcc can replace the
library.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import repository  # noqa: F401, puts the next ones within reach

# isort: split
import manifest_reader
from cutlass_attn._build.variant_key import key_of

from .sass import disassemble as sass
from .sass.issue_slots import PARTS, model_of
from .sass.loops import KINDS, SassError
from .sass.serving_tiles import latent_tile_of
from .sass.tiles import backward_tile_of, tile_of


def print_tables(found: dict[str, dict[str, Any]]) -> None:
    wide = max(map(len, found), default=0)
    print("instructions of a warp for one tile, or of a backward kernel's scheduler for one step")
    print(" " * wide, *(f"{kind:>7}" for kind in (*KINDS, "all")))
    for key, row in found.items():
        print(f"{key:<{wide}}", *(f"{n:>7}" for n in (*row["counts"].values(),)), end=" ")
        print(f"{row['clocks']['issue']:>7}")
    units = ("issue", "MUFU", "ALU", "shared")
    for part in PARTS:
        clocks = f"{part.hmma_clocks} an HMMA, {part.hmma_clocks_fp16} with its sum in fp16"
        print(f"\n{part.name}: clocks of a scheduler for it, {clocks}")
        heads = ("tensor", *units, "bound", "at most", "TFLOP/s", "alone")
        print(" " * wide, *(f"{head:>7}" for head in heads))
        for key, row in found.items():
            on = row["parts"][part.name]
            values = (on["tensor"], *(row["clocks"][unit] for unit in units), on["bound"])
            shares = f"{on['utilisation']:>7.0%} {on['tflops']:>7} {on['without_overlap']:>7.0%}"
            print(f"{key:<{wide}}", *(f"{value:>7}" for value in values), shares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="or a .cubin")
    parser.add_argument("--arch", default="sm_89")
    parser.add_argument("--json", metavar="FILE", help="- for stdout, instead of the tables")
    options = parser.parse_args()

    found: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    rows = manifest_reader.load()
    kernels = list(dict.fromkeys(row.kernel_name for row in rows))
    for name, graph in sass.control_flow(options.library, options.arch):
        symbol, score = sass.identify(name) or ("", "")
        key = key_of(symbol, kernels)
        tile = tile_of(key, score) or backward_tile_of(key) or latent_tile_of(key)
        if tile is None or score != "identity":
            continue
        try:
            found[key] = model_of(graph, tile)
        except SassError as error:
            failures[key] = str(error)
    text = json.dumps(found, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        print_tables(found)
        if options.json:
            Path(options.json).write_text(text, encoding="utf-8")
    for key, message in failures.items():
        print(f"FAIL {key}: {message}", file=sys.stderr)
    print(f"{len(found)} rows, {len(failures)} failed", file=sys.stderr)
    return 1 if failures or not found else 0


if __name__ == "__main__":
    sys.exit(main())
