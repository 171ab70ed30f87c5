"""Sources of tiles that the manifest does not list."""

from __future__ import annotations

import json
from functools import cache as once
from pathlib import Path
from typing import Any

from ..gates.tile import tile_of


@once
def space(tree: Path) -> dict[str, Any]:
    """{kernel: "axes" of its tile, "elements", and "source" to fill in}: kernels/space.toml."""
    path = tree / "space.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def unit_of(tree: Path, key: str) -> str:
    """The source of a variant such as sm80/f16/d64/96x64x2. It asserts the sizes of gates/tile.py.

    Raises ValueError for a key whose kernel has no tiles to choose.
    """
    tile = tile_of(key, "")
    kernel, _, rest = key.rpartition("/d")[0].rpartition("/")
    if tile is None or kernel not in space(tree):
        raise ValueError(
            f"key is {key!r}; tiles can be chosen of {', '.join(space(tree)) or 'none'}"
        )
    entry = space(tree)[kernel]
    text = str(entry["source"])
    fields = {
        "element": entry["elements"][rest],
        "threads": tile.threads,
        "smem_bytes": tile.smem_bytes,
        **{name: getattr(tile, name) for name in ("head_dim", "head_dim_v", *entry["axes"])},
    }
    for name, value in fields.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text
