"""Compiled kernels on disk, safe with several processes and with files that were cut short."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path


def folder() -> Path:
    """$CUTLASS_ATTN_CACHE, else cutlass_attn under $XDG_CACHE_HOME, else under ~/.cache.

    Raises RuntimeError where there is neither of them nor a home directory.
    """
    if chosen := os.environ.get("CUTLASS_ATTN_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "cutlass_attn"
    try:
        return Path.home() / ".cache" / "cutlass_attn"
    except RuntimeError as error:
        raise RuntimeError(
            f"compiled kernels have no place: {error}; set CUTLASS_ATTN_CACHE to a folder"
        ) from error


class Entry:
    """One file: 32 bytes of SHA-256, then the code that they are the digest of.

    A file appears by being renamed, so a reader sees all of it or none.
    """

    def __init__(self, name: str, identity: str) -> None:
        self.path = folder() / f"{name}-{identity[:24]}.cubin"

    def read(self) -> bytes | None:
        """The code, or None if it is not there or is damaged."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return None
        digest, code = data[:32], data[32:]
        return code if hashlib.sha256(code).digest() == digest else None

    def write(self, code: bytes) -> None:
        """Keeps the code; where the folder takes none, a warning says so and nothing is kept."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(code).digest() + code)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            warnings.warn(
                f"cutlass_attn cannot keep a compiled kernel, and compiles it again next time: "
                f"{error}; set CUTLASS_ATTN_CACHE to a folder that can be written",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds other processes off the same entry; without a lock where there can be none."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path.with_suffix(".lock"), "w")  # noqa: SIM115
        except OSError:
            yield
            return
        with file:
            with contextlib.suppress(OSError):  # of a file system without locks
                # Until the file closes, or the process ends.
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = f"cutlass_attn: waiting for another process to make {self.path}"
                    print(text, file=sys.stderr, flush=True)
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield
