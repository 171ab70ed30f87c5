"""`python -m dev.figures`."""

import sys

from cutlass_attn.tools.console import run

from .command import figures

if __name__ == "__main__":
    sys.exit(run(figures, "python -m dev.figures"))
