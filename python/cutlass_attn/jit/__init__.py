"""Kernels that the build left out, compiled for the GPU at hand when a call first wants them.

Needs NVRTC and headers of the CUDA runtime, see `compiler.find_compiler`. What it compiles is kept
in a cache on disk, see `cache.folder`; what the cache has needs neither. Nothing of this is
imported before it is needed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache as once
from pathlib import Path
from typing import Any

from .. import _C
from ..devices import CUDA
from . import cache
from .compiler import OPTIONS, CompileError, Compiler, CompilerNotFound, find_compiler
from .sources import core_unit_of, scores_of, space, unit_of, with_score_mod, with_scores

__all__ = [
    "CompileError",
    "CompilerNotFound",
    "available",
    "compile_anew",
    "cubin",
    "digest",
    "entries",
    "entry_name",
    "left_out",
    "missing",
    "prepare",
    "provide",
    "score_mod",
    "tile_space",
    "units",
]

logger = logging.getLogger("cutlass_attn")
TREE = Path(_C.__file__).parent / "nvrtc"  # what kernels/nvrtc_tree.py wrote


@once
def units() -> dict[str, str]:
    """{key of a variant: its source, with the scores that are not in this build} of all that can be
    compiled at run time."""
    path = TREE / "units.json"
    if not path.is_file():
        return {}
    added = [row["key"] for row in _C.variants() if row["tier"] == "tuned"]
    made = json.loads(path.read_text(encoding="utf-8"))
    return {**made, **{key: unit_of(TREE, key) for key in added}}


def entries(key: str) -> list[str]:
    """What is compiled by itself of a variant: "<key>+<score>" for each of its scores that is left
    out, or the key alone where it has one score."""
    scores = scores_of(units()[key])
    has_several = len(scores) > 1 or _rows().get(key, {}).get("compiled")
    return [f"{key}+{score}" for score in scores] if has_several else [key]


def entry_name(key: str, score: str) -> str:
    """The entry that a call runs, for a variant and the score that a verdict names."""
    name = f"{key}+{score}"
    return name if name in entries(key) else key


@once
def _units_for_score_mods() -> dict[str, str]:
    """As `units`, of the kernels that a score_mod can be compiled with, with all their scores."""
    path = TREE / "score_mods.json"
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


_score_mods: dict[str, str] = {}  # C++ by name


def score_mod(text: str) -> str:
    """The name of a score_mod's C++, in which it is a struct Mod, with all that this needs. Entries
    are called "<key>+<score>+<name>"."""
    name = f"mod_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _score_mods.setdefault(name, text)
    return name


def _source(name: str) -> str:
    """Of an entry; of a variant with all of its scores, if a key is given."""
    key, _, score = name.partition("+")
    score, _, mod = score.partition("+")
    if mod:
        return with_score_mod(_units_for_score_mods()[key], score, _score_mods[mod])
    return with_scores(units()[key], score) if score else units()[key]


def tile_space() -> dict[str, Any]:
    """{kernel: its "axes", ...} of the kernels that have tiles to choose in this build."""
    return space(TREE)


@once
def digest() -> str:
    """Of the project's headers and CUTLASS's, and the CUDA version that the build is for."""
    return (TREE / "digest").read_text(encoding="utf-8") + _C.build_info()["cuda"]


@once
def _compiler() -> Compiler:
    return find_compiler(TREE)


def _entry(name: str, arch: str) -> cache.Entry:
    # Not by NVRTC's version: finding NVRTC alone takes longer than a hit may.
    parts = [_source(name), arch, *OPTIONS, digest()]
    identity = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache.Entry(f"{name.replace('/', '_')}-{arch}", identity)


@once
def _rows() -> dict[str, Any]:
    return {row["key"]: row for row in _C.variants()}


def arch_for(name: str, capability: int) -> str:
    """What an entry is compiled for on a GPU of this compute capability: "sm_89", or "sm_90a" for
    one of Hopper's own instructions."""
    key, _, _ = name.partition("+")
    arch = _rows().get(key, {}).get("arch", "")
    if not arch.endswith("a"):
        return f"sm_{capability}"
    if arch != f"{capability}a":
        raise ValueError(f"{key} is for compute capability {arch[:-2]}.{arch[-2]} alone")
    return f"sm_{arch}"


