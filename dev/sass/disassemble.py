"""Runs cuobjdump and nvdisasm on compiled kernels and parses their output: registers, local memory,
instructions and control flow.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

INSTALL = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


class ToolNotFound(RuntimeError):
    """cuobjdump or nvdisasm is missing; the message says what to install."""


def cuobjdump() -> str:
    """The tool of the PyPI wheels, else the one on PATH. Raises ToolNotFound."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for tool in sorted(Path(location).glob("cu*/bin/cuobjdump"), reverse=True):
            return str(tool)
    if tool_on_path := shutil.which("cuobjdump"):
        return tool_on_path
    raise ToolNotFound(f"no cuobjdump: {INSTALL}")


def _run(*command: str, cwd: str | None = None) -> str:
    """Output of a tool. nvdisasm, which cuobjdump also runs, is searched first in its folder."""
    search = os.pathsep.join([str(Path(cuobjdump()).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": search}
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ToolNotFound(f"no {command[0]}: {INSTALL}") from error
    sys.stderr.write(without_warnings(done.stderr))
    done.check_returncode()
    return done.stdout


def without_warnings(text: str) -> str:
    """What a tool prints on stderr, without cuobjdump's warnings: for a few selected functions, it
    prints one for every other cubin of the library."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("cuobjdump warning"))


def dump(option: str, library: Path, arch: str, functions: Iterable[str] = ()) -> str:
    """Output of cuobjdump for a library's or a .cubin's code for `arch`, of all functions or of
    some."""
    of = ["-fun", names] if (names := ",".join(functions)) else []
    return _run(cuobjdump(), option, *of, "-arch", arch, str(library))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def control_flow(library: Path, arch: str) -> Iterator[tuple[str, str]]:
    """(function, its graph of basic blocks) for a library's or a .cubin's code for `arch`."""
    with tempfile.TemporaryDirectory() as folder:
        _run(cuobjdump(), "-xelf", arch, str(library.resolve()), cwd=folder)
        # In the library's order: file names differ only in their number.
        for cubin in sorted(Path(folder).iterdir(), key=lambda path: _numbers(path.name)):
            yield from parse_graphs(_run("nvdisasm", "-bbcfg", "-poff", str(cubin)))


def identify(function: str) -> tuple[str, str] | None:
    """(symbol of the variant, score functor's token) of an entry; None for any other function."""
    symbol, separator, token = function.rpartition("__")
    return (symbol, token) if separator and not function.startswith("_") else None


def parse_resources(text: str) -> dict[str, dict[str, int]]:
    """{function: {"REG", "STACK", "LOCAL", "SHARED", ...: number}} of cuobjdump -res-usage."""
    return {
        name: {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", usage)}
        for name, usage in re.findall(r"Function (\w+):\n\s*(REG:.*)", text)
    }


def parse_listings(text: str) -> Iterator[tuple[str, str]]:
    """(function, its instructions) of cuobjdump -sass."""
    for part in text.split("Function : ")[1:]:
        name, _, listing = part.partition("\n")
        yield name.strip(), listing


def parse_graphs(text: str) -> Iterator[tuple[str, str]]:
    """(function, its graph) of nvdisasm -bbcfg."""
    for part in text.split('subgraph "cluster_')[1:]:
        name, _, graph = part.partition('"')
        yield name, graph


def count(listing: str) -> Counter[str]:
    """Number of each instruction in the code that the gates count."""
    counts: Counter[str] = Counter()
    kinds = (
        r"HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|LDSM|LDGSTS|LDL|STL|I2FP|I2F|F2I|USETMAXREG"
        r"|WARPGROUP\.DEPBAR"
    )
    for operation in re.findall(rf"\b(?:{kinds})\b[.\w]*", listing):
        if operation.startswith("WARPGROUP"):
            counts["WARPGROUP.DEPBAR"] += 1
            continue
        base = operation.split(".")[0]
        counts["LDSM.T" if base == "LDSM" and ".MT" in operation else base] += 1
        if operation == "HMMA.16816.F16":  # the sum, not the operands
            counts["HMMA.F16"] += 1
    return counts


def read_resources(library: Path, arch: str) -> dict[tuple[str, str], dict[str, int]]:
    """Registers, stack and local memory of every kernel, by its symbol and score."""
    found = parse_resources(dump("-res-usage", library, arch))
    return {kernel: used for name, used in found.items() if (kernel := identify(name))}


def read_counts(
    library: Path, arch: str, kernels: Iterable[tuple[str, str]] = ()
) -> dict[tuple[str, str], Counter[str]]:
    """Instructions of every kernel that the gates count, by its symbol and score, or of some."""
    functions = (f"{symbol}__{score}" for symbol, score in kernels)
    listings = parse_listings(dump("-sass", library, arch, functions))
    return {kernel: count(code) for name, code in listings if (kernel := identify(name))}


def static_figures(
    used: Mapping[str, int], counts: Mapping[str, int], smem: int | None
) -> dict[str, float]:
    """The gates' figures that machine code determines, from its resources and instructions.

    `smem`: shared memory that the kernel is launched with, in addition to what it declares; None if
    unknown, and then it has no figure.
    """
    local = (
        used.get("STACK", 0) + used.get("LOCAL", 0) + counts.get("LDL", 0) + counts.get("STL", 0)
    )
    figures: dict[str, float] = {"registers": used["REG"], "local_memory": local}
    if smem is not None:
        figures["shared_memory"] = smem + used.get("SHARED", 0)
    return figures
