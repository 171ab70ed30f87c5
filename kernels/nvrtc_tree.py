#!/usr/bin/env python3
"""Gathers the headers of this project, CUTLASS and CCCL with which NVRTC compiles kernels.

    nvrtc_tree.py --units gen/units.json --space gen/space.json --cutlass CUTLASS/include \\
        --cuda CUDA/include --cxx g++ --out DIR

writes into DIR

    units.json        sources of the kernels that this build leaves out
    score_mods.json   sources of the kernels that a score_mod can be compiled with
    space.json        sources of other tiles, to be filled in
    include/          the headers that a compilation opens, and no others
    include/cccl/     the headers of CCCL
    digest            hash of the headers: kernels compiled with other headers are not reused
    CUTLASS_LICENSE.txt, CCCL_LICENSE.txt

Headers of the CUDA runtime are not included: they come with CUDA's own wheels or toolkit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parent
CCCL_LICENCE = KERNELS.parent / "third_party/cccl/LICENSE.txt"
INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"].*$", re.MULTILINE)

# These determine which headers are opened: the lowest and the newest NVRTC that were tried, and one
# GPU for each family of kernels.
VERSIONS = ((12, 8), (13, 5))
ARCHS = (
    ("__CUDA_ARCH__=800",),
    ("__CUDA_ARCH__=890",),
    ("__CUDA_ARCH__=900", "__CUDA_ARCH_FEAT_SM90_ALL", "__CUDA_ARCH_SPECIFIC__=900"),
)
# NVRTC defines these itself, including the guards of runtime headers that it has read in advance.
PREDEFINED = (
    *("__CUDACC__", "__CUDACC_RTC__", "__LP64__", "__EDG__", "__EDG_VERSION__=606"),
    *("__CUDA_RUNTIME_H__", "__DEVICE_TYPES_H__", "__DRIVER_TYPES_H__"),
    *("__HOST_DEFINES_H__", "__VECTOR_TYPES_H__"),
)
# Variables that make g++ and clang++ search more folders: CPATH, CPLUS_INCLUDE_PATH, ...
SEARCHED = ("CPATH", "INCLUDE_PATH")


def opened(sources: list[str], folders: list[Path], cxx: str) -> list[Path]:
    """The files that NVRTC opens for the sources, as listed by the C++ preprocessor."""
    text = "\n".join(dict.fromkeys(line for x in sources for line in INCLUDE.findall(x)))
    found: dict[Path, None] = {}
    # -nostdinc does not exclude folders of the environment.
    env = {name: value for name, value in os.environ.items() if not name.endswith(SEARCHED)}
    for (major, minor), arch in itertools.product(VERSIONS, ARCHS):
        version = (
            f"__CUDACC_VER_MAJOR__={major}",
            f"__CUDACC_VER_MINOR__={minor}",
            f"CUDART_VERSION={1000 * major + 10 * minor}",
        )
        # Nothing of the host: neither its headers nor its macros.
        command = [cxx, "-M", "-nostdinc", "-undef", "-std=c++17", "-x", "c++", "-"]
        command += [f"-D{name}" for name in (*PREDEFINED, *arch, *version)]
        command += [f"-I{folder}" for folder in folders]
        run = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, env=env
        )
        if run.returncode:
            sys.exit(f"{cxx} cannot list the headers that kernels include:\n{run.stderr}")
        rule = run.stdout.split(":", 1)[1].replace("\\\n", " ")
        names = (name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", rule))
        found.update((Path(name), None) for name in names if name not in ("", "-"))
    return list(found)


def version_of(header: Path, pattern: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(pattern, header.read_text(encoding="utf-8"), re.MULTILINE)))


def find_cccl(cuda: list[Path], cutlass: Path) -> Path:
    """The folder of CCCL's headers: in the toolkit, otherwise in a wheel of this environment.

    NVRTC cannot compile CUTLASS before 4.7 with CCCL 3.2 or later (in CUDA 13.2): both specialise
    std::tuple_size.
    """
    wheels = [Path(place) / "nvidia" / "cu13" / "include" for place in sys.path if place]
    is_old = version_of(cutlass / "cutlass/version.h", r"#define CUTLASS_M\w+OR (\d+)") < (4, 7)
    seen = ""
    for folder in [*cuda, *wheels]:
        for root in (folder / "cccl", folder):
            if not (root / "cuda/std/cstdint").is_file():
                continue
            header = root / "cuda/std/__cccl/version.h"
            (number,) = version_of(header, r"#\s*define CCCL_VERSION (\d+)")
            if not is_old or number < 3_002_000:
                return root
            seen += f"\n  {root} has {number // 1_000_000}.{number // 1_000 % 1_000}"
    sys.exit(
        "no headers of CCCL before 3.2, which NVRTC needs with CUTLASS before 4.7; build with CUDA "
        f"12.8 to 13.1, or have the wheel nvidia-cuda-cccl<13.2 in the build's environment{seen}"
    )


def licence(cutlass: Path) -> Path:
    """CUTLASS's licence file: in a checkout, or in the wheel that contains the headers."""
    candidates = [cutlass.parent / "LICENSE.txt"]
    candidates += cutlass.parents[2].glob("nvidia_cutlass-*.dist-info/licenses/LICENSE.txt")
    for path in candidates:
        if path.is_file():
            return path
    sys.exit(f"no LICENSE.txt of CUTLASS with {cutlass}: its headers cannot be passed on without")


