"""Modules that were elsewhere in earlier versions, by their old names.

An old name imports as before, with a DeprecationWarning that says the new one; nothing is imported
for it until then. What is a module's own is in one place: an old name only looks it up there.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.rpartition(".")[0]

# By what follows "cutlass_attn."; "" is the package itself.
_NEW = {
    "bench": "tools.experiment",
    "bench.accuracy": "tools.experiment.judge",
    "bench.environment": "tools.experiment.environment",
    "bench.impls": "tools.experiment.impls",
    "bench.plot": "tools.experiment.plot",
    "bench.report": "tools.experiment.report",
    "bench.runner": "tools.experiment.runner",
    "bench.shapes": "tools.experiment.problems",
    "bench.stats": "tools.experiment.stats",
    "bench.table": "tools.experiment.table",
    "bench.timing": "tools.experiment.timing",
    "check": "tools.check",
    "cli": "tools.cli",
    "functional": "",
    "gates": "tools.gates",
    "gates.hot_path": "tools.sass.loops",
    "gates.issue_slots": "tools.sass.issue_slots",
    "gates.ncu": "tools.gates.ncu",
    "gates.sass": "tools.sass.disassemble",
    "gates.thresholds": "tools.gates.thresholds",
    "gates.tile": "tools.sass.tiles",
    "info": "",
    "jit.tiles": "jit.sources",
    "ladder": "tools.ladder",
    "profile": "tools.profile.measure",
    "profile.command": "tools.profile.command",
    "profile.launch": "tools.profile.launch",
    "terminal": "tools.console",
    "tune": "tools.tune.search",
    "tune.command": "tools.tune.command",
    "tune.evaluate": "tools.tune.evaluate",
    "tune.proposers": "tools.tune.proposers",
    "tune.report": "tools.tune.report",
    "tune.space": "tools.tune.space",
    "tune.state": "tools.tune.state",
    "tune.static": "tools.tune.static",
    "tune.worker": "tools.tune.worker",
    "tuning_file": "_build.tuned_toml",
    "variant_key": "_build.variant_key",
}
MOVED = {f"{_PACKAGE}.{old}": f"{_PACKAGE}.{new}".removesuffix(".") for old, new in _NEW.items()}


class _Finder:
    """Finds and loads the names in MOVED, when no file is found for them."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name not in MOVED:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        _warn(f"{old} is now {new}")
        vars(module)["__getattr__"] = partial(getattr, importlib.import_module(new))


def _warn(text: str) -> None:
    """A DeprecationWarning of the line that imports, however deep the import machinery is."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in (_PACKAGE, "importlib"):
        frame = frame.f_back
    where, names = frame.f_code.co_filename, frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, DeprecationWarning, where, frame.f_lineno, names["__name__"], registry
    )


sys.meta_path.append(_Finder())  # type: ignore[arg-type]
