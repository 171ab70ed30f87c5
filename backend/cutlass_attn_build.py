"""PEP 517 backend: scikit-build-core, with further build requirements only where they are needed.

A machine without a working nvcc gets the pinned compiler wheels, one without the CUTLASS headers
gets pip, which third_party/cutlass/FindCUTLASS.cmake fetches them with.
"""

from __future__ import annotations

import importlib.util
import os

import toolkit
from scikit_build_core import build as _backend
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]]

_FALSE = {"OFF", "0", "FALSE", "NO", "N", ""}


def _define(settings: Settings | None, name: str, default: str) -> str:
    """The value of a CMake option as `pip install -C cmake.define.<name>=<value>` gives it."""
    value = (settings or {}).get(f"cmake.define.{name}", default)
    return str(value[-1] if isinstance(value, list) else value)


def extra_requirements(settings: Settings | None = None) -> list[str]:
    """What this machine lacks for a build with these config settings."""
    cuda = _define(settings, "CUTLASS_ATTN_CUDA", "ON").upper() not in _FALSE
    simt = _define(settings, "CUTLASS_ATTN_SIMT", "scalar").upper() not in _FALSE
    extra = []
    own_nvcc = _define(settings, "CMAKE_CUDA_COMPILER", os.environ.get("CUDACXX", ""))
    if cuda and not own_nvcc and not toolkit.machine_nvcc()[0]:
        extra.append(toolkit.WHEELS)
    own_cutlass = _define(settings, "CUTLASS_DIR", os.environ.get("CUTLASS_DIR", ""))
    if (cuda or simt) and not own_cutlass and not importlib.util.find_spec("pip"):
        extra.append("pip")
    return extra


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    required = _backend.get_requires_for_build_wheel(config_settings)
    return required + extra_requirements(config_settings)


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    required = _backend.get_requires_for_build_editable(config_settings)
    return required + extra_requirements(config_settings)