def _arch(name: str, device_index: int) -> str:
    """The same for a GPU that is there. Raises RuntimeError if it is not."""
    info = _C.device_info(CUDA, device_index)
    if info["unavailable"]:
        raise RuntimeError(info["unavailable"])
    return arch_for(name, info["compute_capability"])


def available(device_index: int | None = None) -> str:
    """Why kernels cannot be compiled now; empty if they can. Tells the dispatcher, too.

    Args:
        device_index: CUDA ordinal of a GPU to load what the cache has for it onto if nothing can be
            compiled: the dispatcher then takes these kernels as before.
    """
    try:
        _compiler()
        reason = ""
    except CompilerNotFound as error:
        reason = str(error)
        if device_index is not None:
            _load_cached(device_index)
            _warn_once(device_index, reason)
    _C.set_compiler(reason)
    return reason


def missing() -> str:
    """What this machine lacks for want of NVRTC, and what to install; empty if nothing."""
    if not units() or not (reason := available()):
        return ""
    kernels = {row["kernel"].split("/")[0] for row in _C.variants() if row["key"] in units()}
    return (
        f"{len(units())} kernels that are compiled at first use are unavailable, among them those "
        f"of {', '.join(sorted(kernels))}: {reason}"
    )


@once
def _warn_once(device_index: int, reason: str) -> None:
    """A call, or `explain`, has found that a GPU lacks the kernels that it would rather run."""
    if units():
        warnings.warn(
            f"cutlass_attn runs slower kernels on cuda:{device_index}, for some calls many times "
            f"slower, because it cannot compile those that this build left out: {reason}",
            stacklevel=2,
        )


@once
def _load_cached(device_index: int) -> None:
    try:
        cache.check_folder()
    except cache.CacheError as error:  # compiled variants run all the same
        warnings.warn(str(error), stacklevel=2)
        return
    for name in [name for key in units() for name in entries(key)]:
        try:
            entry = _entry(name, _arch(name, device_index))
        except ValueError:  # for GPUs of another architecture
            continue
        if (code := entry.read()) is not None:
            try:
                _C.load_kernel(name, device_index, code)
            except RuntimeError as error:  # other calls can do without it
                warnings.warn(f"{entry.path} cannot be used: {error}", stacklevel=2)


def cubin(name: str, arch: str) -> bytes:
    """The machine code of an entry for an architecture, such as "sm_89"; cached on disk.

    Args:
        name: one of `entries`, or the key of a variant for all of its scores in one.
        arch: "sm_89", or "sm_90a" for kernels of Hopper's own instructions.

    Raises:
        ValueError: this build has no source for such a key.
        CompilerNotFound: NVRTC or CUDA's headers are missing, and the cache does not have it.
        CompileError: NVRTC refuses the code; the message quotes it.
        RuntimeError: the cache's folder is one that other users can write to.
    """
    key, _, score = name.partition("+")
    has_mod = "+" in score
    known = _units_for_score_mods() if has_mod else units()
    if key not in known:
        raise ValueError(f"key is {name!r}; allowed: {', '.join(known) or 'none in this build'}")
    if score and not has_mod and name not in entries(key):
        raise ValueError(f"key is {name!r}; allowed: {', '.join([key, *entries(key)])}")
    entry = _entry(name, arch)
    if (code := entry.read()) is not None:
        return code
    cache.size_limit()  # refused before the compilation, not after
    compiler = _compiler()
    with entry.locked():
        if (code := entry.read()) is None:  # or another process made it meanwhile
            with _announced(name, arch):
                code = compiler.compile(_source(name), arch)
            entry.write(code)
    return code


