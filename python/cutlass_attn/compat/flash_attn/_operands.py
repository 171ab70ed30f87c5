"""Translates flash_attn's arguments and log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """Seed and offset of dropout, drawn on the device: each replay of a CUDA graph draws others."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), device=device)


def int32(count: int, number: int, device: torch.device | str) -> Tensor:
    return torch.full((count,), int(number), dtype=torch.int32, device=device)


def options_of(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    """The options that all functions of cutlass_attn have. Numbers may be CPU tensors."""
    left, right = window_size
    return {
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "causal": bool(causal),
        "window": (int(left), int(right)),
        "softcap": float(softcap),
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.detach(),
        "sinks": None if s_aux is None else s_aux.float().contiguous(),
    }


def padded(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands with head dims padded to a multiple of 8, which fast kernels need."""
    pad = torch.nn.functional.pad
    return tuple(
        pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else with_dense_rows(x) for x in operands
    )


def with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def as_flash(lse: Tensor) -> Tensor:
    """The log-sum-exp with +inf for queries that see no key, as in flash_attn 2, not -inf."""
    return torch.where(lse == -torch.inf, torch.inf, lse)
