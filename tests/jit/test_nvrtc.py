"""The NVRTC that is found, and that it compiles a kernel of each class from the headers that the
package ships: whatever its version, and without CCCL.

CUTLASS_ATTN_TEST_NVRTC has folders, separated by colons, with NVIDIA's wheels of other versions
(`pip install --target`) that are to compile a kernel of each class too.
"""

import os
import sys
from pathlib import Path

import pytest
import test_hopper_code
import test_sm80_code
from cutlass_attn import jit
from cutlass_attn.jit import compiler
from cutlass_attn.jit.nvrtc import Nvrtc, _quote
from pairwise import pairwise


@pytest.fixture(scope="module")
def nvrtc():
    """The compiler of this environment."""
    if reason := jit.available():
        pytest.skip(reason)
    return jit._compiler()


# Kernels by what they are made of, and the GPU's architecture.
CLASSES = [
    [("scalar/vectorized", "sm_89")],
    [("wmma", "sm_89")],
    [("sm80", "sm_89"), ("sm80/wide", "sm_90")],
    [("sm80/backward", "sm_89")],
    [("sm80/paged_fp8", "sm_89"), ("sm89/wide_fp8", "sm_89")],
    [("sm89/int8_fp8", "sm_89")],
    [
        ("sm80/latent", "sm_89"),
        ("sm80/latent_64_ds_mla", "sm_89"),
        ("sm80/latent_ds_mla_v4", "sm_90"),
    ],
    [("sm90", "sm_90a"), ("sm90/wide", "sm_90a")],
    [("sm90/int8_fp8", "sm_90a")],
    [("sm90/latent", "sm_90a")],
    [("sm90/backward_wgmma", "sm_90a"), ("sm90/backward_two_pass", "sm_90a")],
]


OTHERS = [x for x in os.environ.get("CUTLASS_ATTN_TEST_NVRTC", "").split(os.pathsep) if x]


def of_wheels(folder):
    """The compiler of the wheels in a folder, with their own headers and nothing else of CUDA."""
    (library,) = Path(folder).glob("nvidia/*/lib/libnvrtc.so.1?")
    nvrtc = Nvrtc(library)
    headers = compiler._runtime_headers(library, nvrtc.version[0])
    assert headers.is_relative_to(folder)
    return compiler.Compiler(nvrtc, (jit.TREE / "include", jit.TREE / "include" / "cccl", headers))


# The compiler of this environment, which compiles what follows, is between the others, if given.
# Each of these compiles the first kernel of a class; of further kernels they take turns.
FOLDERS = OTHERS or [None]
COMPILED_BY = [
    pytest.param(*of_class[i], folder, id=f"{of_class[i][0]}-{Path(folder or 'found').name}")
    for c, of_class in enumerate(CLASSES)
    for i in range(len(of_class))
    for folder in (FOLDERS if i == 0 else [FOLDERS[(c + i) % len(FOLDERS)]])
]


@pytest.mark.parametrize(("kernel", "arch", "folder"), COMPILED_BY)
def test_a_kernel_of_each_class_compiles(nvrtc, kernel, arch, folder):
    if folder:
        nvrtc = of_wheels(folder)
    keys = [key for key in jit.units() if key.startswith((f"{kernel}/f16/", f"{kernel}/bf16/"))]
    if not keys:
        pytest.skip(f"this build has every row of {kernel}")
    code = nvrtc.compile(jit._source(jit.entries(keys[0])[0]), arch)
    assert code[:4] == b"\x7fELF"


def words_of(row):
    """Of its kernel's name: sm90/bias_mask has a bias and a mask."""
    return row["kernel"].partition("/")[2].split("_")


TERMS = {"softcap": (False, True), "alibi": (False, True), "chunk": (False, True)}


def row_of(name):
    """A composed score that another test compiles, as a row of these."""
    key, _, score = name.partition("+")
    kernel, dtype, head_dim, _tile = key.rsplit("/", 3)
    found = {"kernel": kernel, "tail": f"{dtype}/{head_dim}"}
    # A chunk is part of the mask's map.
    return found | {x: x in score or (x == "chunk" and "mask" in score) for x in TERMS}


