"""An attention backend of diffusers.

    cutlass_attn.compat.diffusers.register()
    pipeline.transformer.set_attention_backend("cutlass_attn")

`diffusers.models.attention_dispatch.attention_backend("cutlass_attn")` is the context manager.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.distributed import _functional_collectives

import cutlass_attn

from .. import _C
from .._call import torch_library
from . import sdpa
from ._translate import mask_or_bias
from ._versions import check_version

NAME = "cutlass_attn"
SUPPORTED = (0, 36), (0, 43)  # tested with the first version and with 0.42.1


def register(*, any_version: bool = False) -> None:
    """Adds the backend "cutlass_attn" to diffusers. May be called again.

    diffusers has a closed list of names and no public way to add one: this extends its enumeration.

    Args:
        any_version: warn, instead of raising, about a version of diffusers that is not supported.

    Raises:
        ImportError: diffusers is not installed.
        RuntimeError: this version of diffusers is not supported.
    """
    import diffusers
    from diffusers.models import attention_dispatch

    check_version(diffusers, *SUPPORTED, any_version)
    names: Any = attention_dispatch.AttentionBackendName
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member
        names._member_names_.append(member._name_)
        type.__setattr__(names, member._name_, member)
    add = attention_dispatch._AttentionBackendRegistry.register
    options: dict[str, Any] = {"constraints": []}
    if "supports_context_parallel" in inspect.signature(add).parameters:
        options["supports_context_parallel"] = True
    add(member, **options)(attention)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """The function that diffusers calls: operands and result are (B, S, H, D).

    attn_mask is a mask of scaled_dot_product_attention, or (B, Sk); the other arguments are that
    function's. As in `compat.sdpa`, calls in float32 go to torch, except with return_lse or a
    window. With return_lse the result is a pair with the log-sum-exp, (B, H, Sq) float32.

    With _parallel_config, diffusers' own context parallelism calls `_forward` and `_backward` for
    the part of each rank.

    Raises:
        NotImplementedError: with _parallel_config: dropout; in a ring a mask or a window.
        ValueError: window_size is no pair; return_lse or window_size with a call that
            `compat.sdpa.why_not` names, or a window together with is_causal.
    """
    if _parallel_config is not None:
        from diffusers.models.attention_dispatch import _templated_context_parallel_attention

        return _templated_context_parallel_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            forward_op=functools.partial(_forward, window=(window_size[0], window_size[1])),
            backward_op=_backward,
            _parallel_config=_parallel_config,
        )
    attn_mask = _four_dims(attn_mask, query, key)
    operands = [x.transpose(1, 2) for x in (query, key, value)]
    arguments: Any = (*operands, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size is {window_size!r}, allowed: a pair, the keys before and after a query's"
        )
    windowed = any(side is not None and side >= 0 for side in window_size)
    if not (return_lse or windowed):
        return sdpa.scaled_dot_product_attention(*arguments, **options).transpose(1, 2)
    arguments = (*sdpa.autocast(*operands, attn_mask), dropout_p, is_causal)
    call = sdpa.translate(*arguments, **options)
    if isinstance(call, str):
        raise ValueError(f'backend "cutlass_attn" has no return_lse or window_size here: {call}')
    if windowed:
        if is_causal:
            raise ValueError('backend "cutlass_attn" takes window_size or is_causal, not both')
        call.options["window"] = tuple(window_size)
    out, lse = call.run_with_lse()
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)


def _four_dims(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> Any:
    """A mask (B, Sk) as torch's function takes it."""
    if mask is not None and mask.shape == (query.shape[0], key.shape[1]):
        return mask[:, None, None, :]
    return mask


def _forward(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
    *,
    window: tuple[int, int] = (-1, -1),
) -> Any:
    """Attention of a rank's queries over keys of one rank (ring), or of some heads (Ulysses):
    operands are (B, S, H, D), the log-sum-exp (B, S, H)."""
    is_ring = _parallel_config is not None and (
        _parallel_config.context_parallel_config.ring_degree > 1
    )
    for name, is_there in (
        ("dropout", dropout_p != 0),
        ("an attn_mask under ring attention", is_ring and attn_mask is not None),
        ("a window_size under ring attention", is_ring and window != (-1, -1)),
    ):
        if is_there:
            raise NotImplementedError(
                f'backend "{NAME}" has no context parallelism with {name}; Ulysses takes masks '
                "and windows"
            )
    masked = mask_or_bias(_four_dims(attn_mask, query, key))
    options: dict[str, Any] = {"softmax_scale": scale, "window": window, "layout": "bshd"}
    out, lse = cutlass_attn.attention(query, key, value, **options, **masked, return_lse=True)
    lse = lse.transpose(1, 2)
    if _save_ctx:
        (name, mask), *_ = [*masked.items(), (None, None)]
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.options, ctx.mask_name, ctx.is_ring = options, name, is_ring
    return (out, lse) if return_lse else out


def _backward(
    ctx: Any,
    grad_out: torch.Tensor,
    *_: Any,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    **__: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value. A ring passes the keys of each step, with output and
    log-sum-exp over all of them; otherwise they are those of the forward call."""
    if ctx.is_ring and key is None:
        raise NotImplementedError(
            f'backend "{NAME}" has no gradient under ring attention of this version of diffusers, '
            "which does not pass the keys of each step"
        )
    *saved, mask = ctx.saved_tensors
    given = (query, key, value, out, lse)
    query, key, value, out, lse = (_here(y if x is None else x) for x, y in zip(given, saved))
    options = ctx.options if mask is None else {**ctx.options, ctx.mask_name: mask}
    grads: tuple[torch.Tensor, ...] = _C.backward(
        query,
        key,
        value,
        {**options, "deterministic": torch_library.is_deterministic()},
        grad_out=grad_out,
        out=out,
        softmax_lse=lse.transpose(1, 2).contiguous(),
        grad_softmax_lse=None,
        wanted=[True] * 3,
        dispatched=True,
    )
    return grads


def _here(x: Any) -> Any:
    """A tensor that a collective may still be filling, as the memory that it fills."""
    if isinstance(x, _functional_collectives.AsyncCollectiveTensor):
        return x.wait()
    return x
