"""`attention`, the library's one computation, and `prequantize`, for calls with one k and v."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from . import _C
from ._C import PrequantizedKV
from ._call import batch_dims, numpy_library  # noqa: F401  numpy registers itself
from ._call.call import MODS, Call, P, computes
from ._call.foreign import converted, retried
from ._call.keywords import answered, misplaced
from .verify import verified

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Unpack

    from ._types import A, AttentionOptions, Foreign, Layout, Quantized

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


_MODS = frozenset(MODS)  # torch.compile traces isdisjoint of a frozenset


def _with_mods(
    function: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]
) -> Any:
    if find_torch() is None:
        named = next(name for name in options if name in MODS)
        raise TypeError(f"{named} needs torch tensors, got a q of {type(q).__name__}")
    from . import _modified

    return _modified.attention(function, q, k, v, options)


def _in_cpp(described: Callable[P, Any]) -> Callable[P, Any]:
    """A function that `_C.forward` computes; keywords that a caller leaves out never reach it."""

    @computes(described)
    def attention(
        q: Array = None, k: Array = None, v: Array = None, *more: Any, **options: Any
    ) -> Any:
        if more or v is None:
            raise misplaced("attention", ("q", "k", "v"), more, options, (q, k, v))
        torch = _torch or find_torch()
        if torch and torch.is_compiling():
            if not _MODS.isdisjoint(options):
                return _with_mods(attention, q, k, v, options)
            if batch_dims.are_several(q):
                return batch_dims.attention(attention, q, k, v, options)
            again: Callable[..., Any] = attention
            given = {"q": q, "k": k, "v": v, **options}
            if arrays := converted(given):
                return again(**{**given, **arrays})
            if isinstance(q, np.ndarray):
                return torch.numpy_arrays_outside_of_graph(attention, given)
            from ._call import operator

            return operator.recorded(q, k, v, options)
        try:
            if options.get("verify"):
                return verified(cast(Call(q, k, v, options)))
            return _C.forward(q, k, v, options)
        except TypeError as error:
            refused = error.with_traceback(None)  # which holds this frame
        except ValueError:
            if not batch_dims.are_several(q):
                raise
            return batch_dims.attention(attention, q, k, v, options)
        if not _MODS.isdisjoint(options):  # looked at where it costs others nothing
            return _with_mods(attention, q, k, v, options)
        return retried(attention, {"q": q, "k": k, "v": v, **options}, refused)

    return attention


@overload
def attention(
    q: A,
    k: A,
    v: A,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> A: ...
@overload
def attention(
    q: A,
    k: A,
    v: A,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[A, A]: ...
@overload
def attention(
    q: A,
    k: A,
    v: A,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[A, A]: ...
@overload
def attention(
    q: A,
    k: A,
    v: A,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[A, A, A]: ...
@overload
def attention(
    q: Foreign,
    k: Foreign,
    v: Foreign,
    *,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any: ...
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
    return_max_logit: bool = False,
    out: Array | None = None,
    kernel: str = "auto",
    accumulate: str = "fp32",
    verify: bool = False,
    bias: Array | None = None,
    mask: Array | None = None,
    seqused_q: Array | Sequence[int] | int | None = None,
    seqused_k: Array | Sequence[int] | int | None = None,
    leftpad_q: Array | Sequence[int] | int | None = None,
    leftpad_k: Array | Sequence[int] | int | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    rng_state: Array | None = None,
    deterministic: bool = False,
    quantize: str | PrequantizedKV | None = None,
    max_error: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
) -> Any:
    """softmax(q @ k^T * softmax_scale) @ v with masks and other options, in one fused kernel.

    GQA and MQA, causal masks, sliding windows, padding masks, bias, ALiBi, softcap, attention sinks
    and dropout combine. A logit passes through softmax_scale, softcap, ALiBi, bias, masks, softmax
    (with sink) and dropout, in this order. torch differentiates the call in q, k, v, bias and
    sinks. After FlashAttention (arXiv 2205.14135, 2307.08691). B is the batch size; Hq and Hkv are
    query and KV heads, Sq and Sk queries and keys, D and Dv head dims. User guide:
    docs/attention.md.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with ``layout="bshd"``. A torch tensor on a CPU or CUDA
            device, or a numpy array; float16, bfloat16 (numpy: of ml_dtypes) or float32, on a CPU
            also float64. Arrays of CuPy, JAX and others with ``__dlpack__`` are read, without a
            copy, as torch tensors, which results are then. D is 1 to 576. The last dimension is
            contiguous; the others may have any stride. More batch dimensions may come first, the
            same in q, k, v and `out`: they are viewed as one, without a copy.
        k: (B, Hkv, Sk, D) in the same layout, dtype and device. Hkv divides Hq: query head h reads
            KV head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv) in the same layout, dtype and device; Dv is 1 to 576. NaN or infinity in
            V may reach queries that mask its key: a weight of 0 times NaN is NaN.
        causal: query i sees keys up to ``i + Sk - Sq``: the last query sees the last key (aligned
            bottom-right, as in flash_attn; torch's is_causal is aligned top-left).
        window: sliding window around key ``i + Sk - Sq``: query i sees `left` keys before it and
            `right` keys after it. One int for both sides or a pair; None or -1 is unlimited. A
            causal call has no keys on the right.
        attention_chunk: chunk length, 1 to 2^28: query i sees only keys in the chunk of key
            ``i + Sk - Sq``; chunks start at key 0 (Llama 4). Applies on top of causal and window.
        softmax_scale: factor of q @ k^T, of any sign; None is ``1 / sqrt(D)``.
        softcap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``; 0 is off.
            Up to 4096, as the error of a logit is 1e-7 of it; in float64 any finite number.
        layout: order of the dimensions of q, k, v, out and the result: "bhsd" or "bshd".
        return_lse: also return the log-sum-exp.
        return_max_logit: also return the largest logit of each query head, as QK-clip (MuonClip)
            needs it.
        out: tensor or array for the result, of its shape and dtype; must not overlap an input.
        kernel: "auto", a kernel such as "sm80" or "scalar/tiled", or a key of `variants()`. A named
            kernel that cannot run the call is an error. The backward pass chooses its own kernel.
        accumulate: accumulator of the tensor cores. "fp32"; "fp16" for q @ k^T and for the weights
            times v; "fp16_qk" or "fp16_pv" for one of the two. fp16 is faster on GeForce and less
            exact; float16 inputs on a GPU only. docs/accumulation.md.
        verify: also run a scalar kernel, and raise VerificationError if the two results disagree by
            more than rounding explains, or with `max_error` if a head in 8 bits has a larger error.
            Waits for the GPU. Forward pass only; not for float64.
        bias: added to the logits. q's dtype or float32; 1 to 4 dimensions that broadcast to (B, Hq,
            Sq, Sk) in either layout; any strides. -inf masks a key. Not expanded in memory.
        mask: bool, 1 to 4 dimensions that broadcast to (B, Hq, Sq, Sk) in either layout; any
            strides. True = visible. Applies on top of causal, window and attention_chunk.
        seqused_q: padding as lengths: (B,) int32 on q's device, a list of int, or an int for all
            entries. The queries of a batch entry are its rows from ``leftpad_q`` up to
            ``seqused_q``, by default all. Other rows of the result and of gradients are zeros, and
            their log-sum-exp is -inf. i, j, Sq and Sk in this text then count rows of an entry's
            intervals. An array is read when the kernel runs: nothing waits for it, and a CUDA graph
            replays with new numbers. Lists are checked, and arrays on a CPU; a GPU takes an
            interval of an array beyond the rows for one that ends there. Not with mask, bias,
            mask_mod, block_mask or a score_mod that reads positions; with quantize neither verify
            nor max_error.
        seqused_k: padding as lengths, of the type of ``seqused_q``. The keys and values of a batch
            entry are its rows from ``leftpad_k`` up to ``seqused_k``, by default all. Other rows
            are not read.
        leftpad_q: the number of rows of padding before the first query of each batch entry, of the
            type of ``seqused_q``; default 0.
        leftpad_k: the number of rows of padding before the first key, of the type of ``seqused_q``;
            default 0. With ``causal`` it suffices for a batch that is padded on the left: queries
            of padding then see no key. If such a query holds NaN and a gradient is computed, give
            ``leftpad_q`` too. A batch that is padded on the right needs ``seqused_q`` and
            ``seqused_k``.
        alibi_slopes: (Hq,) or (B, Hq) float32 (float64 queries: or float64), contiguous in the last
            dimension: subtracts ``slope * abs(j - (i + Sk - Sq))`` from the logit of query i and
            key j (ALiBi, arXiv 2108.12409).
        sinks: attention sinks: (Hq,), contiguous, float32 (float64 for float64 queries). One logit
            per query head that joins the softmax's denominator, and the log-sum-exp, without a key
            or a value; neither scaled nor capped.
        dropout_p: probability, 0 to 1, that a softmax weight becomes 0, rounded to a multiple of
            2^-15; the others are divided by the share that is kept. The log-sum-exp ignores
            dropout.
        rng_state: (2,) int64 or uint64 on q's device: seed and offset of dropout, read when the
            kernel runs. The same numbers drop the same weights in every kernel;
            `testing.dropout_mask` returns them. None draws both: for tensors from torch's generator
            of q's device, so torch.manual_seed makes them repeatable and each replay of a CUDA
            graph differs; for arrays from numpy.random.default_rng(), not repeatable. The backward
            pass reuses them. Or (6,): the call is a part of a larger one and drops what that one
            drops there. It is followed by the number of query heads of the larger call and the
            first head, query (a multiple of 16) and key (of 32) of the part, which only calls on
            CPUs check; others round the last two down.
        deterministic: gradients have the same bits in every run, also under
            torch.use_deterministic_algorithms(True). The forward result always has.
        quantize: products in 8 bits, for inference: None; "qk" (int8 q @ k^T); "int8" or "fp8"
            (also the weights times v; "fp8" from compute capability 8.9 on); or what `prequantize`
            returned for this k and v. float16 and bfloat16 only, without dropout or gradients. NaN
            or infinity in a key then reaches all queries that see one of the 16 keys with its
            scale. docs/eight-bit.md.
        max_error: with a `quantize` name: the largest predicted RMS error of a head, relative to
            the RMS of its result, such as 0.02. Heads beyond it, and heads that share their KV
            head, run in 16 bits. Decided on the device in every call. The prediction is an
            estimate, no bound.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, FlexAttention's: the logit in place of
            softmax_scale * q.k, instead of softcap, alibi_slopes and bias. docs/flex.md says what
            it may do. Of several batch dimensions, b counts the entries of all.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``: True = visible. Applies on top of the masks
            above. Unlike causal, it counts queries and keys from 0.
        block_mask: torch's BlockMask of Sq and Sk. Applies on top of the masks above.

    Returns:
        The result, (B, Hq, Sq, Dv) in q's layout and dtype, contiguous, or `out`. With
        ``return_lse`` a pair of it and the natural log of each softmax's denominator, (B, Hq, Sq)
        in either layout, float32 (float64 for float64 queries). A query that sees no key gives
        zeros and -inf, or the sink. With ``return_max_logit`` the last of a tuple is the largest
        logit of each query head over all batch entries, queries and keys that they see, (Hq,) of
        that dtype: after softmax_scale, softcap, ALiBi and bias, without sinks; -inf if there is
        none. It has no gradient. On CUDA the work is enqueued on torch's current stream. On a
        CPU it is done on return, with as many threads as torch uses; for numpy arrays on all cores.

    Raises:
        TypeError: an argument has a wrong type, is missing, or is not known.
        ValueError: an argument is out of range or contradicts another, or no kernel of this build
            accepts the call; `explain` shows why.
        NotImplementedError: an unsupported derivative: of alibi_slopes, with `quantize`, of second
            order, or in forward mode; or a score_mod or mask_mod does what cannot be traced, or
            what docs/flex.md excludes under torch.func.
        RuntimeError: CUDA reported an error.
        VerificationError: see `verify`.
    """


@answered
def prequantize(
    k: Array, v: Array, *, quantize: Quantized, layout: Layout = "bhsd", kernel: str = "auto"
) -> PrequantizedKV:
    """Round k and v to 8 bits once, for many calls of `attention` with them.

        kept = prequantize(k, v, quantize="int8")
        out = attention(q, k, v, quantize=kept)  # bitwise the result of quantize="int8"

    For cross-attention over one encoder output, or queries in chunks. The calls pass k and v again,
    and are free in q, its number of heads, masks, bias and softmax_scale. They skip the launch that
    rounds K, and for "int8" and "fp8" V. Under torch.autocast k and v are cast first; pass
    ``kept.k`` and ``kept.v`` to the calls then. The CPU kernel rounds in every call, and nothing is
    kept.

    Args:
        k: (B, Hkv, Sk, D), or (B, Sk, Hkv, D) with ``layout="bshd"``: a torch tensor on a CPU or
            CUDA device, or a numpy array; float16 or bfloat16; the last dimension is contiguous.
        v: (B, Hkv, Sk, Dv) in the same layout, library, dtype and device.
        quantize: "qk" (k alone; calls read v as it is), "int8" or "fp8", as in `attention`.
        layout: order of the dimensions of k and v: "bhsd" or "bshd".
        kernel: "auto", or a kernel or key of `variants()` that has this `quantize`. All of them
            read what any of them has rounded, so the calls may use others.

    Returns:
        A PrequantizedKV to pass as ``quantize`` to `attention` and `explain`. It keeps k and v
        alive (``k``, ``v``), and has ``quantize`` and ``nbytes``, its device memory in bytes: for
        each key D, rounded up to 32, and except for "qk" Dv for each value, and scales. On CUDA the
        work is enqueued on torch's current stream; a call on another stream must wait for it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or no kernel accepts it (messages name k as q).
            Later, in calls: k or v is not the same memory with the same sizes and strides, or torch
            counted a write to it. Writes to numpy arrays, or by kernels that torch does not know,
            go unnoticed.
        NotImplementedError: k or v needs a gradient.
        RuntimeError: CUDA reported an error.
    """
    torch = _torch or find_torch()
    if torch and torch.is_compiling():
        raise ValueError(torch.NO_PREQUANTIZED)
    given = {"k": k, "v": v}
    if arrays := converted(given):
        k, v = {**given, **arrays}.values()
        find_torch()
    options = {"quantize": quantize, "layout": layout, "kernel": kernel}
    call = cast(Call(k, k, v, options))
    return _C.prequantize(call.k, call.k, call.v, options)
