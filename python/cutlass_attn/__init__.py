"""Fused attention kernels written with CUTLASS, each checkable against a scalar baseline.

    import cutlass_attn
    out = cutlass_attn.attention(q, k, v, causal=True)   # torch tensors or numpy arrays

`explain` says which kernel a call runs, `variants` and `build_info` what this build holds.
Importing needs neither torch, nor a GPU, nor CUDA.
"""

import importlib as _importlib

from . import tuning as _tuning
from ._C import PrequantizedKV
from ._moved import MOVED as _MOVED
from .attention import attention, prequantize
from .decode import append_kv, attention_decode, merge_states
from .explain import Explanation, Verdict, explain
from .variants import BuildInfo, Variant, build_info, variants
from .variants import accumulate_of as accumulate_of  # which cutlass_attn.info had
from .varlen import attention_varlen
from .verify import VerificationError

__version__ = build_info().version
_tuning.load()


def __getattr__(name: str) -> object:
    # Reads files and looks for NVRTC: not on import.
    if name == "warmup":
        from .jit import warmup

        return warmup
    if (old := f"{__name__}.{name}") in _MOVED:
        return _importlib.import_module(old)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BuildInfo",
    "Explanation",
    "PrequantizedKV",
    "Variant",
    "Verdict",
    "VerificationError",
    "append_kv",
    "attention",
    "attention_decode",
    "attention_varlen",
    "build_info",
    "explain",
    "merge_states",
    "prequantize",
    "variants",
    "warmup",
]
