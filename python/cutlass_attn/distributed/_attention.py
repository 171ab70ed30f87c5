"""`context_attention`."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .._call import torch_library
from .._call.call import Call
from . import _layouts
from ._agree import agree
from ._gather import Gather, number_of_groups
from ._kernels import Dropout, Terms, forward
from ._plan import ContextPlan
from ._ring import Ring
from ._schedule import DRAW, Band, Span
from ._ulysses import Tensors, by_heads

Window = int | tuple[int | None, int | None] | None


@torch.compiler.disable
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    *,
    causal: bool = False,
    window: Window = None,
    attention_chunk: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bhsd",
    return_lse: bool = False,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
) -> Any:
    """`cutlass_attn.attention` of a sequence that is divided among several ranks.

    A collective call: all ranks of the plan make it with equal shapes and options. Each passes its
    rows of q, k and v and gets its rows of the result. The backward pass is a collective call too.
    User guide: docs/several-gpus.md.

    Args:
        q: (B, Hq, plan.local_rows, D), with ``layout="bshd"`` (B, rows, Hq, D), or (rows, Hq, D) if
            the plan has cu_seqlens. `plan.shard` makes it of the whole sequence. A DTensor has
            these rows as its local tensor, Shard(the dimension of rows) over the plan's ranks; the
            results are DTensors then.
        k: (B, Hkv, plan.local_rows, D), in q's layout. Hkv divides Hq.
        v: (B, Hkv, plan.local_rows, Dv), in q's layout.
        plan: which rank has which rows, and the scheme of communication.
        causal: as in `attention`; positions are those of the whole sequence, or of its document.
        window: as in `attention`.
        attention_chunk: as in `attention`; chunks start where the sequence, or its document, does.
        softmax_scale: as in `attention`.
        softcap: as in `attention`.
        layout: order of the dimensions of q, k, v and the result: "bhsd" or "bshd".
        return_lse: also return the log-sum-exp.
        bias: as in `attention`, with this rank's rows and all of plan.padded_seqlen keys; either
            may be 1. scheme="gather", or another with one for all rows ("ulysses"). Not packed.
        mask: bool, True = visible; shape and limits as for `bias`.
        alibi_slopes: as in `attention`; in "gather" with causal=True, and in "ulysses".
        sinks: (Hq,) as in `attention`, equal on all ranks. Its gradient is the share of this rank's
            rows, as for all weights under context parallelism: sum it over the ranks.
        dropout_p: as in `attention`. The weights that are dropped are those that `attention` drops
            with the same rng_state, if plan.chunk_rows and attention_chunk are multiples of 32.
            Otherwise, and for packed sequences, they are others for another plan.
        rng_state: (2,) as in `attention`, on q's device, equal on all ranks. None: as the plan's
            first rank draws it.
        deterministic: as in `attention`.

    Returns:
        The result, in q's dtype and layout, contiguous but for "bhsd", which is a view of "bshd".
        With ``return_lse`` a pair of it and the log-sum-exp (B, Hq, rows), or (Hq, rows) if packed,
        float32.

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention`. Errors in shapes and options
            are raised on all ranks, and name the rank.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
    call = _layouts.Call(plan, layout, q, k, v, sinks)
    try:
        band = _band(window, causal)
    except (TypeError, ValueError) as error:  # to be raised on all ranks
        call.error, band = error, Band(None, None)
    terms = Terms(
        band=band,
        attention_chunk=attention_chunk,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sinks=None,
    )
    more = {"dropout_p": dropout_p, "rng_state": rng_state, "return_lse": return_lse}
    _check(plan, call, terms, more)
    if dropout_p:
        terms = replace(terms, dropout=_dropout(plan, call, terms, dropout_p, rng_state))
    with torch.autocast(call.q.device.type, enabled=False):
        out, lse = _run(plan, call, terms, return_lse)
    return call.results(out, lse) if return_lse else call.results(out, None)


def _band(window: Window, causal: bool) -> Band:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not all(x is None or _is_int(x) for x in sides):
        raise TypeError(f"window must be an int, a pair of int, or None, got {window!r}")
    if any(x is not None and x < -1 for x in sides):
        raise ValueError(f"window must not be below -1, got {window!r}")
    left, right = (None if x is None or x == -1 else int(x) for x in sides)
    return Band(left, 0 if causal else right)


def _dropout(
    plan: ContextPlan, call: _layouts.Call, terms: Terms, p: float, rng_state: torch.Tensor | None
) -> Dropout:
    if rng_state is None:
        rng_state = torch_library.random_state(call.q)
        for group in (plan.inner, plan.outer):
            if group is not None:
                dist.broadcast(rng_state, dist.get_global_rank(group, 0), group)
    else:  # a copy, as for one device: the caller may change it before the backward pass
        rng_state = rng_state.view(torch.int64).clone()
    # Rows of chunks count if they are on several ranks.
    lengths = [terms.attention_chunk or 0, plan.chunk_rows if plan.outer_size > 1 else 0]
    is_of_one_device = not call.is_packed and all(n % DRAW == 0 for n in lengths)
    return Dropout(p, rng_state, call.q.shape[2], is_of_one_device=is_of_one_device)


def _is_int(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _run(plan: ContextPlan, call: _layouts.Call, terms: Terms, return_lse: bool) -> Any:
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    bias, mask = (
        None if x is None else x[(None,) * (4 - x.dim())] for x in (terms.bias, terms.mask)
    )
    slopes = terms.alibi_slopes
    # Slopes of one entry are those of all documents.
    if slopes is not None and slopes.shape[0] == 1:
        slopes = slopes.reshape(-1)
    terms = replace(terms, bias=bias, mask=mask, alibi_slopes=slopes, sinks=sinks)
    size = plan.inner_size
    if size == 1:
        return _of_rows(plan, terms, q, k, v)
    if k.shape[2] % size:  # copies of KV heads, until they divide; gradients add up
        copies = next(n for n in range(1, size + 1) if k.shape[2] * n % size == 0)
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    # "gather" and "ring" overlap with their own kernels.
    shares = [1] if plan.outer_size > 1 else _shares(plan, q, k.shape[2] // size)
    heads = q.shape[2] // size
    ends = [
        plan.inner_rank * heads + heads // sum(shares) * n for n in accumulate(shares, initial=0)
    ]

    def compute(i: int, operands: Tensors) -> Tensors:
        out, lse = _of_rows(plan, terms.of_heads(Span(ends[i], ends[i + 1])), *operands)
        return (out, lse.transpose(1, 2)[..., None]) if return_lse else (out,)

    out, *rest = by_heads(plan.inner, shares, (q, k, v), compute)
    return out, rest[0].squeeze(-1).transpose(1, 2) if return_lse else None


def _shares(plan: ContextPlan, q: torch.Tensor, heads: int) -> list[int]:
    """The groups of heads of "ulysses", in parts of a rank's KV heads. Nothing hides the exchange
    of the first group's inputs and of the last one's results, so these groups are small: the two
    middle quarters share a group."""
    count = number_of_groups(plan, q, heads)
    return [1, 2, 1] if count == 4 and plan.head_groups is None else [1] * count


def _of_rows(
    plan: ContextPlan, terms: Terms, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Any:
    """Output and log-sum-exp of the rows of a Ulysses group, or of this rank."""
    if plan.scheme.startswith("ring"):
        return Ring.apply(plan, terms, q, k, v, terms.bias, terms.sinks)
    if plan.outer_size == 1:
        calls = plan.calls_of_gather(terms.band, terms.attention_chunk, terms.joins(q.shape[0]))
        whole = Span(0, q.shape[1])
        if len(calls) == 1 and calls[0].q == calls[0].k == whole:
            return forward(q, k, v, calls[0], terms.options(calls[0], has_sinks=True))
    return Gather.apply(plan, terms, q, k, v, terms.bias, terms.sinks)


def _check(plan: ContextPlan, call: _layouts.Call, terms: Terms, more: dict[str, Any]) -> None:
    """Raises, on all ranks, the errors of any rank, and differences between their calls. `more`:
    the call's dropout_p, rng_state and return_lse."""
    fields = _fields(call, terms, more)
    key = repr(fields)  # what was given may be of any type, and its hash may not exist
    if plan.check == "first" and key in plan.agreed:
        return
    error: Exception | None = None
    try:
        _check_own(plan, call, terms, more)
    except Exception as raised:  # whatever it is: the other ranks wait for this one
        error = raised
    if not plan.groups:
        if error is not None:
            raise error
    else:
        names = ("scheme", "seqlen", "cu_seqlens", "placement", "head_groups")
        fields |= {f"plan.{name}": getattr(plan, name) for name in names}
        agree(plan.groups, _collective_device(plan.groups[0]), fields, error)
    plan.agreed.add(key)


def _collective_device(group: Any) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _fields(call: _layouts.Call, terms: Terms, more: dict[str, Any]) -> dict[str, Any]:
    """The properties of a call that collectives and errors depend on."""
    given = {"q": call.q, "k": call.k, "v": call.v, "sinks": call.sinks}
    given |= {"rng_state": more["rng_state"]}
    given |= {name: getattr(terms, name) for name in ("bias", "mask", "alibi_slopes")}
    fields: dict[str, Any] = {}
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            fields[name] = None if x is None else type(x).__name__
            continue
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        fields[f"{name}.shape"] = tuple(x.shape)
        fields[f"{name}.dtype"] = str(x.dtype)
        fields[f"{name}.device"] = x.device.type
        fields[f"{name}.requires_grad"] = needs_gradient
    # Not causal and window themselves: different ones may be equal masks.
    fields["the mask of causal and window, as (left, right),"] = tuple(terms.band)
    names = ("attention_chunk", "softmax_scale", "softcap", "deterministic")
    fields |= {name: getattr(terms, name) for name in names}
    return fields | {
        "layout": call.layout,
        "dropout_p": more["dropout_p"],
        "return_lse": more["return_lse"],
        "error": call.error and str(call.error),
    }


def _check_own(plan: ContextPlan, call: _layouts.Call, terms: Terms, more: dict[str, Any]) -> None:
    """Checks this rank's own call. Raises TypeError, ValueError, NotImplementedError."""
    if call.error is not None:
        raise call.error
    options = {name: getattr(terms, name) for name in ("bias", "mask", "alibi_slopes")}
    rng_state = more["rng_state"]
    options |= {"sinks": call.sinks, "rng_state": rng_state}
    for name, x in options.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
    q, k, v = call.q, call.k, call.v
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must be {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}"
            )
        if x.shape[:1] != q.shape[:1] or x.shape[2] != k.shape[2]:
            raise ValueError(
                "q, k and v must have one batch, k and v equal numbers of heads, got "
                f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} as (B, rows, heads, "
                "head_dim)"
            )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"heads of k, {k.shape[2]}, must divide those of q, {q.shape[2]}")
    if q.shape[2] % plan.inner_size:
        raise ValueError(
            f"q has {q.shape[2]} heads, which {plan.inner_size} ranks cannot share equally "
            f"(scheme={plan.scheme!r}); allowed: a multiple of the ranks, or scheme='gather'"
        )
    is_ring = plan.scheme.startswith("ring")
    is_aligned = plan.outer_size == 1 or (not is_ring and terms.band.right == 0)
    if terms.alibi_slopes is not None and not is_aligned:
        raise NotImplementedError(
            f"alibi_slopes need scheme='gather' with causal=True, or 'ulysses', got "
            f"scheme={plan.scheme!r}"
        )
    slopes = terms.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "context_attention has no gradient of alibi_slopes, which requires a gradient; "
            "detach it"
        )
    _check_biases(plan, call, terms)
    # The rest is as `attention` has it. Checked here, since kernels run on ranks with rows alone.
    if rng_state is not None and tuple(rng_state.shape) != (2,):
        raise ValueError(
            f"rng_state must have shape (2,), a seed and an offset, got {tuple(rng_state.shape)}"
        )
    names = ("attention_chunk", "softmax_scale", "softcap", "deterministic")
    options |= {name: getattr(terms, name) for name in names}
    options |= {"layout": "bshd", **more}
    options = {name: x for name, x in options.items() if x is not None}
    keys, values = (x[:, :1].expand(-1, plan.padded_seqlen, -1, -1) for x in (k, v))
    Call(q, keys, values, options).facts()


def _check_biases(plan: ContextPlan, call: _layouts.Call, terms: Terms) -> None:
    q = call.q
    due = (q.shape[0], q.shape[2], plan.local_rows, plan.padded_seqlen)
    for name in ("bias", "mask"):
        x = getattr(terms, name)
        if x is None:
            continue
        if plan.scheme.startswith("ring"):
            raise NotImplementedError(
                f"{name} needs scheme='gather' or 'ulysses', got scheme={plan.scheme!r}"
            )
        if call.is_packed:
            raise NotImplementedError(f"{name} must be None with packed sequences")
        if not 1 <= x.dim() <= 4 or any(
            size not in (1, allowed) for size, allowed in zip(x.shape[::-1], due[::-1])
        ):
            raise ValueError(
                f"{name} must broadcast to (B, Hq, local rows, padded seqlen) {due}, got "
                f"{tuple(x.shape)}"
            )
        if plan.inner_size > 1 and x.dim() > 1 and x.shape[-2] > 1:
            raise NotImplementedError(
                f"{name} must be the same for all rows with scheme={plan.scheme!r}, got "
                f"{tuple(x.shape)}; scheme='gather' takes it"
            )
        if plan.inner_size > 1 and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} has a gradient only with scheme='gather'")
