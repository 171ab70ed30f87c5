"""A backward pass that cannot be differentiated, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def first_order(compute: Callable[..., tuple[Any, ...]], *tensors: torch.Tensor | None) -> Any:
    """`compute(*tensors)`, the gradients of a call, computed without recording.

    Raises:
        NotImplementedError: later, where torch differentiates these gradients.
    """
    return _FirstOrder.apply(compute, *tensors)  # type: ignore[no-untyped-call]


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Any, ...]], *tensors: Any) -> Any:
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "attention has no second derivative: its backward pass cannot be differentiated"
        )
