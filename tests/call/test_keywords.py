"""Wrong keywords are answered with ours, and with what differs from the library they are from."""

import cutlass_attn
import pytest
from cases import torch

Q, K = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 8, 16)
ROWS, ENDS = torch.zeros(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
CACHE = torch.zeros(1, 8, 2, 16)
LSE = torch.zeros(1, 2, 3)

CALLS = {
    "attention": (Q, K, K),
    "explain": (Q, K, K),
    "attention_varlen": (ROWS, ROWS, ROWS, ENDS),
    "attention_decode": (CACHE[:, :3], CACHE, CACHE, ENDS[1:]),
    "merge_states": (Q, LSE, Q, LSE),
    "append_kv": (ROWS, ROWS, CACHE, CACHE.clone(), torch.arange(4)),
    "prequantize": (Q, Q),
}
COMPUTING = ("attention", "attention_varlen", "attention_decode", "explain")

# What other libraries call it, what the answer must say.
NAMES = {
    "is_causal": "causal, aligned at the last key.*torch aligns at the first key",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "window_size": r"window=\(left, right\)",
    "window_left": r"window=\(left, right\)",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "logits_soft_cap": "softcap",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", COMPUTING)
def test_names_of_other_libraries_are_answered_with_ours(function, name):
    message = rf"{function}\(\) has no '{name}': use {NAMES[name]}"
    with pytest.raises(TypeError, match=message):
        getattr(cutlass_attn, function)(*CALLS[function], **{name: 1})


@pytest.mark.parametrize(
    ("function", "name", "message"),
    [
        ("attention", "attn_mask", "mask if it is bool, and bias"),
        ("attention", "attn_bias", "bias if it is a tensor.*LowerTriangularFromBottomRightMask"),
        ("attention", "p", "dropout_p"),
        ("attention", "enable_gqa", "has no 'enable_gqa': not needed: k and v may have"),
        ("attention", "key_padding_mask", r"use seqused_k, .* mask=~key_padding_mask\[:, None"),
        ("attention", "num_splits", "the number of splits is chosen"),
        ("attention_varlen", "max_seqlen_q", "lengths are read from cu_seqlens_q"),
        ("attention_varlen", "attn_mask", "masks are of attention"),
        ("attention_decode", "p", "decoding has no dropout"),
        ("attention_decode", "kv_layout", 'layout.*HND is "bhsd"'),
        ("merge_states", "v_a", "o_a"),
        ("merge_states", "s_b", "lse_b, natural logarithms"),
        ("merge_states", "kv_layout", 'layout.*NHD is "bshd"'),
        ("attention", "op", "kernel"),
        ("attention", "attention_mask", "use mask if it is bool.*for padding seqused_k"),
        ("attention", "tensor_layout", 'use layout.*HND is "bhsd"'),
        ("attention", "need_weights", "use return_lse.*weights"),
        ("attention_varlen", "sliding_window", r"use window=\(sliding_window - 1, 0\)"),
        ("attention", "scaling", "use softmax_scale"),
        ("attention", "custom_mask", "mask, bool.*FlashInfer's is flattened"),
        ("attention", "s_aux", "sinks"),
        ("attention", "cu_seqlens_k", "packed sequences are of attention_varlen"),
        ("attention", "seqlens_k", "seqused_k"),
        ("attention", "cache_leftpad", "leftpad_k"),
        ("attention_varlen", "qo_indptr", "cu_seqlens_q"),
        ("attention_varlen", "seqused_q", "lengths are read from cu_seqlens_q"),
        ("attention_varlen", "page_table", "block_table"),
        ("attention_varlen", "paged_kv_cache", "k and v, each .* with block_table"),
        ("attention_varlen", "cache_seqlens", "seqused_k, with the keys of this call"),
        ("attention_varlen", "leftpad_k", "begin each sequence at its first key"),
        ("attention_varlen", "k_descale", "k_scale"),
        ("attention_decode", "k", "k_new, keys to append"),
        ("attention_decode", "v", "v_new, values to append"),
        ("attention_decode", "key", "k_cache, or k_new"),
        ("attention_decode", "block_tables", "block_table"),
        ("attention_decode", "seqused_k", "cache_seqlens, keys .* before k_new"),
        ("attention_decode", "attn_mask", "tree_mask"),
        ("attention_decode", "cu_seqlens_q", "attention_varlen.*block_table"),
        ("append_kv", "key", "k"),
        ("append_kv", "append_value", "v"),
        ("append_kv", "paged_kv_cache", "k_cache and v_cache"),
        ("append_kv", "positions", r"slot_mapping: page \* page_size \+ row"),
        ("append_kv", "kv_layout", "pages"),
        ("append_kv", "zzz", "unexpected keyword argument 'zzz'; allowed: k, v, k_cache"),
        ("prequantize", "kv_layout", "layout"),
        ("prequantize", "mode", "quantize"),
        ("prequantize", "key", "k"),
        ("attention", "softmax_scal", "did you mean 'softmax_scale'"),
        ("attention", "zzz", "unexpected keyword argument 'zzz'; allowed: q, k, v, "),
    ],
)
def test_what_one_function_says(function, name, message):
    with pytest.raises(TypeError, match=rf"{function}\(\) .*{message}"):
        getattr(cutlass_attn, function)(*CALLS[function], **{name: 1})


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("attention", (Q, K), "needs q, k, v; not given, or None: v$"),
        ("attention", (None, K, None), "needs q, k, v; not given, or None: q, v$"),
        ("explain", (Q,), "needs q, k, v; not given, or None: k, v$"),
        ("attention_varlen", (ROWS, ROWS, ROWS), "not given, or None: cu_seqlens_q$"),
        ("attention_decode", (CACHE, CACHE, CACHE, None), "not given, or None: cache_seqlens$"),
    ],
)
def test_what_is_not_given_is_named(function, given, message):
    with pytest.raises(TypeError, match=rf"{function}\(\) .*{message}"):
        getattr(cutlass_attn, function)(*given)