def compile_anew(key: str, arch: str) -> tuple[bytes, str]:
    """Machine code of any tile that can be chosen, with the scores that builds compile ahead, and
    what NVRTC and ptxas say of it.

    Nothing is read from the cache; a variant that this process knows, and that has no other scores,
    is kept there.

    Raises:
        ValueError: the key is not of a kernel with tiles to choose.
        CompilerNotFound, CompileError: as `cubin`.
    """
    source = core_unit_of(TREE, key)
    code, log = _compiler().compile_with_log(source, arch)
    if units().get(key) == source:
        _entry(key, arch).write(code)
    return code, log


def provide(name: str, device_index: int) -> None:
    """Loads an entry onto a GPU, for the dispatcher.

    Without a compiler a warning says so once, and the dispatcher takes compiled variants from then
    on; with one that refuses this code, it passes this variant over.
    """
    try:
        code = cubin(name, _arch(name, device_index))
    except CompilerNotFound:
        available(device_index)
    except CompileError as error:
        if name.count("+") > 1:  # no other kernel has this score_mod
            raise
        warnings.warn(f"{name} is not compiled, another variant runs: {error}", stacklevel=2)
        _C.refuse_kernel(name, str(error))
    else:
        _C.load_kernel(name, device_index, code)


def left_out(names: str | Iterable[str]) -> list[str]:
    """The entries that this build left out, of all that `names` stand for.

    Args:
        names: keys of `cutlass_attn.variants()`, also with "+" and a score, and kernels' names; or
            one of them.

    Raises:
        ValueError: a name is none of these, or no build can compile it at run time.
    """
    found: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        key, _, score = name.partition("+") if isinstance(name, str) else (name, "", "")
        rows = [row for row in _C.variants() if key in (row["key"], row["kernel"])]
        if not rows:
            kernels = [row["kernel"] for row in _C.variants() if row["device"] == "cuda"]
            raise ValueError(
                f"{name!r} is neither a key of variants() nor a kernel; allowed: "
                f"{', '.join(dict.fromkeys(kernels))}, or a key such as {_C.variants()[0]['key']!r}"
            )
        wanted = [row["key"] for row in rows if not row["compiled"] or row["key"] in units()]
        if missing := [key for key in wanted if key not in units()]:
            raise ValueError(
                f"{missing[0]} cannot be compiled at run time: this build left it out without its "
                f"source, which only GPU kernels of a build with CUTLASS_ATTN_CUDA=ON have"
            )
        of_name = [entry for key in wanted for entry in entries(key)]
        if score:
            of_name = [entry for entry in of_name if entry.endswith(f"+{score}")]
            if not of_name and not all(row["compiled"] for row in rows):
                allowed = ", ".join(entries(wanted[0]))
                raise ValueError(f"{name!r} is not compiled; allowed: {allowed}")
        found += of_name
    return list(dict.fromkeys(found))


def prepare(
    names: list[str],
    index: int,
    capability: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> None:
    """Compiles entries for a compute capability, or, where that is 0, for the GPU with this
    ordinal, onto which they are loaded."""
    for done, name in enumerate(names):
        progress(name, done, len(names))
        arch = arch_for(name, capability) if capability else _arch(name, index)
        code = cubin(name, arch)
        if not capability:
            _C.load_kernel(name, index, code)


@contextmanager
def _announced(name: str, arch: str) -> Iterator[None]:
    """Logs what takes so long, and how to have it before; a terminal shows how long."""
    text = f"compiling {name} for {arch}, once"
    if name.count("+") > 1:
        logger.info("%s; ahead: cutlass_attn.warmup() of the same call", text)
    else:
        logger.info("%s; ahead: cutlass-attn warmup %s --device %s", text, name, arch)
    started, done = time.monotonic(), threading.Event()

    def show(end: str) -> None:
        with suppress(Exception):  # stderr may be closed, full, or anything
            sys.stderr.write(f"\rcutlass_attn: {text}: {time.monotonic() - started:.0f} s{end}")
            sys.stderr.flush()

    def count() -> None:
        while not done.wait(0.5):
            show("")

    counting = None
    with suppress(Exception):  # as above: None has no isatty()
        if sys.stderr.isatty():
            counting = threading.Thread(target=count, daemon=True)
            counting.start()
    try:
        yield
    finally:
        done.set()
        if counting:
            counting.join()
            show("\n")
