"""Fused attention kernels written with CUTLASS, each checkable against a scalar baseline.

    import cutlass_attn
    out = cutlass_attn.attention(q, k, v, causal=True)   # torch tensors or numpy arrays

`explain` says which kernel a call runs, `variants` and `build_info` what this build holds.
Importing needs neither torch, nor a GPU, nor CUDA.
"""

from .functional import attention
from .info import (
    BuildInfo,
    Explanation,
    Variant,
    Verdict,
    build_info,
    explain,
    variants,
)
from .verify import VerificationError

__version__ = build_info().version

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
]
