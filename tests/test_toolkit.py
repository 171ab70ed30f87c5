"""backend/: which nvcc builds the library, and what the build asks pip for."""

import os
import sys
from pathlib import Path

import pytest

BACKEND = Path(__file__).parents[1] / "backend"


@pytest.fixture
def toolkit(monkeypatch):
    """The module, on a machine without any CUDA."""
    monkeypatch.syspath_prepend(str(BACKEND))
    for name in ("toolkit", "cutlass_attn_build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import toolkit

    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME", "CUTLASS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolkit, "wheel_root", lambda: None)
    machine_roots = toolkit.machine_roots
    monkeypatch.setattr(
        toolkit,
        "machine_roots",
        lambda: [root for root in machine_roots() if root != Path("/usr/local/cuda")],
    )
    return toolkit


def make_nvcc(root, release, compiles=True):
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && echo "release {release}, V{release}.1" && exit 0\n'
        f"echo unsupported host compiler; exit {0 if compiles else 1}\n"
    )
    nvcc.chmod(0o755)
    return nvcc


def make_headers(root, version):
    for name in ("crt/host_config.h", "cccl/cuda/std/version"):
        (root / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "include" / name).touch()
    (root / "include" / "cuda_runtime.h").touch()
    (root / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")


def test_the_machines_nvcc_comes_first(toolkit, tmp_path, monkeypatch):
    nvcc = make_nvcc(tmp_path / "cuda", "12.8")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda"))
    monkeypatch.setattr(toolkit, "wheel_root", lambda: tmp_path / "wheels")
    assert toolkit.nvcc(tmp_path / "tree") == nvcc
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize(
    ("release", "compiles", "reason"),
    [("12.7", True, "is of CUDA 12.7, 12.8 is needed"), ("13.0", False, "unsupported host")],
)
def test_an_nvcc_that_does_not_serve_is_named_with_what_to_do(
    toolkit, tmp_path, monkeypatch, release, compiles, reason
):
    make_nvcc(tmp_path / "cuda", release, compiles)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(LookupError, match=reason) as raised:
        toolkit.nvcc(tmp_path / "tree")
    assert toolkit.WHEELS in str(raised.value)
    assert "CUTLASS_ATTN_CUDA=OFF" in str(raised.value)


def test_the_wheels_become_a_toolkit(toolkit, tmp_path, monkeypatch):
    wheels = tmp_path / "nvidia" / "cu13"
    make_nvcc(wheels, "13.0")
    (wheels / "lib").mkdir()
    for library in ("libcudart_static.a", "libcudart.so.13"):
        (wheels / "lib" / library).touch()
    monkeypatch.setattr(toolkit, "wheel_root", lambda: wheels)
    tree = tmp_path / "tree"
    for _ in range(2):  # again over what an earlier configuration left
        assert toolkit.nvcc(tree) == tree / "bin" / "nvcc"
    assert sorted(os.listdir(tree / "lib64")) == [
        "libcudart.so",
        "libcudart.so.13",
        "libcudart_static.a",
    ]


def test_cudacxx_is_used_or_refused_but_never_replaced(toolkit, tmp_path, monkeypatch):
    make_nvcc(tmp_path / "good", "13.0")
    old = make_nvcc(tmp_path / "old", "11.8")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "good"))
    monkeypatch.setenv("CUDACXX", str(old))
    with pytest.raises(LookupError, match=r"11\.8"):
        toolkit.nvcc(tmp_path / "tree")


def test_headers_of_an_old_toolkit_are_passed_over(toolkit, tmp_path, monkeypatch):
    make_headers(tmp_path / "old", 11080)
    make_headers(tmp_path / "new", 13000)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "old"))
    with pytest.raises(LookupError, match="no CUDA headers"):
        toolkit.headers()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "new"))
    include = tmp_path / "new" / "include"
    assert toolkit.headers() == [include, include / "cccl"]


def test_compiler_wheels_are_required_only_where_needed(toolkit, tmp_path, monkeypatch):
    pytest.importorskip("scikit_build_core")
    import cutlass_attn_build as backend

    monkeypatch.chdir(BACKEND.parent)  # where a build front end calls from
    assert toolkit.WHEELS in backend.extra_requirements()
    assert toolkit.WHEELS in backend.get_requires_for_build_wheel({})
    off = {"cmake.define.CUTLASS_ATTN_CUDA": "OFF"}
    assert toolkit.WHEELS not in backend.extra_requirements(off)
    make_nvcc(tmp_path / "cuda", "12.8")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda"))
    assert toolkit.WHEELS not in backend.extra_requirements()
