"""Fused attention kernels written with CUTLASS, each checkable against a scalar baseline.

    import cutlass_attn
    out = cutlass_attn.attention(q, k, v, causal=True)   # torch tensors or numpy arrays

`explain` says which kernel a call runs, `variants` and `build_info` what this build holds.
Importing needs neither torch, nor a GPU, nor CUDA.
"""

from . import tuning as _tuning
from .attention import attention
from .explain import Explanation, Verdict, explain
from .variants import BuildInfo, Variant, build_info, variants
from .verify import VerificationError

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
    "attention",
    "build_info",
    "explain",
    "variants",
    "warmup",
]
