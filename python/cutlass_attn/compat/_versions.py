"""Which versions of a package the compat layer works with."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from types import ModuleType


def check_version(
    module: ModuleType, first: tuple[int, ...], past: tuple[int, ...], any_version: bool
) -> None:
    """Raises RuntimeError unless first <= the module's version < past; a warning if any will do."""
    numbers = re.match(r"\d+(\.\d+)*", module.__version__)
    if numbers is not None and first <= tuple(map(int, numbers[0].split("."))) < past:
        return
    name = module.__name__
    least, end = (".".join(map(str, version)) for version in (first, past))
    message = (
        f"cutlass_attn.compat.{name} supports {name} from {least} to before {end}; "
        f"{module.__version__} is installed"
    )
    if not any_version:
        raise RuntimeError(f"{message}; register(any_version=True) tries it")
    warnings.warn(message, stacklevel=3)


def plugin_of(register: Callable[[], None]) -> Callable[[], None]:
    """What an engine calls in all of its processes, whichever backend they run: `register`, with a
    warning where that raises RuntimeError about the engine's version."""

    def plugin() -> None:
        try:
            register()
        except RuntimeError as error:
            logging.getLogger("cutlass_attn").warning("%s", error)

    return plugin
