"""What `_C` asks of torch (python/arrays.hpp); the counterpart of numpy_library. Imports torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from .. import _C

ARRAY = torch.Tensor
strided = torch.strided  # the one layout that is read

# Of torch.compile and strict export, which trace Python and cannot see into C; others that compile
# put an interceptor in the way.
is_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
is_neg = torch.Tensor.is_neg
num_threads = torch.get_num_threads
empty_like = torch.empty_like
empty_like_contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)

# How C reads tensors; absent from torch before 2.10, whose tensors are read by their attributes.
exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

# torch.cuda.current_stream() builds a Stream object, which takes longer than launching the kernel.
# Triton and torch's own compiled code read the raw handle in this way too.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent from CPU builds

# Each says whether something has to see calls before memory is touched: dispatch modes (FakeTensor
# among them), function modes, functorch transforms, tracing, forward-mode derivatives. So must it
# where an input needs a gradient, is of a subclass, or is lazily negated: Torch::must_see() in
# python/torch_arrays.cpp asks all of that. docs/notes/host-time.md says what it costs.
INTERCEPTORS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._is_torch_function_mode_enabled,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._is_tracing,
    lambda: forward_ad._current_level >= 0,
)


def empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def empty_lse(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def filled(like: torch.Tensor, shape: tuple[int, ...], value: float) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float32, device=like.device)


def scratch(like: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def random_state(like: torch.Tensor) -> torch.Tensor:
    """Seed and offset from the generator of the tensor's device, never by way of the host: a CUDA
    graph that captures this draws anew in every replay."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=like.device)


def to_float32(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def through_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: Any = None,
    verify: bool = False,
    **options: Any,
) -> Any:
    """`attention` by way of torch's dispatcher; torch.compile and torch.export see this alone."""
    from .operator import arguments, attention_forward

    refuse_gradients("attention", (q, k, v, *options.values()), out)
    if verify:
        raise ValueError(
            "verify=True looks at results on the host: it works neither under torch.compile nor "
            "under a dispatch mode or a function transform, nor with lazily negated tensors"
        )
    options_for_operator(q, options)
    # The scale as the caller gave it: computed from D it would be symbolic under torch.compile.
    result, lse = attention_forward(*arguments(q, k, v, **options))
    result = copied(result, out)
    return (result, lse) if options.get("return_lse") else result


def refuse_gradients(function: str, arguments: Iterable[Any], out: Any = None) -> None:
    """Raises NotImplementedError where an input has, or needs, a derivative."""
    tensors = [x for x in arguments if isinstance(x, ARRAY)]
    has_tangents = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    if has_tangents and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{function} has no forward-mode derivative yet, but an input has a tangent"
        )
    if torch.is_grad_enabled():
        if any(x.requires_grad for x in tensors):
            raise NotImplementedError(
                f"{function} has no backward pass yet, but an input requires a gradient; "
                "call it under torch.no_grad() or detach the inputs"
            )
        if out is not None and out.requires_grad:
            raise ValueError("out must not require a gradient")


def options_for_operator(q: torch.Tensor, options: dict[str, Any]) -> None:
    """Options as an operator's schema has them, in place. Raises TypeError."""
    _refuse_bools(options)
    if (window := options.get("window")) is not None:
        sides = window if isinstance(window, (tuple, list)) else (window, window)
        # Beyond every key all numbers say the same, and the operator takes 64 bits.
        options["window"] = [
            -1 if side is None else min(side, 2**31) if type(side) is int else side
            for side in sides
        ]
    if options.get("dropout_p", 0.0) != 0.0 and options.get("rng_state") is None:
        options["rng_state"] = random_state(q)


def copied(result: torch.Tensor, out: Any) -> torch.Tensor:
    """`out`, unless it is None, with an operator's result in it. Raises ValueError."""
    if out is None:
        return result
    for name, due, got in (
        ("have shape", tuple(result.shape), tuple(out.shape)),
        ("be", result.dtype, out.dtype),
        ("be on", result.device, out.device),
    ):
        if got != due:
            raise ValueError(f"out must {name} {due} like the result, got {got}")
    copy: torch.Tensor = out.copy_(result)
    return copy


def _refuse_bools(options: dict[str, Any]) -> None:
    """The operator's schema would take True for 1, and 1 for True. Raises TypeError."""
    for name in ("causal", "return_lse"):
        if not isinstance(options.get(name, False), bool):
            raise TypeError(f"{name} must be True or False, got a {type(options[name]).__name__}")
    window = options.get("window")
    sides = window if isinstance(window, (tuple, list)) else (window,)
    for name, values, kind in (
        ("window", sides, "an int or a pair (left, right) of int"),
        ("attention_chunk", (options.get("attention_chunk"),), "an int or None"),
        *((n, (options.get(n),), "a number") for n in ("softmax_scale", "softcap", "dropout_p")),
    ):
        if any(isinstance(x, bool) for x in values):
            raise TypeError(f"{name} must be {kind}, got a bool")


_C.register_torch(sys.modules[__name__])
