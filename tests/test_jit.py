"""cutlass_attn.jit: kernels compiled at first use, and the cache that keeps them. Without a GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import cutlass_attn
import pytest
from cutlass_attn import _C, jit
from cutlass_attn.jit import cache, compiler

ARCH = "sm_89"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A cache of its own for every test, and nothing known of compilers."""
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path / "cache"))
    jit._compiler.cache_clear()
    yield
    jit._compiler.cache_clear()
    _C.set_compiler("")


class StubCompiler:
    """In NVRTC's place: counts what it is asked for."""

    def __init__(self, code=b"machine code"):
        self.code, self.calls = code, 0

    def identity(self, source, arch):
        return compiler.hashlib.sha256((source + arch).encode()).hexdigest()

    def compile(self, source, arch):
        self.calls += 1
        return self.code


@pytest.fixture
def stub(monkeypatch):
    made = StubCompiler()
    monkeypatch.setattr(jit, "_compiler", lambda: made)
    monkeypatch.setattr(jit, "units", lambda: {"fast/f16/d64/64x64x4": "one", "slow/f16": "two"})
    monkeypatch.setattr(jit._compiler, "cache_clear", lambda: None, raising=False)
    return made


def test_a_kernel_is_compiled_once_and_then_read(stub, capfd):
    assert jit.cubin("slow/f16", ARCH) == stub.code
    assert f"compiling slow/f16 for {ARCH}" in capfd.readouterr().err
    assert jit.cubin("slow/f16", ARCH) == stub.code
    assert stub.calls == 1
    assert capfd.readouterr().err == ""
    jit.cubin("slow/f16", "sm_90")
    jit.cubin("fast/f16/d64/64x64x4", ARCH)
    assert stub.calls == 3
    names = sorted(path.name.rsplit("-", 1)[0] for path in cache.folder().glob("*.cubin"))
    assert names == ["fast_f16_d64_64x64x4-sm_89", "slow_f16-sm_89", "slow_f16-sm_90"]


@pytest.mark.parametrize("damage", [lambda data: data[:20], lambda data: data[:-1] + b"?"])
def test_a_damaged_file_is_replaced(stub, damage):
    jit.cubin("slow/f16", ARCH)
    (path,) = cache.folder().glob("*.cubin")
    path.write_bytes(damage(path.read_bytes()))
    assert jit.cubin("slow/f16", ARCH) == stub.code
    assert stub.calls == 2
    assert cache.Entry(path.stem.rsplit("-", 1)[0], path.stem.rsplit("-", 1)[1]).read() == stub.code


def test_a_cache_that_cannot_be_written_is_a_warning(stub, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="set CUTLASS_ATTN_CACHE to a folder that can be written"):
        assert jit.cubin("slow/f16", ARCH) == stub.code


def test_nothing_is_left_of_a_compilation_that_fails(stub, monkeypatch):
    def fail(source, arch):
        raise RuntimeError("NVRTC cannot compile")

    monkeypatch.setattr(stub, "compile", fail)
    with pytest.raises(RuntimeError, match="cannot compile"):
        jit.cubin("slow/f16", ARCH)
    assert [path.suffix for path in cache.folder().iterdir()] == [".lock"]


