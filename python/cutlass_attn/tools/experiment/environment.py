"""The device, clocks and versions of a measurement."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict
from typing import Any

import numpy as np

from ... import _C
from ..._variants import build_info
from ...devices import CUDA


def environment(device: str) -> dict[str, Any]:
    """Device and versions, for the record; `device` is "cpu", "cuda" or "cuda:N"."""
    found: dict[str, Any] = {"build": asdict(build_info()), "numpy": np.__version__}
    found["python"] = platform.python_version()
    found["device"] = platform.processor() or platform.machine()
    try:
        import torch
    except ImportError:
        return found
    found["torch"] = torch.__version__
    if device != "cpu":
        found["device"] = torch.cuda.get_device_name(device)
        found["compute_capability"] = torch.cuda.get_device_capability(device)
        found["cuda"] = torch.version.cuda
        found |= driver_facts(device)
    return found


def driver_facts(device: str) -> dict[str, str]:
    """Driver and current clocks of a CUDA device, as far as NVML reports them."""
    import torch

    try:
        import pynvml
    except ImportError:
        return {}
    # torch counts the visible devices, NVML all of them; both know the UUID.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # torch 2.5 or later
    try:
        pynvml.nvmlInit()
        if uuid:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        else:
            handle = pynvml.nvmlDeviceGetHandleByIndex(torch.device(device).index or 0)
        sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        return {
            "driver_version": str(pynvml.nvmlSystemGetDriverVersion()),
            "clocks.sm": f"{pynvml.nvmlDeviceGetClockInfo(handle, sm)} MHz",
            "clocks.max.sm": f"{pynvml.nvmlDeviceGetMaxClockInfo(handle, sm)} MHz",
            "clocks.mem": f"{pynvml.nvmlDeviceGetClockInfo(handle, memory)} MHz",
        }
    except pynvml.NVMLError:
        return {}


def default_device() -> str:
    """ "cuda" if torch and this build can use a GPU, else "cpu"."""
    return "cpu" if why_no_gpu("cuda") else "cuda"


def why_no_gpu(device: str) -> str:
    """Why torch or this build cannot use "cuda" or "cuda:N"; empty if they can.

    Raises ValueError for the name of any other device.
    """
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N", got {device!r}')
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no usable GPU or driver"
    return _C.device_info(CUDA, int(match[1] or 0))["unavailable"]
