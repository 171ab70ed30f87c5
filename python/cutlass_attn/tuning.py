"""The user's own choice of tiles: read when the library is imported, and handed to dispatch.

Nothing but a look at the file system happens where there is no such file.
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

    None where there is neither of them nor a home directory, and for an empty $CUTLASS_ATTN_TUNING,
    which stands for no file.
    """
    if (chosen := os.environ.get(VARIABLE)) is not None:
        return Path(chosen) if chosen else None
    folder = user_folder("XDG_CONFIG_HOME", ".config")
    return folder / "tuned.toml" if folder else None


def read(file: Path) -> Tuning:
    """What the file says. Raises TuningError, which names file and line, and OSError."""
    from ._build.tuned_toml import TuningError, parse

    try:
        return parse(file.read_text(encoding="utf-8"))
    except (TuningError, UnicodeDecodeError) as error:
        raise TuningError(f"{file}: {error}") from error


def update(file: Path, change: Callable[[Tuning], Tuning]) -> None:
    """Rewrites a file with what `change` makes of its present content, one process at a time.

    Comments stay. A reader sees the old file or the new one. Raises TuningError for a file that
    cannot be read as one, and OSError.
    """
    from ._build.tuned_toml import Tuning

    with _held(file) as file:
        before = read(file) if file.exists() else Tuning()
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        replace_file(file, change(before).dumps(text).encode())


def check_writable(file: Path) -> None:
    """Raises what `update` would, and leaves the file as it is."""
    with _held(file) as file:
        if file.exists():
            read(file)
        new = file.with_name(f"{file.name}.new")
        new.touch()
        new.unlink()


def rules_in_force(
    device_class: str, kernel: str, head_dims: tuple[int, int], decode: bool
) -> list[Rule]:
    """What dispatch goes by on a class of GPUs, in order; the last rule has no condition.

    Without any rule the first of the kernel's variants runs.
    """
    from ._build.tuned_toml import DEVICE_CLASSES, Rule

    wanted = kernel, *head_dims
    qk, v = head_dims
    where = device_class, kernel, f"d{qk}" if qk == v else f"d{qk}v{v}"
    known = [
        Rule(*where, rule["tile"], round(rule["min_blocks_per_sm"], 6), decode=rule["decode"])
        for rule in _C.tile_rules()
        if (rule["kernel"], rule["head_dim"], rule["head_dim_v"]) == wanted
        and rule["smem_kb"] == DEVICE_CLASSES[device_class]
    ]
    found = [rule for rule in known if rule.decode == decode]
    if not found:  # decoding then goes by the rules of all calls
        found = [replace(rule, decode=decode) for rule in known if not rule.decode]
    if found and not found[-1].min_blocks_per_sm:
        return found
    # Where no rule holds, dispatch takes the first variant.
    rows = (x for x in _C.variants() if (x["kernel"], x["head_dim"], x["head_dim_v"]) == wanted)
    tile = found[0].tile if found else next(rows)["tile"]
    return [*found, Rule(*where, tile, decode=decode)]


def with_rules(tuning: Tuning, rules: list[Rule]) -> Tuning:
    """A tuning with its rules for the same kernel, head dims and class replaced.

    Marks of tiles that are no variants without a rule go with their rules.
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
    """The file that a link leads to, with other processes kept off it."""
    file = file.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f"{file.name}.lock")):
        yield file


def apply(tuning: Tuning, source: str) -> list[str]:
    """Hands rules, tiles of their own and marks to dispatch; returns what is wrong with the others.

    Only before anything has asked for variants or for a kernel.
    """
    wrong = []
    for rule in tuning.rules:
        reason = ""
        try:
            reason = _add(rule)
            _C.prefer_tile(
                smem_kb=rule.smem_kb,
                min_blocks_per_sm=rule.min_blocks_per_sm,
                decode=rule.decode,
                **_tile_of(rule),
            )
        except ValueError as error:
            text = f"{error}; a new one: {reason}" if reason else str(error)
            wrong.append(f"{source}, line {rule.line}: {rule.where}: {text}")
    for mark in tuning.failing:
        try:
            _C.mark_failing(mark.smem_kb, mark.key, mark.reason)
        except ValueError as error:
            wrong.append(f"{source}, line {mark.line}: {error}")
    return wrong


def _add(rule: Rule) -> str:
    """Makes a variant of a rule's tile, unless there is one; why not, if it cannot be one."""
    from ._build.tile import shape_of
    from .jit import tile_space

    tile = shape_of(f"{rule.kernel}/f16/{rule.head_dims}/{rule.tile}")
    if tile is None:
        return ""  # what dispatch says of it is all there is
    if reason := tile.why_not():
        return reason
    kernels = tile_space()
    if kernels and rule.kernel not in kernels:  # without any, no GPU kernel runs in this build
        return f"tiles can be chosen of {', '.join(kernels)}"
    _C.add_tile(**_tile_of(rule))
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
    """Reads the user's file, if there is one. What is wrong in it is a warning, without effect."""
    if (file := path()) is None:
        return
    try:
        if not file.is_file():
            if os.environ.get(VARIABLE):
                warnings.warn(f"${VARIABLE} names {file}, which is no file", stacklevel=2)
            return
        wrong = apply(read(file), str(file))
    except (OSError, ValueError) as error:  # of a folder that may not be looked into, too
        wrong = [str(error)]
    for message in wrong:
        warnings.warn(f"{message}; this has no effect", stacklevel=2)
