"""Registers, local memory and instructions of compiled kernels, by cuobjdump."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

INSTALL = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"

KERNEL = re.compile(
    r"4sm807ForwardIN7cutlass(?P<type>6half_t|10bfloat16_t)E"
    r"Li(?P<head_dim>\d+)ELi(?P<head_dim_v>\d+)ELi(?P<m>\d+)ELi(?P<n>\d+)ELi(?P<warps>\d+)"
    r"ELi(?P<columns>\d+)E(?P<sums>(?:f|S\d*_){2})EENS_\d+(?P<score>\w+?)EEE"
)
# What Q K^T and P V are added up in, by the two types of the template: float, or the element's.
FAMILIES = {(0, 0): "sm80", (1, 1): "sm80/fp16", (1, 0): "sm80/fp16_qk", (0, 1): "sm80/fp16_pv"}
DTYPES = {"6half_t": "f16", "10bfloat16_t": "bf16"}


class ToolNotFound(RuntimeError):
    """cuobjdump is missing; the message says what to install."""


def cuobjdump() -> str:
    """The tool of the PyPI wheels, else the one on PATH. Raises ToolNotFound."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for tool in sorted(Path(location).glob("cu*/bin/cuobjdump"), reverse=True):
            return str(tool)
    if tool_on_path := shutil.which("cuobjdump"):
        return tool_on_path
    raise ToolNotFound(f"no cuobjdump: {INSTALL}")


def dump(option: str, library: Path, arch: str) -> str:
    """What cuobjdump prints of a library's or a .cubin's code for `arch`."""
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
    qk, pv = re.findall(r"f|S\d*_", match["sums"])
    family = FAMILIES[qk != "f", pv != "f"]
    if match["score"] == "GeneralScore":
        family = "sm80/general"
    return f"{family}/{DTYPES[match['type']]}/{dims}/{tile}", match["score"]


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


def count(listing: str) -> Counter[str]:
    """How often the code has each of the instructions that the gates count."""
    counts: Counter[str] = Counter()
    for operation in re.findall(r"\b(?:HMMA|LDSM|LDGSTS|LDL|STL)[.\w]*", listing):
        base = operation.split(".")[0]
        counts["LDSM.T" if base == "LDSM" and ".MT" in operation else base] += 1
        if operation == "HMMA.16816.F16":  # the sum, not the operands
            counts["HMMA.F16"] += 1
    return counts


def read_resources(library: Path, arch: str) -> dict[tuple[str, str], dict[str, int]]:
    """Registers, stack and local memory of every sm80 kernel, by its key and score."""
    found = parse_resources(dump("-res-usage", library, arch))
    return {kernel: used for name, used in found.items() if (kernel := identify(name))}


def read_counts(library: Path, arch: str) -> dict[tuple[str, str], Counter[str]]:
    """Instructions of every sm80 kernel that the gates count, by its key and score."""
    listings = parse_listings(dump("-sass", library, arch))
    return {kernel: count(code) for name, code in listings if (kernel := identify(name))}


def static_figures(
    used: Mapping[str, int], counts: Mapping[str, int], smem: int
) -> dict[str, float]:
    """The gates' figures that machine code has, of its resources and instructions.

    `smem` is the shared memory that the kernel is launched with, beside what it declares.
    """
    local = (
        used.get("STACK", 0) + used.get("LOCAL", 0) + counts.get("LDL", 0) + counts.get("STL", 0)
    )
    return {
        "registers": used["REG"],
        "local_memory": local,
        "shared_memory": smem + used.get("SHARED", 0),
    }
