"""The operators `torch.ops.cutlass_attn.attention_varlen`, `attention_decode`, `decode_append` and
`append_kv`.

torch.compile, torch.export and dispatch modes see the serving calls as these operators. A decoding
step with new keys is two of them: one writes the cache, the other is attention over it.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from . import torch_library
from .autograd import Differentiable
from .call import NEW_KEYS, OF_APPEND
from .schema import Schema
from .token_format import values_of

_NOT_OF_OPS = ("out", "verify", "validate", "tree_mask", "cache_leftpad", "layout")

_VARLEN = Schema("attention_varlen", lambda name: name not in _NOT_OF_OPS)
_DECODE = Schema(
    "attention_decode",
    lambda name: name not in (*_NOT_OF_OPS, *NEW_KEYS),
    more={"mask": "Tensor?", "max_logits": "bool?"},
)
_DECODE_APPEND = Schema(
    "attention_decode",
    lambda name: name in ("q", "k_cache", "v_cache", *OF_APPEND),
    mutates=("k_cache", "v_cache"),
    returns="(Tensor, Tensor)",
)


@torch.library.custom_op("cutlass_attn::attention_varlen", mutates_args=(), schema=_VARLEN.text)
def attention_varlen_op(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the log-sum-exp and the largest logits; the last two have no elements unless
    `return_lse` and `return_max_logit`."""
    q, k, v, options = _VARLEN.call_of(args)
    result = _C.varlen(q, k, v, options, dispatched=True)
    return torch_library.all_results(q, result, options)


@attention_varlen_op.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _VARLEN.by_name(args)
    q, v = options["q"], options["v"]
    torch_library.require_dims("q", q, 3, "(rows, heads, head_dim)")
    rows, heads, _d = q.shape
    out = torch_library.empty(q, (rows, heads, v.shape[-1]))
    return torch_library.with_shapes(out, q, options, (heads, rows), (heads,))


VARLEN = Differentiable(
    _VARLEN, attention_varlen_op, "attention_varlen_backward", _C.varlen, _C.backward_varlen
)
eager_varlen, record_varlen = VARLEN.eager, VARLEN.record


