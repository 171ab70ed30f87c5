"""What cross-builds a wheel for Arm: the toolkit that is laid out, and what pip is told."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def aarch64(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "backend"))
    import aarch64

    return aarch64


@pytest.mark.skipif(os.name != "posix", reason="the nvcc is a shell script")
def test_a_toolkit_for_arm(aarch64, tmp_path):
    """Found by way of a script that calls nvcc, as some images have it."""
    home, runtime = tmp_path / "cuda", tmp_path / "runtime"
    for folder in (home / "bin", home / "nvvm", home / "include", runtime / "lib"):
        folder.mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho '#$ _SPACE_= ' >&2\necho '#$ TOP={home}/bin/..' >&2\n")
    (runtime / "lib" / "libcudart_static.a").touch()
    script = tmp_path / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    for path in (nvcc, script):
        path.chmod(0o755)
    made = aarch64.lay_out(script, runtime, tmp_path / "tree")
    tree = tmp_path / "tree"
    assert made == tree / "bin" / "nvcc" and made.resolve() == nvcc
    # nvcc takes the folder above its own link for its home.
    assert not (tree / "bin").is_symlink()
    target = tree / "targets" / "aarch64-linux"
    assert (target / "include").samefile(home / "include")
    assert (target / "lib" / "libcudart_static.a").is_file()


def test_the_target_is_named_to_the_build_alone(aarch64):
    """In the environment, the names would have pip fetch build tools for Arm."""
    settings = aarch64.build_settings("3.12")
    assert settings[::2] == ["--config-settings"] * (len(settings) // 2)
    assert {
        "cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64",
        "env._PYTHON_HOST_PLATFORM=linux-aarch64",
        "env.SETUPTOOLS_EXT_SUFFIX=.cpython-312-aarch64-linux-gnu.so",
    } <= set(settings[1::2])


def test_what_is_missing_is_named_by_package(aarch64, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert aarch64.missing().endswith("g++-aarch64-linux-gnu, qemu-user, apt")
    for command in (aarch64.COMPILER, aarch64.EMULATOR, "apt-get"):
        (tmp_path / command).touch(0o755)
    assert aarch64.missing() == ""
