"""The parts of the repository that read a library before the package is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

# The package without what it does on import, which needs it to be built.
_package = ModuleType("cutlass_attn")
_package.__path__ = [str(ROOT / "python" / "cutlass_attn")]
sys.modules["cutlass_attn"] = _package


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "kernels" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
