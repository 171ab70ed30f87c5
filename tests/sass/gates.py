#!/usr/bin/env python3
"""Gates on the machine code of the mma.sync kernels, read off the library without a GPU.

    gates.py --library libcutlass_attn.so [--arch sm_89] [--tier core]

For every compiled sm80 row of the manifest and every score:

- no local memory;
- registers few enough for the blocks per SM that the kernel asks for;
- exactly as many HMMA, LDSM, LDSM.T and LDGSTS as the tile shape implies. More of them mean that
  the compiler duplicated a loop body or that copies got narrower, fewer that work was lost.

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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

# The loop's body is compiled for tiles that need the mask's test and for those that do not.
BODIES = 2
# A copy of keys for whole tiles and for others; one of queries for tiles of several heads as well.
COPIES, COPIES_Q = 2, 3

REGISTERS = 65536  # of an SM

KERNEL = re.compile(
    r"4sm807ForwardIN7cutlass(?P<type>6half_t|10bfloat16_t)E"
    r"Li(?P<head_dim>\d+)ELi(?P<head_dim_v>\d+)ELi(?P<m>\d+)ELi(?P<n>\d+)ELi(?P<warps>\d+)"
    r"ELi(?P<columns>\d+)EEENS_\d+(?P<score>\w+?)EEE"
)
DTYPES = {"6half_t": "f16", "10bfloat16_t": "bf16"}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "kernels" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Shape:
    """What a kernel's machine code depends on."""

    head_dim: int
    head_dim_v: int
    m: int
    n: int
    warps: int
    columns: int
    score: str

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.columns

    @property
    def rows(self) -> int:
        """m16 blocks of a warp."""
        return self.m // (16 * self.warps)

    @property
    def is_pipelined(self) -> bool:
        """Q stays in registers: kPipelined of sm80/config.hpp."""
        return self.columns == 1 and self.rows * (self.head_dim // 16) * 4 <= 32

    @property
    def slice(self) -> int:
        """Keys that go through softmax together: slice() of sm80/config.hpp, in units of 16."""
        return 2 if self.is_pipelined and self.n >= 64 and self.score == "IdentityScore" else 1

    @property
    def steps_in_registers(self) -> int:
        """Steps of 16 columns of Q that stay in registers: sm80/config_split.hpp."""
        budget = 144 if self.score == "GeneralScore" else 160
        steps = (budget - self.rows * (self.head_dim_v // self.columns // 8) * 4) // (self.rows * 4)
        return min(steps, self.head_dim // 16)

    def counts(self) -> dict[str, int]:
        """Instructions of one thread's code.

        m16n8k16 products: Q K^T has n/8 of them per 16 of head_dim, P V head_dim_v/8 per 16 keys,
        for every 16 rows of a warp. ldmatrix.x4 brings 16x16 elements; Q and K come plain, V
        transposed. cp.async brings 8 elements. Outside the bodies are the first copies.
        """
        blocks, dims, dims_v = self.n // 16, self.head_dim // 16, self.head_dim_v // 16
        load_q, load_k, load_v = (
            -(-rows * d // 8 // self.threads)
            for rows, d in (
                (self.m, self.head_dim),
                (self.n, self.head_dim),
                (self.n, self.head_dim_v),
            )
        )
        copies = COPIES_Q * load_q + COPIES * (load_k + BODIES * (load_k + load_v))
        if self.columns > 1:
            # A warp has a share of the keys for Q K^T, and one of V's columns; it reads P as well.
            keys, dims_v = self.n // self.columns, dims_v // self.columns
            kept = self.steps_in_registers
            body = dims * keys // 16 + self.rows * (dims - kept + blocks)
            return {
                "HMMA": BODIES * self.rows * (dims * keys // 8 + 2 * dims_v * blocks),
                "LDSM": BODIES * body + self.rows * kept,
                "LDSM.T": BODIES * blocks * dims_v,
                "LDGSTS": copies,
            }
        if self.is_pipelined:
            # Q once; the first slice's Q K^T and the last one's P V, of which the loop has read the
            # first 16 columns; in the body for any tile Q K^T of each slice once more, for slices
            # that have to raise a reference.
            qk, pv = (BODIES + 1) * blocks + self.slice, BODIES * blocks + self.slice
            return {
                "HMMA": self.rows * 2 * (qk * dims + pv * dims_v),
                "LDSM": self.rows * dims + qk * dims,
                "LDSM.T": pv * dims_v - 1,
                "LDGSTS": copies + COPIES * load_v,
            }
        return {
            "HMMA": BODIES * blocks * self.rows * 2 * (dims + dims_v),
            "LDSM": BODIES * (blocks + self.rows) * dims,
            "LDSM.T": BODIES * blocks * dims_v,
            "LDGSTS": copies,
        }

    def register_limit(self) -> int:
        """Registers a thread may use: kMinBlocksPerSm of sm80/config.hpp on an SM."""
        small = self.rows == 1 and max(self.head_dim, self.head_dim_v) <= 64
        blocks = 1 if self.columns > 1 else 3 if small else 2
        return min(REGISTERS // (self.threads * blocks) // 8 * 8, 255)


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
    tile += f"c{match['columns']}" * (match["columns"] != "1")
    dims = f"d{match['head_dim']}"
    dims += f"v{match['head_dim_v']}" * (match["head_dim_v"] != match["head_dim"])
    family = "sm80/general" if match["score"] == "GeneralScore" else "sm80"
    return f"{family}/{DTYPES[match['type']]}/{dims}/{tile}", match["score"]


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
        operations = re.findall(r"\b(?:HMMA|LDSM|LDGSTS|LDL|STL)[.\w]*", code)
        bases = [operation.split(".")[0] for operation in operations]
        for operation, base in zip(operations, bases):
            counts["LDSM.T" if base == "LDSM" and ".MT" in operation else base] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--arch", default="sm_89")
    parser.add_argument("--tier", default="core")
    options = parser.parse_args()

    generate = load_generator()
    rows, _ = generate.load()
    build = generate.Build(tier=options.tier, simt=False)
    resources = read_resources(options.library, options.arch)
    counts = read_counts(options.library, options.arch)
    failures = 0

    def gate(what: str, measured: object, holds: bool, allowed: str) -> None:
        nonlocal failures
        failures += not holds
        print(f"  {'ok  ' if holds else 'FAIL'} {what:<10} {measured!s:>5}  allowed: {allowed}")

    families = ("sm80", "sm80/general")
    checked = [row for row in rows if row.kernel.name in families and build.compiles(row)]
    for row in checked:
        for score in row.kernel.scores.values():
            print(f"{row.key} {score}")
            kernel = (row.key, score)
            if kernel not in resources or kernel not in counts:
                gate("code", "none", False, f"one kernel for {options.arch}")
                continue
            used, tile = resources[kernel], row.tile
            local = counts[kernel]["LDL"] + counts[kernel]["STL"]
            gate("local", local, local == 0, "0 loads and stores")
            stack = used["STACK"] + used["LOCAL"]
            gate("stack", stack, stack == 0, "0 bytes")
            dims = row.head_dims
            shape = Shape(dims.qk, dims.v, **vars(tile), score=score)
            limit = shape.register_limit()
            gate("registers", used["REG"], used["REG"] <= limit, f"<= {limit}")
            for operation, count in shape.counts().items():
                measured = counts[kernel][operation]
                gate(operation, measured, measured == count, str(count))
    print(f"{len(checked)} rows, {failures} gates failed")
    return 1 if failures or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
