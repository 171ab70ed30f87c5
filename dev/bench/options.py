"""Options of the calls that are timed: masks, biases, softcap, ALiBi, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cutlass_attn.tools.experiment.problems import (
    OPTIONS,
    VISIBLE,
    Flex,
    Keywords,
    Problem,
    Shape,
)


def _random(device: str, *sizes: int) -> Any:
    import torch

    return torch.rand(sizes, generator=torch.Generator(device).manual_seed(1), device=device)


def _softcap(problem: Problem, device: str) -> Keywords:
    import torch

    cap = 30.0
    return Keywords(
        {"softcap": cap}, None, Flex(score_mod=lambda s, b, h, q, k: cap * torch.tanh(s / cap))
    )


def _alibi(problem: Problem, device: str) -> Keywords:
    import torch

    shape, slopes = problem.shape, _random(device, problem.shape.heads_q)
    offset = shape.seqlen_k - shape.seqlen_q

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slopes[h] * torch.abs(q + offset - k)

    return Keywords({"alibi_slopes": slopes}, None, Flex(score_mod=score_mod))


def _bias(problem: Problem, device: str) -> Keywords:
    import torch

    shape = problem.shape
    bias = 4 * _random(device, 1, shape.heads_q, shape.seqlen_q, shape.seqlen_k) - 2
    bias = bias.to(getattr(torch, problem.dtype))
    return Keywords(
        {"bias": bias},
        {"attn_mask": bias.expand(shape.batch, -1, -1, -1)},
        Flex(score_mod=lambda s, b, h, q, k: s + bias[0, h, q, k]),
    )


def _bias_grad(problem: Problem, device: str) -> Keywords:
    """With a gradient of the bias, summed over the batch."""
    shape = problem.shape
    bias = _bias(problem, device).ours["bias"].requires_grad_()
    return Keywords(
        {"bias": bias},
        {"attn_mask": bias.expand(shape.batch, -1, -1, -1)},
        Flex(score_mod=lambda s, b, h, q, k: s + bias[0, h, q, k]),
        (bias,),
    )


def _masked(problem: Problem, mask: Any, mask_mod: Callable[..., Any]) -> Keywords:
    """With a bool mask (B or 1, 1, Sq or 1, Sk). PyTorch gets it expanded, which writes nothing;
    FlexAttention gets the function."""
    shape = problem.shape
    sizes = (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k)
    return Keywords(
        {"mask": mask}, {"attn_mask": mask.expand(sizes)}, Flex(None, mask_mod, len(mask) > 1)
    )


def _mask(problem: Problem, device: str) -> Keywords:
    """Random: no key tile can be skipped."""
    shape = problem.shape
    mask = _random(device, shape.batch, 1, shape.seqlen_q, shape.seqlen_k) < 0.9
    return _masked(problem, mask, lambda b, h, q, k: mask[b, 0, q, k])


def _padding(problem: Problem, device: str) -> Keywords:
    """(B, 1, 1, Sk): each entry has its own number of keys at the beginning, then padding."""
    import torch

    lengths = torch.from_numpy(_padded_lengths(problem.shape)).to(device)
    keys = torch.arange(problem.shape.seqlen_k, device=device)
    mask = (keys < lengths[:, None])[:, None, None]
    return _masked(problem, mask, lambda b, h, q, k: k < lengths[b])


def _documents(problem: Problem, device: str) -> Keywords:
    """(1, 1, Sq, Sk): causal documents in one sequence."""
    import torch

    shape = problem.shape
    number = torch.from_numpy(_document_of_key(shape)).to(device)
    keys = torch.arange(shape.seqlen_k, device=device)
    rows, offset = keys[-shape.seqlen_q :, None], shape.seqlen_k - shape.seqlen_q
    mask = (number[rows] == number) & (rows >= keys)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (number[q + offset] == number[k]) & (q + offset >= k)

    return _masked(problem, mask[None, None], mask_mod)


def _padded_lengths(shape: Shape) -> np.ndarray:
    """From all keys down to a quarter of them."""
    shares = np.linspace(1.0, 0.25, shape.batch)
    return np.maximum(1, (shape.seqlen_k * shares).astype(np.int64))


def _document_of_key(shape: Shape) -> np.ndarray:
    """Index of each key's document: eight documents, with lengths that grow from 1/36 to 8/36."""
    begins = np.cumsum(np.arange(8)) / 36 * shape.seqlen_k
    return np.searchsorted(begins, np.arange(shape.seqlen_k), side="right") - 1


def _visible_of_documents(shape: Shape) -> float:
    number, keys = _document_of_key(shape), np.arange(shape.seqlen_k)
    first = np.searchsorted(number, number)  # first key of each key's document
    return float((keys - first + 1)[-shape.seqlen_q :].mean() / shape.seqlen_k)


OPTIONS |= {
    "softcap": _softcap,
    "alibi": _alibi,
    "bias": _bias,
    "bias_grad": _bias_grad,
    "mask": _mask,
    "padding": _padding,
    "documents": _documents,
    "dropout": lambda problem, device: Keywords({"dropout_p": 0.1}, {"dropout_p": 0.1}),
}
VISIBLE |= {
    "padding": lambda shape: float(_padded_lengths(shape).mean() / shape.seqlen_k),
    "documents": _visible_of_documents,
}
