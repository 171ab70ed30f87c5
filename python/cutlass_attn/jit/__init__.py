"""Compiles the kernels that the build left out, when a call first needs them.

Compiling needs NVRTC and the headers of the CUDA runtime (`compiler.find_compiler`). Compiled
kernels are cached on disk (`cache.folder`); loading them from there needs neither. The package
imports this module at the first such call.
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
    """{key of a variant: its source with the scores that are not in this build}, of all variants
    that can be compiled at run time."""
    path = TREE / "units.json"
    if not path.is_file():
        return {}
    added = [row["key"] for row in _C.variants() if row["tier"] == "tuned"]
    made = json.loads(path.read_text(encoding="utf-8"))
    return {**made, **{key: unit_of(TREE, key) for key in added}}


def entries(key: str) -> list[str]:
    """The entries of a variant, each compiled separately: "<key>+<score>" for each score that this
    build lacks, or only the key if the variant has a single score."""
    scores = scores_of(units()[key])
    has_several = len(scores) > 1 or _rows().get(key, {}).get("compiled")
    return [f"{key}+{score}" for score in scores] if has_several else [key]


def entry_name(key: str, score: str) -> str:
    """The entry that a call runs, given its variant and the score of its `Verdict`."""
    name = f"{key}+{score}"
    return name if name in entries(key) else key


@once
def _units_for_score_mods() -> dict[str, str]:
    """{key: source with all scores} of the variants that a score_mod can be compiled into."""
    path = TREE / "score_mods.json"
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


_score_mods: dict[str, str] = {}  # C++ by name


def score_mod(text: str) -> str:
    """Registers the C++ of a score_mod, which defines a struct Mod, and returns its name.

    Entries with it are called "<key>+<score>+<name>".
    """
    name = f"mod_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _score_mods.setdefault(name, text)
    return name


def _source(name: str) -> str:
    """The source of an entry, or of a variant with all of its scores if `name` is a key."""
    key, _, score = name.partition("+")
    score, _, mod = score.partition("+")
    if mod:
        return with_score_mod(_units_for_score_mods()[key], score, _score_mods[mod])
    return with_scores(units()[key], score) if score else units()[key]


def tile_space() -> dict[str, Any]:
    """{kernel: its "axes", ...} of the kernels of this build that can have other tiles."""
    return space(TREE)


@once
def digest() -> str:
    """Digest of the headers that kernels include, and of the build's CUDA version."""
    return (TREE / "digest").read_text(encoding="utf-8") + _C.build_info()["cuda"]


@once
def _compiler() -> Compiler:
    return find_compiler(TREE)


def _entry(name: str, arch: str) -> cache.Entry:
    # Does not depend on NVRTC's version: finding NVRTC takes longer than reading the cache.
    parts = [_source(name), arch, *OPTIONS, digest()]
    identity = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache.Entry(f"{name.replace('/', '_')}-{arch}", identity)


@once
def _rows() -> dict[str, Any]:
    return {row["key"]: row for row in _C.variants()}


def arch_for(name: str, capability: int) -> str:
    """The architecture to compile an entry for: "sm_89", or "sm_90a" if it uses wgmma and TMA.

    Raises ValueError if a GPU of this compute capability cannot run it.
    """
    key, _, _ = name.partition("+")
    arch = _rows().get(key, {}).get("arch", "")
    if not arch.endswith("a"):
        return f"sm_{capability}"
    if arch != f"{capability}a":
        raise ValueError(f"{key} runs only on compute capability {arch[:-2]}.{arch[-2]}")
    return f"sm_{arch}"


def _arch(name: str, device_index: int) -> str:
    """`arch_for` a GPU of this machine. Raises RuntimeError if it does not exist."""
    info = _C.device_info(CUDA, device_index)
    if info["unavailable"]:
        raise RuntimeError(info["unavailable"])
    return arch_for(name, info["compute_capability"])