COMPILED = (*test_hopper_code.CODE, *test_hopper_code.NAMES, *test_sm80_code.NAMES)
ELSEWHERE = [row_of(name) for name in COMPILED]
COMPOSED = pairwise(
    {
        "kernel": ("sm90", "sm90/varlen", "sm90/paged", "sm90/bias", "sm90/bias_mask"),
        "tail": ("f16/d64", "bf16/d128"),
        **TERMS,
    },
    seed=43,
    given=ELSEWHERE,
)
# A build has the scores of these that have no ALiBi.
COMPOSED += pairwise(
    {
        "kernel": ("sm80", "sm80/split_keys", "sm80/varlen", "sm80/paged"),
        "tail": ("f16/d64", "bf16/d128"),
        "softcap": (False, True),
        "alibi": (True,),
    },
    seed=80,
)


COMPOSED += pairwise(
    {
        "kernel": ("sm80", "sm80/bias", "sm80/mask", "sm80/bias_mask", "sm80/any_bias"),
        "tail": ("f16/d64", "bf16/d128", "f16/d256"),
        "softcap": (False, True),
        "alibi": (False, True),
        "chunk": (True,),
    },
    seed=89,
    given=ELSEWHERE,
)


@pytest.mark.parametrize("row", COMPOSED, ids=lambda row: "-".join(str(x) for x in row.values()))
def test_composed_scores_compile(nvrtc, row):
    terms = {term for term in TERMS if row.get(term)} | ({"bias", "mask"} & set(words_of(row)))
    if "mask" in terms:
        terms.discard("chunk")  # it is part of the mask's map
    terms = [term for term in ("softcap", "alibi", "bias", "chunk", "mask") if term in terms]
    wanted = "_".join(terms) or "identity"
    keys = [key for key in jit.units() if key.startswith(f"{row['kernel']}/{row['tail']}/")]
    if not keys:
        pytest.skip(f"this build has every row of {row['kernel']}")
    name = f"{keys[0]}+{wanted}"
    assert name in jit.entries(keys[0])
    arch = "sm_90a" if row["kernel"].startswith("sm90") else "sm_89"
    assert nvrtc.compile(jit._source(name), arch)[:4] == b"\x7fELF"


BACKWARD = [
    row
    for kernels, seed in (
        (("sm90/backward_wgmma", "sm80/backward_varlen", "sm80/backward_ordered"), 44),
        (("sm80/backward_with_bias", "sm80/backward_mask", "sm80/backward_with_bias_mask"), 45),
    )
    for row in pairwise(
        {
            "kernel": kernels,
            "tail": ("f16/d64", "bf16/d128"),
            "arch": ("sm_89", "sm_90a"),
            "softcap": (False, True),
            "alibi": (False, True),
        },
        seed=seed,
    )
]


@pytest.mark.parametrize("row", BACKWARD, ids=lambda row: "-".join(str(x) for x in row.values()))
def test_composed_scores_of_backward_passes_compile(nvrtc, row):
    kernel, arch = row["kernel"], row["arch"]
    terms = [term for term in ("softcap", "alibi") if row[term]]
    terms += [f"pair{term}" for term in ("bias", "mask") if term in kernel.split("_")]
    keys = [key for key in jit.units() if key.startswith(f"{kernel}/{row['tail']}/")]
    if not keys:
        pytest.skip(f"this build has every row of {kernel}")
    name = f"{keys[0]}+{'_'.join(terms) or 'identity'}"
    assert name in jit.entries(keys[0])
    if kernel.startswith("sm90"):
        arch = "sm_90a"
    assert nvrtc.compile(jit._source(name), arch)[:4] == b"\x7fELF"


def test_cccl_is_shipped(nvrtc):
    """And its licence."""
    own, cccl = nvrtc.includes[:2]
    assert (own, cccl) == (jit.TREE / "include", jit.TREE / "include" / "cccl")
    assert (cccl / "cuda/std/cstdint").is_file() and (cccl / "nv/target").is_file()
    assert "LLVM Exceptions" in (jit.TREE / "CCCL_LICENSE.txt").read_text()


def test_errors_are_quoted(nvrtc):
    quoted = r'(?s)NVRTC 1\d\.\d+ refuses --gpu-architecture=sm_89:.*"undeclared" is undefined'
    with pytest.raises(jit.CompileError, match=quoted):
        nvrtc.compile("int x = undeclared;", "sm_89")


