"""Keys of variants, such as sm80/f16/d64/128x64x4: kernel/dtype[/head dims[/tile]].

kernels/generate.py, which makes them, reads this file as well, without the package around it but
`facts`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .facts import DTYPE_KEYS

_NUMBER = r"[1-9]\d{0,3}"
# A tile: queries x keys x warps along M, and how many times as many along N; each in one way only.
TILE = rf"({_NUMBER})x({_NUMBER})x({_NUMBER})(?:c([2-9]|[1-9]\d{{1,3}}))?"
_KEY = re.compile(
    rf"(?P<kernel>\w+(?:/\w+)*?)/(?P<dtype>{'|'.join(DTYPE_KEYS.values())})"
    rf"(?:/d(?P<qk>{_NUMBER})(?:v(?P<v>{_NUMBER}))?)?(?:/(?P<tile>{TILE}))?"
)


@dataclass(frozen=True)
class VariantKey:
    kernel: str
    dtype: str
    head_dim: int  # 0: any
    head_dim_v: int
    tile: dict[str, int]  # of m, n, warps and columns; empty: the kernel has no choice of tile


def parse(key: str) -> VariantKey | None:
    """The parts of a key; None if the text is not a key."""
    if not (match := _KEY.fullmatch(key)):
        return None
    qk = int(match["qk"] or 0)
    *_, m, n, warps, columns = match.groups()
    tile = {"m": m, "n": n, "warps": warps, "columns": columns or 1} if match["tile"] else {}
    fields = {name: int(value) for name, value in tile.items()}
    return VariantKey(match["kernel"], match["dtype"], qk, int(match["v"] or qk), fields)


# What the names of a variant's entries begin with, by `entry_names` of kernels/manifest.toml. ptxas
# schedules functions with "cutlass" in their name in another way. Without it, HMMA of sm80's
# forward kernels are out of the order in which they share operands and all LDSM of P V come before
# them, which cost 3 % at d128 and 10 % with softcap at d64 (H200); other kernels have less in local
# memory without.
PREFIXES = {"cutlass": "cutlass_attn_", "plain": "attn_"}


def symbol_of(key: str, entry_names: str = "cutlass") -> str:
    """The variant's C++ identifier; its entries are called <symbol>__<score functor's token>."""
    return PREFIXES[entry_names] + file_stem(key)


def file_stem(key: str) -> str:
    """What the file of the variant's translation unit is called, such as sm80_f16_d64_64x64x4."""
    return re.sub(r"\W", "_", key)


def key_of(symbol: str, kernels: Iterable[str]) -> str:
    """The key of the variant with this symbol, among these kernels' variants; empty if none."""
    for kernel, names in itertools.product(kernels, PREFIXES):
        prefix = symbol_of(kernel, names) + "_"
        key = f"{kernel}/" + symbol.removeprefix(prefix).replace("_", "/")
        parts = parse(key)
        if symbol.startswith(prefix) and parts and parts.kernel == kernel:
            return key
    return ""
