"""NVRTC, through the Python package cuda-bindings, and the headers that it needs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALL = "pip install 'cutlass_attn[jit]'"
OPTIONS = ("--std=c++17", "-default-device")  # CUTLASS leaves functions unannotated
_REPORT = "--ptxas-options=-v"  # registers and spills, in the log; the code is the same


class CompilerNotFound(RuntimeError):
    """NVRTC or headers of CUDA are missing; the message says what to install."""


class CompileError(RuntimeError):
    """NVRTC refuses a kernel; the message quotes it."""


@dataclass(frozen=True)
class Compiler:
    """NVRTC with the folders of headers."""

    nvrtc: Any  # the module cuda.bindings.nvrtc
    version: tuple[int, int]
    includes: tuple[Path, ...]

    def compile(self, source: str, arch: str) -> bytes:
        """Machine code of a translation unit. Raises CompileError."""
        return self.compile_with_log(source, arch)[0]

    def compile_with_log(self, source: str, arch: str) -> tuple[bytes, str]:
        """Machine code, and what NVRTC and ptxas say of it. Raises CompileError."""
        options = [f"--gpu-architecture={arch}", *OPTIONS, _REPORT]
        options += [f"--include-path={folder}" for folder in self.includes]
        nvrtc = self.nvrtc
        # "..." is looked up beside the including file first: not in the current directory.
        name = str(self.includes[0] / "unit.cu").encode()
        program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), name, 0, [], []))
        try:
            result, *_ = nvrtc.nvrtcCompileProgram(
                program, len(options), [option.encode() for option in options]
            )
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            text = log.rstrip(b"\0").decode(errors="replace")
            if int(result) != 0:
                version = ".".join(map(str, self.version))
                raise CompileError(f"NVRTC {version} cannot compile for {arch}:\n{text}")
            code = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
            return bytes(code), text
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """What a function of cuda-bindings returns after its status."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if values else None


def find_compiler(tree: Path) -> Compiler:
    """NVRTC of this Python environment, for the sources in `tree`. Raises CompilerNotFound."""
    if not (tree / "units.json").is_file():
        raise CompilerNotFound("this build left no kernel to be compiled at run time")
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise CompilerNotFound(f"no NVRTC: {error}; {INSTALL}") from error
    try:
        status, *version = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-bindings found no libnvrtc
        raise CompilerNotFound(f"no NVRTC: {str(error).strip()}; {INSTALL}") from error
    if int(status) != 0:
        raise CompilerNotFound(f"no NVRTC: {status.name}; {INSTALL}")
    major, minor = version
    return Compiler(nvrtc, (major, minor), (tree / "include", *_cuda_headers(major)))


def _cuda_headers(major: int) -> list[Path]:
    """The folders of CUDA's and CCCL's headers of a major version: in wheels, then in toolkits."""
    folders = [*_wheel_folders(), *_toolkit_folders()]
    folders += [folder / "cccl" for folder in folders]
    standard = [folder for folder in folders if (folder / "cuda" / "std" / "cstdint").is_file()]
    for folder in folders:
        header = folder / "cuda_runtime_api.h"
        if not (folder / "cuda_fp16.h").is_file() or not header.is_file():
            continue
        version = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
        if not version or int(version[1]) // 1000 != major:
            continue
        # That of the same installation, else the first.
        near = sorted(standard, key=lambda other: folder not in (other, other.parent))
        if near:
            # CUTLASS names some of them with "cccl/" before, from CUDA 13 on.
            above = [near[0].parent] if near[0].name == "cccl" else []
            return list(dict.fromkeys([folder, near[0], *above]))
    raise CompilerNotFound(f"no headers of CUDA {major} (runtime and cccl); {INSTALL}")


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return [folder for root in roots for folder in sorted(root.glob("*/include"), reverse=True)]


def _toolkit_folders() -> list[Path]:
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    if nvcc := shutil.which("nvcc"):
        roots += [str(Path(nvcc).parents[1]), str(Path(nvcc).resolve().parents[1])]
    roots.append("/usr/local/cuda")
    return [Path(root) / "include" for root in dict.fromkeys(roots) if root]
