"""Tests that need a GPU are left out where there is none; a line at the top says so, and why."""

import gc
import os
import sys

import pytest

# Of the time that collecting takes, a quarter went to looking for garbage among tests that stay.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# Each worker of pytest-xdist is one of as many as there are cores: threads of torch's and of a BLAS
# would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _no_gpu():
    try:
        import cases
    except pytest.skip.Exception as skipped:  # without torch
        return str(skipped)
    return cases.no_gpu()


def pytest_runtest_teardown():
    """Frees memory that torch would keep after a large test: other processes on this GPU need it.
    Resets Dynamo, which would not compile a function again whose graph broke in an earlier test."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo and dynamo.utils.counters:
        dynamo.reset()
        dynamo.utils.counters.clear()


def pytest_report_header():
    return f"GPU tests are left out: {reason}" if (reason := _no_gpu()) else None


def pytest_collection_modifyitems(config, items):
    """Left out, not skipped: of every build's variants half would be lines of skips."""
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out and _no_gpu():
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