@torch.library.custom_op("cutlass_attn::attention_decode", mutates_args=(), schema=_DECODE.text)
def attention_decode_op(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result, log-sum-exp and largest logits of the queries, of attention over a cache that already
    has the new keys; the last two have no elements unless `return_lse` and `max_logits`."""
    options = _DECODE.by_name(args)
    q, k, v = (options.pop(name) for name in ("q", "k_cache", "v_cache"))
    more = {"mask": options.pop("mask"), "return_max_logit": bool(options.pop("max_logits"))}
    result = _C.decode(q, k, v, options, **more, dispatched=True)
    return torch_library.all_results(q, result, {**options, **more})


@attention_decode_op.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _DECODE.by_name(args)
    q = options["q"]
    torch_library.require_dims("q", q, 4, torch_library.DIMS[True])
    batch, rows, heads, _d = q.shape
    columns = values_of(options["v_cache"], options["kv_format"])
    out = torch_library.empty(q, (batch, rows, heads, columns))
    of_rows, wanted = (batch, heads, rows), {**options, "return_max_logit": options["max_logits"]}
    return torch_library.with_shapes(out, q, wanted, of_rows, of_rows)


@torch.library.custom_op(
    "cutlass_attn::decode_append", mutates_args=("k_cache", "v_cache"), schema=_DECODE_APPEND.text
)
def decode_append_op(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes new keys into the cache. Returns the rotated queries (no elements without rotary
    embeddings) and the new number of keys of each sequence."""
    options = _DECODE_APPEND.by_name(args)
    q, k, v = (options.pop(name) for name in ("q", "k_cache", "v_cache"))
    rotated, seqlens = _C.decode_append(q, k, v, options, dispatched=True)
    return (torch_library.empty(q, (0,)) if rotated is None else rotated), seqlens


@decode_append_op.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = _DECODE_APPEND.by_name(args)
    q = options["q"]
    shape = (0,) if options["rotary_cos"] is None else tuple(q.shape)
    return torch_library.empty(q, shape), torch_library.scratch(q, "int32", (q.shape[0],))


@torch.library.custom_op(
    "cutlass_attn::append_kv",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor k, Tensor? v, Tensor(a0!) k_cache, Tensor(a1!)? v_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale, str? kv_format) -> ()",
)
def append_kv_op(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    kv_format: str | None,
) -> None:
    """See `append_kv`."""
    options = {"v_new": v, "slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale}
    options["kv_format"] = kv_format
    _C.append(k, k_cache, k_cache if v_cache is None else v_cache, options, dispatched=True)


@append_kv_op.register_fake
def _(*args: Any) -> None:
    return None


# --- The functions by way of their operators ------------------------------------------------------


def _prepare(q: torch.Tensor, options: dict[str, Any]) -> None:
    torch_library.refuse_nested({"q": q, **options})
    if options.pop("verify", False):
        raise ValueError(torch_library.NO_VERIFY)
    if isinstance(options.get("quantize"), _C.PrequantizedKV):
        raise ValueError(torch_library.NO_PREQUANTIZED)
    for name in ("k_scale", "v_scale"):
        scale = options.get(name)
        if isinstance(scale, bool):
            raise TypeError(f"{name} must be a number, got {scale}")
        if isinstance(scale, (int, float)):
            if not 0 < scale <= 3e38:
                raise ValueError(f"{name} is {scale!r}, allowed: a finite number > 0")
            options[name] = (
                None if scale == 1 else torch_library.filled(q, "float32", (1,), float(scale))
            )
    for name in ("num_splits", "split_size"):
        x = options.get(name, 0)
        if isinstance(x, bool):
            raise TypeError(f"{name} must be an int, got {x}")
        if isinstance(x, int) and not 0 <= x < 2**31:
            raise ValueError(f"{name} is {x!r}, allowed: 0 to 2147483647")
    torch_library.options_for_operator(q, options)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`attention_varlen`."""
    if options.get("indices") is not None:  # which has no derivative
        torch_library.needs_gradient("attention_varlen", {"q": q, "k": k, "v": v, **options})
    _prepare(q, options)
    return VARLEN.recorded(q, k, v, options)


def decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any) -> Any:
    """`attention_decode`, with `mask` in place of the arguments that it is made of."""
    out, lse, _ = _decode(q, k_cache, v_cache, options)
    return (out, lse) if options.get("return_lse") else out


def decode_with_max_logits(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    """As `decode`, and last the largest logit of each query, (B, Hq, Sq)."""
    out, lse, max_logits = _decode(q, k_cache, v_cache, options, max_logits=True)
    return (out, lse, max_logits) if options.get("return_lse") else (out, max_logits)


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    options: dict[str, Any],
    **more: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    torch_library.needs_gradient("attention_decode", {**operands, **options})
    if options.get("indices") is not None:
        options = {"causal": False, **options}  # the operator's default is True
    if options.get("kv_format") is not None:
        v_cache = k_cache.new_empty((0,))  # operators take no array twice if they write it
    out = options.pop("out", None)
    _prepare(q, options)
    new_keys = {name: options.pop(name) for name in NEW_KEYS if name in options}
    if new_keys.get("k_new") is not None:
        if out is not None:  # before the cache is written
            columns = values_of(v_cache, options.get("kv_format"))
            torch_library.check_out(out, q, (*q.shape[:-1], columns))
        shared = {name: options[name] for name in OF_APPEND if name in options}
        rotated, options["cache_seqlens"] = decode_append_op(
            *_DECODE_APPEND.arguments(q=q, k_cache=k_cache, v_cache=v_cache, **shared, **new_keys)
        )
        if new_keys.get("rotary_cos") is not None:
            q = rotated
    elif any(new_keys.get(name) is not None for name in ("v_new", "rotary_cos", "rotary_sin")):
        raise ValueError("v_new, rotary_cos and rotary_sin need k_new")
    result, lse, max_logits = attention_decode_op(
        *_DECODE.arguments(q=q, k_cache=k_cache, v_cache=v_cache, **options, **more)
    )
    return torch_library.copied(result, out), lse, max_logits


def append(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    *,
    v_new: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_format: str | None = None,
    **scales: Any,
) -> None:
    """`append_kv`."""
    arrays = {"k": k, "v": v_new, "k_cache": k_cache, "v_cache": v_cache, **scales}
    torch_library.needs_gradient("append_kv", arrays)
    _prepare(k, scales)
    if kv_format is not None:
        v_cache = None  # k_cache itself, which is written once
    k_scale, v_scale = scales.get("k_scale"), scales.get("v_scale")
    append_kv_op(k, v_new, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_format)


# --- Checks on the device -------------------------------------------------------------------------


def _require(holds: torch.Tensor, message: str) -> None:
    """Asserts a condition without waiting for the device: a GPU stops its own work."""
    torch._assert_async(holds.all(), message)


def _require_offsets(name: str, offsets: torch.Tensor, rows: int) -> None:
    _require(offsets[:1] >= 0, f"{name} must begin with 0 or more")
    _require(offsets[1:] >= offsets[:-1], f"{name} must not decrease")
    _require(offsets[-1:] <= rows, f"{name} must end at the last row, {rows}, or before")


def _require_pages(
    k: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, what: str
) -> None:
    pages, size = k.shape[:2]
    covered = block_table.shape[1] * size
    _require((lengths >= 0) & (lengths <= covered), f"{what} must be 0 to {covered}")
    first = torch.arange(block_table.shape[1], device=k.device) * size
    used = first < lengths[:, None]
    is_page = (block_table >= 0) & (block_table < pages)
    _require(
        is_page | ~used, f"block_table must hold pages, 0 to {pages - 1}, where {what} uses it"
    )


def validate_varlen(q: torch.Tensor, k: torch.Tensor, **options: Any) -> None:
    """Checks the arrays of `attention_varlen` on a GPU; on a CPU the call itself checks them."""
    offsets, keys = options["cu_seqlens_q"], options.get("cu_seqlens_k")
    if (listed := options.get("indices")) is not None:
        rows = k.shape[0]
        _require((listed >= -1) & (listed < rows), f"indices must be rows, 0 to {rows - 1}, or -1")
        return None
    _require_offsets("cu_seqlens_q", offsets, q.shape[0])
    used, table = options.get("seqused_k"), options.get("block_table")
    if table is not None:
        return _require_pages(k, table, used, "seqused_k") if used is not None else None
    if keys is not None:
        _require_offsets("cu_seqlens_k", keys, k.shape[0])
    if used is not None:
        lengths = torch.diff(offsets if keys is None else keys)
        _require((used >= 0) & (used <= lengths), "seqused_k must be 0 to the length of an entry")
    return None


def validate_decode(k_cache: torch.Tensor, **options: Any) -> None:
    """Checks the arrays of `attention_decode` on a GPU."""
    new, table = options.get("k_new"), options.get("block_table")
    if (listed := options.get("indices")) is not None:
        rows = k_cache.shape[0] * k_cache.shape[1]
        if table is not None:
            _require_pages(k_cache, table, options["cache_seqlens"], "cache_seqlens")
            rows = options["cache_seqlens"][:, None, None]
        allowed = "rows of the sequence" if table is not None else f"rows, 0 to {rows - 1},"
        is_right = (listed >= -1) & (listed < rows)
        if (counts := options.get("topk_lengths")) is not None:
            most = listed.shape[-1]
            _require((counts >= 0) & (counts <= most), f"topk_lengths must be 0 to {most}")
            entry = torch.arange(most, device=listed.device)
            is_right |= entry >= counts[:, None, None]  # not looked at
        _require(is_right, f"indices must be {allowed} or -1")
        return None
    lengths = options["cache_seqlens"]
    _require(lengths >= 0, "cache_seqlens must be 0 or more")
    after = lengths if new is None else lengths + new.shape[1]
    if table is not None:
        return _require_pages(k_cache, table, after, "cache_seqlens with the new keys")
    rows, entries = k_cache.shape[1], k_cache.shape[0]
    _require(after <= rows, f"cache_seqlens with the new keys must be up to {rows}")
    if (index := options.get("cache_batch_idx")) is not None:
        _require((index >= 0) & (index < entries), f"cache_batch_idx must be 0 to {entries - 1}")
    return None
