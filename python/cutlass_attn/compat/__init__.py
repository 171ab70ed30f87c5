"""Ways to switch by one line: cutlass_attn under the names that programs already call.

    from cutlass_attn.compat import flash_attn     # the functions of the package flash_attn
    from cutlass_attn.compat import flash_mla      # those of FlashMLA
    from cutlass_attn.compat import sdpa           # torch's scaled_dot_product_attention
    from cutlass_attn.compat import flex           # torch's flex_attention
    from cutlass_attn.compat import transformers   # an attention implementation of transformers
    from cutlass_attn.compat import diffusers      # an attention backend of diffusers
    from cutlass_attn.compat import comfyui        # a node of ComfyUI
    from cutlass_attn.compat import vllm           # an attention backend of vLLM
    from cutlass_attn.compat import sglang         # an attention backend of SGLang

All need torch; transformers, diffusers, vllm and sglang also need the package that they are named
after, and say which versions of it they support. docs/drop-in.md is the user's page. Each is
imported when first named, so that `import cutlass_attn; cutlass_attn.compat.sdpa.route()` works
without further imports.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from . import comfyui as comfyui
    from . import diffusers as diffusers
    from . import flash_attn as flash_attn
    from . import flash_mla as flash_mla
    from . import flex as flex
    from . import sdpa as sdpa
    from . import sglang as sglang
    from . import transformers as transformers
    from . import vllm as vllm


_NAMES = (
    "comfyui",
    "diffusers",
    "flash_attn",
    "flash_mla",
    "flex",
    "sdpa",
    "sglang",
    "transformers",
    "vllm",
)


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; allowed: {', '.join(_NAMES)}"
    )
