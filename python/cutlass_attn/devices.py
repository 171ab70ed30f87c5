"""Devices by name: "cuda:1", "sm_89", "RTX 4090"."""

from __future__ import annotations

import difflib
import re
import sys
from typing import NamedTuple

from . import _C

CPU, CUDA = 0, 1  # the library's Device


class Device(NamedTuple):
    """The device that `_C.explain` chooses a kernel for."""

    kind: int
    ordinal: int = 0
    compute_capability: int = 0  # of a GPU that may be absent; 0: the GPU with this ordinal
    num_sms: int = 0  # SMs of an absent GPU; 0: as a common product of that capability


# Products: compute capability, and streaming multiprocessors. Shared memory follows from the
# compute capability: runtime/device.cpp has it. The first three are too old; explain() says so.
PRODUCTS = {
    "V100": (70, 80),
    "T4": (75, 40),
    "RTX 2080 Ti": (75, 68),
    "A100": (80, 108),
    "A30": (80, 56),
    "A40": (86, 84),
    "A10": (86, 72),
    "RTX A6000": (86, 84),
    "RTX 3090 Ti": (86, 84),
    "RTX 3090": (86, 82),
    "RTX 3080 Ti": (86, 80),
    "RTX 3080": (86, 68),
    "RTX 3070 Ti": (86, 48),
    "RTX 3070": (86, 46),
    "RTX 3060 Ti": (86, 38),
    "RTX 3060": (86, 28),
    "L4": (89, 58),
    "L40": (89, 142),
    "L40S": (89, 142),
    "RTX 6000 Ada": (89, 142),
    "RTX 4090": (89, 128),
    "RTX 4080 SUPER": (89, 80),
    "RTX 4080": (89, 76),
    "RTX 4070 Ti SUPER": (89, 66),
    "RTX 4070 Ti": (89, 60),
    "RTX 4070 SUPER": (89, 56),
    "RTX 4070": (89, 46),
    "RTX 4060 Ti": (89, 34),
    "RTX 4060": (89, 24),
    "H100": (90, 132),
    "H100 PCIe": (90, 114),
    "H200": (90, 132),
    "GH200": (90, 132),
    "B200": (100, 148),
    "RTX PRO 6000 Blackwell": (120, 188),
    "RTX 5090": (120, 170),
    "RTX 5080": (120, 84),
    "RTX 5070 Ti": (120, 70),
    "RTX 5070": (120, 48),
}


def _plain(name: str) -> str:
    """A product's name without maker, brand, spaces and case."""
    return re.sub(r"nvidia|geforce|generation|tesla|[\s_-]", "", name.casefold())


_BY_PLAIN_NAME = {_plain(name): name for name in PRODUCTS}


def parse_device(device: str) -> tuple[Device, str]:
    """The device with this name, and the text that describes it.

    "cpu"; "cuda" or "cuda:1", a GPU of this machine; "sm_89", "8.9" or "RTX 4090", a GPU that may
    be absent. Raises TypeError if the name is not a string, ValueError if it is unknown.
    """
    if not isinstance(device, str):
        raise TypeError(f'device must be a string such as "cuda:1" or "sm_89", got {device!r}')
    if device == "cpu":
        return Device(CPU), "cpu"
    if match := re.fullmatch(r"sm_?(\d{1,2})(\d)a?|(\d{1,2})\.(\d)", device):
        capability = int("".join(filter(None, match.groups())))
        return Device(CUDA, compute_capability=capability), f"sm_{capability}"
    if match := re.fullmatch(r"cuda(?::(\d{1,4}))?", device):
        index = int(match[1] or 0)
        capability = _C.device_info(CUDA, index)["compute_capability"]
        facts = f" ({_product_at(index)}sm_{capability})" if capability > 0 else ""
        return Device(CUDA, index), device + facts
    if name := _BY_PLAIN_NAME.get(_plain(device)):
        capability, num_sms = PRODUCTS[name]
        where = Device(CUDA, compute_capability=capability, num_sms=num_sms)
        return where, f"{name} (sm_{capability}, {num_sms} SMs)"
    close = difflib.get_close_matches(_plain(device), _BY_PLAIN_NAME, 3, 0.75)
    hint = " or ".join(repr(_BY_PLAIN_NAME[x]) for x in close)
    raise ValueError(
        'device must be "cpu", "cuda", "cuda:N", a compute capability such as "sm_89" or a product '
        f'such as "RTX 4090", got {device!r}' + (f"; did you mean {hint}?" if hint else "")
    )


def _product_at(index: int) -> str:
    """The product name of a GPU of this machine, such as "NVIDIA L4, "; empty without torch."""
    torch = sys.modules.get("torch")
    if torch is None or index >= torch.cuda.device_count():
        return ""
    return f"{torch.cuda.get_device_name(index)}, "
