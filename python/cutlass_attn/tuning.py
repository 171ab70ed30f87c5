"""The user's own choice of tiles: read when the library is imported, and handed to dispatch.

Nothing but a look at the file system happens where there is no such file.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from . import _C

if TYPE_CHECKING:
    from .tuning_file import Tuning

VARIABLE = "CUTLASS_ATTN_TUNING"


def path() -> Path | None:
    """$CUTLASS_ATTN_TUNING, else cutlass_attn/tuned.toml under $XDG_CONFIG_HOME or ~/.config.

    None where there is neither of them nor a home directory, and for an empty $CUTLASS_ATTN_TUNING,
    which stands for no file.
    """
    if (chosen := os.environ.get(VARIABLE)) is not None:
        return Path(chosen) if chosen else None
    if base := os.environ.get("XDG_CONFIG_HOME"):
        return Path(base) / "cutlass_attn" / "tuned.toml"
    try:
        return Path.home() / ".config" / "cutlass_attn" / "tuned.toml"
    except RuntimeError:
        return None


def read(file: Path) -> Tuning:
    """What the file says. Raises TuningError, which names file and line, and OSError."""
    from .tuning_file import TuningError, parse

    try:
        return parse(file.read_text(encoding="utf-8"))
    except (TuningError, UnicodeDecodeError) as error:
        raise TuningError(f"{file}: {error}") from error


def apply(tuning: Tuning, source: str) -> list[str]:
    """Hands rules, tiles of their own and marks to dispatch; returns what is wrong with the others.

    Only before anything has asked for variants or for a kernel.
    """
    from .gates.tile import shape_of

    wrong = []
    for rule in tuning.rules:
        try:
            qk, v = rule.dims()
            shape = shape_of(f"{rule.kernel}/f16/{rule.head_dims}/{rule.tile}", "")
            if shape and not shape.why_not():
                sizes = (shape.m, shape.threads, shape.smem_bytes)
                _C.add_tile(rule.kernel, qk, v, rule.tile, *sizes)
            _C.prefer_tile(rule.smem_kb, rule.kernel, qk, v, rule.tile, rule.min_blocks_per_sm)
        except ValueError as error:
            wrong.append(f"{source}, line {rule.line}: {rule.where}: {error}")
    for mark in tuning.failing:
        try:
            _C.mark_failing(mark.smem_kb, mark.key, mark.reason)
        except ValueError as error:
            wrong.append(f"{source}, line {mark.line}: {error}")
    return wrong


def load() -> None:
    """Reads the user's file, if there is one. What is wrong in it is a warning, without effect."""
    file = path()
    if file is None or not file.is_file():
        if os.environ.get(VARIABLE):
            warnings.warn(f"${VARIABLE} names {file}, which is no file", stacklevel=2)
        return
    from .tuning_file import TuningError

    try:
        wrong = apply(read(file), str(file))
    except (TuningError, OSError) as error:
        wrong = [str(error)]
    for message in wrong:
        warnings.warn(f"{message}; this has no effect", stacklevel=2)
