#!/usr/bin/env python3
"""Gathers what NVRTC needs of this project and of CUTLASS to compile kernels at first use.

    nvrtc_tree.py --units gen/units.json --space gen/space.json --cutlass CUTLASS/include --out DIR

writes into DIR

    units.json    the source of every kernel that this build leaves out
    space.json    that of other tiles, to be filled in
    include/      the headers that they include, and no others
    digest        of the headers: kernels compiled with others are not reused
    CUTLASS_LICENSE.txt

Headers of CUDA are not among them: they come with CUDA's own wheels or toolkit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

KERNELS = Path(__file__).parent
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def closure(sources: Iterable[str], roots: list[Path]) -> dict[str, Path]:
    """The headers under `roots` that the sources include, directly or not: {include name: path}.

    Conditions around an #include are not evaluated, so this is what any compiler may ask for.
    """
    found: dict[str, Path] = {}

    def visit(text: str, folder: Path | None) -> None:
        for name in INCLUDE.findall(text):
            for root in roots:
                beside = folder / name if folder else None
                if beside and beside.is_file() and beside.is_relative_to(root):
                    name = beside.relative_to(root).as_posix()
                path = root / name
                if not path.is_file():
                    continue
                if name not in found:
                    found[name] = path
                    visit(path.read_text(encoding="utf-8"), path.parent)
                break

    for source in sources:
        visit(source, None)
    return found


def licence(cutlass: Path) -> Path:
    """The file of CUTLASS's licence: that of a checkout, or of the wheel around the headers."""
    candidates = [cutlass.parent / "LICENSE.txt"]
    candidates += cutlass.parents[2].glob("nvidia_cutlass-*.dist-info/licenses/LICENSE.txt")
    for path in candidates:
        if path.is_file():
            return path
    sys.exit(f"no LICENSE.txt of CUTLASS with {cutlass}: its headers cannot be passed on without")


def write(out: Path, units: Path, space: Path, cutlass: Path) -> None:
    sources: list[str] = list(json.loads(units.read_text(encoding="utf-8")).values())
    sources += [entry["source"] for entry in json.loads(space.read_text(encoding="utf-8")).values()]
    shutil.rmtree(out, ignore_errors=True)
    (out / "include").mkdir(parents=True)
    digest = hashlib.sha256()
    headers = closure(sources, [KERNELS / "nvrtc", KERNELS, units.parent, cutlass])
    for name, path in sorted(headers.items()):
        target = out / "include" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        digest.update(name.encode() + b"\0" + path.read_bytes())
    shutil.copyfile(units, out / "units.json")
    shutil.copyfile(space, out / "space.json")
    (out / "digest").write_text(digest.hexdigest(), encoding="utf-8")
    shutil.copyfile(licence(cutlass), out / "CUTLASS_LICENSE.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=Path, required=True)
    parser.add_argument("--space", type=Path, required=True)
    parser.add_argument("--cutlass", type=Path, required=True, help="its include directory")
    parser.add_argument("--out", type=Path, required=True, help="directory for nothing else")
    options = parser.parse_args()
    write(options.out, options.units, options.space, options.cutlass)


if __name__ == "__main__":
    main()