def test_warmup_is_named_in_its_own_errors():
    with pytest.raises(TypeError, match=r"q is 'sm80'; allowed: an array, or .* names='sm80'"):
        cutlass_attn.warmup("sm80")
    with pytest.raises(TypeError, match=r"warmup\(\) has no 'is_causal': use causal"):
        cutlass_attn.warmup(Q, K, K, is_causal=True)
    with pytest.raises(TypeError, match=r"warmup\(\) has no 'page_table': use block_table"):
        cutlass_attn.warmup(ROWS, ROWS, ROWS, cu_seqlens_q=ENDS, page_table=ENDS)


@pytest.mark.parametrize("function", ["append_kv", "prequantize"])
def test_what_is_missing_is_said_as_python_says_it(function):
    with pytest.raises(TypeError, match="missing"):
        getattr(cutlass_attn, function)(*CALLS[function][:1])


@pytest.mark.parametrize("function", ["attention", "explain"])
def test_query_key_value_by_name(function):
    with pytest.raises(TypeError, match="has no 'query': use q"):
        getattr(cutlass_attn, function)(query=Q, key=K, value=K)


@pytest.mark.parametrize("function", CALLS)
def test_options_by_position_are_refused(function):
    given = CALLS[function] + ((ENDS,) if function == "attention_varlen" else ())
    message = rf"{function}\(\) takes {len(given)} arguments by position, .*got {len(given) + 1}:"
    with pytest.raises(TypeError, match=message):
        getattr(cutlass_attn, function)(*given, None)


def test_compiled_calls_are_answered_as_well():
    @torch.compile(fullgraph=True, backend="eager")
    def call(q, k):
        return cutlass_attn.attention(q, k, k, is_causal=True)

    with pytest.raises(Exception, match="has no 'is_causal'"):
        call(Q, K)
