#!/usr/bin/env python3
"""Issue-slot model of the mma.sync kernels' main loop on Ada, read off the machine code.

    issue_slots.py --library libcutlass_attn.so [--arch sm_89] [--tier core] [--json FILE]

For every sm80 row with the identity score: the instructions that a warp executes for one tile of
keys which all its queries see, and what they take of each unit. docs/ada.md has the model and its
sources. A .cubin will do for the library; with --tier every row of that tier has to be in it.

The tile's path is the way around the loop with the products, exponentials and copies that the
tile's shape asks for, and the fewest instructions: a mask's test makes it longer, a reference that
is raised takes further exponentials or products (hot_path.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates import KERNEL, Shape, dump, identify, load_generator
from hot_path import KINDS, MEMORY, Instruction, SassError, hot_path, read_blocks

SCHEDULERS = 4  # of an SM, each with a quarter of its units
MUFU_CLOCKS = 32 // 4
ALU_CLOCKS = 32 // 16  # integers, compares, conversions: half as many lanes as for FP32
HMMA_FLOP = 2 * 16 * 8 * 16


@dataclass(frozen=True)
class Part:
    """A GPU as its maker describes it."""

    name: str
    sms: int
    boost_ghz: float
    tflops: float  # dense, float16 products added up in float32

    @property
    def hmma_clocks(self) -> int:
        """Clocks of a scheduler's tensor core for one m16n8k16 product."""
        return round(HMMA_FLOP * SCHEDULERS * self.sms * self.boost_ghz / (1000 * self.tflops))


PARTS = (Part("L4", 58, 2.04, 121.0), Part("RTX 4090", 128, 2.52, 165.2))


def smem_clocks(instruction: Instruction) -> int:
    """Clocks of the SM's shared memory, at 128 bytes each and without conflicts."""
    width = instruction.name.split(".")[-1]
    if instruction.kind == "LDSM":  # as many 8x8 matrices
        return int(width) if width.isdigit() else 1
    if instruction.kind in MEMORY:  # bits of each thread
        return int(width) // 32 if width in ("64", "128") else 1
    return 0


def per_tile(shape: Shape) -> dict[str, int]:
    """What a warp has to do for a tile that all its queries see, however it is compiled."""
    keys = shape.n // shape.columns
    dims = (shape.head_dim, shape.head_dim_v)
    return {
        "HMMA": shape.rows * sum(dims) // 16 * keys // 8,
        "MUFU": shape.rows * 16 * keys // 32,
        "LDGSTS": sum(-(-shape.n * dim // 8 // shape.threads) for dim in dims),
    }


def model(path: list[Instruction]) -> dict[str, Any]:
    """Counts by kind, and clocks of a scheduler per unit for one warp and tile."""
    counts = Counter(i.kind for i in path)
    clocks = {
        "issue": len(path),
        "MUFU": MUFU_CLOCKS * counts["MUFU"],
        "ALU": ALU_CLOCKS * (counts["pack"] + counts["other"]),
        "shared": SCHEDULERS * sum(map(smem_clocks, path)),
    }
    alone = clocks["issue"] - counts["HMMA"] - counts["MUFU"] + clocks["MUFU"]
    parts = {}
    for part in PARTS:
        tensor = part.hmma_clocks * counts["HMMA"]
        unit, most = max([("tensor", tensor), *clocks.items()], key=lambda item: item[1])
        parts[part.name] = {
            "tensor": tensor,
            "tensor_per": {unit: round(tensor / n, 2) for unit, n in clocks.items()},
            "bound": unit,
            "utilisation": round(tensor / most, 3),
            "tflops": round(part.tflops * tensor / most, 1),
            "without_overlap": round(tensor / (tensor + alone), 3),
        }
    return {"counts": {kind: counts[kind] for kind in KINDS}, "clocks": clocks, "parts": parts}


def kernels(library: Path, arch: str) -> Iterator[tuple[str, Shape, str]]:
    """(row's key, shape, listing) of every sm80 kernel with the identity score."""
    for part in dump("-sass", library, arch).split("Function : ")[1:]:
        name, _, listing = part.partition("\n")
        match, row = KERNEL.search(name), identify(name)
        if match and row and row[1] == "IdentityScore":
            sizes = {name: int(n) for name, n in match.groupdict().items() if n.isdigit()}
            yield row[0], Shape(**sizes, score=row[1]), listing


def print_tables(found: dict[str, dict[str, Any]]) -> None:
    wide = max(map(len, found), default=0)
    print("instructions of a warp for one tile")
    print(" " * wide, *(f"{kind:>7}" for kind in (*KINDS, "all")))
    for key, row in found.items():
        print(f"{key:<{wide}}", *(f"{n:>7}" for n in (*row["counts"].values(),)), end=" ")
        print(f"{row['clocks']['issue']:>7}")
    units = ("issue", "MUFU", "ALU", "shared")
    for part in PARTS:
        print(f"\n{part.name}: clocks of a scheduler for it, {part.hmma_clocks} an HMMA")
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
    parser.add_argument("--tier", help="whose rows all have to be there")
    parser.add_argument("--json", metavar="FILE", help="- for stdout, in place of the tables")
    options = parser.parse_args()

    found: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for key, shape, listing in kernels(options.library, options.arch):
        try:
            found[key] = model(hot_path(read_blocks(listing), per_tile(shape)))
        except SassError as error:
            failures[key] = str(error)
    if options.tier:
        generate = load_generator()
        build = generate.Build(tier=options.tier, simt=False)
        rows = [row for row in generate.load()[0] if row.kernel.name == "sm80"]
        for row in rows:
            if build.compiles(row) and row.key not in found:
                failures.setdefault(row.key, f"no kernel for {options.arch}")

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
