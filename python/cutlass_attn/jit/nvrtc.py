"""NVRTC, called through ctypes, so that any package or toolkit that brings it will do."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

_QUOTED_LINES, _QUOTED_COLUMNS = 20, 300
_SUCCESS = 0
_SIGNATURES = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcCreateProgram": (
        *(POINTER(c_void_p), c_char_p, c_char_p),
        *(c_int, POINTER(c_char_p), POINTER(c_char_p)),
    ),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
}


class CompileError(RuntimeError):
    """NVRTC refuses a kernel. The message quotes the first errors and names the file of the log."""


class Nvrtc:
    """An NVRTC library. Raises OSError if the file cannot be loaded, AttributeError if it is
    another library."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        # NVRTC opens this library by name, and not every release looks in its own folder.
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(self.path)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = (major.value, minor.value)

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    def compile(self, source: str, name: str, options: list[str]) -> tuple[bytes, str]:
        """Compiles a translation unit; returns machine code and log. Raises CompileError."""
        program = c_void_p()
        text = source.encode()
        self._call("nvrtcCreateProgram", byref(program), text, name.encode(), 0, None, None)
        try:
            encoded = (c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
            said = log.rstrip(b"\0").decode(errors="replace")
            if status != _SUCCESS:
                raise CompileError(_quote(said, f"{self} refuses {' '.join(options[:1])}"))
            return self._bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program), said
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _bytes(self, size_of: str, read: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._call(size_of, program, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(read, program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise RuntimeError(f"{name} of {self.path} failed with status {status}")


def _quote(log: str, title: str) -> str:
    """The title and the log's first errors. A log, which can exceed a megabyte, goes to a file."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    quoted = [line[:_QUOTED_COLUMNS] for line in lines[first : first + _QUOTED_LINES]]
    if quoted == lines:
        return "\n".join([f"{title}:", *lines])
    where = "could not be written"
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="cutlass_attn-", suffix=".log", delete=False
        ) as file:
            file.write(log)
        where = f"is {file.name}"
    return "\n".join([f"{title}:", *quoted, f"... ({len(lines)} lines; the whole log {where})"])
