"""torch.vmap of the operators: one call with a larger batch where possible, else several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Arguments with a batch dimension, which the mapped dimension can join.
_ROWS = {"q", "k", "v", "out", "softmax_lse", "grad_out", "grad_softmax_lse"}


def rule(names: tuple[str, ...], operator: Callable[..., Any]) -> Callable[..., Any]:
    """The vmap rule of an operator with these parameters, for `register_vmap`."""

    def run(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        given = dict(zip(names, args, strict=True))
        dims = {name: dim for name, dim in zip(names, in_dims) if torch.is_tensor(given[name])}
        if _is_one_call(given, dims):
            rows = {n: _with_batch(given[n], dims[n], info.batch_size) for n in dims.keys() & _ROWS}
            results = operator(*(given | rows).values())
            sizes = (info.batch_size, rows["q"].shape[0] // info.batch_size)
            # A result that was not requested has one dimension and no elements.
            outputs = tuple(x.unflatten(0, sizes) if x.dim() > 1 else x for x in results)
            return outputs, tuple(0 if x.dim() > 1 else None for x in results)
        mapped = {name: given[name].unbind(dim) for name, dim in dims.items() if dim is not None}
        calls = [dict(zip(mapped, x)) for x in zip(*mapped.values())]
        one_by_one = [operator(*(given | call).values()) for call in calls]
        return tuple(torch.stack(x) for x in zip(*one_by_one)), (0,) * len(one_by_one[0])

    return run


def _is_one_call(given: dict[str, Any], dims: dict[str, int | None]) -> bool:
    """Whether the mapped dimension can become part of the batch."""
    if given["dropout_p"] != 0.0:  # the dropped weights depend on the batch entry
        return False
    if given["return_max_logit"]:  # of all batch entries
        return False
    for name, dim in dims.items():
        if name in _ROWS or (name == "rng_state" and dim is None):
            continue
        x = given[name]
        shared = {"bias": x.dim() < 4 or x.shape[0] == 1, "alibi_slopes": x.dim() == 1}
        shared |= {"mask": shared["bias"], "sinks": True}
        if dim is not None or not shared.get(name, False):
            return False
    # Gradients of shared arguments would be summed over the mapped dimension.
    return not any(given.get("wanted", ())[3:])


def _with_batch(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)
