"""One process at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Holds off other processes that lock the same file, which is made and stays.

    On a file system without locks nobody is held off. Raises OSError if the file cannot be made,
    and without `wait` BlockingIOError if another one holds it.
    """
    with open(path, "w") as file:  # closing it, or the end of the process, gives it back
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
