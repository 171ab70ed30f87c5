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

# Mangled names, from the kernel's type to its score.
_TYPE = r"I(?P<type>f|N7cutlass(?:6half_t|10bfloat16_t)E)"
_TILE = r"Li(?P<m>\d+)ELi(?P<n>\d+)ELi(?P<warps>\d+)E"
_SCORE = r"EENS_\d+(?P<score>\w+?)EEE"
SM80 = re.compile(
    rf"4sm807Forward{_TYPE}Li(?P<head_dim>\d+)ELi(?P<head_dim_v>\d+)E{_TILE}"
    rf"Li(?P<columns>\d+)E(?P<sums>(?:f|S\d*_){{2}}){_SCORE}"
)
WMMA = re.compile(
    rf"4wmma7Forward{_TYPE}Li(?P<head_dim>\d+)E{_TILE}Li(?P<frag_m>\d+)ELi(?P<frag_n>\d+)E{_SCORE}"
)
SCALAR = re.compile(
    rf"6scalar\d+(?P<name>Vectorized|Tiled|Minimal){_TYPE}(?:Li(?P<head_dim>\d+)E)?{_SCORE}"
)
# What Q K^T and P V are added up in, by the two types of the template: float, or the element's.
FAMILIES = {(0, 0): "sm80", (1, 1): "sm80/fp16", (1, 0): "sm80/fp16_qk", (0, 1): "sm80/fp16_pv"}
FRAGMENTS = {("16", "16"): "wmma", ("8", "32"): "wmma/8x32x16"}
DTYPES = {"N7cutlass6half_tE": "f16", "N7cutlass10bfloat16_tE": "bf16", "f": "f32"}


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
    """(key of the manifest's row, score functor) of a kernel; None for any other function."""
    if match := SM80.search(mangled):
        return _sm80_key(match), match["score"]
    if match := WMMA.search(mangled):
        family = FRAGMENTS[match["frag_m"], match["frag_n"]]
        tile = "x".join(match[name] for name in ("m", "n", "warps"))
        key = f"{family}/{DTYPES[match['type']]}/d{match['head_dim']}/{tile}"
        return key, match["score"]
    if match := SCALAR.search(mangled):
        key = f"scalar/{match['name'].lower()}/{DTYPES[match['type']]}"
        return key + (f"/d{match['head_dim']}" if match["head_dim"] else ""), match["score"]
    return None


def _sm80_key(match: re.Match[str]) -> str:
    tile = "x".join(match[name] for name in ("m", "n", "warps"))
    tile += f"c{match['columns']}" * (match["columns"] != "1")
    dims = f"d{match['head_dim']}"
    dims += f"v{match['head_dim_v']}" * (match["head_dim_v"] != match["head_dim"])
    qk, pv = re.findall(r"f|S\d*_", match["sums"])
    family = FAMILIES[qk != "f", pv != "f"]
    if match["score"] == "GeneralScore":
        family = "sm80/general"
    return f"{family}/{DTYPES[match['type']]}/{dims}/{tile}"


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
    """Registers, stack and local memory of every kernel, by its key and score."""
    found = parse_resources(dump("-res-usage", library, arch))
    return {kernel: used for name, used in found.items() if (kernel := identify(name))}


def read_counts(library: Path, arch: str) -> dict[tuple[str, str], Counter[str]]:
    """Instructions of every kernel that the gates count, by its key and score."""
    listings = parse_listings(dump("-sass", library, arch))
    return {kernel: count(code) for name, code in listings if (kernel := identify(name))}


def static_figures(
    used: Mapping[str, int], counts: Mapping[str, int], smem: int | None
) -> dict[str, float]:
    """The gates' figures that machine code has, of its resources and instructions.

    `smem` is the shared memory that the kernel is launched with, beside what it declares; None if
    unknown, and then there is no figure of it.
    """
    local = (
        used.get("STACK", 0) + used.get("LOCAL", 0) + counts.get("LDL", 0) + counts.get("STL", 0)
    )
    figures: dict[str, float] = {"registers": used["REG"], "local_memory": local}
    if smem is not None:
        figures["shared_memory"] = smem + used.get("SHARED", 0)
    return figures
