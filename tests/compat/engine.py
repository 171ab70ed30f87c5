"""Engines that compat has a backend for: the installed package, or its stub in stubs/."""

import contextlib
import importlib
import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

STUBS = Path(__file__).parent / "stubs"


@contextlib.contextmanager
def stub(name):
    """The stub of a package is what is imported by its name; the compat module with it."""
    names = name, f"cutlass_attn.compat.{name}"

    def take():
        found = [x for x in sys.modules if any(x == n or x.startswith(f"{n}.") for n in names)]
        return {x: sys.modules.pop(x) for x in found}

    before = take()
    sys.path.insert(0, str(STUBS))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(STUBS))
        take()
        sys.modules.update(before)
        importlib.invalidate_caches()


@contextlib.contextmanager
def engine(name, kind):
    """The module cutlass_attn.compat.<name> over the "stub" or the "installed" package."""
    if kind == "installed":
        pytest.importorskip(name)
        yield importlib.import_module(f"cutlass_attn.compat.{name}")
        return
    with stub(name):
        yield importlib.import_module(f"cutlass_attn.compat.{name}")


def entry_point(group):
    """What an engine loads of this distribution, as the engine does."""
    (point,) = (x for x in importlib.metadata.entry_points(group=group) if x.name == "cutlass_attn")
    return point.load()


def rows_of(parts, like, spare=8):
    """(H, S, D) of each sequence as rows (T, H, D), with NaN behind, in a wider tensor as a model's
    projection leaves them."""
    rows = torch.from_numpy(np.concatenate(parts, axis=1)).to(like).transpose(0, 1)
    wide = torch.full((rows.shape[0] + spare, 2, *rows.shape[1:]), torch.nan, dtype=like)
    wide[: len(rows), 1] = rows
    return wide[:, 1]
