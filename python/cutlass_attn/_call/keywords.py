"""Error messages for wrong arguments: translate the keywords of other libraries to ours."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .call import SIGNATURES, P

R = TypeVar("R")


def refuse_nested(q: Any, lacking: dict[str, Any]) -> None:
    """Raises ValueError if q is a nested tensor, which has none of these options.

    lacking: names of options that are given, and what is allowed.
    """
    if not getattr(q, "is_nested", False):
        return
    for name, default in lacking.items():
        raise ValueError(f"nested tensors have no {name}; allowed: {default!r}")


_SCALE = "softmax_scale, the factor of q @ k^T"
_LSE = "return_lse, which returns the log-sum-exp; the weights themselves are never in memory"
_WINDOW = "window=(left, right); None or -1 is no limit"
_LAYOUT = 'layout, "bhsd" or "bshd"; NHD is "bshd", and HND is "bhsd"'
_NOT_NEEDED = "not needed: "
_QUERIES = _NOT_NEEDED + "lengths are read from cu_seqlens_q"
_KEYS = _NOT_NEEDED + "lengths are read from cu_seqlens_k or seqused_k"
_STATE = "natural logarithms and (B, Hq, Sq), where FlashInfer has base 2"
_WIDTH = "window=(sliding_window - 1, 0), which counts the keys before the query's own"
_MASK = "mask if it is bool, and bias if it is added to the logits"
_SLOTS = "slot_mapping: page * page_size + row of each token, (T,) int64"
# Keywords of torch's scaled_dot_product_attention, flash_attn, xformers, FlashInfer, SageAttention,
# transformers and vLLM. For each: pairs of our keyword and the text for it. The first pair that the
# function has is used.
_MEANT: dict[str, tuple[tuple[str, str], ...]] = {
    "query": (("q", "q"),),
    "key": (("k", "k"), ("k_cache", "k_cache, or k_new for keys to append")),
    "value": (("v", "v"), ("v_cache", "v_cache, or v_new for values to append")),
    "k": (("k_new", "k_new, keys to append; those of the cache are k_cache"),),
    "v": (("v_new", "v_new, values to append; those of the cache are v_cache"),),
    "append_key": (("k", "k"),),
    "append_value": (("v", "v"),),
    "key_cache": (("k_cache", "k_cache"),),
    "value_cache": (("v_cache", "v_cache"),),
    "paged_kv_cache": (
        ("k_cache", "k_cache and v_cache, each (P, page, Hkv, D); halves of one tensor will do"),
        ("block_table", "k and v, each (P, page, Hkv, D), with block_table"),
    ),
    "is_causal": (
        (
            "causal",
            "causal, aligned at the last key: query i sees keys up to i + Sk - Sq. torch aligns at "
            "the first key, which differs where Sq != Sk",
        ),
    ),
    "attn_mask": (("mask", _MASK),),
    "attention_mask": (("mask", f"{_MASK}; for padding seqused_k, the keys of each batch entry"),),
    "key_padding_mask": (
        (
            "seqused_k",
            "seqused_k, the number of keys of each batch entry, or mask=~key_padding_mask[:, None, "
            "None, :] (True = visible)",
        ),
    ),
    "custom_mask": (
        (
            "mask",
            "mask, bool and (B, Hq, Sq, Sk) or what broadcasts to it, where FlashInfer's is "
            "flattened",
        ),
        ("tree_mask", "tree_mask, (B, Sq, Sq): which of the last Sq keys a query sees"),
    ),
    "attn_bias": (
        (
            "bias",
            "bias if it is a tensor. Of xformers' classes, LowerTriangularFromBottomRightMask is "
            "causal=True, and BlockDiagonalMask is attention_varlen",
        ),
    ),
    "scale": (("softmax_scale", _SCALE),),
    "sm_scale": (("softmax_scale", _SCALE),),
    "scaling": (("softmax_scale", _SCALE),),
    "enable_gqa": (
        ("q", _NOT_NEEDED + "k and v may have any number of heads that divides that of q"),
    ),
    "dropout": (("dropout_p", "dropout_p"),),
    "p": (("dropout_p", "dropout_p"),),
    "window_size": (("window", _WINDOW),),
    "window_left": (("window", _WINDOW),),
    "sliding_window": (("window", _WIDTH),),
    "return_attn_probs": (("return_lse", _LSE),),
    "return_softmax_lse": (("return_lse", _LSE),),
    "need_weights": (("return_lse", _LSE),),
    "output_attentions": (("return_lse", _LSE),),
    "return_max_logits": (("return_max_logit", "return_max_logit"),),
    "logits_soft_cap": (("softcap", "softcap"),),
    "logit_cap": (("softcap", "softcap"),),
    "learnable_sink": (("sinks", "sinks, (Hq,) float32"),),
    "s_aux": (("sinks", "sinks, (Hq,) float32"),),
    "kv_layout": (("layout", _LAYOUT),),
    "tensor_layout": (("layout", _LAYOUT),),
    "use_fp16_qk_reduction": (("accumulate", 'accumulate="fp16_qk"'),),
    "op": (("kernel", 'kernel, a name such as "sm80"; "auto" chooses'),),
    "backend": (("kernel", 'kernel, a name such as "sm80"; "auto" chooses'),),
    "k_descale": (("k_scale", "k_scale, a number or (Hkv,) float32"),),
    "v_descale": (("v_scale", "v_scale, a number or (Hkv,) float32"),),
    "qo_indptr": (("cu_seqlens_q", "cu_seqlens_q"),),
    "kv_indptr": (
        ("cu_seqlens_k", "cu_seqlens_k; of pages, block_table and seqused_k"),
        ("block_table", "block_table, (B, pages per sequence), with cache_seqlens"),
        ("slot_mapping", _SLOTS),
    ),
    "max_seqlen_q": (("cu_seqlens_q", _QUERIES),),
    "max_seqlen_k": (("cu_seqlens_q", _KEYS),),
    "seqused_q": (("cu_seqlens_q", _QUERIES),),
    "seqlens_q": (("seqused_q", "seqused_q"),),
    "seqlens_k": (
        ("seqused_k", "seqused_k"),
        ("cache_seqlens", "cache_seqlens, keys in the cache before k_new are appended"),
    ),
    "seqused_k": (("cache_seqlens", "cache_seqlens, keys in the cache before k_new are appended"),),
    "cache_seqlens": (("seqused_k", "seqused_k, with the keys of this call"),),
    "page_table": (("block_table", "block_table"),),
    "block_tables": (("block_table", "block_table"),),
    "paged_kv_indices": (
        ("block_table", "block_table, (B, pages per sequence), one row for each sequence"),
        ("slot_mapping", _SLOTS),
    ),
    "kv_indices": (("slot_mapping", _SLOTS),),
    "batch_indices": (("slot_mapping", _SLOTS),),
    "positions": (("slot_mapping", _SLOTS),),
    "slots": (("slot_mapping", _SLOTS),),
    "leftpad_k": (("cache_leftpad", "cache_leftpad"),),
    "cache_leftpad": (("leftpad_k", "leftpad_k"),),
    "kv_cache_dtype": (("k_cache", _NOT_NEEDED + "the dtype of the cache is that of k_cache"),),
    "mode": (("quantize", "quantize"),),
    "v_a": (("o_a", "o_a"),),
    "s_a": (("lse_a", f"lse_a, {_STATE}"),),
    "v_b": (("o_b", "o_b"),),
    "s_b": (("lse_b", f"lse_b, {_STATE}"),),
}
# For keywords of one function that another one lacks.
_DECODING = {
    "mask": "it has tree_mask, and cache_leftpad for padding",
    "bias": "biases are of attention()",
    "dropout_p": "decoding has no dropout",
    "return_max_logit": "it is for training, with attention() and attention_varlen()",
    "deterministic": "decoding has no gradients, and its results have the same bits in every run",
    "cu_seqlens_q": "each sequence has Sq queries; for other numbers of them there is "
    "attention_varlen(), with block_table",
}
_LACKS = {
    ("attention_varlen", "layout"): "packed rows are (T, H, D) and pages (P, page, H, D)",
    ("attention_varlen", "mask"): "masks are of attention(); lengths are seqused_k here",
    ("attention_varlen", "bias"): "biases are of attention()",
    ("attention_varlen", "cache_leftpad"): "begin each sequence at its first key, in cu_seqlens_k",
    ("append_kv", "layout"): "rows are (T, H, D) and pages (P, page, H, D)",
    **{("attention_decode", name): reason for name, reason in _DECODING.items()},
    ("attention", "cu_seqlens_q"): "packed sequences are of attention_varlen()",
    ("attention", "cu_seqlens_k"): "packed sequences are of attention_varlen()",
    ("attention", "block_table"): "pages are of attention_varlen() and attention_decode()",
    ("attention", "num_splits"): "the number of splits is chosen for the GPU",
}


def refusal(function: str, names: Iterable[str], known: Iterable[str] = ()) -> TypeError | None:
    """The error for the first of these keywords that `function` does not have, or None.

    `known`: keywords that the function has, by default those of its signature.
    """
    parameters = tuple(known) or tuple(SIGNATURES[function].parameters)
    for name in names:
        if name in parameters:
            continue
        meant = _MEANT.get(name, ())
        for ours, text in meant:
            if ours in parameters:
                use = "" if text.startswith(_NOT_NEEDED) else "use "
                return TypeError(f"{function}() has no {name!r}: {use}{text}")
        for ours in (name, *(ours for ours, _ in meant)):
            if reason := _LACKS.get((function, ours)):
                return TypeError(f"{function}() has no {name!r}: {reason}")
        close = difflib.get_close_matches(name, parameters, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(parameters)}"
        return TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")
    return None


def misplaced(
    function: str,
    needed: tuple[str, ...],
    more: tuple[object, ...],
    names: Iterable[str],
    given: tuple[object, ...] = (),
) -> TypeError:
    """The error for too many arguments by position, `more` than the `needed` ones, or too few.

    `given`: the values of the `needed` ones, of which some are None.
    """
    if more:
        return TypeError(
            f"{function}() takes {len(needed)} arguments by position, {', '.join(needed)}, got "
            f"{len(needed) + len(more)}: pass options by name, as libraries differ in their order"
        )
    known = (*SIGNATURES["attention"].parameters, "device", "grad") if function == "explain" else ()
    unknown = refusal(function, names, known)
    absent = [name for name, x in zip(needed, given) if x is None]
    lacks = f"; not given, or None: {', '.join(absent)}" if absent else ""
    return unknown or TypeError(f"{function}() needs {', '.join(needed)}{lacks}")


def answered(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function written in Python: wrong arguments raise the errors above."""
    name, signature = function.__name__, inspect.signature(function)
    needed = tuple(n for n, x in signature.parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD)

    @functools.wraps(function)
    def checked(*given: P.args, **options: P.kwargs) -> R:
        try:
            return function(*given, **options)
        except TypeError as error:
            try:
                signature.bind(*given, **options)
            except TypeError:
                more = given[len(needed) :]
                unknown = None if more else refusal(name, options, signature.parameters)
                if unknown or more:
                    raise (unknown or misplaced(name, needed, more, options)) from None
            raise error from None

    return checked


def must_validate(options: dict[str, Any]) -> bool:
    """Takes `validate` out of the options. Raises TypeError."""
    validate = options.pop("validate", False)
    if not isinstance(validate, bool):
        raise TypeError(f"validate must be True or False, got {validate!r}")
    return validate
