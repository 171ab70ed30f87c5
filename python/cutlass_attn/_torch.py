"""torch tensors, as the library sees them; the counterpart of _numpy. Imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from ._call import CPU, CUDA

ARRAY = torch.Tensor
DTYPES: dict[Any, int] = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

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


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> bool:
    """May addresses be read right away, past torch's dispatcher?

    Only if nothing stands between the caller and the memory: not compiling, exporting or tracing
    (the call must be recorded), no dispatch or function mode and no functorch transform (they must
    see the call), no forward-mode derivative, no tensor subclass, FakeTensor among them (there may
    be no memory), no lazily negated view (its memory holds the opposite values). All else goes
    through the registered operator, which costs some 10 us more on the host.
    """
    return (
        not torch.compiler.is_compiling()
        and type(q) is type(k) is type(v) is torch.Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not q.is_meta
        and (out is None or (type(out) is torch.Tensor and not out.is_neg()))
    )


def is_writable(x: torch.Tensor) -> bool:
    return not (x.requires_grad and torch.is_grad_enabled())


def empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if like.shape == shape:  # half the time of torch.empty
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def empty_lse(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def to_float32(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
