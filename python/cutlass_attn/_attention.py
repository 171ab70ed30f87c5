"""`attention`, the library's one computation, and `prequantize`, for calls with one k and v."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import _C
from ._C import PrequantizedKV
from ._call import numpy_library  # noqa: F401  numpy registers itself
from ._call.call import Call, P, computes
from ._call.keywords import misplaced, refusal
from .verify import verified

Array = Any  # torch.Tensor or numpy.ndarray
Window = int | tuple[int | None, int | None] | None

_torch: Any = None  # _call.torch_library, from the moment that there is a torch


def find_torch() -> Any:
    """The module torch_library, which lets `_C` know of torch, if the program has imported that."""
    global _torch
    # A stub of that name, or a torch that is still being imported, has no tensors.
    if _torch is None and "torch._C" in sys.modules and hasattr(sys.modules["torch"], "Tensor"):
        from ._call import torch_library as _torch  # type: ignore[no-redef]
    return _torch


find_torch()


def cast(call: Call, device: str | None = None) -> Call:
    """The call with operands as torch.autocast casts them, on a device of this type; None: q's.
    `_C.forward` does so by itself; this is for calls that are looked at before they run."""
    torch = find_torch()
    if not (torch and torch.is_autocast_enabled()):
        return call
    operands = (call.q, call.k, call.v, call.options.get("bias"))
    q, k, v, bias = torch.autocast(*operands, device=device)
    return Call(q, k, v, call.options if bias is None else {**call.options, "bias": bias})


def _in_cpp(described: Callable[P, Any]) -> Callable[P, Any]:
    """A function that `_C.forward` computes; keywords that a caller leaves out never reach it."""

    @computes(described)
    def attention(
        q: Array = None, k: Array = None, v: Array = None, *more: Any, **options: Any
    ) -> Any:
        if more or v is None:
            raise misplaced("attention", ("q", "k", "v"), more, options)
        torch = _torch or find_torch()
        if torch and torch.is_compiling():
            from ._call import operator

            return operator.recorded(q, k, v, options)
        try:
            if options.get("verify"):
                return verified(cast(Call(q, k, v, options)))
            return _C.forward(q, k, v, options)
        except TypeError as error:
            raise refusal("attention", options) or error from None

    return attention


@_in_cpp
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: Window = None,
    attention_chunk: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Array | None = None,
    kernel: str = "auto",
    accumulate: str = "fp32",
    verify: bool = False,
    bias: Array | None = None,
    mask: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    rng_state: Array | None = None,
    deterministic: bool = False,
    quantize: str | PrequantizedKV | None = None,
    max_error: float | None = None,
) -> Any:
    """softmax(score(q @ k^T) + mask) @ v for every batch entry and query head.

    Fused as in FlashAttention (arXiv 2205.14135, 2307.08691). torch differentiates it in q, k, v,
    bias and sinks, through the result and the log-sum-exp (docs/training.md). A logit's life:
    softmax_scale, softcap, ALiBi, bias, masks, softmax (with sink), dropout. docs/attention.md has
    one line for each and the kernels that take it.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with ``layout="bshd"``. A torch tensor on a CPU or
            CUDA device, or a numpy array; float16, bfloat16 (numpy: of ml_dtypes) or float32, on a
            CPU also float64. The last dimension is contiguous; the others may have any stride.
        k: (B, Hkv, Sk, D). Hkv divides Hq: query head h reads key head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv). A NaN or infinity in it may reach queries whose mask hides it, and an
            infinity may come out as NaN: a weight of zero times either is NaN.
        causal: query i sees keys up to ``i + Sk - Sq``: the last query sees the last key.
        window: also limits query i to ``left`` keys before that one and ``right`` keys after it:
            one int for both, or a pair; None or -1 is no limit. A causal mask has no right side.
        attention_chunk: query i sees only keys of the chunk that key ``i + Sk - Sq`` is in: chunks
            are of so many keys, 1 to 2^28, counted from key 0 (Llama 4's chunked attention). On top
            of causal and window.
        softmax_scale: factor of q @ k^T; ``1 / sqrt(D)`` by default.
        softcap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``.
        layout: order of the dimensions of q, k, v and of the result, "bhsd" or "bshd".
        return_lse: also return the natural log of each softmax's denominator.
        out: where to put the result: shape and dtype of the result, sharing no memory with inputs.
        kernel: "auto", a kernel such as "sm80" or "scalar/tiled", or a whole key of `variants()`.
            A backward pass chooses its own.
        accumulate: what products are added up in: "fp32"; "fp16", faster on some GPUs and less
            exact, for q @ k^T and for the weights times v, or "fp16_qk" or "fp16_pv" for one of
            them. float16 alone, and only by kernels that have it: docs/accumulation.md.
        quantize: what is multiplied in 8 bits: None, nothing; "qk", q and k, faster on some GPUs
            and less exact; "int8" or "fp8", also the weights and v, "fp8" on GPUs from compute
            capability 8.9 on. float16 and bfloat16 alone, without dropout or gradients, and only by
            kernels that have it, which "auto" takes for no other call. A NaN or infinity in k then
            reaches every query that sees one of 16 keys: of its 64 (from a multiple of 64 on) those
            with the same ``key % 8 // 2``. Or what `prequantize` made of this k and v, for many
            calls; not under torch.compile or a function transform. docs/eight-bit.md.
        max_error: with the name of a `quantize`, the largest RMS error that a head's result may be
            predicted to have, relative to its RMS: 0.02, say. Heads beyond it run in 16 bits, and
            with them those that share their key head. The device decides in every call, in every
            replay of a CUDA graph, too; nothing waits for it. A prediction is an estimate, from
            some queries and keys, without masks: docs/eight-bit.md.
        verify: compute the call once more with a scalar kernel, and raise VerificationError if the
            two disagree, or with ``max_error`` if a head in 8 bits is further off than that. Waits
            for the GPU. Not of float64. Of the forward pass alone: gradients are not verified.
        bias: added to the logits: q's dtype or float32, of 1 to 4 dimensions that broadcast to
            (B, Hq, Sq, Sk), in either layout. Any strides; nothing is expanded in memory.
        mask: bool, shaped like a bias: True where a query sees a key, on top of causal and window.
        alibi_slopes: (Hq,) or (B, Hq) float32, contiguous in the last dimension: the logit of query
            i and key j loses ``slope * abs(j - (i + Sk - Sq))`` (ALiBi, arXiv 2108.12409).
        sinks: (Hq,) float32, for float64 queries float64, contiguous: a logit per query head that
            joins the softmax's denominator, and so the log-sum-exp, without a key or value of its
            own.
        dropout_p: probability, 0 to 1, rounded to a multiple of 1/32768, that a weight becomes 0;
            the others are divided by the probability to stay that this leaves. The log-sum-exp
            knows nothing of it.
        rng_state: (2,) int64 or uint64 on q's device: seed and offset of dropout's generator. The
            same two numbers drop the same weights in every kernel; `testing.dropout_mask` tells
            which. By default both are drawn: for tensors by torch's generator of q's device, so
            that torch.manual_seed makes them repeatable and every replay of a CUDA graph draws
            anew; for arrays from numpy.random.default_rng(), which is not repeatable. A backward
            pass uses those of its forward pass.
        deterministic: gradients that are bitwise the same in every run. So they are, too, while
            torch.use_deterministic_algorithms(True) holds; the result always is.

    Returns:
        The result, contiguous, in q's dtype and layout, (B, Hq, Sq, Dv); with ``return_lse`` also
        the log-sum-exp, (B, Hq, Sq) in either layout, float32 or for float64 queries float64. A
        query that sees no key gives a row of zeros and -inf (with a sink, the sink). On CUDA the
        work is enqueued on torch's current stream; on a CPU it is done on return, by as many
        threads as torch uses, or on all cores for numpy arrays.

    Raises:
        TypeError, ValueError: an argument contradicts the above, or no compiled kernel takes the
            call; `explain` says why for each of them.
        NotImplementedError: alibi_slopes, or an input with quantize, need a gradient, an input has
            a tangent of forward-mode differentiation, or a gradient of a gradient is asked for.
        RuntimeError: CUDA reported an error.
        VerificationError: see ``verify``.
    """


def prequantize(
    k: Array, v: Array, *, quantize: str, layout: str = "bhsd", kernel: str = "auto"
) -> PrequantizedKV:
    """k and v rounded to 8 bits once, for any number of calls: cross-attention over one encoder's
    output, say, or queries in chunks.

        kept = prequantize(k, v, quantize="int8")
        out = attention(q, k, v, quantize=kept)  # bitwise what quantize="int8" gives

    k and v stay arguments of these calls, which are free in all others: q with its number of heads,
    masks, bias, softmax_scale. Under torch.autocast k and v are cast first, once: calls there get
    ``kept.k`` and ``kept.v``. A call then leaves out the launch that rounds K, and for "int8" and
    "fp8" V. The kernel for CPUs rounds as it goes, in these calls as well: there nothing is kept.

    Args:
        k: (B, Hkv, Sk, D), or (B, Sk, Hkv, D) with ``layout="bshd"``: a torch tensor on a CPU or
            CUDA device, or a numpy array, float16 or bfloat16, of any strides but the last.
        v: (B, Hkv, Sk, Dv), of the same library, dtype and device.
        quantize: "qk", "int8" or "fp8", as of `attention`. With "qk" calls read v as it is.
        layout: order of the dimensions of k and v.
        kernel: as of `attention`, where "auto" chooses as if k were q. On a GPU it matters to none
            of the calls: each kernel of a `quantize` reads what any of them has rounded.

    Returns:
        A PrequantizedKV, for `attention` and `explain`: ``k``, ``v``, which it keeps alive,
        ``quantize``, and ``nbytes``, the memory that it has on their device: for a key D bytes, D
        rounded up to 32, and but for "qk" Dv for a value, and their scales. On CUDA the work is
        enqueued on torch's current stream; a call on another stream has to wait for that.

    Raises:
        TypeError, ValueError: an argument contradicts the above, or no compiled kernel takes it.
            k stands in for q in messages. Later, in calls: k or v is not the same memory with the
            same sizes and strides, or torch counted a write to it since. Writes that torch does not
            count, to arrays of numpy or by kernels of others, are not noticed.
        NotImplementedError: k or v needs a gradient.
        RuntimeError: CUDA reported an error.
    """
    torch = _torch or find_torch()
    if torch and torch.is_compiling():
        raise ValueError(torch.NO_PREQUANTIZED)
    options = {"quantize": quantize, "layout": layout, "kernel": kernel}
    call = cast(Call(k, k, v, options))
    return _C.prequantize(call.k, call.k, call.v, options)
