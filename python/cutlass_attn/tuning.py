"""The user's tuning file: read on import, and handed to dispatch.

Without such a file the import costs one look at the file system.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _C
from ._build.files import locked, replace_file, user_folder

if TYPE_CHECKING:
    from ._build.tuned_toml import Rule, Tuning

VARIABLE = "CUTLASS_ATTN_TUNING"


def path() -> Path | None:
    """$CUTLASS_ATTN_TUNING, else cutlass_attn/tuned.toml under $XDG_CONFIG_HOME or ~/.config.

    None if $CUTLASS_ATTN_TUNING is empty, which means no file, or if there is no home directory.
    """
    if (chosen := os.environ.get(VARIABLE)) is not None:
        return Path(chosen) if chosen else None
    folder = user_folder("XDG_CONFIG_HOME", ".config")
    return folder / "tuned.toml" if folder else None


def read(file: Path) -> Tuning:
    """The content of the file. Raises TuningError, which names file and line, and OSError."""
    from ._build.tuned_toml import TuningError, parse

    try:
        return parse(file.read_text(encoding="utf-8"))
    except (TuningError, UnicodeDecodeError) as error:
        raise TuningError(f"{file}: {error}") from error


def update(file: Path, change: Callable[[Tuning], Tuning]) -> None:
    """Replaces the content of a file by `change` of it, one process at a time.

    Keeps comments. A reader sees the old file or the new one. Raises TuningError if the file cannot
    be parsed, and OSError.
    """
    from ._build.tuned_toml import Tuning

    with _held(file) as file:
        before = read(file) if file.exists() else Tuning()
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        replace_file(file, change(before).dumps(text).encode())


def check_writable(file: Path) -> None:
    """Raises the errors of `update`, and leaves the file unchanged."""
    with _held(file) as file:
        if file.exists():
            read(file)
        new = file.with_name(f"{file.name}.new")
        new.touch()
        new.unlink()


def rules_in_force(
    device_class: str, kernel: str, head_dims: tuple[int, int], decode: bool
) -> list[Rule]:
    """The rules that dispatch uses on a class of GPUs, in order.

    If the kernel has no rule, its first variant is returned as the only one.
    """
    from ._build.tuned_toml import DEVICE_CLASSES, Rule

    wanted = kernel, *head_dims
    qk, v = head_dims
    where = device_class, kernel, f"d{qk}" if qk == v else f"d{qk}v{v}"
    known = [
        Rule(*where, rule["tile"], decode=rule["decode"])
        for rule in _C.tile_rules()
        if (rule["kernel"], rule["head_dim"], rule["head_dim_v"]) == wanted
        and rule["smem_kb"] == DEVICE_CLASSES[device_class]
    ]
    found = [rule for rule in known if rule.decode == decode]
    if not found:  # without decode rules, the rules of all calls apply
        found = [replace(rule, decode=decode) for rule in known if not rule.decode]
    rows = (x for x in _C.variants() if (x["kernel"], x["head_dim"], x["head_dim_v"]) == wanted)
    return found or [Rule(*where, next(rows)["tile"], decode=decode)]


def with_rules(tuning: Tuning, rules: list[Rule]) -> Tuning:
    """A tuning with the rules for one kernel, head dims and class replaced.

    A [failing] mark of a tile that is a variant only because of a replaced rule goes with the rule.
    """
    from ._build.facts import DTYPE_KEYS
    from ._build.tuned_toml import Tuning

    kept = [rule for rule in tuning.rules if rule.where != rules[0].where] + rules
    keys = {row["key"] for row in _C.variants() if row["tier"] != "tuned"}
    for rule in kept:
        keys |= {f"{rule.kernel}/{key}/{rule.head_dims}/{rule.tile}" for key in DTYPE_KEYS.values()}
    return Tuning(kept, [mark for mark in tuning.failing if mark.key in keys])


@contextmanager
def _held(file: Path) -> Iterator[Path]:
    """Locks the file, following links, against other processes; yields its path."""
    file = file.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f"{file.name}.lock")):
        yield file


def apply(tuning: Tuning, source: str) -> list[str]:
    """Hands rules, new tiles and marks to dispatch; returns what is wrong with those it refused.

    To be called before any variant is listed and before any kernel runs.
    """
    wrong = []
    for rule in tuning.rules:
        reason = ""
        try:
            reason = _add(rule)
            _C.prefer_tile(smem_kb=rule.smem_kb, decode=rule.decode, **_tile_of(rule))
        except ValueError as error:
            is_new = reason and reason != str(error)
            text = f"{error}; a new one: {reason}" if is_new else str(error)
            wrong.append(f"{source}, line {rule.line}: {rule.where}: {text}")
    for mark in tuning.failing:
        try:
            _C.mark_failing(mark.smem_kb, mark.key, mark.reason)
        except ValueError as error:
            wrong.append(f"{source}, line {mark.line}: {error}")
    return wrong


def _add(rule: Rule) -> str:
    """Adds a variant with the rule's tile, unless it exists. Returns why it cannot be added."""
    from .jit import tile_space

    kernels = tile_space()
    if kernels and rule.kernel not in kernels:  # without any, no GPU kernel runs in this build
        return f"tiles can be chosen of {', '.join(kernels)}"
    try:
        _C.add_tile(**_tile_of(rule))
    except ValueError as error:
        return str(error)
    return ""


def _tile_of(rule: Rule) -> dict[str, Any]:
    head_dim, head_dim_v = rule.dims()
    return {
        "kernel": rule.kernel,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "tile": rule.tile,
    }


def load() -> None:
    """Reads the user's file, if there is one. Each mistake in it is a warning, and is ignored."""
    if (file := path()) is None:
        return
    is_named = bool(os.environ.get(VARIABLE))
    try:
        if not file.is_file():
            if is_named:
                warnings.warn(f"${VARIABLE} names {file}, which is no file", stacklevel=2)
            return
    except PermissionError as error:
        # Without a file named: the home of another user, as in a container. There is no file.
        if is_named:
            warnings.warn(f"{error}; this has no effect", stacklevel=2)
        return
    try:
        wrong = apply(read(file), str(file))
    except (OSError, ValueError) as error:
        wrong = [str(error)]
    for message in wrong:
        warnings.warn(f"{message}; this has no effect", stacklevel=2)
