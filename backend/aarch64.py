"""What an x86-64 machine needs to build and to try a wheel for 64-bit Arm.

Debian's packages g++-aarch64-linux-gnu and qemu-user are the compiler and the emulator. nvcc
compiles for the CPU that its host compiler compiles for. The CUDA runtime's library for Arm comes
from PyPI, a Python for Arm from Debian.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
# What pip has to be told of a machine on which it does not run.
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")


def missing() -> str:
    """What this machine has to have and has not; empty if nothing."""
    packages = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user", "apt-get": "apt"}
    absent = [package for command, package in packages.items() if not shutil.which(command)]
    return f"needs Debian's or Ubuntu's {', '.join(absent)}" if absent else ""


def build_settings(version: str) -> list[str]:
    """Arguments of pip for a build by Python `version`, such as 3.12.

    Names of the target are for the build alone: pip has to go on fetching what runs here.
    """
    suffix = f".cpython-{version.replace('.', '')}-aarch64-linux-gnu.so"
    settings = {
        "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "env._PYTHON_HOST_PLATFORM": "linux-aarch64",
        "env.SETUPTOOLS_EXT_SUFFIX": suffix,
    }
    return [x for key, value in settings.items() for x in ("--config-settings", f"{key}={value}")]


def home(nvcc: Path) -> Path:
    """The toolkit that an nvcc, which may be a script that calls one, belongs to."""
    command = [os.fspath(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"^#\$ TOP=(.*)$", told.stderr, re.MULTILINE)
    assert found, told.stderr
    return Path(found[1]).resolve()


def lay_out(nvcc: Path, runtime: Path, tree: Path) -> Path:
    """Makes `tree` a toolkit whose nvcc compiles for Arm; returns that nvcc.

    `runtime` is the folder of the Arm wheel of the CUDA runtime, with include/ and lib/. nvcc takes
    the folder above its link for its home, and looks for what belongs to the target below that.
    """
    here = home(nvcc)
    (tree / "bin").mkdir(parents=True)
    for path in (here / "bin").iterdir():
        (tree / "bin" / path.name).symlink_to(path)
    (tree / "nvvm").symlink_to(here / "nvvm")
    target = tree / "targets" / "aarch64-linux"
    target.mkdir(parents=True)
    (target / "include").symlink_to(here / "include")  # equal for all targets
    (target / "lib").symlink_to(runtime / "lib")
    return tree / "bin" / "nvcc"


def python(folder: Path) -> list[str]:
    """A command that runs Debian's Python for Arm, whose packages are unpacked into `folder`.

    Neither root nor a change of this machine's packages is needed.
    """
    (folder / "lists").mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",  # does not change the user where there is nobody to change to
        "Debug::NoLocking": "1",
        "Dir::Cache": str(folder),
        "Dir::State": str(folder),
        "Dir::State::status": str(folder / "status"),
    }
    apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
    install = ["--yes", "--no-install-recommends", "--download-only", "install"]
    install += ["python3", "libstdc++6"]
    for command in ("update",), install:
        subprocess.run([*apt, *command], check=True)
    root = folder / "root"
    for package in sorted(folder.glob("archives/*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
    return [EMULATOR, "-L", os.fspath(root), os.fspath(root / "usr" / "bin" / "python3")]
