"""`torch.ops.cutlass_attn.attention_forward`: what torch.compile, torch.export and dispatch modes
see of `attention`. Plain eager calls go past it, see `_torch.is_plain`."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch
from ._call import Request, launch, make_request
from ._options import make_options

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, bool causal, SymInt window_left, SymInt window_right, "
    "float? softmax_scale, float softcap, str layout, str kernel, str accumulate, bool return_lse, "
    "Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, float dropout_p, "
    "Tensor? rng_state) "
    "-> (Tensor, Tensor)"
)


@torch.library.custom_op("cutlass_attn::attention_forward", mutates_args=(), schema=_SCHEMA)
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float | None,
    softcap: float,
    layout: str,
    kernel: str,
    accumulate: str,
    return_lse: bool,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and log-sum-exp; the latter has no elements unless `return_lse`."""
    window = (window_left, window_right)
    request = make_request(
        _torch, q, k, v, causal, window, softmax_scale, softcap, layout, accumulate
    )
    out, lse = _results(q, request, return_lse)
    checked = make_options(_torch, request, q, *options)
    launch(_torch, request, q, k, v, checked, out, lse if return_lse else None, kernel)
    return out, lse


@attention_forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float | None,
    softcap: float,
    layout: str,
    kernel: str,
    accumulate: str,
    return_lse: bool,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    window = (window_left, window_right)
    request = make_request(
        _torch, q, k, v, causal, window, softmax_scale, softcap, layout, accumulate
    )
    make_options(_torch, request, q, *options)
    return _results(q, request, return_lse)


def _results(
    q: torch.Tensor, request: Request, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = _torch.empty(q, request.out_shape)
    return out, _torch.empty_lse(q, request.lse_shape if return_lse else (0,))
