#!/usr/bin/env python3
"""Gates on the machine code of the mma.sync kernels, read off the library without a GPU.

    gates.py --library libcutlass_attn.so [--arch sm_89] [--tier core]

For every compiled sm80 row of the manifest and every score:

- no local memory: neither spills nor a stack frame;
- registers few enough for the blocks that an SM's shared memory holds, up to MAX_BLOCKS of them;
- exactly as many HMMA, LDSM, LDSM.T and LDGSTS as the tile shape implies. More of them mean that
  the compiler duplicated the loop body or that copies got narrower, fewer that work was lost.

Needs cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

# The loop's body is compiled for tiles that need the mask's test and for those that do not.
BODIES = 2

# An SM of Ada.
SHARED_MEMORY = 100 * 1024
RESERVED_PER_BLOCK = 1024
REGISTERS = 65536
MAX_BLOCKS = 3  # more of them are not asked for

KERNEL = re.compile(
    r"4sm807ForwardIN7cutlass(?P<type>6half_t|10bfloat16_t)E"
    r"Li(?P<head_dim>\d+)ELi(?P<m>\d+)ELi(?P<n>\d+)ELi(?P<warps>\d+)EEENS_\d+(?P<score>\w+?)EEE"
)
DTYPES = {"6half_t": "f16", "10bfloat16_t": "bf16"}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "kernels" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def expected_counts(head_dim: int, m: int, n: int, warps: int) -> dict[str, int]:
    """Instructions of one thread's code that the tile shape implies.

    m16n8k16 products: Q K^T has n/8 of them per 16 of head_dim, P V head_dim/8 per 16 keys, for
    every 16 rows of a warp. ldmatrix.x4 brings 16x16 elements; Q and K come plain, V transposed.
    cp.async brings 8 elements: Q and the first K before the loop, V and the next K in its body.
    """
    rows = m // (16 * warps)
    keys, dims = n // 16, head_dim // 16
    threads = 32 * warps
    load_q, load_kv = m * head_dim // 8 // threads, n * head_dim // 8 // threads
    return {
        "HMMA": BODIES * rows * 2 * (2 * keys * dims),
        "LDSM": BODIES * (rows + keys) * dims,
        "LDSM.T": BODIES * keys * dims,
        "LDGSTS": load_q + load_kv + BODIES * 2 * load_kv,
    }


def register_limit(head_dim: int, m: int, n: int, warps: int) -> int:
    """Registers a thread may use if as many blocks as fit share an SM; Q, K and V are 16-bit."""
    shared = 2 * (m + 2 * n) * head_dim
    blocks = min(SHARED_MEMORY // (shared + RESERVED_PER_BLOCK), MAX_BLOCKS)
    return min(REGISTERS // (32 * warps * blocks) // 8 * 8, 255)


def cuobjdump() -> str:
    """The tool of the PyPI wheels, else the one on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for tool in sorted(Path(location).glob("cu*/bin/cuobjdump"), reverse=True):
            return str(tool)
    if tool := shutil.which("cuobjdump"):
        return tool
    sys.exit("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def dump(option: str, library: Path, arch: str) -> str:
    tool = cuobjdump()
    search = os.pathsep.join([str(Path(tool).parent), os.environ["PATH"]])  # for nvdisasm
    return subprocess.run(
        [tool, option, "-arch", arch, str(library)],
        env={**os.environ, "PATH": search},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def identify(mangled: str) -> tuple[str, str] | None:
    """(key of the manifest's row, score functor) of a kernel, or None if it is not an sm80 one."""
    if not (match := KERNEL.search(mangled)):
        return None
    tile = "x".join(match[name] for name in ("m", "n", "warps"))
    return f"sm80/{DTYPES[match['type']]}/d{match['head_dim']}/{tile}", match["score"]


def read_resources(library: Path, arch: str) -> dict[tuple[str, str], dict[str, int]]:
    """Registers, stack and local memory of every sm80 kernel."""
    found = {}
    text = dump("-res-usage", library, arch)
    for name, usage in re.findall(r"Function (\w+):\n\s*(REG:.*)", text):
        if kernel := identify(name):
            found[kernel] = {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", usage)}
    return found


def read_counts(library: Path, arch: str) -> dict[tuple[str, str], Counter[str]]:
    """How often every sm80 kernel's code has each of the instructions that the gates count."""
    found = {}
    for part in dump("-sass", library, arch).split("Function : ")[1:]:
        name, _, code = part.partition("\n")
        if not (kernel := identify(name)):
            continue
        counts = found[kernel] = Counter()
        for operation in re.findall(r"\b(?:HMMA|LDSM|LDGSTS|LDL|STL)[.\w]*", code):
            base = operation.split(".")[0]
            counts["LDSM.T" if base == "LDSM" and ".MT" in operation else base] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--arch", default="sm_89")
    parser.add_argument("--tier", default="core")
    options = parser.parse_args()

    generate = load_generator()
    rows, scores = generate.load()
    build = generate.Build(tier=options.tier, simt=False)
    resources = read_resources(options.library, options.arch)
    counts = read_counts(options.library, options.arch)
    failures = 0

    def gate(what: str, measured: object, holds: bool, allowed: str) -> None:
        nonlocal failures
        failures += not holds
        print(f"  {'ok  ' if holds else 'FAIL'} {what:<10} {measured!s:>5}  allowed: {allowed}")

    checked = [row for row in rows if row.kernel.name == "sm80" and build.compiles(row)]
    for row in checked:
        for score in scores.values():
            print(f"{row.key} {score}")
            kernel = (row.key, score)
            if kernel not in resources or kernel not in counts:
                gate("code", "none", False, f"one kernel for {options.arch}")
                continue
            used, tile = resources[kernel], row.tile
            local = used["STACK"] + used["LOCAL"] + counts[kernel]["LDL"] + counts[kernel]["STL"]
            gate("local", local, local == 0, "none (stack frame, spills, LDL, STL)")
            shape = (row.head_dim, tile.m, tile.n, tile.warps)
            limit = register_limit(*shape)
            gate("registers", used["REG"], used["REG"] <= limit, f"<= {limit}")
            for operation, count in expected_counts(*shape).items():
                measured = counts[kernel][operation]
                gate(operation, measured, measured == count, str(count))
    print(f"{len(checked)} rows, {failures} gates failed")
    return 1 if failures or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
