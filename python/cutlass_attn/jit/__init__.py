"""Kernels that the build left out, compiled for the GPU at hand when a call first wants them.

Needs NVRTC and CUDA's headers: `pip install 'cutlass_attn[jit]'`. What it compiles is kept in a
cache on disk, see `cache.folder`. Nothing of this is imported before it is needed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache as once
from pathlib import Path

from .. import _C
from .._call import CUDA
from . import cache
from .compiler import Compiler, CompilerNotFound, find_compiler

__all__ = ["CompilerNotFound", "available", "cubin", "provide", "units", "warmup"]

TREE = Path(_C.__file__).parent / "nvrtc"  # what kernels/nvrtc_tree.py wrote


@once
def units() -> dict[str, str]:
    """{key of a variant: its source} of all that this build can compile at run time."""
    path = TREE / "units.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@once
def _compiler() -> Compiler:
    return find_compiler(TREE)


def available() -> str:
    """Why kernels cannot be compiled now; empty if they can. Tells the dispatcher, too."""
    try:
        _compiler()
        reason = ""
    except CompilerNotFound as error:
        reason = str(error)
    _C.set_compiler(reason)
    return reason


def cubin(key: str, arch: str) -> bytes:
    """The machine code of a variant for an architecture, such as "sm_89"; cached on disk.

    Raises:
        ValueError: this build has no source for such a key.
        CompilerNotFound: NVRTC or CUDA's headers are missing, and the cache does not have it.
        RuntimeError: NVRTC refuses the code; the message quotes it.
    """
    source = units().get(key)
    if source is None:
        raise ValueError(f"key is {key!r}; allowed: {', '.join(units()) or 'none in this build'}")
    compiler = _compiler()
    entry = cache.Entry(f"{key.replace('/', '_')}-{arch}", compiler.identity(source, arch))
    if (code := entry.read()) is not None:
        return code
    with entry.locked():
        if (code := entry.read()) is None:  # or another process made it meanwhile
            with _announced(key, arch):
                code = compiler.compile(source, arch)
            entry.write(code)
    return code


def provide(key: str, device_index: int) -> None:
    """Loads a variant onto a GPU, for the dispatcher. Without a compiler, it says so there."""
    if available():
        return
    capability, unavailable = _C.device_info(CUDA, device_index)
    if unavailable:
        raise RuntimeError(unavailable)
    _C.load_kernel(key, device_index, cubin(key, f"sm_{capability}"))


def warmup(keys: str | Iterable[str], *, device: int | str = 0) -> None:
    """Compiles variants ahead of the calls that want them, about 20 s each unless cached.

    Args:
        keys: keys of `cutlass_attn.variants()`, or one of them, or a kernel's name for all it has
            that this build left out; those that it compiled are ready as they are.
        device: CUDA ordinal of a GPU, onto which they are loaded as well; or an architecture such
            as "sm_89", for a GPU that need not be there: they wait in the cache.

    Raises:
        ValueError: a key is not among those of this build.
        CompilerNotFound: NVRTC or CUDA's headers are missing; the message says what to install.
        RuntimeError: the device does not exist, or has no driver.
    """
    compiled = {row["key"] for row in _C.variants() if row["compiled"]}
    wanted: list[str] = []
    for key in [keys] if isinstance(keys, str) else keys:
        of_kernel = [row["key"] for row in _C.variants() if key in (row["key"], row["kernel"])]
        if not of_kernel:
            raise ValueError(f"{key!r} is neither a key of variants() nor a kernel")
        wanted += [name for name in of_kernel if name not in compiled]
    if wanted and (reason := available()):
        raise CompilerNotFound(reason)
    for key in dict.fromkeys(wanted):
        if isinstance(device, str):
            cubin(key, device)
        else:
            provide(key, device)


@contextmanager
def _announced(key: str, arch: str) -> Iterator[None]:
    """Says on stderr what takes so long; with a spinner if a person is watching."""
    text = f"cutlass_attn: compiling {key} for {arch}, about 20 s, once"
    started = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        print(text, file=sys.stderr, flush=True)
        yield
    print(f"cutlass_attn: {key} took {time.monotonic() - started:.0f} s", file=sys.stderr)
