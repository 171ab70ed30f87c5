"""Translates score_mod, mask_mod and block_mask to other options of `attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import masks, scores, transforms
from .block_mask import Mask, read, read_function
from .graph import Graph, UnsupportedModError, loads
from .tracing import trace

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Function = Callable[..., Any]
_MAX_SOFTCAP = 4096.0  # of the option, except in float64: kernels/runtime/check.cpp


@dataclass(frozen=True)
class Mods:
    """score_mod, mask_mod and block_mask of a call."""

    score_mod: Function | None = None
    mask_mod: Function | None = None
    block_mask: BlockMask | None = None


@dataclass(frozen=True)
class Translated:
    """Options of `attention` that are equal to a call's mods."""

    scale: float  # of softmax_scale
    keys: int  # no query sees later keys
    options: dict[str, Any]
    lse_shift: torch.Tensor | float  # to be added to the log-sum-exp
    score: Graph | None  # a score_mod that no option expresses


def translate(
    query: torch.Tensor,
    lengths: masks.Lengths,
    mods: Mods,
    *,
    given: masks.Interval | None = None,
    has_sinks: bool = False,
    may_cut: bool = True,
    may_compile: bool = False,
) -> Translated:
    """The options for a call.

    Args:
        query: of the call, for its dtype and device.
        lengths: of the call.
        mods: its functions.
        given: the call's own causal mask, window and chunk, if it has one of them; then a mask of
            `mods` has to be a bool mask.
        has_sinks: whether the call has sinks. Without them, a term that is constant in a row does
            not change the softmax and goes to `lse_shift`; with them no option expresses it.
        may_cut: whether keys that no query sees may be left out.
        may_compile: whether the call runs as fast with a score_mod that is compiled.

    Raises:
        TypeError, UnsupportedModError: a function cannot be traced.
        ValueError: a captured tensor is too small, or on another device than query.
    """
    device = query.device
    interval = masks.Interval()
    visible: list[torch.Tensor] = []  # bool masks; a key must be visible in all
    score, graph, is_known = scores.Score(), None, True
    if mods.score_mod is not None:
        graph = trace(mods.score_mod, "score_mod", device)
        try:
            score = scores.split(graph)
        except UnsupportedModError:
            is_known = False
        if score.softcap > _MAX_SOFTCAP and query.dtype != torch.float64:  # the option refuses it
            score, is_known = scores.Score(), False
    for node in score.masks:
        assert graph is not None
        own, rest = masks.split(graph, node)
        interval = _joined(interval, own, visible, lengths, device)
        if rest is not None:
            transforms.refuse_mapped("score_mod", (graph.captures[x.value] for x in loads(rest)))
            with torch.no_grad(), torch.inference_mode(False):
                visible.append(masks.dense(graph, rest, lengths, device))
    known: list[Mask] = []
    if mods.mask_mod is not None:
        known.append(read_function(mods.mask_mod, lengths, device))
    if mods.block_mask is not None:
        known.append(read(mods.block_mask, lengths))
    for mask in known:
        interval = _joined(interval, mask.interval, visible, lengths, device)
        if mask.dense is not None:
            visible.append(mask.dense)
    may_have_options = given is None or interval == masks.Interval()
    found = masks.options(interval, lengths) if may_have_options else None
    if found is None or (found[0] < lengths.k and not may_cut):
        if not any(x.has_interval and x.interval == interval for x in known):
            visible.append(masks.dense_interval(interval, lengths, device))
        found = lengths.k, {}
    keys, options = found
    if visible:
        dense = visible[0]
        for x in visible[1:]:
            dense = dense & x
        options["mask"] = dense[..., :keys]
    if graph is not None and is_known:
        of_call = masks.Lengths(lengths.b, lengths.h, lengths.q, keys)
        try:
            if given is not None:
                interval = interval.within(given.low, given.high)
            operands = scores.operands(graph, score.terms, of_call, interval, query)
        except UnsupportedModError:
            is_known = False
        else:
            is_shifted = not isinstance(operands.lse_shift, float) or operands.lse_shift != 0.0
            is_known = not (has_sinks and is_shifted)
            # On a GPU only a bias of the operands' dtype runs on a fast kernel.
            bias = operands.bias
            if may_compile and bias is not None and bias.dtype != query.dtype:
                is_known = is_known and bias.requires_grad
    if graph is None or not is_known:
        return Translated(1.0, keys, options, 0.0, graph)
    if score.softcap:
        options["softcap"] = score.softcap
    if operands.bias is not None:
        options["bias"] = operands.bias
    if operands.alibi_slopes is not None:
        options["alibi_slopes"] = operands.alibi_slopes
    return Translated(score.scale, keys, options, operands.lse_shift, None)


def _joined(
    first: masks.Interval,
    second: masks.Interval,
    visible: list[torch.Tensor],
    lengths: masks.Lengths,
    device: torch.device,
) -> masks.Interval:
    both = first & second
    if both is None:  # two chunk lengths
        visible.append(masks.dense_interval(second, lengths, device))
        return first
    return both
