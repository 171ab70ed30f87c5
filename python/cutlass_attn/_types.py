"""Types of the public calls, for type checkers. Keywords are written a second time here, for all
overloads of a function; a test compares them with the signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from ._C import PrequantizedKV

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from torch.nn.attention.flex_attention import BlockMask

# The library of the operands and of the result. To mypy numpy's arrays, which have an Any in their
# type, match several overloads: their results are Any.
A = TypeVar("A", "torch.Tensor", "np.ndarray[Any, Any]")
Array = Any  # an option: of that library, or with __dlpack__
Lengths = Any  # an int32 array, a list of int, or an int
Layout = Literal["bhsd", "bshd"]
TokenFormat = Literal["ds_mla", "ds_mla_v4"]
Quantized = Literal["qk", "int8", "fp8"]
Accumulator = Literal["fp32", "fp16", "fp16_qk", "fp16_pv"]


class Foreign(Protocol):
    """An array of another library, such as CuPy or JAX; results are torch tensors."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


class _Common(TypedDict, total=False):
    causal: bool
    window: int | tuple[int | None, int | None] | None
    attention_chunk: int | None
    softmax_scale: float | Array | None
    softcap: float | Array
    out: Array | None
    kernel: str
    verify: bool
    alibi_slopes: Array | None
    sinks: Array | None


class AttentionOptions(_Common, total=False):
    """Keywords of `attention` but return_lse and return_max_logit."""

    layout: Layout
    accumulate: Accumulator
    bias: Array | None
    mask: Array | None
    seqused_q: Lengths | None
    seqused_k: Lengths | None
    leftpad_q: Lengths | None
    leftpad_k: Lengths | None
    dropout_p: float
    rng_state: Array | None
    deterministic: bool
    quantize: Quantized | PrequantizedKV | None
    max_error: float | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    block_mask: BlockMask | None


class VarlenOptions(_Common, total=False):
    """Keywords of `attention_varlen` but return_lse and return_max_logit."""

    seqused_k: Lengths | None
    block_table: Array | None
    indices: Array | None
    dropout_p: float
    rng_state: Array | None
    deterministic: bool
    k_scale: float | Array | None
    v_scale: float | Array | None
    num_splits: int
    split_size: int
    quantize: Quantized | None
    validate: bool


class DecodeOptions(_Common, total=False):
    """Keywords of `attention_decode` but return_lse."""

    layout: Layout
    block_table: Array | None
    kv_format: TokenFormat | None
    indices: Array | None
    topk_lengths: Array | None
    k_new: Array | None
    v_new: Array | None
    rotary_cos: Array | None
    rotary_sin: Array | None
    rotary_interleaved: bool
    cache_batch_idx: Lengths | None
    cache_leftpad: Lengths | None
    tree_mask: Array | None
    k_scale: float | Array | None
    v_scale: float | Array | None
    num_splits: int
    split_size: int
    validate: bool