def write(out: Path, units: Path, space: Path, cutlass: Path, cuda: list[Path], cxx: str) -> None:
    score_mods = units.parent / "score_mods.json"
    sources: list[str] = []
    for path in (units, score_mods):
        sources += json.loads(path.read_text(encoding="utf-8")).values()
    sources += [entry["source"] for entry in json.loads(space.read_text(encoding="utf-8")).values()]
    shutil.rmtree(out, ignore_errors=True)
    (out / "include").mkdir(parents=True)
    cccl = find_cccl(cuda, cutlass)
    # Order in which NVRTC searches: {folder: its place in `include`}.
    places = {KERNELS / "nvrtc": "", KERNELS: "", units.parent: "", cutlass: "", cccl: "cccl"}
    headers: dict[str, Path] = {}
    for path in opened(sources, [*places, *cuda], cxx):
        if root := next((root for root in places if path.is_relative_to(root)), None):
            headers[(Path(places[root]) / path.relative_to(root)).as_posix()] = path
    digest = hashlib.sha256()
    for name, path in sorted(headers.items()):
        target = out / "include" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        digest.update(name.encode() + b"\0" + path.read_bytes())
    shutil.copyfile(units, out / "units.json")
    shutil.copyfile(score_mods, out / "score_mods.json")
    shutil.copyfile(space, out / "space.json")
    (out / "digest").write_text(digest.hexdigest(), encoding="utf-8")
    shutil.copyfile(licence(cutlass), out / "CUTLASS_LICENSE.txt")
    shutil.copyfile(CCCL_LICENCE, out / "CCCL_LICENSE.txt")


def main() -> None:
    def folders(text: str) -> list[Path]:  # a list as CMake writes it
        return [Path(folder) for folder in text.split(";") if folder]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=Path, required=True)
    parser.add_argument("--space", type=Path, required=True)
    parser.add_argument("--cutlass", type=Path, required=True, help="its include directory")
    parser.add_argument("--cuda", type=folders, required=True, help="the toolkit's, with ; between")
    parser.add_argument("--cxx", required=True, help="g++, or a compiler with its options")
    parser.add_argument("--out", type=Path, required=True, help="directory for these files alone")
    options = parser.parse_args()
    write(options.out, options.units, options.space, options.cutlass, options.cuda, options.cxx)


if __name__ == "__main__":
    main()
