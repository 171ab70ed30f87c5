"""An attention implementation of transformers.

    cutlass_attn.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cutlass_attn")

It works for all models that support "sdpa" or "eager", with dynamic, static and sliding-window
caches, including those with softcap (Gemma 2) and attention sinks (gpt-oss), which "sdpa" lacks.
For padding-free and continuous batches use `local_kernel_dir`.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

import cutlass_attn
from cutlass_attn._call.torch_library import autocast

from ._padding_mask import PaddingMask, mask_function
from ._translate import bounded_bias, mask_or_bias, top_left_causal
from ._versions import check_version

SUPPORTED = (5, 0), (6, 0)  # tested with the first version and with 5.23.0

# Keywords that models pass to every attention function and that do not affect the result.
_HARMLESS = {
    "cache_position",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}
_SPARSE = ("indices", "block_indices")
_RESERVED = ("eager", "flash", "flex_attention", "paged", "sdpa")


def register(
    name: str = "cutlass_attn",
    quantize: str | None = None,
    max_error: float | None = None,
    *,
    ignore: Collection[str] = (),
    any_version: bool = False,
) -> None:
    """Registers `name` as a value of attn_implementation. May be called again.

    Args:
        name: must not contain "eager", "flash", "flex_attention", "paged" or "sdpa", which
            transformers interprets itself.
        quantize: `quantize` of every call: docs/eight-bit.md. For models in float16 or bfloat16,
            without gradients.
        max_error: `max_error` of every call, with `quantize`: heads beyond it run in 16 bits.
        ignore: names of further keywords that models may pass and that do not affect attention.
        any_version: warn, instead of raising, about a version of transformers that is not
            supported.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: this version of transformers is not supported.
        ValueError: the name contains one of these words; max_error without quantize.
    """
    import transformers
    from transformers.masking_utils import AttentionMaskInterface

    check_version(transformers, *SUPPORTED, any_version)
    for word in _RESERVED:
        if word in name:
            raise ValueError(f'name must not contain "{word}", got {name!r}')
    function: Any = attention_forward
    if max_error is not None and quantize is None:
        raise ValueError(
            f"max_error is {max_error!r}, but quantize is None; allowed: a mode, such as 'qk'"
        )
    if quantize is not None:
        function = functools.partial(function, quantize=quantize, max_error=max_error)
    if ignore:
        function = functools.partial(function, ignore=frozenset(ignore))
    transformers.AttentionInterface.register(name, function)
    # Without a mask function, models would pass no mask at all, not even for padding.
    AttentionMaskInterface.register(name, mask_function)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    quantize: str | None = None,
    max_error: float | None = None,
    ignore: Collection[str] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that models call.

    Args:
        module: the layer; its is_causal is used if the argument is None.
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D); Hkv divides Hq.
        value: (B, Hkv, Sk, Dv).
        attention_mask: bool or additive, broadcasts to (B, Hq, Sq, Sk), or a `PaddingMask`. It
            includes a sliding window, since keys of a cache may be in any order. Without it, query
            i of a causal layer sees keys 0 to i, as for the prompt in a longer static cache.
        dropout: probability that a weight becomes 0.
        scaling: factor of the products, ``1 / sqrt(D)`` by default.
        softcap: if not None, a scaled logit s becomes ``softcap * tanh(s / softcap)``.
        s_aux: attention sinks, (Hq,): one more logit in the softmax's denominator. Some models call
            it "sinks".
        position_bias: added to the logits, broadcasts to (B, Hq, Sq, Sk or more).
        quantize: as in `cutlass_attn.attention`.
        max_error: as in `cutlass_attn.attention`; not for packed sequences.
        ignore: names of further keywords that do not affect attention.

    Returns:
        (B, Sq, Hq, Dv), contiguous, and None in place of the weights.

    Raises:
        ValueError: an unknown keyword, such as indices of sparse attention, which may affect the
            result; and as `cutlass_attn.attention`.
    """
    s_aux = kwargs.pop("sinks", None) if s_aux is None else s_aux
    offsets = [kwargs.pop(name, None) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    _check_keywords(kwargs, ignore)
    query, key, value, attention_mask = autocast(query, key, value, attention_mask)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if quantize is not None:
        options["quantize"] = quantize
    if max_error is not None:
        options["max_error"] = max_error
    if s_aux is not None:
        options["sinks"] = s_aux.reshape(-1).float()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if offsets[0] is not None and attention_mask is None and position_bias is None:
        return _packed(query, key, value, offsets, causal, dropout, options), None

    if query.shape[0] != key.shape[0]:  # learned queries, shared by the batch
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    # Biases per query and key, and max_error, do not combine with lengths: make the mask.
    may_be_interval = position_bias is None and max_error is None
    options |= _mask_options(attention_mask, query, key, may_be_interval)
    if causal and attention_mask is None and query.shape[2] > 1:
        keys, top_left = top_left_causal(query.shape[2], key.shape[2])
        key, value = key[:, :, :keys], value[:, :, :keys]
        options |= top_left
    if position_bias is not None:
        bias = bounded_bias(position_bias[..., : key.shape[2]])
        options["bias"] = bias + options["bias"] if "bias" in options else bias
    operands = (
        x.transpose(1, 2) if x.stride(-1) == 1 else x.transpose(1, 2).contiguous()
        for x in (query, key, value)
    )
    out = cutlass_attn.attention(*operands, layout="bshd", dropout_p=dropout, **options)
    return out, None


def _mask_options(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, may_be_interval: bool
) -> dict[str, Any]:
    if not isinstance(mask, PaddingMask):
        return mask_or_bias(mask)
    is_whole = mask.shape == (query.shape[0], 1, query.shape[2], key.shape[2])
    if is_whole and may_be_interval and mask.numbers is None:
        return dict(mask.options)
    return mask_or_bias(mask.dense())


def _check_keywords(kwargs: dict[str, Any], ignore: Collection[str]) -> None:
    """Raises ValueError for keywords that may affect the result."""
    given = {name for name, x in kwargs.items() if x is not None and x is not False}
    for name in given.intersection(_SPARSE):
        raise ValueError(f"cutlass_attn has no sparse attention: {name} must be None")
    if "cache" in given:
        raise ValueError(
            "continuous batching needs the kernels of "
            "cutlass_attn.compat.transformers.local_kernel_dir()"
        )
    if "output_attentions" in given:
        warnings.warn(
            'cutlass_attn gives no attention weights: output_attentions needs "eager"', stacklevel=3
        )
    if unknown := given - _HARMLESS - {"output_attentions", *ignore}:
        raise ValueError(
            f"this model passes {', '.join(sorted(unknown))}, which cutlass_attn does not support; "
            f"allowed: the arguments of attention_forward, {', '.join(sorted(_HARMLESS))}, and "
            "keywords that do not affect attention, if register(ignore=[...]) names them"
        )


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: list[torch.Tensor],
    causal: bool,
    dropout: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of packed sequences in a batch of one, which have offsets instead of a mask."""
    if (max_error := options.get("max_error")) is not None:
        raise ValueError(f"max_error is {max_error!r}, but sequences are packed; allowed: None")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of one, got one of {query.shape[0]}")
    if dropout:
        options["dropout_p"] = dropout
    varlen: Any = cutlass_attn.attention_varlen
    operands = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen(*operands, *(x.int() for x in offsets), causal=causal, **options)[None]


_KERNEL = '''"""cutlass_attn for transformers' flash attention, by way of LOCAL_KERNELS."""

from cutlass_attn.compat.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''


def local_kernel_dir() -> Path:
    """Writes a folder that the package `kernels` loads instead of a download, and returns it.

    With it cutlass_attn is a flash attention of transformers, which runs padded and packed batches
    without padding, and `generate_batch` with a paged cache:

        LOCAL_KERNELS="cutlass/flash-attn2=$(python -c 'import cutlass_attn.compat.transformers \\
            as t; print(t.local_kernel_dir())')" python program.py
        model.set_attn_implementation("cutlass/flash-attn2", allow_all_kernels=True)

    It lies where compiled kernels are kept: $CUTLASS_ATTN_CACHE, else cutlass_attn under
    $XDG_CACHE_HOME, else under ~/.cache. Raises OSError if that cannot be written.
    """
    from cutlass_attn.jit import cache

    cache.make_folder(cache.folder())
    folder = cache.folder() / "kernels" / "flash-attn2"
    for backend in ("cpu", "cuda"):
        variant = folder / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        metadata = {
            "id": f"_cutlass_attn_{backend}",
            "name": "flash-attn2",
            "version": 1,
            "license": "BSD-3-Clause",
            "python-depends": [],
            "backend": {"type": backend},
        }
        _write(variant / "metadata.json", json.dumps(metadata, indent=2) + "\n")
        _write(variant / "__init__.py", _KERNEL)
    return folder


def _write(path: Path, text: str) -> None:
    """Replaces a file atomically, since another process may be reading it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
