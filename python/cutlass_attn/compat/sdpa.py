"""torch's scaled_dot_product_attention, computed by `cutlass_attn.attention` where possible.

Three ways in, from the narrowest to the widest:

- `scaled_dot_product_attention`: the function, to be called or imported in place of torch's;
- `route`: a context in which every such call of the process comes here, whoever makes it;
- `register_flash_impl`: an entry of torch's own registry of flash attention implementations.

Calls that `attention` does not accept go to torch unchanged, with torch's results, gradients and
errors; `why_not` tells whether a call is one of them, and why.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

import cutlass_attn
from cutlass_attn._call.torch_library import autocast, is_transformed

from ._flash_impl import register_flash_impl
from ._translate import float_mask, mask_or_bias, top_left_causal

__all__ = ["Report", "register_flash_impl", "route", "scaled_dot_product_attention", "why_not"]

_logger = logging.getLogger("cutlass_attn")

_DTYPES = (torch.float16, torch.bfloat16)
_MASK_DTYPES = (torch.bool, torch.float32)  # in addition to query's dtype
_MAX_HEAD_DIM = 512
_MAX_SCALE = torch.finfo(torch.float32).max
_HAVE_BACKWARD = {
    (x.device, getattr(torch, x.dtype)) for x in cutlass_attn.variants("backward") if x.automatic
}


@dataclass(frozen=True)
class Call:
    """A call of `attention` that is equal to one of torch's function."""

    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: dict[str, Any]
    shape: tuple[int, ...]  # of torch's result

    def run(self) -> torch.Tensor:
        out = self._attend()
        return out if len(self.shape) == 4 else out.view(self.shape)

    def run_with_lse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-sum-exp is (..., Hq, Sq) float32."""
        out, lse = self._attend(return_lse=True)
        return out.view(self.shape), lse.view(self.shape[:-1])

    def _attend(self, **more: Any) -> Any:
        attention: Any = cutlass_attn.attention
        out = self.options.get("out")
        is_bshd = out is not None and out.transpose(1, 2).is_contiguous()
        if not is_bshd or not _need_gradient((*self.operands, self.options.get("bias"))):
            return attention(*self.operands, **self.options, **more)
        # A result with a gradient would be copied to `out`. This one is laid out like it.
        operands = (x.transpose(1, 2) for x in self.operands)
        options = {name: x for name, x in self.options.items() if name != "out"}
        result = attention(*operands, layout="bshd", **options, **more)
        if isinstance(result, tuple):
            return result[0].transpose(1, 2), result[1]
        return result.transpose(1, 2)

    def summary(self) -> str:
        q = self.operands[0]
        named = [f", {x}" for x in ("causal", "window", "mask", "bias") if x in self.options]
        named += [", dropout"] * (self.options["dropout_p"] > 0)
        dtype = str(q.dtype).removeprefix("torch.")
        head_dim = q.shape[-1] if isinstance(q.shape[-1], int) else "any"  # any: dynamic=True
        return f"{dtype}, head_dim {head_dim}{''.join(named)}"


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, argument for argument.

    Args:
        query: (..., Hq, Sq, D), of two dimensions or more; those before the last two broadcast
            with the ones of key and value.
        key: (..., Hkv, Sk, D).
        value: (..., Hkv, Sk, Dv).
        attn_mask: bool, True where a query sees a key, or float, added to the logits; broadcasts
            to (..., Hq, Sq, Sk). Not together with is_causal.
        dropout_p: probability that a weight becomes 0, in steps of 1/32768; applied whenever it is
            not 0. Which weights those are differs from torch, and follows torch.manual_seed.
        is_causal: query i sees keys 0 to i, counted from the first of both: the last query sees
            the last key only where Sq equals Sk.
        scale: factor of the products; ``1 / sqrt(D)`` by default.
        enable_gqa: Hkv divides Hq, and query head h reads key head ``h // (Hq // Hkv)``.

    Returns:
        (..., Hq, Sq, Dv) in query's dtype. Of four dimensions its memory has the order of query's.
        A query that sees no key gives zeros.

    Float16 and bfloat16 on a CPU or CUDA device are computed here, and so are their gradients;
    other dtypes and whatever else `why_not` names are computed by torch, which also raises the
    errors: RuntimeError, ValueError and TypeError as its documentation has them.
    """
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    call = translate(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if isinstance(call, Call):
        return call.run()
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )


