"""Which versions of a package the compat layer works with."""

from __future__ import annotations

import re
from types import ModuleType


def check_version(module: ModuleType, first: tuple[int, int], past: tuple[int, int]) -> None:
    """Raises RuntimeError unless first <= the module's version < past."""
    found = re.match(r"(\d+)\.(\d+)", module.__version__)
    if found is None or not first <= (int(found[1]), int(found[2])) < past:
        name = module.__name__
        raise RuntimeError(
            f"cutlass_attn.compat.{name} supports {name} from {first[0]}.{first[1]} to before "
            f"{past[0]}.{past[1]}; {module.__version__} is installed"
        )
