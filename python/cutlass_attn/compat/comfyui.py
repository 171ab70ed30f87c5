"""A node of ComfyUI, and the function by which it replaces a model's attention.

examples/comfyui is the folder to copy into ComfyUI's custom_nodes. A script can do what the node
does:

    options = model.model_options.setdefault("transformer_options", {})
    options["optimized_attention_override"] = cutlass_attn.compat.comfyui.override()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from . import sdpa

# Keywords of ComfyUI's attention functions that do not change the result.
_HARMLESS = ("_inside_attn_wrapper", "transformer_options")


def override(quantize: str | None = None) -> Callable[..., torch.Tensor]:
    """A function for transformer_options["optimized_attention_override"].

    It takes the function that ComfyUI would run, and that function's arguments. It runs
    `cutlass_attn.attention`, and for calls that `compat.sdpa.why_not` names, such as those in
    float32, or that have a keyword it does not know, ComfyUI's function.

    Args:
        quantize: `quantize` of `cutlass_attn.attention`: "qk", "int8" or "fp8", products in 8 bits
            (docs/eight-bit.md). Calls that no such kernel takes, and those with
            low_precision_attention=False, run in 16 bits.

    Raises:
        ValueError: an unknown `quantize`.
    """
    if quantize not in (None, "qk", "int8", "fp8"):
        raise ValueError(f'quantize must be None, "qk", "int8" or "fp8", got {quantize!r}')

    def attention(
        func: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        more = dict(options)
        scale, gqa = more.pop("scale", None), bool(more.pop("enable_gqa", False))
        low_precision = more.pop("low_precision_attention", True) is not False
        if any(x is not None for name, x in more.items() if name not in _HARMLESS):
            call: sdpa.Call | str = "a keyword is not known"
        else:
            call = _call(q, k, v, heads, mask, skip_reshape, scale=scale, enable_gqa=gqa)
        if isinstance(call, str):
            # attn_precision asks for products added up in float32, as kernels here do anyway.
            shape = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            precision = {"mask": mask, "attn_precision": attn_precision}
            return func(q, k, v, heads, **precision, **shape, **options)
        if not skip_output_reshape:  # a result whose heads lie side by side
            batch, num_heads, rows, columns = call.shape
            call.options["out"] = q.new_empty(batch, rows, num_heads, columns).transpose(1, 2)
        out = _run(call, quantize if low_precision else None)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    return attention


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None,
    skip_reshape: bool,
    **options: Any,
) -> sdpa.Call | str:
    if not skip_reshape:
        # (B, S, heads of D): with GQA the width says how many K and V have.
        head_dim = q.shape[-1] // heads
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
        sizes = (-1, head_dim) if options["enable_gqa"] else (heads, -1)
        k, v = (x.unflatten(-1, sizes).transpose(1, 2) for x in (k, v))
    if mask is not None and mask.dim() == 3:  # (B, Sq, Sk)
        mask = mask.unsqueeze(1)
    return sdpa.translate(q, k, v, mask, 0.0, False, **options)


def _run(call: sdpa.Call, quantize: str | None) -> torch.Tensor:
    if quantize is not None:
        try:
            return sdpa.Call(
                call.operands, {**call.options, "quantize": quantize}, call.shape
            ).run()
        except ValueError:  # by no kernel of 8 bits; what else is wrong, is so in 16 bits
            pass
    return call.run()


class PatchAttention:
    """The node: a model whose attention runs on cutlass_attn."""

    CATEGORY = "model_patches"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    PRODUCTS: ClassVar[dict[str, str | None]] = {
        "16 bits": None,
        "8 bits: q @ k": "qk",
        "8 bits: int8": "int8",
        "8 bits: int8 and fp8": "fp8",
    }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "products": (list(cls.PRODUCTS),)}}

    def patch(self, model: Any, products: str) -> tuple[Any]:
        """A clone of the model with the override; the given model stays as it is."""
        model = model.clone()
        given = model.model_options
        transformer = dict(given.get("transformer_options", {}))
        transformer["optimized_attention_override"] = override(self.PRODUCTS[products])
        model.model_options = {**given, "transformer_options": transformer}
        return (model,)


NODE_CLASS_MAPPINGS = {"CutlassAttention": PatchAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"CutlassAttention": "Attention by cutlass_attn"}
