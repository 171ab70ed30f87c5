"""torch tensors, as the library sees them; the counterpart of _numpy. Imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from . import _C
from ._call import CPU, CUDA

ARRAY = torch.Tensor
DTYPES: dict[Any, int] = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Of bias and vectors per head; of a mask; of a random state.
OPTION_DTYPES = (torch.float32, torch.bool, (torch.int64, torch.uint64))

is_compiling = torch.compiler.is_compiling
address = torch.Tensor.data_ptr
strides = torch.Tensor.stride

# torch.cuda.current_stream() builds a Stream object, which takes longer than launching the kernel.
# Triton and torch's own compiled code read the raw handle in this way too.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent from CPU builds


def place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int]:
    """Device, its index, its stream, threads. Raises ValueError for mixed or foreign devices."""
    if q.is_cuda and k.is_cuda and v.is_cuda:
        index = q.get_device()
        if k.get_device() == index and v.get_device() == index:
            return CUDA, index, _raw_stream(index), 0  # type: ignore[misc]
    elif q.is_cpu and k.is_cpu and v.is_cpu:
        return CPU, 0, 0, torch.get_num_threads()
    if q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on a CPU or CUDA device, got {q.device}")
    raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")


def needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


# Each says whether something has to see calls before memory is touched: dispatch modes (FakeTensor
# among them), function modes, functorch transforms, tracing, forward-mode derivatives.
_INTERCEPTORS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._is_torch_function_mode_enabled,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._is_tracing,
    lambda: forward_ad._current_level >= 0,
)


def is_plain(*tensors: torch.Tensor) -> bool:
    """May addresses be read right away, past torch's dispatcher?

    Only if nothing stands between the caller and the memory: not compiling or exporting (the call
    must be recorded), no interceptor of those above, no tensor subclass (there may be no memory, as
    in a FakeTensor), no lazily negated view (its memory holds the opposite values). All else goes
    through the registered operator. docs/host-time.md says what the checks cost.
    """
    return (
        not is_compiling()
        and not any(intercepts() for intercepts in _INTERCEPTORS)
        and all(type(x) is torch.Tensor and not x.is_neg() for x in tensors)
        and not tensors[0].is_meta  # others must be where the first one is: place() sees to it
    )


def _make_short_path() -> Any:
    """A function of (q, k, v, causal, softmax_scale, softcap, layout) that does for plain tensors
    what the rest of this package does in Python, and returns None for what it does not take: for
    everything with torch before 2.10, which does not let other libraries read tensors in C."""
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange_api is None:
        return lambda *call: None
    return _C.short_path(
        torch.Tensor,
        exchange_api,
        torch.empty_like,
        torch.contiguous_format,
        torch.Tensor.is_neg,
        torch.is_grad_enabled,
        torch.get_num_threads,
        _INTERCEPTORS,
    )


short_path = _make_short_path()


def is_writable(x: torch.Tensor) -> bool:
    return not (x.requires_grad and torch.is_grad_enabled())


def empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if like.shape == shape:  # half the time of torch.empty
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def empty_lse(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def random_state(like: torch.Tensor) -> torch.Tensor:
    """Seed and offset from the generator of the tensor's device, never by way of the host: a CUDA
    graph that captures this draws anew in every replay."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=like.device)


def to_float32(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
