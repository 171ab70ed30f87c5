"""Registers the operators `torch.ops.cutlass_attn` as soon as a program has both packages.

Programs name the operators, or load a graph that does (torch.export.load, aoti_load_package),
before any call of this library. Importing this library must not import torch, so where torch
comes later a finder waits for it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Registers the operators now if torch is imported, otherwise right after its import."""
    if sys.modules.get("torch"):
        _import_operators()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _import_operators() -> None:
    # A torch that is too old must not fail here: calls with its tensors raise the error.
    with contextlib.suppress(Exception):
        for name in ("operator", "serving_operator"):
            importlib.import_module(f"{__package__}.{name}")


class _AfterTorch(MetaPathFinder):
    """Finds torch through the other finders, and adds a step after its import."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((found for found in specs if found), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _import_operators()

        loader.exec_module = exec_module
