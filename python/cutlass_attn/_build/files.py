"""Files of the user's: where they are, and how they are replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def user_folder(variable: str, below_home: str) -> Path | None:
    """cutlass_attn under $XDG_CACHE_HOME, say, else under ~/.cache; None without a home directory.

    By hand, as platformdirs would be: it takes as long to import as all of this package, and the
    user's tuning file is looked for at every import.
    """
    base = os.environ.get(variable, "")
    if os.path.isabs(base):  # the XDG specification has others ignored
        return Path(base) / "cutlass_attn"
    try:
        return Path.home() / below_home / "cutlass_attn"
    except RuntimeError:
        return None


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file that a reader sees whole, the old one or the new one. Raises OSError."""
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
    """Holds other processes and threads off the same file, which is made if it is not there.

    Raises BlockingIOError if one has it and `wait` is false, another OSError where there can be no
    lock.
    """
    import fcntl

    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked has the file, too
    finally:
        os.close(file)
