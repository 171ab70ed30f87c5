#!/usr/bin/env python3
"""What a shared library of this project links and exports.

    linkage.py LIBRARY [--exports HEADER...]

It may need the C and C++ run-time libraries and libcutlass_attn.so, and nothing of CUDA or torch:
a wheel then loads on a machine without a driver and beside any torch. With --exports, the functions
it exports are exactly those that the HEADERs mark CUTLASS_ATTN_API.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ALLOWED = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libc\+\+|libc\+\+abi|libunwind"
    r"|ld-linux[-\w]*|libcutlass_attn)\.so(\.\d+)*"
)


def run(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--exports", type=Path, nargs="+")
    options = parser.parse_args()
    problems = []

    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(options.library)))
    if not needed:
        problems.append("readelf shows no NEEDED entry at all")
    problems += [f"needs {name}" for name in needed if not ALLOWED.fullmatch(name)]

    if options.exports:
        header = "".join(path.read_text() for path in options.exports)
        public = set(re.findall(r"^CUTLASS_ATTN_API [\w:<> &]+[ &](\w+)\(", header, re.MULTILINE))
        symbols = run("nm", "-D", "--defined-only", "--demangle", str(options.library)).splitlines()
        exported = set()
        for symbol in symbols:
            name = re.fullmatch(r"[0-9a-f]* T cutlass_attn::(\w+)(\[abi:\w+\])?\(.*\)", symbol)
            if not name:
                problems.append(f"exports {symbol}")
            else:
                exported.add(name[1])
        problems += [f"exports {name}, which is not public" for name in exported - public]
        problems += [f"does not export {name}" for name in public - exported]

    for problem in problems:
        print(f"{options.library.name} {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