def test_two_processes_compile_once(tmp_path):
    program = tmp_path / "program.py"
    log = tmp_path / "log"
    program.write_text(
        "import os, time\n"
        "from cutlass_attn import jit\n"
        "class Slow:\n"
        "    def identity(self, source, arch): return 'f' * 64\n"
        "    def compile(self, source, arch):\n"
        f"        open({str(log)!r}, 'a').write('x')\n"
        "        time.sleep(1)\n"
        "        return b'code'\n"
        "jit._compiler = Slow\n"
        "jit.units = lambda: {'slow/f16': 'source'}\n"
        f"assert jit.cubin('slow/f16', {ARCH!r}) == b'code'\n"
    )
    both = [subprocess.Popen([sys.executable, str(program)]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert log.read_text() == "x"


def test_the_folder_of_the_cache(monkeypatch):
    assert str(cache.folder()) == os.environ["CUTLASS_ATTN_CACHE"]
    monkeypatch.delenv("CUTLASS_ATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/cutlass_attn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.folder() == Path("/home/someone/.cache/cutlass_attn")


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "digest").write_text("digest")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        jit.CompilerNotFound, match=r"no NVRTC: .*pip install 'cutlass_attn\[jit\]'"
    ):
        compiler.find_compiler(tmp_path)
    monkeypatch.setattr(jit, "TREE", tmp_path)
    assert "pip install 'cutlass_attn[jit]'" in jit.available()


def test_a_build_that_leaves_nothing_out_says_so(tmp_path):
    with pytest.raises(jit.CompilerNotFound, match="left no kernel to be compiled"):
        compiler.find_compiler(tmp_path)


def test_without_headers_of_the_same_cuda_the_error_names_it(monkeypatch, tmp_path):
    include = tmp_path / "include"
    (include / "cuda" / "std").mkdir(parents=True)
    for name in ("cuda_fp16.h", "cuda/std/cstdint"):
        (include / name).touch()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    monkeypatch.setattr(compiler, "_wheel_folders", lambda: [include])
    monkeypatch.setattr(compiler, "_toolkit_folders", list)
    assert compiler._cuda_headers(12) == (12080, [include])
    with pytest.raises(jit.CompilerNotFound, match=r"no headers of CUDA 13 \(runtime and cccl\)"):
        compiler._cuda_headers(13)


def test_importing_needs_no_compiler():
    code = "import sys, cutlass_attn; assert not {'cuda', 'cutlass_attn.jit'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_warmup_refuses_unknown_names():
    with pytest.raises(ValueError, match=r"'warp/9' is neither a key of variants\(\) nor a kernel"):
        cutlass_attn.warmup(["warp/9"])


def test_warmup_of_what_is_compiled_needs_nothing(monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: pytest.fail("asked for a compiler"))
    compiled = [variant.key for variant in cutlass_attn.variants() if variant.compiled]
    cutlass_attn.warmup(compiled, device=ARCH)


def test_warmup_compiles_each_left_out_variant_once(stub, monkeypatch):
    rows = [
        {"key": "fast/f16/d64/64x64x4", "kernel": "fast", "compiled": False},
        {"key": "slow/f16", "kernel": "slow", "compiled": False},
        {"key": "slow/f32", "kernel": "slow", "compiled": True},
    ]
    monkeypatch.setattr(_C, "variants", lambda: rows)
    cutlass_attn.warmup(["slow", "slow/f16", "slow/f32"], device=ARCH)
    assert stub.calls == 1
    cutlass_attn.warmup("fast", device=ARCH)
    assert stub.calls == 2


def test_loading_names_what_is_wrong():
    with pytest.raises((ValueError, RuntimeError), match=r"this build|allowed: a GPU"):
        _C.load_kernel("warp/9", 0, b"")


# --- With NVRTC ----------------------------------------------------------------------------------


def _key():
    if reason := jit.available():
        pytest.skip(reason)
    return next(key for key in jit.units() if key.startswith("sm80/f16/"))


def test_nvrtc_compiles_a_row_and_a_second_process_reads_it_quickly(capfd):
    key = _key()
    code = jit.cubin(key, ARCH)
    assert code[:4] == b"\x7fELF"
    for entry in (b"identity", b"softcap"):
        assert b".text." + entry + b"\0" in code
    started = time.perf_counter()
    assert jit.cubin(key, ARCH) == code
    assert time.perf_counter() - started < 0.05


def test_nvrtc_quotes_its_messages():
    _key()
    with pytest.raises(RuntimeError, match=r'(?s)cannot compile for sm_89:.*"undeclared" is undef'):
        jit._compiler().compile("int x = undeclared;", ARCH)
