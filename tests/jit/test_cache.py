"""The cache that keeps compiled kernels: its folder, files, limit and command."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cutlass_attn import jit
from cutlass_attn.jit import cache
from cutlass_attn.tools import cli
from stubs import ARCH

pytestmark = pytest.mark.usefixtures("fresh")


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
        raise jit.CompileError("NVRTC cannot compile")

    monkeypatch.setattr(stub, "compile", fail)
    with pytest.raises(jit.CompileError, match="cannot compile"):
        jit.cubin("slow/f16", ARCH)
    assert [path.suffix for path in cache.folder().iterdir()] == [".lock"]


def test_two_processes_compile_once(tmp_path):
    program = tmp_path / "program.py"
    log = tmp_path / "log"
    program.write_text(
        "import os, time\n"
        "from cutlass_attn import jit\n"
        "class Slow:\n"
        "    def compile(self, source, arch):\n"
        f"        open({str(log)!r}, 'a').write('x')\n"
        "        time.sleep(1)\n"
        "        return b'code'\n"
        "jit._compiler = Slow\n"
        "jit.units = lambda: {'slow/f16': 'source'}\n"
        "jit.digest = lambda: 'headers'\n"
        "import logging\n"
        "logging.basicConfig(level='INFO')\n"
        f"assert jit.cubin('slow/f16', {ARCH!r}) == b'code'\n"
    )
    both = [
        subprocess.Popen([sys.executable, str(program)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert log.read_text() == "x"
    assert sum("compiling slow/f16" in text for text in errors) == 1
    # The other one waits, unless it starts after the first has ended.
    assert sum("waiting for another process to make" in text for text in errors) <= 1


def test_the_folder_of_the_cache(monkeypatch):
    assert str(cache.folder()) == os.environ["CUTLASS_ATTN_CACHE"]
    monkeypatch.delenv("CUTLASS_ATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/cutlass_attn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.folder() == Path("/home/someone/.cache/cutlass_attn")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache.folder() == Path("/home/someone/.cache/cutlass_attn")

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(RuntimeError, match=r"no home directory; set CUTLASS_ATTN_CACHE"):
        cache.folder()


def test_a_folder_whose_name_is_not_utf_8(stub, monkeypatch, tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", folder)
    code = jit.cubin("slow/f16", ARCH)
    monkeypatch.setattr(stub, "compile", lambda *_: pytest.fail("compiled again"))
    assert jit.cubin("slow/f16", ARCH) == code
    assert len(cache.entries()) == 1
    console = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    program = [sys.executable, "-m", "cutlass_attn", "cache"]
    done = subprocess.run(program, env=env, **console)
    assert done.returncode == 0, done.stdout


def test_a_file_system_without_locks_is_no_obstacle(stub, monkeypatch):
    def fail(*args, **options):
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert jit.cubin("slow/f16", ARCH) == stub.code


def test_a_folder_that_others_can_write_is_refused(stub, monkeypatch, tmp_path):
    """Who writes there has this user's GPU run any code."""
    folder = tmp_path / "open"
    folder.mkdir()
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(folder))
    monkeypatch.setattr(cache, "_is_private_group", lambda gid: False)
    for mode in (0o777, 0o770, 0o1777):
        folder.chmod(mode)
        with pytest.raises(RuntimeError, match=rf"by other users \(mode {mode:o}\).*chmod go-w"):
            jit.cubin("slow/f16", ARCH)
        assert cli.main(["cache"]) == 1
    assert not list(folder.iterdir())
    monkeypatch.setattr(cache, "_is_private_group", lambda gid: True)
    with pytest.raises(RuntimeError, match="by other users"):
        jit.cubin("slow/f16", ARCH)  # 1777: not of the group alone
    folder.chmod(0o775)
    jit.cubin("slow/f16", "sm_80")
    folder.chmod(0o755)
    assert jit.cubin("slow/f16", ARCH) == stub.code


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
@pytest.mark.parametrize(("shared", "modes"), [(False, (0o700, 0o600)), (True, (0o755, 0o644))])
def test_the_modes_of_a_new_folder(stub, monkeypatch, tmp_path, umask, shared, modes):
    """What its user chose, or root made for an image, others can read."""
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(cache, "_is_shared", lambda: shared)
    before = os.umask(umask)
    try:
        jit.cubin("slow/f16", ARCH)
    finally:
        os.umask(before)
    (file,) = (tmp_path / "new").glob("*.cubin")
    assert tuple(path.stat().st_mode & 0o777 for path in (tmp_path / "new", file)) == modes
    cache.check_folder()


def test_what_cannot_be_read_is_said(stub, monkeypatch):
    jit.cubin("slow/f16", ARCH)

    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.warns(UserWarning, match=r"cannot read .* \(Permission denied\), .*_CACHE"):
        assert jit.cubin("slow/f16", ARCH) == stub.code


def test_leftovers_of_killed_processes_are_removed(stub):
    jit.cubin("slow/f16", ARCH)
    new, old = cache.folder() / ".new-1", cache.folder() / ".new-2"
    for path, age in ((new, 0), (old, 7200)):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    jit.cubin("slow/f16", "sm_80")
    assert new.exists() and not old.exists()
    (cache.folder() / "folder.cubin").mkdir()
    assert cache.clear() == 2
    assert [path.name for path in cache.folder().iterdir()] == ["folder.cubin"]


def test_the_cache_has_a_limit(monkeypatch):
    """What was unused for longest goes first, and never what was just written."""
    monkeypatch.setenv("CUTLASS_ATTN_CACHE_SIZE", "1K")
    kept = [cache.Entry(f"k{i}", "0" * 24) for i in range(4)]
    for age, entry in enumerate(kept[:3]):
        entry.write(bytes(300))
        os.utime(entry.path, (1e9 + age, 1e9 + age))
    assert kept[0].read() == bytes(300)  # which makes it the last one used
    kept[3].write(bytes(300))
    assert [entry.read() is not None for entry in kept] == [True, False, True, True]
    monkeypatch.setenv("CUTLASS_ATTN_CACHE_SIZE", "1")
    kept[1].write(bytes(300))
    assert [entry.read() is not None for entry in kept] == [False, True, False, False]


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 2**30), ("500M", 500 * 2**20), ("2gb", 2**31), ("1.5G", 3 * 2**29), ("100", 100)],
)
def test_the_limit_is_read(monkeypatch, text, size):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE_SIZE", text)
    assert cache.size_limit() == size


def test_a_wrong_limit_is_named(monkeypatch):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE_SIZE", "much")
    with pytest.raises(RuntimeError, match="CUTLASS_ATTN_CACHE_SIZE is 'much'; allowed: bytes"):
        cache.size_limit()


def test_a_wrong_limit_is_refused_before_a_compilation(stub, monkeypatch):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE_SIZE", "much")
    with pytest.raises(RuntimeError, match="CUTLASS_ATTN_CACHE_SIZE is 'much'"):
        jit.cubin("slow/f16", ARCH)
    assert stub.calls == 0


def test_the_command_cache(stub, capsys):
    jit.cubin("slow/f16", ARCH)
    assert cli.main(["cache", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["folder"]) == ("cache", str(cache.folder()))
    (row,) = document["rows"]
    assert (row["kernel"], row["arch"]) == ("slow_f16", ARCH) and row["size"] > 32
    assert cli.main(["cache"]) == 0
    assert "1 kernels, 0.0 of 1024 MB, in " in capsys.readouterr().out
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("1 removed from ")
    assert cache.entries() == [] and not list(cache.folder().iterdir())
