"""`python -m dev.accuracy`."""

import sys

from cutlass_attn.tools.console import run

from .command import accuracy

if __name__ == "__main__":
    sys.exit(run(accuracy, "python -m dev.accuracy"))
