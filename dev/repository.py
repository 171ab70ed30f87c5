"""Makes modules importable before the package is installed: the generator's, and the package's
own modules that read a library.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]

sys.path.insert(0, str(ROOT / "kernels"))

# The package without its import-time code, which needs a built package.
_package = ModuleType("cutlass_attn")
_package.__path__ = [str(ROOT / "python" / "cutlass_attn")]
sys.modules["cutlass_attn"] = _package

import facts  # noqa: E402

facts.load("cutlass_attn._build.facts")
