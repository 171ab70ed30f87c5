"""The cache of compiled kernels on disk, which processes share; damaged files are ignored."""

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
_USED_S = 3600.0  # the time of last use is updated at most this often
_LEFTOVER_S = 3600.0  # a temporary file older than this was left by a process that was killed


class CacheError(RuntimeError):
    """The cache's folder or size limit is not usable; the message says what to do."""


def folder() -> Path:
    """$CUTLASS_ATTN_CACHE, else cutlass_attn under $XDG_CACHE_HOME, else under ~/.cache.

    Raises CacheError if none of them is set and there is no home directory.
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    if found := user_folder("XDG_CACHE_HOME", ".cache"):
        return found
    raise CacheError(
        f"there is no folder for compiled kernels, as there is no home directory; set {VARIABLE}"
    )


def size_limit() -> int:
    """Most bytes that the cache may hold: $CUTLASS_ATTN_CACHE_SIZE, such as 500M; 1G by default.

    Raises CacheError if the variable is not a size.
    """
    text = os.environ.get(SIZE_VARIABLE) or _DEFAULT_SIZE
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if match is None:
        raise CacheError(f"{SIZE_VARIABLE} is {text!r}; allowed: bytes, or a size such as 500M, 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def _is_shared() -> bool:
    """Whether other users may read the kernels: if the variable names the folder, or for root, who
    may be building a container's image."""
    return bool(os.environ.get(VARIABLE)) or os.getuid() == 0


def make_folder(path: Path) -> None:
    """Makes the folder with a mode that check_folder() accepts, whatever the umask is."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755 if _is_shared() else 0o700)


def _is_private_group(gid: int) -> bool:
    """Whether this user is the group's only member, as on systems with a group for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and not group.gr_mem


def check_folder() -> Path:
    """The cache's folder. Raises CacheError if other users could put code into it."""
    path = folder()
    try:
        found = path.stat()
    except OSError:  # the folder does not exist yet; writing reports other reasons
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
        "your own: whoever can write there can run code on your GPU"
    )


class Entry:
    """One file: the SHA-256 of the code (32 bytes), then the code.

    A new file is renamed into place, so a reader never sees a part of it. Raises CacheError if
    other users may write to the folder.
    """

    def __init__(self, name: str, identity: str) -> None:
        self.path = check_folder() / f"{name}-{identity[:24]}.cubin"

    def read(self) -> bytes | None:
        """The code, or None if the file is missing or damaged."""
        try:
            data = self.path.read_bytes()
            if time.time() - self.path.stat().st_mtime > _USED_S:
                with contextlib.suppress(OSError):  # the folder may be read-only
                    os.utime(self.path)  # the least recently used are removed first
        except PermissionError as error:
            warnings.warn(  # shown once for each folder: Python compares the text
                f"cutlass_attn cannot read the compiled kernels in {self.path.parent} "
                f"({error.strerror}), so it compiles them again; set {VARIABLE} to another folder",
                stacklevel=2,
            )
            return None
        except OSError:
            return None
        digest, code = data[:32], data[32:]
        return code if hashlib.sha256(code).digest() == digest else None

    def write(self, code: bytes) -> None:
        """Writes the code. Warns, and keeps nothing, if the folder cannot be written."""
        try:
            make_folder(self.path.parent)
            replace_file(self.path, hashlib.sha256(code).digest() + code)
            if _is_shared():
                self.path.chmod(0o644)
        except OSError as error:
            warnings.warn(
                f"cutlass_attn cannot cache a compiled kernel, so the next process compiles it: "
                f"{error}; set {VARIABLE} to a folder that can be written",
                stacklevel=2,
            )
        _make_room(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the entry against other processes; does without where locks are not supported."""
        path = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # a read-only folder, or no locks there
                make_folder(path.parent)
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
        with contextlib.suppress(OSError):  # another process has removed it
            if stat.S_ISREG((status := path.stat()).st_mode):
                found.append((path, status))
    return sorted(found, key=lambda item: item[1].st_mtime)


def entries() -> list[File]:
    """The cache's entries, the most recently used last. Raises CacheError."""
    listed = []
    for path, found in _files():
        kernel, arch, _ = (*path.stem.rsplit("-", 2), "", "")[:3]
        used = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(found.st_mtime))
        listed.append(File(kernel, arch, found.st_size, used, path.name))
    return listed


def clear() -> int:
    """Removes all entries and their locks, and returns the number of entries. Raises CacheError."""
    removed = 0
    for path, _ in _files():
        for part in (path, path.with_suffix(".lock")):
            part.unlink(missing_ok=True)
        removed += 1
    _remove_leftovers(0.0)
    return removed


def _remove_leftovers(age: float) -> None:
    """Removes temporary files of killed processes that are older than `age` seconds."""
    for path in check_folder().glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= age:
                path.unlink()


def _make_room(kept: Path) -> None:
    """Removes the least recently used entries until the limit holds; never `kept`."""
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
