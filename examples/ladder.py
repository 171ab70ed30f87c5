"""Every kernel from the plainest to the fastest: what each step gains, and that each is right.

Run it with `python examples/ladder.py`; options are those of `cutlass-attn check`. Without a GPU
the kernels are emulated on the CPU. On a GPU, with matplotlib, it draws ladder.png as well.
"""

import importlib.util
import sys

from cutlass_attn.tools.cli import main

if __name__ == "__main__":
    arguments = ["check", "--ladder"]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--plot", "."]
    else:
        print("no plot: pip install matplotlib", file=sys.stderr)
    sys.exit(main([*arguments, *sys.argv[1:]]))  # the last --plot counts
