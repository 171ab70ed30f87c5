"""`torch.ops.cutlass_attn.attention_forward`: what torch.compile, torch.export and dispatch modes
see of `attention`. Plain eager calls go past it, see `_torch.is_plain`."""

from __future__ import annotations

import torch

from . import _torch
from ._call import Request, launch, make_request

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, bool causal, SymInt window_left, SymInt window_right, "
    "float? softmax_scale, float softcap, str layout, str kernel, bool return_lse) "
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
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and log-sum-exp; the latter has no elements unless `return_lse`."""
    request = _request(q, k, v, causal, window_left, window_right, softmax_scale, softcap, layout)
    out, lse = _results(q, request, return_lse)
    launch(_torch, request, q, k, v, out, lse if return_lse else None, kernel)
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
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    request = _request(q, k, v, causal, window_left, window_right, softmax_scale, softcap, layout)
    return _results(q, request, return_lse)


def _request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float | None,
    softcap: float,
    layout: str,
) -> Request:
    window = (window_left, window_right)
    return make_request(_torch, q, k, v, causal, window, softmax_scale, softcap, layout)


def _results(
    q: torch.Tensor, request: Request, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = _torch.empty(q, request.out_shape)
    return out, _torch.empty_lse(q, request.lse_shape if return_lse else (0,))
