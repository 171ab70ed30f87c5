"""`attention` with several batch dimensions, as of AlphaFold: they are viewed as one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .call import MODS, PADDING

_OPERANDS = ("q", "k", "v", "out")
_PER_LOGIT = ("bias", "mask")
# Depend on the number of an entry in the batch, so that calls of their own would not do.
_COUNTING = ("rng_state", *MODS)


def are_several(q: Any) -> bool:
    """Whether q is an array with more than one batch dimension."""
    return len(getattr(q, "shape", ())) > 4 and not getattr(q, "is_nested", False)


def attention(function: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """The result of `function`, which is attention(), with the batch dimensions of q.

    Where a bias or a mask repeats over some of the batch dimensions alone, so that no view with one
    batch dimension exists, the entries of the first one are calls of their own, whose results are
    stacked unless `out` is given. Where the number of an entry matters, which is so for `rng_state`
    and for the index b of a score_mod, mask_mod or block_mask, the bias or mask is copied for each
    entry instead. Nothing else is copied.

    Raises:
        ValueError: q, k, v, out or an option has other batch dimensions, or is in an order of
            memory of which no such view exists.
    """
    given, batch = _arguments(q, k, v, options)
    if _is_foldable(given, batch):
        result = function(**_folded(given, batch))
        parts = result if isinstance(result, tuple) else (result,)
        # The largest logits are those of all batch entries.
        shaped = tuple(x if x.ndim == 1 else x.reshape(*batch, *x.shape[1:]) for x in parts)
        if given.get("out") is not None:
            shaped = (given["out"], *shaped[1:])
        return shaped if isinstance(result, tuple) else shaped[0]
    results = [function(**_entry(given, batch, i)) for i in range(batch[0])]
    if not isinstance(results[0], tuple):
        return _stacked(results, given.get("out"))
    outs, *more = zip(*results)
    stacked = (_largest(x) if x[0].ndim == 1 else _stacked(x, None) for x in more)
    return _stacked(outs, given.get("out")), *stacked


def first_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the first call with one batch dimension. Raises as `attention`."""
    given, batch = _arguments(q, k, v, options)
    while not _is_foldable(given, batch):
        given, batch = _entry(given, batch, 0), batch[1:]
    return _folded(given, batch) if len(batch) > 1 else given


def _arguments(
    q: Any, k: Any, v: Any, options: dict[str, Any]
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """All arguments, and the batch dimensions."""
    given, batch = {"q": q, "k": k, "v": v, **options}, tuple(q.shape[:-3])
    if not _is_foldable(given, batch) and any(given.get(x) is not None for x in _COUNTING):
        given |= {n: _expanded(x, batch) for n, x in given.items() if n in _PER_LOGIT}
    return given, batch


def _is_foldable(given: dict[str, Any], batch: tuple[int, ...]) -> bool:
    """Whether each bias and mask has all batch dimensions, or none of them."""
    for name in _PER_LOGIT:
        sizes = tuple(getattr(given.get(name), "shape", ())[:-3])
        if sizes and sizes != batch and any(size != 1 for size in sizes):
            return False
    return True


def _folded(given: dict[str, Any], batch: tuple[int, ...]) -> dict[str, Any]:
    result = dict(given)
    for name, x in given.items():
        if not hasattr(x, "shape"):
            continue
        if name in _OPERANDS:
            _check(name, x, batch, 3)
            result[name] = _viewed(name, x, (math.prod(batch), *x.shape[-3:]))
        elif name in _PER_LOGIT and len(x.shape) > 3:
            size = math.prod(x.shape[:-3])  # 1: the same for all entries
            result[name] = _viewed(name, x, (size, *x.shape[-3:]))
        elif name in PADDING or (name == "alibi_slopes" and len(x.shape) > 1):
            rest = int(name == "alibi_slopes")
            _check(name, x, batch, rest)
            result[name] = _viewed(name, x, (math.prod(batch), *x.shape[len(batch) :]))
    return result


def _entry(given: dict[str, Any], batch: tuple[int, ...], i: int) -> dict[str, Any]:
    """The arguments for one index of the first batch dimension."""
    result = dict(given)
    for name, x in given.items():
        if not hasattr(x, "shape"):
            continue
        if name in _OPERANDS:
            _check(name, x, batch, 3)
            result[name] = x[i]
        elif name in _PER_LOGIT and len(x.shape) == len(batch) + 3:
            if x.shape[0] not in (1, batch[0]):
                raise ValueError(
                    f"{name} has {x.shape[0]} entries in its first dimension, allowed: 1 or "
                    f"{batch[0]}, as q of shape {tuple(given['q'].shape)}"
                )
            result[name] = x[i if x.shape[0] > 1 else 0]
        elif name in _PER_LOGIT and len(x.shape) > len(batch) + 3:
            raise ValueError(
                f"{name} has {len(x.shape)} dimensions, allowed: up to {len(batch) + 3}, as q"
            )
        elif name in PADDING or (name == "alibi_slopes" and len(x.shape) > 1):
            _check(name, x, batch, int(name == "alibi_slopes"))
            result[name] = x[i]
    return result


def _check(name: str, x: Any, batch: tuple[int, ...], rest: int) -> None:
    if len(x.shape) != len(batch) + rest or tuple(x.shape[: len(batch)]) != batch:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; allowed: batch dimensions {batch} as q, and then "
            f"{rest} more"
        )


def _expanded(x: Any, batch: tuple[int, ...]) -> Any:
    """x with all batch dimensions, if it has any and they broadcast."""
    shape = tuple(getattr(x, "shape", ()))
    sizes = shape[:-3]
    if not 0 < len(sizes) <= len(batch):
        return x
    if any(size not in (1, due) for size, due in zip(sizes, batch[-len(sizes) :], strict=True)):
        return x
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(np.broadcast_to(x, (*batch, *shape[-3:])))
    return x.expand(*batch, *shape[-3:]).contiguous()


def _viewed(name: str, x: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(x, np.ndarray):
        result = x.reshape(shape)
        if result.size == 0 or np.may_share_memory(result, x):
            return result
    else:
        try:
            return x.view(shape)
        except RuntimeError:
            pass
    raise ValueError(
        f"{name} of shape {tuple(x.shape)} has batch dimensions that are no single one in memory; "
        "make it contiguous first, or move them next to each other"
    )


def _largest(parts: Any) -> Any:
    stacked = _stacked(parts, None)
    return stacked.max(axis=0) if isinstance(stacked, np.ndarray) else stacked.amax(0)


def _stacked(parts: Any, out: Any) -> Any:
    if out is not None:
        return out
    if isinstance(parts[0], np.ndarray):
        return np.stack(parts)
    import torch

    return torch.stack(tuple(parts))
