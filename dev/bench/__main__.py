"""`python -m dev.bench`."""

import sys

from cutlass_attn.tools.console import run

from .command import bench

if __name__ == "__main__":
    sys.exit(run(bench, "python -m dev.bench"))
