"""An attention backend of diffusers.

    cutlass_attn.compat.diffusers.register()
    pipeline.transformer.set_attention_backend("cutlass_attn")

`diffusers.models.attention_dispatch.attention_backend("cutlass_attn")` is the context manager.
"""

from __future__ import annotations

from typing import Any

import torch

from . import sdpa
from ._versions import check_version

NAME = "cutlass_attn"
SUPPORTED = (0, 36), (0, 43)  # tested with the first version and with 0.42.1


def register() -> None:
    """Adds the backend "cutlass_attn"; again is no error.

    diffusers has a closed list of names and no public way to add one: this extends its enumeration.

    Raises:
        ImportError: diffusers is not installed.
        RuntimeError: its version is none of those that this is tested with.
    """
    import diffusers
    from diffusers.models import attention_dispatch

    check_version(diffusers, *SUPPORTED)
    names: Any = attention_dispatch.AttentionBackendName
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member
        names._member_names_.append(member._name_)
        type.__setattr__(names, member._name_, member)
    attention_dispatch._AttentionBackendRegistry.register(member, constraints=[])(attention)


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
    """What diffusers calls: operands are (B, S, H, D), and so is the result.

    A mask is what torch's function takes, or (B, Sk); the other arguments are that function's, and
    as in `compat.sdpa` calls in float32 go to torch. With return_lse, or a window, all is computed
    here: (result, log-sum-exp (B, H, Sq) float32).

    Raises:
        NotImplementedError: context parallelism.
        ValueError: return_lse or window_size with a call that `compat.sdpa.why_not` names, or a
            window together with is_causal.
    """
    if _parallel_config is not None:
        raise NotImplementedError('backend "cutlass_attn" has no context parallelism')
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    operands = [x.transpose(1, 2) for x in (query, key, value)]
    arguments: Any = (*operands, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    windowed = any(side is not None and side >= 0 for side in window_size)
    if not (return_lse or windowed):
        return sdpa.scaled_dot_product_attention(*arguments, **options).transpose(1, 2)
    call = sdpa.translate(*arguments, **options)
    if isinstance(call, str):
        raise ValueError(f'backend "cutlass_attn" has no return_lse or window_size here: {call}')
    if windowed:
        if is_causal:
            raise ValueError('backend "cutlass_attn" takes window_size or is_causal, not both')
        call.options["window"] = tuple(window_size)
    out, lse = call.run_with_lse()
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)
