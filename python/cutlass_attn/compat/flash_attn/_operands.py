"""Translates flash_attn's arguments and log-sum-exp."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """Seed and offset of dropout, drawn on the device: each replay of a CUDA graph draws others."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), device=device)


def int32(name: str, count: int, number: Any, device: torch.device | str) -> Tensor:
    """One number for `count` sequences. Raises TypeError."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt, np.integer)):
        raise TypeError(f"{name} must be an int or an int32 tensor (B,), got {number!r}")
    return torch.full((count,), int(number), dtype=torch.int32, device=device)


def unpacked(name: str, x: Tensor, dims: str) -> tuple[Tensor, ...]:
    """The parts of x, whose dimensions are named such as "B, S, 3, H, D". Raises ValueError."""
    names = dims.split(", ")
    at, count = next((i, int(size)) for i, size in enumerate(names) if size.isdigit())
    if x.dim() != len(names) or x.shape[at] != count:
        raise ValueError(f"{name} must have shape ({dims}), got {tuple(x.shape)}")
    return x.unbind(at)


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
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right) of int, got {window_size!r}")
    return {
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "causal": bool(causal),
        "window": tuple(map(_side, window_size)),
        "softcap": float(softcap) if isinstance(softcap, Tensor) else softcap,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.detach(),
        "sinks": None if s_aux is None else s_aux.float().contiguous(),
    }


def _side(keys: Any) -> Any:
    """One side of a window; None is no limit, too. Others than numbers are refused later."""
    return -1 if keys is None else int(keys) if isinstance(keys, Tensor) else keys


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