def available(device_index: int | None = None) -> str:
    """Why kernels cannot be compiled now; empty if they can. Also tells the dispatcher.

    Args:
        device_index: CUDA ordinal of a GPU. If nothing can be compiled, the kernels that the cache
            has for it are loaded onto it, so that the dispatcher can still choose them.
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
    """The kernels that are unavailable because NVRTC is missing, and what to install; or empty."""
    if not units() or not (reason := available()):
        return ""
    kernels = {row["kernel"].split("/")[0] for row in _C.variants() if row["key"] in units()}
    return (
        f"{len(units())} kernels that are compiled at first use are unavailable, among them those "
        f"of {', '.join(sorted(kernels))}: {reason}"
    )


@once
def _warn_once(device_index: int, reason: str) -> None:
    """Warns, once for each GPU and reason, that calls run slower kernels for lack of NVRTC."""
    if units():
        warnings.warn(
            f"cutlass_attn runs slower kernels on cuda:{device_index}, for some calls many times "
            f"slower, because it cannot compile the kernels that this build left out: {reason}",
            stacklevel=2,
        )


@once
def _load_cached(device_index: int) -> None:
    try:
        cache.check_folder()
    except cache.CacheError as error:  # the kernels of the build still run
        warnings.warn(str(error), stacklevel=2)
        return
    for name in [name for key in units() for name in entries(key)]:
        try:
            entry = _entry(name, _arch(name, device_index))
        except ValueError:  # the kernel is for another architecture
            continue
        if (code := entry.read()) is not None:
            try:
                _C.load_kernel(name, device_index, code)
            except RuntimeError as error:  # calls that do not need this kernel still run
                warnings.warn(f"{entry.path} cannot be used: {error}", stacklevel=2)


def cubin(name: str, arch: str) -> bytes:
    """The machine code of an entry for an architecture, from the cache on disk or compiled.

    Args:
        name: one of `entries`, or the key of a variant for all of its scores together.
        arch: "sm_89", or "sm_90a" for kernels with wgmma and TMA.

    Raises:
        ValueError: this build has no source for the entry.
        CompilerNotFound: it is not cached, and NVRTC or CUDA's headers are missing.
        CompileError: NVRTC refuses the code; the message quotes NVRTC.
        RuntimeError: other users can write to the cache's folder.
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
    cache.size_limit()  # raises for a wrong setting before the compilation, not after it
    compiler = _compiler()
    with entry.locked():
        if (code := entry.read()) is None:  # else another process has compiled it meanwhile
            with _announced(name, arch):
                code = compiler.compile(_source(name), arch)
            entry.write(code)
    return code


def compile_anew(key: str, arch: str) -> tuple[bytes, str]:
    """Machine code of a variant with any tile, and the log of NVRTC and ptxas, for the tuner.

    It has the scores that builds compile ahead. The cache is not read. The code is written to the
    cache if this process has such a variant, and that variant has no other scores.

    Raises:
        ValueError: the key is not of a kernel that can have other tiles.
        CompilerNotFound, CompileError: see `cubin`.
    """
    source = core_unit_of(TREE, key)
    code, log = _compiler().compile_with_log(source, arch)
    if units().get(key) == source:
        _entry(key, arch).write(code)
    return code, log


def provide(name: str, device_index: int) -> None:
    """Loads an entry onto a GPU, for the dispatcher; compiles it first if need be.

    Without a compiler it warns once, and the dispatcher then chooses among the kernels of the
    build. If the compiler refuses the entry, it warns, and the dispatcher skips this variant.
    """
    try:
        code = cubin(name, _arch(name, device_index))
    except CompilerNotFound:
        available(device_index)
    except CompileError as error:
        if name.count("+") > 1:  # no other kernel can run this score_mod
            raise
        warnings.warn(f"{name} cannot be compiled, another kernel runs: {error}", stacklevel=2)
        _C.refuse_kernel(name, str(error))
    else:
        _C.load_kernel(name, device_index, code)


def left_out(names: str | Iterable[str]) -> list[str]:
    """The entries that `names` stand for and that this build left out.

    Args:
        names: one or more of: keys of `cutlass_attn.variants()`, such keys with "+" and a score,
            names of kernels.

    Raises:
        ValueError: a name is unknown, or it cannot be compiled at run time.
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
                f"{missing[0]} cannot be compiled at run time: this build has no source of it; "
                f"builds with CUTLASS_ATTN_CUDA=ON have the sources of GPU kernels"
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
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Compiles entries into the cache for a compute capability; if that is 0, for the GPU with this
    ordinal, and loads them onto it."""
    for done, name in enumerate(names):
        if progress:
            progress(name, done, len(names))
        arch = arch_for(name, capability) if capability else _arch(name, index)
        code = cubin(name, arch)
        if not capability:
            _C.load_kernel(name, index, code)


@contextmanager
def _announced(name: str, arch: str) -> Iterator[None]:
    """Logs that a kernel is compiled and how to compile it ahead; a terminal shows the seconds."""
    text = f"compiling {name} for {arch}, once"
    if name.count("+") > 1:
        logger.info("%s; ahead: cutlass_attn.warmup() of the same call", text)
    else:
        logger.info("%s; ahead: cutlass-attn warmup %s --device %s", text, name, arch)
    started, done = time.monotonic(), threading.Event()

    def show(end: str) -> None:
        with suppress(Exception):  # stderr may be closed, full, or replaced by another object
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