def test_a_long_log_goes_to_a_file(nvrtc, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(jit.CompileError) as caught:
        nvrtc.compile("\n".join(f"int x{i} = undeclared{i};" for i in range(90)), "sm_89")
    message = str(caught.value)
    assert len(message) < 2000 and '"undeclared0" is undefined' in message
    (file,) = tmp_path.iterdir()
    assert f"the whole log is {file})" in message
    assert '"undeclared80" is undefined' in file.read_text()


def test_the_first_errors_are_quoted_and_not_what_comes_before(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = "\n".join(["a warning"] * 50 + ["x.hpp(3): error: " + "y" * 900] + ["more"] * 50)
    lines = _quote(log, "refused").splitlines()
    assert lines[:2] == ["refused:", "x.hpp(3): error: " + "y" * (300 - 17)]
    assert len(lines) == 22
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert _quote(log, "refused").endswith("the whole log could not be written)")


# --- What is found where --------------------------------------------------------------------------


class Found:
    """NVRTC in a file that names its version."""

    def __init__(self, path):
        self.path = str(path)
        text = Path(path).read_text()
        if not text:
            raise OSError(f"{path}: file too short")
        self.version = tuple(map(int, text.split(".")))

    def __str__(self):
        return "NVRTC {}.{}".format(*self.version)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Nothing but what a test installs under tmp_path."""
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def find(name):
        raise RuntimeError("not found")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", find)
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    monkeypatch.setattr(compiler, "Nvrtc", Found)
    monkeypatch.setattr(compiler, "SYSTEM", str(tmp_path / "system"))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    (tmp_path / "units.json").write_text("{}")
    return tmp_path


def install(prefix, version, library="lib64", include="include"):
    """NVRTC's library and the runtime's headers, as a toolkit or wheels lay them out."""
    major, minor = version
    if library:
        (prefix / library).mkdir(parents=True)
        (prefix / library / f"libnvrtc.so.{major}").write_text(f"{major}.{minor}")
    if include:
        (prefix / include).mkdir(parents=True, exist_ok=True)
        (prefix / include / "cuda_fp16.h").touch()
        text = f"#define CUDART_VERSION  {major * 1000 + minor * 10}\n"
        (prefix / include / "cuda_runtime_api.h").write_text(text)


def found_in(machine):
    made = compiler.find_compiler(machine)
    assert made.includes[:2] == (machine / "include", machine / "include" / "cccl")
    return Path(made.nvrtc.path).relative_to(machine), [
        folder.relative_to(machine).as_posix() for folder in made.includes[2:]
    ]


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_the_environment_names(machine, monkeypatch, variable):
    install(machine / "toolkit", (13, 1))
    monkeypatch.setenv(variable, str(machine / "toolkit"))
    assert found_in(machine) == (Path("toolkit/lib64/libnvrtc.so.13"), ["toolkit/include"])


def test_a_toolkit_of_nvcc_on_path(machine, monkeypatch):
    install(machine / "toolkit", (12, 8))
    (machine / "toolkit" / "bin").mkdir()
    (machine / "toolkit" / "bin" / "nvcc").touch(0o755)
    monkeypatch.setenv("PATH", str(machine / "toolkit" / "bin"))
    assert found_in(machine) == (Path("toolkit/lib64/libnvrtc.so.12"), ["toolkit/include"])


def test_a_toolkit_at_the_usual_place(machine, monkeypatch):
    """Without pathfinder, too, which the extra `jit` brings."""
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    install(machine / "system", (13, 5))
    assert found_in(machine) == (Path("system/lib64/libnvrtc.so.13"), ["system/include"])


def test_wheels_of_cuda_13(machine, monkeypatch):
    import cuda.pathfinder as pathfinder

    install(machine / "nvidia" / "cu13", (13, 0), "lib")
    found = type("Found", (), {"abs_path": str(machine / "nvidia/cu13/lib/libnvrtc.so.13")})
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: found)
    assert found_in(machine) == (Path("nvidia/cu13/lib/libnvrtc.so.13"), ["nvidia/cu13/include"])


def test_wheels_of_cuda_12_anywhere_on_the_path(machine, monkeypatch):
    """One folder for each wheel, outside of site-packages, where pathfinder does not look."""
    install(machine / "nvidia" / "cuda_nvrtc", (12, 8), "lib", include=None)
    install(machine / "nvidia" / "cuda_runtime", (12, 8), library=None)
    spec = type("Spec", (), {"submodule_search_locations": [str(machine / "nvidia")]})
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: spec)
    assert found_in(machine) == (
        Path("nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        ["nvidia/cuda_runtime/include"],
    )


def test_what_is_too_old_broken_or_without_headers_is_passed_over(machine, monkeypatch):
    install(machine / "old", (12, 4))
    install(machine / "broken", (13, 0))
    (machine / "broken/lib64/libnvrtc.so.13").write_text("")
    monkeypatch.setenv("CUDA_PATH", str(machine / "old"))
    monkeypatch.setenv("CUDA_HOME", str(machine / "broken"))
    install(machine / "system", (14, 0), include=None)
    text = (
        r"no NVRTC: .*old/lib64/libnvrtc.so.12 is NVRTC 12.4, allowed: 12.8 or later; "
        r".*broken/lib64/libnvrtc.so.13: file too short; no headers of the CUDA 14 runtime for .*"
        r"system/lib64/libnvrtc.so.14; pip install 'cuda-toolkit\["
    )
    with pytest.raises(jit.CompilerNotFound, match=text):
        compiler.find_compiler(machine)
    install(machine / "system", (14, 0), library=None)
    assert found_in(machine)[0] == Path("system/lib64/libnvrtc.so.14")


def test_without_nvrtc_the_error_says_what_to_install(machine, monkeypatch):
    with pytest.raises(jit.CompilerNotFound) as caught:
        compiler.find_compiler(machine)
    assert str(caught.value) == f"no NVRTC; {compiler.INSTALL}"


def test_a_build_that_leaves_nothing_out_says_so(tmp_path):
    with pytest.raises(jit.CompilerNotFound, match="has no kernels that are compiled"):
        compiler.find_compiler(tmp_path)


def test_another_library_is_no_nvrtc():
    with pytest.raises(AttributeError, match="nvrtcVersion"):
        Nvrtc("libc.so.6")


def test_the_tree_refuses_a_cccl_that_nvrtc_cannot_compile(monkeypatch, tmp_path):
    root = Path(__file__).resolve().parents[2]
    monkeypatch.syspath_prepend(str(root / "kernels"))
    import nvrtc_tree

    monkeypatch.setattr(sys, "path", [])
    version = tmp_path / "cuda" / "cccl" / "cuda" / "std" / "__cccl" / "version.h"
    version.parent.mkdir(parents=True)
    (version.parents[1] / "cstdint").touch()
    version.write_text("#define CCCL_VERSION 3002001\n")
    cutlass = tmp_path / "cutlass" / "version.h"
    cutlass.parent.mkdir()
    cutlass.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n")
    with pytest.raises(SystemExit, match=r"CUDA 12.8 to 13.1, or .*cccl<13.2.*\n.* has 3.2$"):
        nvrtc_tree.find_cccl([tmp_path / "cuda"], tmp_path)
    cutlass.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 7\n")
    assert nvrtc_tree.find_cccl([tmp_path / "cuda"], tmp_path) == tmp_path / "cuda" / "cccl"
    cutlass.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n")
    version.write_text("#define CCCL_VERSION 3001004\n")
    assert nvrtc_tree.find_cccl([tmp_path / "cuda"], tmp_path) == tmp_path / "cuda" / "cccl"


@pytest.mark.parametrize("how", ["a wrapper of the compiler", "the environment"])
def test_the_tree_opens_no_header_of_the_host(monkeypatch, tmp_path, how):
    """However the compiler comes to search the host's folders."""
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    monkeypatch.syspath_prepend(kernels)
    import nvrtc_tree

    host = tmp_path / "host"
    host.mkdir()
    for name in ("version", "cstdint"):
        (host / name).write_text("#include <features.h>  // not found with -nostdinc\n")
    cxx = tmp_path / "g++"
    options = f"-isystem {host}" if how.startswith("a wrapper") else ""
    cxx.write_text(f'#!/bin/sh\nexec g++ {options} "$@"\n')
    cxx.chmod(0o755)
    if not options:
        monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(host))
    (tmp_path / "cuda/std").mkdir(parents=True)
    (tmp_path / "cuda/std/cstdint").touch()
    source = "#include <cstdint>\n#if __has_include(<version>)\n#include <version>\n#endif\n"
    found = nvrtc_tree.opened([source], [kernels / "nvrtc", tmp_path], str(cxx))
    wanted = [kernels / "nvrtc/cstdint", tmp_path / "cuda/std/cstdint", kernels / "nvrtc/version"]
    assert found == wanted
