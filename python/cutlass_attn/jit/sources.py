"""Sources for NVRTC: a variant with selected scores, and with tiles that the manifest lacks."""

from __future__ import annotations

import json
import re
from functools import cache as once
from pathlib import Path
from typing import Any

from .._build.variant_key import parse, symbol_of

_ENTRY = re.compile(r"CA_KERNEL_ENTRY\(\w+, (\w+),")


def scores_of(unit: str) -> list[str]:
    """The scores that a variant's source compiles: compositions of terms, such as softcap_alibi."""
    return _ENTRY.findall(unit)


def with_scores(unit: str, *scores: str) -> str:
    """A variant's source, reduced to the kernels of these scores."""
    lines = unit.splitlines(keepends=True)
    entries = [_ENTRY.match(line) for line in lines]
    return "".join(x for x, entry in zip(lines, entries) if entry is None or entry[1] in scores)


def with_score_mod(unit: str, score: str, mod: str) -> str:
    """A variant's source, reduced to one score, with a user's score_mod in it.

    Args:
        unit: the variant's source.
        score: one of `scores_of`.
        mod: C++ of a struct Mod: see core/terms/score_mod.hpp.
    """
    source = with_scores(unit, score)
    call = re.compile(rf"^CA_KERNEL_ENTRY\((\w+), {score}, (\w+), (.*)\)$", re.MULTILINE)
    source, count = call.subn(rf"CA_SCORE_MOD_ENTRY(\1, {score}, \2, score_mod::Mod, \3)", source)
    begin = "namespace cutlass_attn {\n"
    if count != 1 or begin not in source:
        raise ValueError(f"the source has no score {score!r}")
    return source.replace(begin, f"{begin}\nnamespace score_mod {{\n{mod}}}\n", 1)


@once
def space(tree: Path) -> dict[str, Any]:
    """{kernel: "axes" of its tile, "elements", "core_scores", and "source" to fill in}: of
    kernels/space.toml."""
    path = tree / "space.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def unit_of(tree: Path, key: str) -> str:
    """The source of a variant such as sm80/f16/d64/96x64x2.

    Raises ValueError for a key whose kernel has no tiles to choose.
    """
    parts = parse(key)
    entry = space(tree).get(parts.kernel) if parts and parts.tile else None
    if parts is None or entry is None or parts.dtype not in entry["elements"]:
        raise ValueError(
            f"key is {key!r}; tiles can be chosen of {', '.join(space(tree)) or 'none'}"
        )
    text = str(entry["source"])
    fields = {
        "symbol": symbol_of(key),
        "element": entry["elements"][parts.dtype],
        "head_dim": parts.head_dim,
        "head_dim_v": parts.head_dim_v,
        **{name: parts.tile[name] for name in entry["axes"]},
    }
    for name, value in fields.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def core_unit_of(tree: Path, key: str) -> str:
    """`unit_of`, reduced to the scores that builds compile ahead."""
    unit, parts = unit_of(tree, key), parse(key)
    assert parts is not None  # or unit_of() had raised
    return with_scores(unit, *space(tree)[parts.kernel]["core_scores"])
