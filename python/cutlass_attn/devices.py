"""Devices by their names."""

from __future__ import annotations

import re
from typing import NamedTuple

from . import _C

CPU, CUDA = 0, 1  # the library's Device


class Device(NamedTuple):
    """What `_C.explain` is asked about."""

    kind: int
    ordinal: int = 0
    compute_capability: int = 0  # of a GPU that need not be there; 0: the device at hand


def parse_device(device: str) -> tuple[Device, str]:
    """What a name stands for, and how it is printed.

    "cpu"; "cuda" or "cuda:1", a GPU present; "sm_89", a GPU that need not be there. Raises
    TypeError for what is no string, ValueError for any other.
    """
    if not isinstance(device, str):
        raise TypeError(f'device must be a string such as "cuda:1" or "sm_89", got {device!r}')
    if device == "cpu":
        return Device(CPU), "cpu"
    if match := re.fullmatch(r"sm_?(\d{2,3})a?", device):
        return Device(CUDA, compute_capability=int(match[1])), f"sm_{match[1]}"
    if match := re.fullmatch(r"cuda(?::(\d{1,4}))?", device):
        index = int(match[1] or 0)
        capability = _C.device_info(CUDA, index)["compute_capability"]
        return Device(CUDA, index), device + (f" (sm_{capability})" * (capability > 0))
    raise ValueError(f'device must be "cpu", "cuda", "cuda:N" or "sm_89"-like, got {device!r}')
