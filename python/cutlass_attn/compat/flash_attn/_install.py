"""Puts these functions where programs look for the package flash_attn."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

VERSION = "2.8.3"  # whose functions these are


def install() -> None:
    """Makes `import flash_attn` import `cutlass_attn.compat.flash_attn` in this process.

        cutlass_attn.compat.flash_attn.install()  # before the program's other imports
        import ring_flash_attn  # imports flash_attn.flash_attn_interface

    importlib.metadata also finds a distribution "flash-attn" of version 2.8.3. May be called again.

    Raises:
        RuntimeError: the package flash_attn is installed.
    """
    from .. import flash_attn as package
    from . import bert_padding, flash_attn_interface

    found: Any = sys.modules.get("flash_attn")
    if found is package:
        return
    if found is not None or importlib.util.find_spec("flash_attn") is not None:
        raise RuntimeError(
            "the package flash_attn is installed, and would be hidden: uninstall it, or import "
            "cutlass_attn.compat.flash_attn by its own name"
        )
    compiled = ModuleType("flash_attn_2_cuda", "What Transformer Engine imports, to see it there.")
    compiled.varlen_bwd = _no_compiled_function  # type: ignore[attr-defined]
    sys.modules |= {
        "flash_attn": package,
        "flash_attn.flash_attn_interface": flash_attn_interface,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn_2_cuda": compiled,
    }
    sys.meta_path.append(_Finder())


def _no_compiled_function(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "flash_attn_2_cuda.varlen_bwd is not there: call _flash_attn_varlen_backward of "
        "flash_attn.flash_attn_interface"
    )


class _Distribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": "flash_attn\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flash-attn is cutlass_attn.compat.flash_attn here")


class _Finder(DistributionFinder):
    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        name = getattr(context, "name", None)
        wanted = name is None or name.lower().replace("_", "-") == "flash-attn"
        return [_Distribution()] if wanted else []
