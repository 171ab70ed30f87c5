"""The functions of torch that `_C` calls (python/arrays.hpp); numpy_library is its counterpart."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .. import _C
from .call import NUMBERS

ARRAY = torch.Tensor
strided = torch.strided  # the one layout that is read
# Whether calls keep what they have read of a bool mask, for later calls with the same tensor.
KEEPS_MASKS = {"": True, "1": True, "0": False}.get(os.environ.get("CUTLASS_ATTN_KEEP_MASKS", ""))
if KEEPS_MASKS is None:
    raise ValueError(
        f"CUTLASS_ATTN_KEEP_MASKS is {os.environ['CUTLASS_ATTN_KEEP_MASKS']!r}, allowed: 0 or 1"
    )

# Whether torch.compile or strict export trace this code: they cannot trace C++. Other compilers
# install an interceptor.
is_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
is_neg = torch.Tensor.is_neg
is_zerotensor = torch.Tensor._is_zerotensor
is_inference = torch.Tensor.is_inference
is_inference_mode_enabled = torch.is_inference_mode_enabled
increment_version = torch.autograd.graph.increment_version
num_threads = torch.get_num_threads
empty_like = torch.empty_like
empty_like_contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)
zeros_like = torch.zeros_like
contiguous = torch.Tensor.contiguous


def copy(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and unknown to autograd."""
    return x.detach().clone(memory_format=torch.contiguous_format)


broadcast_to = torch.broadcast_to

# C++ reads tensors through this table; torch before 2.10 lacks it, and attributes are read instead.
exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

# torch.cuda.current_stream() builds a Stream object, which takes longer than launching the kernel.
# Triton and torch's own compiled code read the raw handle in this way too.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent from CPU builds


def _has_function_mode() -> bool:
    """Whether a function mode is active that must see the call.

    torch.set_default_device and `with torch.device(...)` only choose the device of new tensors,
    and those that are made here are on q's device in any case.
    """
    if not torch._C._is_torch_function_mode_enabled():
        return False
    modes = _get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext for mode in modes)


# Each tells whether something must see calls before memory is touched: dispatch modes (FakeTensor
# among them), function modes, functorch transforms, tracing. Torch::must_see() in
# python/torch_arrays.cpp asks all of them, and looks for forward-mode derivatives, tensor
# subclasses and lazily negated inputs. docs/notes/host-time.md has the cost.
INTERCEPTORS = (
    torch._C._len_torch_dispatch_stack,
    _has_function_mode,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._is_tracing,
)
NO_VERIFY = (
    "verify=True reads results on the host: it does not work under torch.compile, a dispatch mode "
    "or a function transform, or with lazily negated tensors"
)
NO_PREQUANTIZED = (
    "prequantize() and quantize=PrequantizedKV do not work under torch.compile, a dispatch mode or "
    "a function transform, or with lazily negated tensors, since torch's operators cannot take "
    'them; allowed there: a name such as quantize="qk"'
)

_BOOLS = ("causal", "return_lse", "return_max_logit", "deterministic", "rotary_interleaved")

# Of any device.
is_autocast_enabled = torch._C._is_any_autocast_enabled
is_deterministic = torch._C._get_deterministic_algorithms


def empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def empty_lse(like: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor:
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    return torch.empty(shape, dtype=dtype, device=like.device)


def zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def filled(like: torch.Tensor, dtype: str, shape: tuple[int, ...], value: float) -> torch.Tensor:
    return torch.full(shape, value, dtype=getattr(torch, dtype), device=like.device)


def largest_per_head(x: torch.Tensor) -> torch.Tensor:
    """(Hq,), from (B, Hq, Sq) or (Hq, T): -inf without rows."""
    other = (0, 2) if x.dim() == 3 else (1,)
    return x.amax(other) if x.numel() > 0 else x.new_full((x.shape[-2],), -torch.inf)


def all_results(
    q: torch.Tensor, result: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of an operator: output, log-sum-exp and largest logits. `result`: of `_C`."""
    found = list(result) if isinstance(result, tuple) else [result]
    nothing = empty_lse(q, (0,))
    lse = found[1] if options["return_lse"] else nothing
    return found[0], lse, found[-1] if options["return_max_logit"] else nothing.clone()


def with_shapes(
    out: torch.Tensor,
    q: torch.Tensor,
    options: dict[str, Any],
    lse: tuple[Any, ...],
    max_logits: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `all_results`, uninitialised. lse, max_logits: their shapes, if they are wanted."""
    shapes = (
        lse if options["return_lse"] else (0,),
        max_logits if options["return_max_logit"] else (0,),
    )
    return out, empty_lse(q, shapes[0]), empty_lse(q, shapes[1])


def scratch(like: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def template(like: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor of that shape with the memory of one element, to be kept for later calls.

    None while a CUDA graph is captured, since the memory would belong to the graph.
    """
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return scratch(like, dtype, (1,)).expand(shape)


def random_state(like: torch.Tensor) -> torch.Tensor:
    """Seed and offset, drawn on the tensor's device by its generator: a CUDA graph that captures
    this draws new numbers in every replay."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=like.device)


def to_float32(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def from_float32(like: torch.Tensor, x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(like.device)


def on_host(x: Any) -> Any:
    """A tensor with its numbers in memory of the host; anything else as it is."""
    return x.detach().cpu() if isinstance(x, torch.Tensor) else x


def has_numbers(x: torch.Tensor) -> bool:
    """Whether the tensor's values can be read now: not on the "meta" device, nor while a CUDA graph
    is captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not x.is_meta and not must_see(x)


def take(x: torch.Tensor, indices: np.ndarray, axis: int) -> torch.Tensor:
    return x.detach().index_select(axis, torch.from_numpy(indices).to(x.device))


def must_see(x: torch.Tensor) -> bool:
    """Torch::must_see() for one tensor."""
    if is_compiling() or forward_ad._current_level >= 0 or any(asks() for asks in INTERCEPTORS):
        return True
    return type(x) is not ARRAY or x.is_neg()


def is_transformed() -> bool:
    """Whether this is within torch.func.grad, torch.vmap or alike, and not under torch.compile."""
    is_compiling = torch.compiler.is_compiling()
    return not is_compiling and torch._C._functorch.peek_interpreter_stack() is not None


def needs_gradient(function: str, given: dict[str, Any], inputs: Collection[str] = ()) -> bool:
    """Whether one of `inputs` requires a gradient.

    Raises NotImplementedError if another argument requires one, or if any has a forward-mode
    tangent, and ValueError if `out` requires one.
    """
    found = False
    has_tangents = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    is_enabled = torch.is_grad_enabled()
    for name, x in given.items():
        if not isinstance(x, ARRAY):
            continue
        if has_tangents and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{function} has no forward-mode derivative yet, but {name} has a tangent"
            )
        if not is_enabled or not x.requires_grad:
            continue
        if name in inputs:
            found = True
        elif name == "out":
            raise ValueError("out must not require a gradient")
        else:
            what = f"gradient of {name}, which" if inputs else f"backward pass, but {name}"
            raise NotImplementedError(
                f"{function} has no {what} requires a gradient; detach it, or call under "
                "torch.no_grad()"
            )
    return found


def autocast(*tensors: torch.Tensor | None, device: str | None = None) -> tuple[Any, ...]:
    """The tensors as torch.autocast casts the arguments of SDPA, on a device of this type; None:
    the type of the first tensor's device."""
    if not isinstance(tensors[0], torch.Tensor):
        return tensors
    device = tensors[0].device.type if device is None else device
    if not casts(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize in (2, 4)
        else x
        for x in tensors
    )


def casts(device: str) -> bool:
    """Whether torch.autocast casts operands on a device of this type."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def autocast_off(device: str) -> contextlib.AbstractContextManager[Any]:
    """For calls with operands that `autocast` has cast. A bias that a score_mod became stays in
    float32 then."""
    return torch.autocast(device, enabled=False) if casts(device) else contextlib.nullcontext()


def options_for_operator(q: torch.Tensor, options: dict[str, Any]) -> None:
    """Converts options to the types of an operator's schema, in place.

    Raises TypeError, and NotImplementedError for a number that requires a gradient.
    """
    _refuse_bools(options)
    for name in NUMBERS:
        x = options.get(name)
        # number() in python/parse.cpp checks eager calls; compiled ones never pass it the tensor.
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} is a tensor that requires a gradient, which is not computed: "
                f"pass {name}.item(), a number"
            )
        # With fullgraph=False torch.compile breaks the graph here, and runs this function as it is.
        # While torch traces, np.float32(2) is an array.
        if isinstance(x, (torch.Tensor, np.ndarray, np.generic)):
            options[name] = torch.as_tensor(x).item()
    if (window := options.get("window")) is not None:
        sides = window if isinstance(window, (tuple, list)) else (window, window)
        # Numbers beyond every key mean the same, and the operator takes only 64 bits.
        options["window"] = [
            -1 if side is None else min(side, 2**31) if type(side) is int else side
            for side in sides
        ]
    if options.get("dropout_p", 0.0) != 0.0 and options.get("rng_state") is None:
        options["rng_state"] = random_state(q)


@torch.compiler.disable
def numpy_arrays_outside_of_graph(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """`function(**given)`, between two graphs of torch.compile, as operators take no numpy arrays.
    With fullgraph=True torch raises an error that names this function."""
    return function(**given)


DIMS = ("(batch, heads, seqlen, head_dim)", "(batch, seqlen, heads, head_dim)")  # by bshd


def require_dims(name: str, x: torch.Tensor, ndim: int, dims: str) -> None:
    """Checks the number of dimensions, for symbolic sizes, which `_C` cannot check."""
    if x.dim() != ndim:
        shape = ", ".join(map(str, x.shape))
        raise ValueError(f"{name} must have {ndim} dimensions, {dims}, got shape ({shape})")


def refuse_nested(given: dict[str, Any]) -> None:
    """Raises TypeError if an argument is a nested tensor."""
    for name, x in given.items():
        if isinstance(x, ARRAY) and x.is_nested:
            raise TypeError(
                f"{name} must not be a nested tensor; allowed: q, k and v of attention() of layout "
                "torch.jagged, or .values() and .offsets() of one in attention_varlen()"
            )


def copied(result: torch.Tensor, out: Any) -> torch.Tensor:
    """The result of an operator, copied to `out` if that is given. Raises ValueError."""
    if out is None:
        return result
    check_out(out, result, tuple(result.shape))
    copy: torch.Tensor = out.copy_(result)
    return copy


def check_out(out: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `out` has this shape, and the dtype and device of `like`."""
    for name, due, got in (
        ("have shape", shape, tuple(out.shape)),
        ("be", like.dtype, out.dtype),
        ("be on", like.device, out.device),
    ):
        if got != due:
            raise ValueError(f"out must {name} {due} like the result, got {got}")


def _refuse_bools(options: dict[str, Any]) -> None:
    """Raises TypeError for bools as numbers and numbers as bools, which the schema would accept."""
    for name in _BOOLS:
        if not isinstance(options.get(name, False), bool):
            raise TypeError(f"{name} must be True or False, got a {type(options[name]).__name__}")
    window = options.get("window")
    sides = window if isinstance(window, (tuple, list)) else (window,)
    for name, values, kind in (
        ("window", sides, "an int or a pair (left, right) of int"),
        ("attention_chunk", (options.get("attention_chunk"),), "an int or None"),
        *((n, (options.get(n),), "a number") for n in NUMBERS),
    ):
        if any(isinstance(x, bool) for x in values):
            raise TypeError(f"{name} must be {kind}, got a bool")


_C.register_torch(sys.modules[__name__])
