"""Finds the compiler: NVRTC, and the headers of the CUDA runtime of its major version."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .nvrtc import CompileError, Nvrtc

__all__ = ["INSTALL", "OPTIONS", "CompileError", "Compiler", "CompilerNotFound", "find_compiler"]

# What the extra `jit` requires. By name of the extra, pip would look for this package on its index.
REQUIREMENT = "cuda-toolkit[cudart,nvrtc]>=12.8,<14"
INSTALL = f"pip install '{REQUIREMENT}'"
LEAST = (12, 8)
SYSTEM = "/usr/local/cuda"
OPTIONS = ("--std=c++17", "-default-device")  # CUTLASS leaves functions unannotated
_REPORT = "--ptxas-options=-v"  # log registers and spills; does not change the code


class CompilerNotFound(RuntimeError):
    """NVRTC or headers of CUDA are missing; the message says what to install."""


@dataclass(frozen=True)
class Compiler:
    """NVRTC and its include folders."""

    nvrtc: Nvrtc
    includes: tuple[Path, ...]

    @property
    def version(self) -> tuple[int, int]:
        return self.nvrtc.version

    def compile(self, source: str, arch: str) -> bytes:
        """Machine code of a translation unit. Raises CompileError."""
        return self.compile_with_log(source, arch)[0]

    def compile_with_log(self, source: str, arch: str) -> tuple[bytes, str]:
        """Machine code, and the log of NVRTC and ptxas. Raises CompileError."""
        options = [f"--gpu-architecture={arch}", *OPTIONS, _REPORT]
        options += [f"--include-path={folder}" for folder in self.includes]
        # NVRTC looks up #include "..." in the folder of the including file, which this path names.
        return self.nvrtc.compile(source, str(self.includes[0] / "unit.cu"), options)


def find_compiler(tree: Path) -> Compiler:
    """The first usable NVRTC, for the sources in `tree`. Raises CompilerNotFound.

    It comes from NVIDIA's wheels (installed by CUDA builds of torch and by the extra `jit`), from
    conda, or from a CUDA toolkit.
    """
    if not (tree / "units.json").is_file():
        raise CompilerNotFound("this build has no kernels that are compiled at run time")
    own = (tree / "include", tree / "include" / "cccl")
    faults = []
    for path in dict.fromkeys(_libraries()):
        try:
            nvrtc = Nvrtc(path)
        except (OSError, AttributeError, RuntimeError) as error:
            faults.append(str(error))
            continue
        if nvrtc.version < LEAST:
            faults.append(f"{path} is {nvrtc}, allowed: 12.8 or later")
        elif runtime := _runtime_headers(path, nvrtc.version[0]):
            return Compiler(nvrtc, (*own, runtime))
        else:
            faults.append(f"no headers of the CUDA {nvrtc.version[0]} runtime for {path}")
    raise CompilerNotFound(f"no NVRTC{': ' * bool(faults)}{'; '.join(faults)}; {INSTALL}")


def _libraries() -> Iterator[Path]:
    """Candidate files of NVRTC, in the order in which they are tried."""
    found = None
    with contextlib.suppress(ImportError, RuntimeError):  # pathfinder finds none
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found = load_nvidia_dynamic_lib("nvrtc").abs_path
    if found:
        yield Path(found)
    for prefix in _prefixes():
        for folder in ("lib", "lib64"):
            yield from sorted((prefix / folder).glob("libnvrtc.so.1[0-9]"), reverse=True)


def _prefixes() -> list[Path]:
    """Folders that may have lib/ or include/ of CUDA."""
    prefixes = []
    with contextlib.suppress(ImportError):
        from cuda.pathfinder import find_nvidia_header_directory

        if found := find_nvidia_header_directory("cudart"):
            prefixes.append(Path(found).parent)
    # pathfinder, if installed, looks in site-packages but not in the rest of sys.path.
    wheels = importlib.util.find_spec("nvidia")
    for place in (wheels and wheels.submodule_search_locations) or ():
        prefixes += [Path(place) / name for name in ("cu13", "cuda_nvrtc", "cuda_runtime")]
    # Nor does it look for nvcc, and it stops at the first NVRTC, which may be too old.
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    if nvcc := shutil.which("nvcc"):
        roots += [str(Path(nvcc).parents[1]), str(Path(nvcc).resolve().parents[1])]
    roots.append(SYSTEM)
    return list(dict.fromkeys([*prefixes, *(Path(root) for root in roots if root)]))


def _runtime_headers(library: Path, major: int) -> Path | None:
    """The folder of cuda_fp16.h of a major version: that of NVRTC's own package, else any other."""
    beside = library.parent.parent
    prefixes = [beside, beside.parent / "cuda_runtime"]  # the latter of CUDA 12's wheels
    for prefix in [*prefixes, *_prefixes()]:
        folder = prefix / "include"
        header = folder / "cuda_runtime_api.h"
        if not (folder / "cuda_fp16.h").is_file() or not header.is_file():
            continue
        version = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
        if version and int(version[1]) // 1000 == major:
            return folder
    return None
