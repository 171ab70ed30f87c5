"""Compiled kernels on disk, safe with several processes and with files that were cut short."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .._build.files import locked, replace_file, user_folder

VARIABLE, SIZE_VARIABLE = "CUTLASS_ATTN_CACHE", "CUTLASS_ATTN_CACHE_SIZE"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DEFAULT_SIZE = "1G"  # some thousand kernels
_USED_S = 3600.0  # a read is noted once in so many seconds
_LEFTOVER_S = 3600.0  # a file that is being written is younger


class CacheError(RuntimeError):
    """The cache's folder or size cannot be used as it is; the message says what to do."""


def folder() -> Path:
    """$CUTLASS_ATTN_CACHE, else cutlass_attn under $XDG_CACHE_HOME, else under ~/.cache.

    Raises CacheError where there is neither of them nor a home directory.
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    if found := user_folder("XDG_CACHE_HOME", ".cache"):
        return found
    raise CacheError(
        f"compiled kernels have no place: there is no home directory; set {VARIABLE} to a folder"
    )


def size_limit() -> int:
    """Bytes that all compiled kernels may take: $CUTLASS_ATTN_CACHE_SIZE, such as 500M; 1G.

    Raises CacheError for another text.
    """
    text = os.environ.get(SIZE_VARIABLE) or _DEFAULT_SIZE
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if match is None:
        raise CacheError(f"{SIZE_VARIABLE} is {text!r}; allowed: bytes, or a size such as 500M, 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def _is_shared() -> bool:
    """Whether other users are to read the kernels: in a folder that was chosen, or of root, such as
    that of a container's image."""
    return bool(os.environ.get(VARIABLE)) or os.getuid() == 0


def _make_folder(path: Path) -> None:
    """With a mode that check_folder() accepts, whatever the umask is."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755 if _is_shared() else 0o700)


def _is_private_group(gid: int) -> bool:
    """Whether the group has this user alone, as many systems make one for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and not group.gr_mem


def check_folder() -> Path:
    """The folder. Raises CacheError if others could put code into it that this user's GPU runs."""
    path = folder()
    try:
        found = path.stat()
    except OSError:  # nothing is there to read, and writing says why it fails
        return path
    reason = ""
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writers == stat.S_IWGRP and _is_private_group(found.st_gid):
        writers = 0
    if writers:
        reason = f"can be written by other users (mode {stat.S_IMODE(found.st_mode):o})"
        reason += f"; run `chmod go-w {path}`"
    elif found.st_uid not in (os.getuid(), 0):
        reason = "belongs to another user"
    if not reason:
        return path
    separator = "," if reason.startswith("belongs") else " or"
    raise CacheError(
        f"the cache of compiled kernels, {path}, {reason}{separator} set {VARIABLE} to a folder of "
        "your own: who writes there has your GPU run any code"
    )


class Entry:
    """One file: 32 bytes of SHA-256, then the code that they are the digest of.

    A file appears by being renamed, so a reader sees all of it or none. Raises CacheError for a
    folder that others may write to.
    """

    def __init__(self, name: str, identity: str) -> None:
        self.path = check_folder() / f"{name}-{identity[:24]}.cubin"

    def read(self) -> bytes | None:
        """The code, or None if it is not there or is damaged."""
        try:
            data = self.path.read_bytes()
            if time.time() - self.path.stat().st_mtime > _USED_S:
                with contextlib.suppress(OSError):  # of a folder that is read only
                    os.utime(self.path)  # those unused for longest are the first to go
        except PermissionError as error:
            warnings.warn(  # shown once: the text is that of the folder
                f"cutlass_attn cannot read the compiled kernels in {self.path.parent} "
                f"({error.strerror}), and compiles them again; set {VARIABLE} to a folder of yours",
                stacklevel=2,
            )
            return None
        except OSError:
            return None
        digest, code = data[:32], data[32:]
        return code if hashlib.sha256(code).digest() == digest else None

    def write(self, code: bytes) -> None:
        """Keeps the code; where the folder takes none, a warning says so and nothing is kept."""
        try:
            _make_folder(self.path.parent)
            replace_file(self.path, hashlib.sha256(code).digest() + code)
            if _is_shared():
                self.path.chmod(0o644)
        except OSError as error:
            warnings.warn(
                f"cutlass_attn cannot keep a compiled kernel, and compiles it again next time: "
                f"{error}; set {VARIABLE} to a folder that can be written",
                stacklevel=2,
            )
        _make_room(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds other processes off the same entry; without a lock where there can be none."""
        path = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # of a folder or a file system
                _make_folder(path.parent)
                try:
                    held.enter_context(locked(path, wait=False))
                except BlockingIOError:
                    logging.getLogger("cutlass_attn").info(
                        "waiting for another process to make %s", self.path
                    )
                    held.enter_context(locked(path))
            yield


@dataclass(frozen=True)
class File:
    """An entry, as `cutlass-attn cache` lists it."""

    kernel: str
    arch: str
    size: int  # bytes
    used: str  # local time, ISO 8601
    file: str


def _files() -> list[tuple[Path, os.stat_result]]:
    """Entries and when they were used, the latest last."""
    found = []
    for path in check_folder().glob("*.cubin"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if stat.S_ISREG((status := path.stat()).st_mode):
                found.append((path, status))
    return sorted(found, key=lambda item: item[1].st_mtime)


def entries() -> list[File]:
    """What is in the cache, the latest used last. Raises CacheError."""
    listed = []
    for path, found in _files():
        kernel, arch, _ = (*path.stem.rsplit("-", 2), "", "")[:3]
        used = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(found.st_mtime))
        listed.append(File(kernel, arch, found.st_size, used, path.name))
    return listed


def clear() -> int:
    """Removes all entries and their locks; how many entries there were. Raises CacheError."""
    removed = 0
    for path, _ in _files():
        for part in (path, path.with_suffix(".lock")):
            part.unlink(missing_ok=True)
        removed += 1
    _remove_leftovers(0.0)
    return removed


def _remove_leftovers(age: float) -> None:
    """Files that a process was killed over, older than so many seconds."""
    for path in check_folder().glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= age:
                path.unlink()


def _make_room(kept: Path) -> None:
    """Removes what was unused for longest until the rest is within the limit; never `kept`."""
    _remove_leftovers(_LEFTOVER_S)
    files = _files()
    excess = sum(found.st_size for _, found in files) - size_limit()
    for path, found in files:
        if excess <= 0:
            return
        if path != kept:
            with contextlib.suppress(OSError):
                path.unlink()
                excess -= found.st_size
