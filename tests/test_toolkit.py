"""backend/: which nvcc builds the library, and what the build asks pip for."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKEND = ROOT / "backend"


@pytest.fixture
def toolkit(monkeypatch):
    """The module, on a machine without any CUDA."""
    monkeypatch.syspath_prepend(str(BACKEND))
    for name in ("toolkit", "cutlass_attn_build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import toolkit

    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME", "CUTLASS_DIR"):
        monkeypatch.delenv(name, raising=False)
    which = shutil.which
    monkeypatch.setattr(
        toolkit.shutil, "which", lambda name: which(name) if os.path.dirname(name) else None
    )
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
    monkeypatch.delenv("CUDA_PATH")
    own = {"cmake.define.CMAKE_CUDA_COMPILER": "/opt/cuda/bin/nvcc"}
    assert toolkit.WHEELS not in backend.extra_requirements(own)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("g++ -m64", ["g++", "-m64"]),
        ("ccache g++", ["g++"]),
        ("env ccache g++ -m64 x", ["g++", "-m64", "x"]),
        ("", []),
    ],
)
def test_launchers_are_no_part_of_a_compiler(toolkit, command, words):
    assert toolkit.command_words(command) == words


def test_a_compiler_path_may_have_spaces(toolkit, tmp_path):
    compiler = tmp_path / "my g++"
    compiler.touch()
    assert toolkit.command_words(str(compiler)) == [str(compiler)]


@pytest.mark.parametrize("variable", ["CXX", "CUDAHOSTCXX"])
def test_nvcc_gets_the_host_compiler_and_its_arguments_apart(
    toolkit, tmp_path, monkeypatch, variable
):
    nvcc = make_nvcc(tmp_path, "13.0")
    nvcc.write_text(
        nvcc.read_text().replace("echo unsup", f'echo "$@" > {tmp_path}/args; echo unsup')
    )
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDAHOSTCXX", raising=False)
    monkeypatch.setenv(variable, "ccache g++ -m64 -Wl,-z,now")
    assert toolkit.why_unusable(nvcc) == ""
    expected = r"-ccbin g++ -Xcompiler=-m64 -Xcompiler=-Wl\,-z\,now"
    assert expected in (tmp_path / "args").read_text()


def test_an_nvcc_in_the_working_directory(toolkit, tmp_path, monkeypatch):
    make_nvcc(tmp_path, "13.0")
    monkeypatch.chdir(tmp_path / "bin")
    with monkeypatch.context() as patch:  # what an empty entry in PATH gives
        patch.setattr(toolkit.shutil, "which", lambda name: name)
        assert toolkit.machine_nvcc()[0] == tmp_path / "bin" / "nvcc"
    monkeypatch.setenv("CUDACXX", "./nvcc")
    assert toolkit.machine_nvcc()[0] == tmp_path / "bin" / "nvcc"
    monkeypatch.setenv("CUDACXX", "nvcc")  # not on PATH, which this folder is no part of
    assert toolkit.machine_nvcc()[0] is None


def test_a_folder_named_nvcc_is_no_compiler(toolkit, tmp_path, monkeypatch):
    (tmp_path / "bin" / "nvcc").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolkit.machine_nvcc() == (None, [])


def test_arguments_in_cudacxx_are_refused_with_what_to_do(toolkit, tmp_path, monkeypatch):
    nvcc = make_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDACXX", f"{nvcc} -allow-unsupported-compiler")
    with pytest.raises(LookupError, match="NVCC_APPEND_FLAGS"):
        toolkit.nvcc(tmp_path / "tree")


def configure(folder, text, env, *arguments, umask=-1):
    """Configures a CMake project of these lines; what it prints."""
    if not shutil.which("cmake") or not shutil.which("g++"):
        pytest.skip("needs cmake and g++")
    folder.mkdir()
    lines = f"cmake_minimum_required(VERSION 3.25)\nproject(test LANGUAGES NONE)\n{text}\n"
    (folder / "CMakeLists.txt").write_text(lines)
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), *arguments]
    done = subprocess.run(
        command, env=env, umask=umask, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"CXX": "g++ -m64 -Wl,-z,now"},
            r'[][-m64 -Wl,-z,now][-Xcompiler="-m64" -Xcompiler="-Wl\,-z\,now"]',
        ),
        ({"CXX": "env g++"}, "[env][][]"),
        ({"CXX": "env g++ -m64"}, '[env][-m64][-Xcompiler="-m64"]'),
        ({"CXX": "g++", "CUDAHOSTCXX": "env g++ -m64"}, '[][][-Xcompiler="-m64"]'),
    ],
)
def test_cmake_takes_launcher_and_arguments_of_the_host_compiler(tmp_path, variables, expected):
    text = f"""
      include({ROOT}/cmake/HostCompiler.cmake)
      cutlass_attn_enable_cxx()
      cutlass_attn_host_compiler()
      get_filename_component(host "${{CMAKE_CUDA_HOST_COMPILER}}" NAME)
      string(STRIP "${{CMAKE_CUDA_FLAGS_INIT}}" flags)
      string(STRIP "${{CMAKE_CXX_COMPILER_ARG1}}" arguments)
      set(launcher "${{CMAKE_CXX_COMPILER_LAUNCHER}}")
      message(STATUS "is ${{host}}[${{launcher}}][${{arguments}}][${{flags}}]")"""
    base = {name: value for name, value in os.environ.items() if name not in ("CXX", "CUDAHOSTCXX")}
    assert f"is g++{expected}\n" in configure(tmp_path / "project", text, {**base, **variables})


@pytest.mark.parametrize("xdg", [None, "", "relative", "absolute"])
def test_cutlass_is_fetched_into_a_folder_of_the_builds(tmp_path, xdg):
    include = "cutlass_library/source/include/cutlass/version.h"
    version = "".join(f"#define CUTLASS_{x}\n" for x in ("MAJOR 4", "MINOR 2", "PATCH 0"))
    with zipfile.ZipFile(tmp_path / "fake.whl", "w") as wheel:
        wheel.writestr(include, version)
        wheel.writestr("nvidia_cutlass-4.2.0.0.dist-info/METADATA", "")
    python = tmp_path / "python"  # `python -m pip download ... -d FOLDER` copies the wheel
    python.write_text(
        '#!/bin/sh\n[ "$1" = -m ] || exit 1\nfor last; do :; done\n'
        f'mkdir -p "$last" && cp {tmp_path}/fake.whl "$last"\n'
    )
    python.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("CUTLASS_DIR", "XDG_CACHE_HOME")}
    env["HOME"] = str(home)
    cache = home / ".cache"
    if xdg == "absolute":
        cache = tmp_path / "cache"
        xdg = str(cache)
    if xdg is not None:
        env["XDG_CACHE_HOME"] = xdg
    text = (
        f"list(APPEND CMAKE_MODULE_PATH {ROOT}/third_party/cutlass)\nfind_package(CUTLASS REQUIRED)"
    )
    configure(tmp_path / "project", text, env, f"-DPython_EXECUTABLE={python}", umask=0o002)
    # Not in cutlass_attn, which a umask of 002 would make one that the kernels' cache refuses.
    assert [path.name for path in cache.iterdir()] == ["cutlass_attn-build"]
    (found,) = (cache / "cutlass_attn-build").iterdir()
    assert (found / include).is_file()
