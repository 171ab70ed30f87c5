"""What a call with a wrong argument is told: ours by the names that other libraries have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .call import SIGNATURES

_SCALE = "softmax_scale, the factor of q @ k^T"
_LSE = "return_lse, which returns the log-sum-exp; the weights themselves are never in memory"
# By names of torch's scaled_dot_product_attention, flash_attn, xformers and FlashInfer: our
# keyword, which a function has or has not, and what to say of it.
_MEANT = {
    "query": ("q", "q"),
    "key": ("k", "k"),
    "value": ("v", "v"),
    "is_causal": (
        "causal",
        "causal, aligned at the last key: query i sees keys up to i + Sk - Sq. torch aligns at the "
        "first key, which differs where Sq != Sk",
    ),
    "attn_mask": ("mask", "mask if it is bool, and bias if it is added to the logits"),
    "attn_bias": (
        "bias",
        "bias if it is a tensor. Of xformers' classes, LowerTriangularFromBottomRightMask is "
        "causal=True, and BlockDiagonalMask is attention_varlen",
    ),
    "scale": ("softmax_scale", _SCALE),
    "sm_scale": ("softmax_scale", _SCALE),
    "enable_gqa": ("q", "nothing to ask for: k and v have any number of heads that divides q's"),
    "dropout": ("dropout_p", "dropout_p"),
    "p": ("dropout_p", "dropout_p"),
    "window_size": ("window", "window=(left, right); None or -1 is no limit"),
    "window_left": ("window", "window=(left, right); None or -1 is no limit"),
    "return_attn_probs": ("return_lse", _LSE),
    "return_softmax_lse": ("return_lse", _LSE),
    "logits_soft_cap": ("softcap", "softcap"),
    "kv_layout": ("layout", 'layout, "bhsd" or "bshd"'),
    "max_seqlen_q": ("cu_seqlens_q", "nothing to give: lengths are read from cu_seqlens_q"),
    "max_seqlen_k": ("cu_seqlens_q", "nothing to give: lengths are read from cu_seqlens_k"),
    "v_a": ("o_a", "o_a"),
    "s_a": ("lse_a", "lse_a, natural logarithms and (B, Hq, Sq), where FlashInfer has base 2"),
    "v_b": ("o_b", "o_b"),
    "s_b": ("lse_b", "lse_b, natural logarithms and (B, Hq, Sq), where FlashInfer has base 2"),
}
# Of functions that lack a keyword of another one.
_LACKS = {
    ("attention_varlen", "layout"): "packed rows are (T, H, D) and pages (P, page, H, D)",
    ("attention_varlen", "mask"): "masks are of attention(); lengths are seqused_k here",
    ("attention_varlen", "bias"): "biases are of attention()",
    ("attention_decode", "layout"): 'q, caches and the result are (B, S, H, D), as of "bshd"',
    ("attention_decode", "mask"): "it has tree_mask, and cache_leftpad for padding",
    ("attention_decode", "bias"): "biases are of attention()",
    ("attention_decode", "dropout_p"): "decoding has no dropout",
}


def refusal(function: str, names: Iterable[str], known: Iterable[str] = ()) -> TypeError | None:
    """The error for the first of these keywords that `function` does not have; None if it has all.
    `known`: the function's own, by default those of its signature."""
    parameters = tuple(known) or tuple(SIGNATURES[function].parameters)
    for name in names:
        if name in parameters:
            continue
        ours, text = _MEANT.get(name, (name, ""))
        if ours in parameters:
            return TypeError(f"{function}() has no {name!r}: here it is {text}")
        if reason := _LACKS.get((function, ours)):
            return TypeError(f"{function}() has no {name!r}: {reason}")
        close = difflib.get_close_matches(name, parameters, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(parameters)}"
        return TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")
    return None


def misplaced(
    function: str, needed: tuple[str, ...], more: tuple[object, ...], names: Iterable[str]
) -> TypeError:
    """The error for `more` arguments by position than those that are `needed`, or for too few."""
    if more:
        return TypeError(
            f"{function}() takes {len(needed)} arguments by position, {', '.join(needed)}, got "
            f"{len(needed) + len(more)}: options have to be named, as libraries order them in "
            "different ways"
        )
    known = (*SIGNATURES["attention"].parameters, "device", "grad") if function == "explain" else ()
    unknown = refusal(function, names, known)
    return unknown or TypeError(f"{function}() needs {', '.join(needed)}")
