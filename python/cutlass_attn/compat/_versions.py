"""Which versions of a package the compat layer works with."""

from __future__ import annotations

import re
import warnings
from types import ModuleType


def check_version(
    module: ModuleType, first: tuple[int, int], past: tuple[int, int], any_version: bool
) -> None:
    """Raises RuntimeError unless first <= the module's version < past; a warning if any will do."""
    found = re.match(r"(\d+)\.(\d+)", module.__version__)
    if found is not None and first <= (int(found[1]), int(found[2])) < past:
        return
    name = module.__name__
    message = (
        f"cutlass_attn.compat.{name} supports {name} from {first[0]}.{first[1]} to before "
        f"{past[0]}.{past[1]}; {module.__version__} is installed"
    )
    if not any_version:
        raise RuntimeError(f"{message}; register(any_version=True) tries it")
    warnings.warn(message, stacklevel=3)
