"""Fused attention kernels written with CUTLASS, each checkable against a scalar baseline.

    import cutlass_attn
    out = cutlass_attn.attention(q, k, v, causal=True)   # torch tensors or numpy arrays

`explain` says which kernel a call runs, `variants` and `build_info` what this build holds.
Importing needs neither torch, nor a GPU, nor CUDA.
"""

import sys as _sys
from types import ModuleType as _ModuleType

from . import tuning as _tuning
from .attention import attention
from .decode import append_kv, attention_decode, merge_states
from .explain import Explanation, Verdict, explain
from .variants import BuildInfo, Variant, accumulate_of, build_info, variants
from .varlen import attention_varlen
from .verify import VerificationError

# Where these were before they had modules of their own names.
for _old, _names in {
    "functional": (attention,),
    "info": (
        BuildInfo,
        Explanation,
        Variant,
        Verdict,
        accumulate_of,
        build_info,
        explain,
        variants,
    ),
}.items():
    _module = _sys.modules[f"{__name__}.{_old}"] = _ModuleType(f"{__name__}.{_old}")
    vars(_module).update({_name.__name__: _name for _name in _names})
    globals()[_old] = _module

__version__ = build_info().version
_tuning.load()


def __getattr__(name: str) -> object:
    # Reads files and looks for NVRTC: not on import.
    if name == "warmup":
        from .jit import warmup

        return warmup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BuildInfo",
    "Explanation",
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
    "variants",
    "warmup",
]
