"""Which CUDA toolkit builds the library: the machine's, if it works, else the one from PyPI.

    toolkit.py nvcc --tree DIR    prints the path of an nvcc that compiles; DIR is where the wheels
                                  of PyPI, if they are what there is, get laid out as a toolkit
    toolkit.py headers            prints the include directories of the CUDA headers

Both exit with status 1 and say why on stderr where there is none. CMake calls the commands, the
PEP 517 backend imports the functions, so that both judge alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MINIMUM = (12, 8)
# 13.0.2 leaves nvvm and crt unpinned, and ptxas then refuses what a newer nvvm wrote.
WHEELS = "cuda-toolkit[nvcc,cccl]==13.0.3.0"

_PROBE = """
#include <cuda/std/type_traits>
__global__ void probe(float* x) { *x = expf(*x); }
"""


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def command_words(command: str) -> list[str]:
    """The compiler and the arguments of a variable such as CXX="ccache g++ -m64".

    Launchers are left out: what runs nvcc's host compiler is not nvcc's affair.
    """
    if Path(command).is_file():  # a path with spaces in it
        return [command]
    words = shlex.split(command)
    while len(words) > 1 and not words[1].startswith("-"):
        del words[0]
    return words


def why_unusable(nvcc: Path | str) -> str:
    """Why this nvcc cannot build the kernels; empty if it can.

    It must be of CUDA 12.8 or later and compile a kernel that includes the CUDA C++ core library,
    which fails where headers are missing or the host compiler is one that nvcc refuses.
    """
    code, output = _run([str(nvcc), "--version"])
    release = re.search(r"release (\d+)\.(\d+)", output)
    if code != 0 or not release:
        return f"{nvcc} --version fails: {output.strip()}"
    if (int(release[1]), int(release[2])) < MINIMUM:
        return f"{nvcc} is of CUDA {release[1]}.{release[2]}, {MINIMUM[0]}.{MINIMUM[1]} is needed"
    host = command_words(os.environ.get("CUDAHOSTCXX") or os.environ.get("CXX") or "")
    flags = ["-ccbin", host[0]] if host else []
    flags += ["-Xcompiler=" + flag.replace(",", r"\,") for flag in host[1:]]  # nvcc takes a list
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.cu")
        source.write_text(_PROBE)
        command = [str(nvcc), "-std=c++17", "-ptx", "-arch=compute_80", "-o", f"{source}.ptx"]
        code, output = _run([*command, *flags, str(source)])
    return "" if code == 0 else f"{nvcc} does not compile a minimal kernel: {output.strip()}"


def machine_roots() -> list[Path]:
    """Where a toolkit would be on this machine, in order of preference."""
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    if found := shutil.which("nvcc"):
        nvcc = Path(found).absolute()  # PATH may have a relative folder, or an empty one
        roots += [str(nvcc.parents[1]), str(nvcc.resolve().parents[1])]
    roots.append("/usr/local/cuda")
    return [Path(root).absolute() for root in dict.fromkeys(roots) if root]


def machine_nvcc() -> tuple[Path | None, list[str]]:
    """A working nvcc of this machine, or None; and why each one before it was passed over.

    CUDACXX, where set, is the only candidate.
    """
    if chosen := os.environ.get("CUDACXX", "").strip():
        name, *arguments = command_words(chosen)
        found = shutil.which(name)
        if arguments or not found:
            allowed = "allowed: an nvcc; its arguments go into NVCC_APPEND_FLAGS"
            return None, [f"CUDACXX is {chosen!r}; {allowed}"]
        candidates = [Path(found).absolute()]
    else:
        candidates = [root / "bin" / "nvcc" for root in machine_roots()]
        candidates = [nvcc for nvcc in candidates if nvcc.is_file() and os.access(nvcc, os.X_OK)]
    refused: list[str] = []
    for nvcc in candidates:
        if not (reason := why_unusable(nvcc)):
            return nvcc, refused
        refused.append(reason)
    return None, refused


def wheel_root() -> Path | None:
    """The directory that the CUDA wheels of this Python environment share, or None."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for root in sorted(Path(location).glob("cu[0-9]*"), reverse=True):
            if (root / "include" / "cuda_runtime.h").is_file():
                return root
    return None


def lay_out(wheels: Path, tree: Path) -> Path:
    """Makes `tree` a toolkit of links into `wheels`, as nvcc and CMake expect it; returns its nvcc.

    The wheels have lib/ where nvcc looks into lib64/, and no unversioned libcudart.so. nvcc takes
    the directory that holds its own link for its home, so bin/ is one of links, not a link.
    """
    shutil.rmtree(tree, ignore_errors=True)
    for source, target in (("bin", "bin"), ("lib", "lib64")):
        (tree / target).mkdir(parents=True)
        for path in (wheels / source).iterdir():
            (tree / target / path.name).symlink_to(path)
            if ".so." in path.name:
                (tree / target / f"{path.name.split('.so.')[0]}.so").symlink_to(path)
    for name in ("include", "nvvm"):
        (tree / name).symlink_to(wheels / name)
    return tree / "bin" / "nvcc"


def nvcc(tree: Path) -> Path:
    """An nvcc that works: the machine's, else that of the wheels. LookupError says what to do."""
    found, refused = machine_nvcc()
    if found:
        return found
    wheels = None if os.environ.get("CUDACXX") else wheel_root()
    if wheels and (wheels / "bin" / "nvcc").is_file():
        found = lay_out(wheels, tree)
        if not (reason := why_unusable(found)):
            return found
        refused.append(reason)
    raise LookupError(
        "no CUDA compiler that works.\n"
        + "".join(f"  {reason}\n" for reason in refused or ["no nvcc on this machine"])
        + "Do one of these:\n"
        f"  - install a CUDA toolkit >= {MINIMUM[0]}.{MINIMUM[1]} and put its nvcc on PATH, "
        "or name it in CUDACXX;\n"
        f"  - pip install '{WHEELS}'  (`pip install .` with build isolation does so by itself);\n"
        "  - build for the CPU alone: pip install . -C cmake.define.CUTLASS_ATTN_CUDA=OFF"
    )


def headers() -> list[Path]:
    """Include directories of CUDA headers >= 12.8. Raises LookupError where there are none."""
    roots = machine_roots()
    if wheels := wheel_root():
        roots.append(wheels)
    for root in roots:
        include = root / "include"
        cccl = include / "cccl" if (include / "cccl").is_dir() else include  # CUDA 13, CUDA 12
        needed = [include / "cuda_runtime_api.h", include / "crt/host_config.h", cccl / "cuda/std"]
        if not all(path.exists() for path in needed):
            continue
        version = re.search(r"#define CUDART_VERSION\s+(\d+)", needed[0].read_text())
        if version and int(version[1]) >= MINIMUM[0] * 1000 + MINIMUM[1] * 10:
            return list(dict.fromkeys([include, cccl]))
    raise LookupError("no CUDA headers (runtime, crt, cccl) on this machine")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("nvcc").add_argument("--tree", type=Path, required=True)
    commands.add_parser("headers")
    options = parser.parse_args()
    try:
        found = [nvcc(options.tree)] if options.command == "nvcc" else headers()
    except LookupError as error:
        print(error, file=sys.stderr)
        return 1
    print(";".join(str(path) for path in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
