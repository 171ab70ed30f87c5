"""The user's files: their folders, atomic replacement, locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def user_folder(variable: str, below_home: str) -> Path | None:
    """The folder cutlass_attn under a base such as $XDG_CACHE_HOME or else ~/.cache; None without a
    home directory.

    platformdirs is not used: importing it takes as long as importing this package, and every import
    looks for the tuning file.
    """
    base = os.environ.get(variable, "")
    if os.path.isabs(base):  # the XDG specification: ignore relative paths
        return Path(base) / "cutlass_attn"
    try:
        return Path.home() / below_home / "cutlass_attn"
    except RuntimeError:
        return None


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader sees the old or the new content. Raises OSError."""
    import tempfile  # not at every import of the package

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Locks the file against other processes and threads; creates it if need be.

    Raises BlockingIOError if it is locked and `wait` is false, and OSError if locks are not
    supported there.
    """
    import fcntl

    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a fork may have the file open
    finally:
        os.close(file)
