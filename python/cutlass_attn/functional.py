"""`attention`, the library's one computation."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import _numpy
from ._call import DTYPES, Request, Window, launch, make_request
from ._options import Options, make_options
from .verify import verify_result

# The counterpart of _numpy, from the moment that there is a torch to use it with.
_torch: Any = None
if sys.modules.get("torch"):
    from . import _torch  # type: ignore[no-redef]

# Options of later versions, and the values that ask for nothing.
_PLANNED: dict[str, Any] = {
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "block_table": None,
    "num_splits": 1,
}


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    kernel: str = "auto",
    accumulate: str = "fp32",
    verify: bool = False,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    block_table: Any = None,
    num_splits: int = 1,
) -> Any:
    """softmax(score(q @ k^T) + mask) @ v for every batch entry and query head.

    The fused forward pass of FlashAttention (arXiv 2205.14135, 2307.08691). A logit's life:
    softmax_scale, softcap, ALiBi, bias, masks, softmax (with sink), dropout. docs/options.md has
    one line for each and the kernels that take it.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with ``layout="bshd"``. A torch tensor on a CPU or
            CUDA device, or a numpy array; float16, bfloat16 (numpy: of ml_dtypes) or float32. The
            last dimension is contiguous; the others may have any stride.
        k: (B, Hkv, Sk, D). Hkv divides Hq: query head h reads key head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv). A NaN or infinity in it may reach queries whose mask hides it: a weight
            of zero times either is NaN.
        causal: query i sees keys up to ``i + Sk - Sq``: the last query sees the last key.
        window: also limits query i to ``left`` keys before that one and ``right`` keys after it:
            one int for both, or a pair; None or -1 is no limit. A causal mask has no right side.
        softmax_scale: factor of q @ k^T; ``1 / sqrt(D)`` by default.
        softcap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``.
        layout: order of the dimensions of q, k, v and of the result, "bhsd" or "bshd".
        return_lse: also return the natural log of each softmax's denominator.
        out: where to put the result: shape and dtype of the result, sharing no memory with inputs.
        kernel: "auto", a kernel such as "sm80" or "scalar/tiled", or a whole key of `variants()`.
        accumulate: what products are added up in: "fp32"; "fp16", faster on some GPUs and less
            exact, for q @ k^T and for the weights times v, or "fp16_qk" or "fp16_pv" for one of
            them. float16 alone, and only by kernels that have it: docs/accumulation.md.
        verify: compute the call once more with a scalar kernel, and raise VerificationError if the
            two disagree. Waits for the GPU.
        bias: added to the logits: q's dtype or float32, of 1 to 4 dimensions that broadcast to
            (B, Hq, Sq, Sk), in either layout. Any strides; nothing is expanded in memory.
        mask: bool, shaped like a bias: True where a query sees a key, on top of causal and window.
        alibi_slopes: (Hq,) or (B, Hq) float32, contiguous in the last dimension: the logit of query
            i and key j loses ``slope * abs(j - (i + Sk - Sq))`` (ALiBi, arXiv 2108.12409).
        sinks: (Hq,) float32, contiguous: a logit per query head that joins the softmax's
            denominator, and so the log-sum-exp, without a key or value of its own.
        dropout_p: probability, 0 to 1 in steps of 1/65536, that a weight becomes 0; the others are
            divided by the probability to stay. The log-sum-exp knows nothing of it.
        rng_state: (2,) int64 or uint64 on q's device: seed and offset of dropout's generator. The
            same two numbers drop the same weights in every kernel; `testing.dropout_mask` tells
            which. By default both are drawn: for tensors by torch's generator of q's device, so
            that torch.manual_seed makes them repeatable and every replay of a CUDA graph draws
            anew; for arrays from numpy.random.default_rng(), which is not repeatable.
        cu_seqlens_q, cu_seqlens_k, block_table, num_splits: not implemented yet.

    Returns:
        The result, contiguous, in q's dtype and layout, (B, Hq, Sq, Dv); with ``return_lse`` also
        the log-sum-exp, (B, Hq, Sq) float32 in either layout. A query that sees no key gives a row
        of zeros and -inf (with a sink, the sink). On CUDA the work is enqueued on torch's current
        stream; on a CPU it is done on return, by as many threads as torch uses, or on all cores
        for numpy arrays.

    Raises:
        TypeError, ValueError: an argument contradicts the above, or no compiled kernel takes the
            call; `explain` says why for each of them.
        NotImplementedError: an option without a kernel so far, or an input that needs a gradient.
        RuntimeError: CUDA reported an error.
        VerificationError: see ``verify``.
    """
    if (
        _torch is not None
        and window is out is bias is mask is alibi_slopes is sinks is rng_state is None
        and cu_seqlens_q is cu_seqlens_k is block_table is None
        and dropout_p == 0.0
        and num_splits == 1
        and kernel == "auto"
        and accumulate == "fp32"
        and not return_lse
        and not verify
        and not _torch.is_compiling()
    ):
        result = _torch.short_path(q, k, v, causal, softmax_scale, softcap, layout)
        if result is not None:
            return result

    refuse_planned(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        num_splits=num_splits,
    )
    lib = array_library(q, k, v)
    request = make_request(lib, q, k, v, causal, window, softmax_scale, softcap, layout, accumulate)
    options = make_options(
        lib, request, q, bias, mask, alibi_slopes, sinks, dropout_p, rng_state
    ).with_random_state(lib, q)
    if type(kernel) is not str:
        raise TypeError(f'kernel must be a string such as "auto", got {kernel!r}')
    if out is not None:
        check_result_type(lib, request, q, out)
    inputs = (q, k, v, *options.arrays().values())
    if lib.needs_grad(*inputs):
        raise NotImplementedError(
            "attention has no backward pass yet, but an input requires a gradient; "
            "call it under torch.no_grad() or detach the inputs"
        )

    if not lib.is_plain(*inputs, *(() if out is None else (out,))):
        if verify:
            raise ValueError(
                "verify=True looks at results on the host: it works neither under torch.compile "
                "nor under a dispatch mode or a function transform"
            )
        return _through_operator(
            q, k, v, request, options, softmax_scale, layout, kernel, accumulate, out, return_lse
        )

    result = lib.empty(q, request.out_shape) if out is None else out
    lse = lib.empty_lse(q, request.lse_shape) if return_lse or verify else None
    launch(lib, request, q, k, v, options, result, lse, kernel)
    if verify:
        verify_result(lib, request, q, k, v, options, result, lse, kernel)
    return (result, lse) if return_lse else result


def array_library(q: Any, k: Any, v: Any) -> Any:
    """_numpy or _torch, whichever q, k and v belong to."""
    global _torch
    if isinstance(q, np.ndarray):
        lib: Any = _numpy
    elif sys.modules.get("torch"):  # else q cannot be a tensor
        if _torch is None:
            from . import _torch
        lib = _torch
    else:
        lib = None
    if lib is None or not (
        isinstance(q, lib.ARRAY) and isinstance(k, lib.ARRAY) and isinstance(v, lib.ARRAY)
    ):
        kinds = ", ".join(f"{type(x).__module__}.{type(x).__qualname__}" for x in (q, k, v))
        raise TypeError(f"q, k and v must all be torch tensors or all numpy arrays, got {kinds}")
    return lib


def refuse_planned(**options: Any) -> None:
    """Raises NotImplementedError for a planned option that asks for something."""
    for name, value in options.items():
        if name not in _PLANNED:
            raise TypeError(f"unexpected keyword argument {name!r}")
        neutral = _PLANNED[name]
        if value is not None if neutral is None else value != neutral:
            raise NotImplementedError(
                f"attention does not implement {name} yet, got {name}={value}"
            )


def check_result_type(lib: Any, request: Request, q: Any, out: Any) -> None:
    """Raises TypeError or ValueError unless `out` looks like the result of the call."""
    if not isinstance(out, lib.ARRAY):
        kind = type(out)
        raise TypeError(
            f"out must be an array of the same library as q, got {kind.__module__}.{kind.__name__}"
        )
    if tuple(out.shape) != request.out_shape:
        raise ValueError(f"out must have shape {request.out_shape}, got {tuple(out.shape)}")
    if out.dtype != q.dtype:
        raise ValueError(f"out must be {DTYPES[request.dtype]} like q, got {out.dtype}")
    if getattr(out, "device", None) != getattr(q, "device", None):
        raise ValueError(f"out must be on {q.device} like q, got {out.device}")
    if not lib.is_writable(out):
        raise ValueError("out must be writable and must not require a gradient")


def _through_operator(
    q: Any,
    k: Any,
    v: Any,
    request: Request,
    options: Options,
    softmax_scale: float | None,
    layout: str,
    kernel: str,
    accumulate: str,
    out: Any,
    return_lse: bool,
) -> Any:
    from . import _ops

    # The scale as the caller gave it: computed from D it would be symbolic under torch.compile.
    result, lse = _ops.attention_forward(
        q,
        k,
        v,
        request.causal,
        request.window_left,
        request.window_right,
        None if softmax_scale is None else request.softmax_scale,
        request.softcap,
        layout,
        kernel,
        accumulate,
        return_lse,
        *options,
    )
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result
