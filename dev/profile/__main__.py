"""`python -m dev.profile`."""

import sys

from cutlass_attn.tools.console import run

from .command import profile

if __name__ == "__main__":
    sys.exit(run(profile, "python -m dev.profile"))
