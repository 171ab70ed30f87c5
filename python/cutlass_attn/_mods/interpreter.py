"""`attention` with any score_mod, evaluated by torch on a CPU, in blocks of rows in float32.

The backward pass computes each block again and differentiates it with torch, so a call never holds
the logits of more than one block.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from .gradients import first_order
from .graph import Graph, evaluate
from .masks import Lengths

_BLOCK = 1 << 22  # logits of a block


@dataclass(frozen=True)
class Options:
    """The options of `attention` that this module supports."""

    softmax_scale: float
    offset: int  # Sk - Sq
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    attention_chunk: int | None = None
    mask: torch.Tensor | None = None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: Graph,
    options: Options,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, in q's dtype, and the log-sum-exp; differentiable in q, k, v, sinks and captures,
    once.

    Args:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, Dv).
        score: a score_mod.
        options: of the call; its mask has 4 dimensions.
        sinks: (Hq,).
    """
    return _Interpreted.apply(score, options, q, k, v, sinks, *score.captures)  # type: ignore


class _Interpreted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, score: Graph, options: Options, q: Any, k: Any, v: Any, sinks: Any, *captures: Any
    ) -> Any:
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=real)
        for rows in _blocks(q, k):
            own = _block(score, options, rows, q[:, :, rows], k, v, sinks)
            out[:, :, rows], lse[:, :, rows] = own
        ctx.save_for_backward(q, k, v, sinks, *captures)
        ctx.call = score, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        score, options = ctx.call
        compute = functools.partial(_gradients, score, options, ctx.needs_input_grad[2:])
        return None, None, *first_order(compute, grad_out, grad_lse, *ctx.saved_tensors)


def _gradients(
    score: Graph,
    options: Options,
    wanted: tuple[bool, ...],
    grad_out: Any,
    grad_lse: Any,
    *saved: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The wanted gradients of q, k, v, sinks and captures, which are `saved`."""
    q, *others = saved
    # In float64, because torch adds to float32 elements in any order.
    captures = [
        x.detach().double() if is_wanted else x for x, is_wanted in zip(others[3:], wanted[4:])
    ]
    score = dataclasses.replace(score, captures=captures)
    inputs: list[Any] = [None if x is None else x.detach() for x in (q, *others[:3])]
    inputs += captures
    sums = [
        torch.zeros_like(x, dtype=_real(x)) if is_wanted else None
        for x, is_wanted in zip(inputs, wanted)
    ]
    asked = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    for rows in _blocks(q, inputs[1]):
        with torch.enable_grad():
            leaves = [x.requires_grad_() if y else x for x, y in zip(inputs, wanted)]
            q_rows = leaves[0][:, :, rows].detach().requires_grad_(wanted[0])
            results = _block(score, options, rows, q_rows, *leaves[1:4])
        grads = [None if g is None else g[:, :, rows] for g in (grad_out, grad_lse)]
        pairs = [
            (y, g.to(y.dtype))
            for y, g in zip(results, grads)
            if g is not None and y.requires_grad  # a score_mod may ignore the score
        ]
        if not pairs:
            continue
        of = [q_rows, *leaves[1:]]
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [of[i] for i in asked],
            [g for _, g in pairs],
            allow_unused=True,
        )
        for i, grad in zip(asked, found):
            if grad is not None:
                total = sums[i][:, :, rows] if i == 0 else sums[i]  # type: ignore[index]
                total += grad
    return tuple(None if x is None else x.to(y.dtype) for x, y in zip(sums, saved))


def _real(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _blocks(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    width = max(1, q.shape[0] * q.shape[1] * k.shape[2])
    count = max(1, _BLOCK // width)
    return [slice(i, min(i + count, q.shape[2])) for i in range(0, q.shape[2], count)]


def _block(
    score: Graph,
    options: Options,
    rows: slice,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp of some rows of q."""
    real = _real(q)
    (b, hq, sq, _), (_, hkv, sk, _) = q.shape, k.shape
    group = (b, hkv, hq // max(hkv, 1), sq)
    grouped = q.to(real).reshape(*group, q.shape[3])
    product = grouped @ k.to(real)[:, :, None].transpose(-1, -2) * options.softmax_scale
    product = product.reshape(b, hq, sq, sk)
    variables = Lengths(b, hq, rows.stop, sk).variables(q.device, rows)
    visible = _visible(options, variables["q"], variables["k"], rows)
    if product.requires_grad and visible is not None:
        # 0 times an infinite derivative of score_mod would be NaN.
        product.register_hook(lambda g: torch.where(visible, g, 0.0))
    s = evaluate(score, score.result, {"score": product, **variables}, real)
    s = s.expand(product.shape)
    if visible is not None:
        s = torch.where(visible, s, -torch.inf)
    largest = s.detach().amax(-1, keepdim=True) if sk else s.new_full((b, hq, sq, 1), -torch.inf)
    if sinks is not None:
        sink = sinks.to(real)[None, :, None, None]
        largest = torch.maximum(largest, sink.detach())
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    p = torch.exp(s - largest)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - largest)
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)
    out = (p.reshape(*group, sk) @ v.to(real)[:, :, None]).reshape(b, hq, sq, v.shape[3]) / total
    lse = torch.where(is_empty, -torch.inf, largest + torch.log(total))[..., 0]
    return out.to(q.dtype), lse


def _visible(
    options: Options, q: torch.Tensor, k: torch.Tensor, rows: slice
) -> torch.Tensor | None:
    """A mask that broadcasts to (B, Hq, rows, Sk), or None if all keys are visible."""
    conditions = []
    if options.mask is not None:
        mask = options.mask
        conditions.append(mask[:, :, rows] if mask.shape[2] != 1 else mask)
    left, right = options.window
    if options.causal:
        right = 0
    if left is not None or right is not None or options.attention_chunk is not None:
        diagonal = q + options.offset
        if left is not None:
            conditions.append(k >= diagonal - left)
        if right is not None:
            conditions.append(k <= diagonal + right)
        if options.attention_chunk is not None:
            size = options.attention_chunk
            conditions.append(k // size == diagonal // size)
    result = None
    for x in conditions:
        result = x if result is None else result & x
    return result