def why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why `scaled_dot_product_attention` and `route` leave this call to torch; None if they do not.

    The arguments are those of `scaled_dot_product_attention`. Nothing is computed.
    """
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    call = translate(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return call if isinstance(call, str) else None


def translate(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Call | str:
    """The equal call of `attention`, or the reason why there is none."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if reason := _unfit(tensors, query):
        return reason
    if attn_mask is not None and is_causal:
        return "attn_mask and is_causal are both given"
    if not 0 <= dropout_p <= 1:
        return "dropout_p is not within 0 to 1"
    if scale is not None and not -_MAX_SCALE <= scale <= _MAX_SCALE:
        return "scale is beyond float32"
    sizes = [tuple(x.shape) for x in tensors[:3]]  # once: each access makes a torch.Size
    (*_, seqlen_q, head_dim), (*_, keys, head_dim_k), (*_, seqlen_k, head_dim_v) = sizes
    if head_dim_k != head_dim or keys != seqlen_k:
        return "shapes do not fit"
    if 0 in sizes[0]:
        return "query has no elements"
    if seqlen_k == 0:
        return "there are no keys"  # torch broadcasts nothing then
    if not 0 < head_dim_v <= _MAX_HEAD_DIM >= head_dim:
        return f"head_dim is beyond {_MAX_HEAD_DIM}, or 0"
    heads = _heads(sizes, enable_gqa)
    if heads is None:
        return "numbers of heads do not fit"
    batches = [x[:-3] for x in sizes]
    batch = batches[0]
    if not batch == batches[1] == batches[2]:
        try:
            batch = torch.broadcast_shapes(*batches)
        except RuntimeError:
            return "shapes do not broadcast"
    q, k, v = (_with_batch(x, size, batch, h) for x, size, h in zip(tensors, sizes, heads))
    shape = (*batch, heads[0], seqlen_q, head_dim_v)[-max(map(len, sizes)) :]

    options: dict[str, Any] = {"softmax_scale": scale, "dropout_p": float(dropout_p)}
    if attn_mask is not None:
        mask = _mask(attn_mask, batch, (heads[0], seqlen_q, seqlen_k))
        if mask is None:
            return "attn_mask does not broadcast to the logits"
        is_float = mask.dtype is not torch.bool
        options |= float_mask(mask) if is_float and dropout_p == 0 else mask_or_bias(mask)
    if is_causal:
        keys, causal = top_left_causal(seqlen_q, seqlen_k)
        k, v = k[:, :, :keys], v[:, :, :keys]
        options |= causal
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    is_4d = len(shape) == query.dim() == 4
    # torch.vmap maps no tensor that is made here.
    if is_4d and (order := _order(query)) != (0, 1, 2, 3) and not is_transformed():
        options["out"] = torch.empty_permuted(shape, order, dtype=q.dtype, device=q.device)
    return Call((q, k, v), options, shape)


def _unfit(tensors: Sequence[Any], query: Any) -> str | None:
    """What is wrong with the tensors, mask included. Fast, since every call runs it."""
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            return "an argument is not a tensor"
    if torch.overrides.has_torch_function(tensors):
        return "an argument is of a subclass of Tensor"
    dtype, device = query.dtype, query.device
    if dtype not in _DTYPES:
        return f"dtype {dtype}"
    if device.type not in ("cpu", "cuda"):
        return f"device {device.type}"
    for i, x in enumerate(tensors):
        if x.is_nested or x.layout is not torch.strided:
            return "an argument is nested or sparse"
        if x.device != device:
            return "arguments are on several devices"
        if x.dtype is not dtype:
            if i < 3:
                return "dtypes of query, key and value differ"
            if x.dtype not in _MASK_DTYPES:
                return "dtype of attn_mask"
        if x.dim() < 2:
            return "an argument has fewer than two dimensions"
    if _need_gradient(tensors) and (device.type, dtype) not in _HAVE_BACKWARD:
        return f"an input requires a gradient, and there is no backward kernel of {device.type}"
    if forward_ad._current_level >= 0:
        return "a forward-mode derivative is taken"
    return None


