"""Fused attention kernels written with CUTLASS, each checkable against a scalar baseline.

    import cutlass_attn
    out = cutlass_attn.attention(q, k, v, causal=True)   # torch tensors or numpy arrays

`explain` says which kernel a call runs, `variants` and `build_info` what this build holds.
Importing needs neither torch, nor a GPU, nor CUDA.
"""

import importlib as _importlib
import typing as _typing

from . import tuning as _tuning
from ._attention import attention, prequantize
from ._C import PrequantizedKV
from ._call import registration as _registration
from ._explain import explain
from ._explanation import Explanation, PassedOver, Verdict
from ._merge_states import merge_states
from ._variants import BuildInfo, Variant, build_info, kept_bytes, variants
from .decode import append_kv, attention_decode
from .varlen import attention_varlen
from .verify import VerificationError

if _typing.TYPE_CHECKING:
    from . import compat as compat
    from . import testing as testing
    from ._warmup import warmup as warmup

# Functions of other libraries, and the module of `compat` with one of that name.
_ELSEWHERE = {
    "create_block_mask": "flex",
    "flash_attn_func": "flash_attn",
    "flash_attn_varlen_func": "flash_attn",
    "flash_attn_with_kvcache": "flash_attn",
    "flash_mla_with_kvcache": "flash_mla",
    "flex_attention": "flex",
    "scaled_dot_product_attention": "sdpa",
}

__version__ = build_info().version
_tuning.load()
_registration.register()

if not _typing.TYPE_CHECKING:  # for a checker it would be an attribute of any name

    def __getattr__(name: str) -> object:
        if name == "warmup":  # reads files and looks for NVRTC: not on import
            from ._warmup import warmup

            return warmup
        if name in ("compat", "testing"):
            return _importlib.import_module(f"{__name__}.{name}")
        where = _ELSEWHERE.get(name)
        hint = f"; {__name__}.compat.{where} has it" if where else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


__all__ = [
    "BuildInfo",
    "Explanation",
    "PassedOver",
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
    "kept_bytes",
    "merge_states",
    "prequantize",
    "variants",
    "warmup",
]