def _need_gradient(tensors: Sequence[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _with_batch(
    x: torch.Tensor, size: tuple[int, ...], batch: Sequence[int], heads: int
) -> torch.Tensor:
    """x as (batch, heads, S, D); copied only if `batch` has several dimensions."""
    if len(size) == 4 and len(batch) == 1 and size[0] == batch[0] and size[1] == heads:
        return x
    x = x.expand(*batch, heads, *size[-2:])
    return x if len(batch) == 1 else x.reshape(math.prod(batch), heads, *size[-2:])


def _heads(sizes: list[tuple[int, ...]], enable_gqa: bool) -> tuple[int, int, int] | None:
    """The numbers of heads that query, key and value are expanded to; None if unsupported."""
    q, k, v = [x[-3] if len(x) > 2 else 1 for x in sizes]
    if enable_gqa:
        fits = min(map(len, sizes)) > 2 and k == v and k > 0 and q % k == 0
        return (q, k, k) if fits else None
    if k == v == 1:  # one head for all queries: nothing is expanded
        return q, 1, 1
    several = [x for x in (q, k, v) if x != 1]  # no set: symbolic sizes have no hash
    fits = all(x == several[0] for x in several)
    return (several[0], several[0], several[0]) if fits else None


def _mask(mask: torch.Tensor, batch: Sequence[int], logits: Sequence[int]) -> torch.Tensor | None:
    """The mask with one batch dimension; None if it does not broadcast to (*batch, *logits)."""
    full = (*batch, *logits)
    sizes = (*([1] * (len(full) - mask.dim())), *mask.shape)
    if len(sizes) > len(full) or any(size not in (1, due) for size, due in zip(sizes, full)):
        return None
    mask = mask.view(sizes)
    if math.prod(sizes[:-3]) == 1:
        return mask.view(sizes[-3:])
    return mask.expand(*batch, *sizes[-3:]).reshape(math.prod(batch), *sizes[-3:])


def _order(query: torch.Tensor) -> tuple[int, ...]:
    """Dimensions in order of falling strides; the last dimension stays the last."""
    a, b, c, _ = strides = query.stride()
    if a >= b >= c:
        return (0, 1, 2, 3)
    if any(strides[i] == 0 and query.shape[i] > 1 for i in range(3)):
        return (0, 1, 2, 3)
    real = [i for i in range(3) if query.shape[i] != 1]  # strides of size 1 mean nothing
    # Insertion sort: torch.compile does not trace sorted() with symbolic keys.
    by_stride: list[int] = []
    for i in real:
        larger = [j for j in by_stride if strides[j] >= strides[i]]
        by_stride = [*larger, i, *by_stride[len(larger) :]]
    rest = iter(by_stride)
    return (*(next(rest) if i in real else i for i in range(3)), 3)


@dataclass
class Report:
    """The calls that `route` took, and those that it left to torch. Prints as a table."""

    taken: Counter[str] = field(default_factory=Counter)  # dtype, head dim and options: calls
    passed_on: Counter[str] = field(default_factory=Counter)  # reason: calls

    def __str__(self) -> str:
        taken, passed_on = self.taken.total(), self.passed_on.total()
        lines = [f"cutlass_attn took {taken} of {taken + passed_on} calls"]
        lines += [f"  {n} taken: {what}" for what, n in self.taken.most_common()]
        lines += [f"  {n} left to torch: {why}" for why, n in self.passed_on.most_common()]
        return "\n".join(lines)


_route_lock = threading.Lock()


@contextlib.contextmanager
def route(devices: Sequence[str] = ("cuda",), report: bool = True) -> Iterator[Report]:
    """A context in which every scaled_dot_product_attention call of the process runs here.

    It replaces the operator in torch's dispatcher. So it also takes calls by names that were
    imported earlier, from C++, from torch.compile, and from all threads, but not the fast path of
    nn.MultiheadAttention in eval mode. It leaves to torch: calls that `why_not` names; calls under
    a `torch.nn.attention.sdpa_kernel` that allows neither flash nor memory-efficient attention,
    such as the math backend alone; and calls in torch.func transforms.

    A compiled function that was compiled outside of the context is compiled once more inside, and
    the other way round: torch.compile's functions in memory are dropped when a route opens and
    when it closes, and its caches on disk have keys of their own for calls within a route. What
    another thread than the one that opened the route compiles stays with torch. A compiled call is
    counted when it is compiled.

    Args:
        devices: the devices whose calls are taken: "cuda", "cpu" or both.
        report: log the report at the end, at level INFO of the logger "cutlass_attn".

    Yields:
        The `Report`, which counts while the context lasts.

    Raises:
        ValueError: a device is neither of the two, or devices is text.
        RuntimeError: a route is open already.
    """
    if isinstance(devices, str):
        raise ValueError(f'devices must be a sequence of "cuda" and "cpu", got {devices!r}')
    for device in devices:
        if device not in ("cpu", "cuda"):
            raise ValueError(f'devices must be of "cuda" and "cpu", got {device!r}')
    if not _route_lock.acquire(blocking=False):
        raise RuntimeError("route() is open already; there is one for the whole process")
    result = Report()
    library = torch.library.Library("aten", "IMPL")
    tag = _cache_tag()
    try:
        if tag is not None:
            _set_cache_tag(f"{tag}cutlass_attn {cutlass_attn.__version__} route {devices}")
        kernel = _routed(result, _cache_tag())
        for device in sorted(set(devices)):
            # The first key is for tensors of torch.inference_mode(), the second for all others:
            # calls that are left to torch are then differentiated by torch.
            for key in (device.upper(), f"Autograd{device.upper()}"):
                library.impl("scaled_dot_product_attention", kernel, key)
        _forget_compiled_code()
        yield result
    finally:
        library._destroy()
        if tag is not None:
            _set_cache_tag(tag)
        _forget_compiled_code()
        _route_lock.release()
        if report:
            _logger.info("%s", result)


def _cache_tag() -> str | None:
    """A tag for the keys of torch.compile's caches on disk, where a routed call would look like one
    that is not. None before torch 2.6, which does not cache graphs by default."""
    tag: str | None = getattr(getattr(torch.compiler, "config", None), "cache_key_tag", None)
    return tag


def _set_cache_tag(tag: str) -> None:
    torch.compiler.config.cache_key_tag = tag


def _forget_compiled_code() -> None:
    """Drops compiled code: torch.compile has no guard for a route, so functions compiled before
    would keep the kernel that the operator had then."""
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        torch.compiler.reset()


def _routed(report: Report, cache_tag: str | None) -> Any:
    """The operator's kernel while a route is open."""
    original = torch.ops.aten.scaled_dot_product_attention.default.decompose
    counting = threading.Lock()

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        # Dynamo runs a call once, with fake tensors. AOTAutograd runs it up to twice more.
        is_counted = not isinstance(query, FunctionalTensor)
        call: Call | str
        cuda = torch.backends.cuda
        if not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()):
            call = "sdpa_kernel() allows neither flash nor memory-efficient attention"
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            call = "a torch.func transform is active"
        elif torch.compiler.is_compiling() and _cache_tag() != cache_tag:
            # From torch 2.12 on the tag is per thread: another thread's caches would mix graphs.
            call = "it is compiled in another thread than the one that opened the route"
        else:
            call = translate(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if isinstance(call, Call):
            try:
                result = call.run()
                if is_counted:
                    with counting:
                        report.taken[call.summary()] += 1
                return result
            except ValueError as error:  # no kernel of this build takes it
                call = str(error).splitlines()[0]
        if is_counted:
            with counting:
                report.passed_on[call] += 1
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return kernel
