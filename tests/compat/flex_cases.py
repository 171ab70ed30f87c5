"""Cases of PyTorch's own tests of FlexAttention, for test_flex_cases.py and test_flex_calls.py.

The parameters are those of test/inductor/test_flex_attention.py and test_flex_decoding.py in
github.com/pytorch/pytorch, in the newest copies at hand: of December 2025 or a little later (they
have the test for issue 170489). Tests that came after them are not here.
"""

import itertools
import os
import random
from dataclasses import dataclass, replace

from flex_mods import SCORES

ALL = os.environ.get("CUTLASS_ATTN_TEST_FLEX") == "all"


def chosen(every, seed, together=2):
    """Of dicts of parameters, some in which all values of so many parameters occur together."""
    if ALL:
        return every
    some, covered = [], set()
    for case in random.Random(seed).sample(every, len(every)):
        values = set(itertools.combinations(case.items(), together))
        if not values <= covered:
            some.append(case)
            covered |= values
    return some


@dataclass(frozen=True)
class Case:
    """Sizes are pairs: of query, and of key and value. head_dims are those of q and k, and of v."""

    score: str = "identity"
    mask: str = "noop"  # "none": without a BlockMask
    dtype: str = "float16"
    batch: tuple = (2, 2)
    heads: tuple = (4, 4)
    lengths: tuple = (256, 256)
    head_dims: tuple = (64, 64)
    block: int | tuple = 128
    paged: bool = False
    backward: bool = True

    def small(self):
        """For a CPU: shorter, and blocks too. Lengths that were odd stay it."""
        small = [x if x < 64 else x // (8 if x < 512 else 16) + x % 8 for x in self.lengths]
        block = self.block
        block = tuple(x // 8 for x in block) if isinstance(block, tuple) else block // 8
        return replace(self, lengths=tuple(small), block=block)


BUILTIN = list(SCORES)[:8]
DTYPES = ["float32", "bfloat16", "float16"]
BOTH = [False, True]  # paged


def grid(base=None, **fields):
    """The cases of all values of the fields that are lists."""
    lists = [x if isinstance(x, list) else [x] for x in fields.values()]
    return [replace(base or Case(), **dict(zip(fields, x))) for x in itertools.product(*lists)]


def with_masks(**fields):
    """Of a builtin score and the mask that it is given in tests of dynamic shapes."""
    masks = {"causal": "causal", "inverse causal": "inverse causal", "relative causal": "causal"}
    return [x for s in BUILTIN for x in grid(score=s, mask=masks.get(s, "noop"), **fields)]


def learning(score, **fields):
    lengths = [(37, 37), (256, 256), (277, 277)]
    fields = {"lengths": lengths, "dtype": DTYPES, "mask": "none"} | fields
    return grid(score=score, head_dims=(16, 16), **fields)


def sized(*sizes):
    """batch and lengths."""
    return [{"batch": (b, b), "lengths": (n, n)} for b, n in sizes]


DYNAMIC = [x for size in sized((2, 1024), (4, 512), (4, 256)) for x in with_masks(**size)]
AUTOMATIC = [
    x for size in sized((2, 1024), (4, 512), (8, 256)) for x in grid(score=BUILTIN, **size)
]
BLOCKS = [128, 256, (128, 256), (256, 128)]
BROADCAST = {"batch": [(3, 1), (4, 1), (5, 1)], "heads": [(4, 2), (4, 1)]}
GQA = {"heads": (16, 4), "paged": BOTH}
ODD = {"mask": "causal", "lengths": (255, 255)}
CAPTURED_ODD = {"dtype": "bfloat16", "score": "query factor", "mask": "none"}
VS_SDPA = ["learned (q + k)", "learned (q, k)", "learned (q)(k)", "learned (k, q)"]

# By the names of torch's tests.
FLEX = {
    "builtin_score_mods": grid(score=BUILTIN, dtype=DTYPES, paged=BOTH),
    "builtin_score_mods_seqlen_lt_default_sparse_block_size": grid(
        score=BUILTIN, lengths=(64, 64), mask="none"
    ),
    "builtin_score_mods_seqlen_lt_custom_sparse_block_size": grid(
        score=BUILTIN, lengths=(64, 64), mask="causal", block=256
    ),
    "builtin_score_mods_dynamic": DYNAMIC,
    "builtin_score_mods_automatic_dynamic": AUTOMATIC,
    "builtin_score_mods_different_seqlen": grid(score=BUILTIN, lengths=(128, 256), paged=BOTH),
    "builtin_score_mods_different_block_size": grid(
        score=BUILTIN, dtype=DTYPES, block=BLOCKS, paged=BOTH
    ),
    "kv_batch_broadcast": grid(score=BUILTIN, **BROADCAST),
    "kv_batch_broadcast_causal_mask": grid(mask="causal", **BROADCAST),
    "GQA": grid(score=BUILTIN, lengths=(32, 256), **GQA),
    "GQA_causal_mask": grid(mask="causal", lengths=(32, 32), **GQA),
    "doc_mask_sparse": grid(score="documents", paged=BOTH),
    "index_multiple": grid(score="in two steps", paged=BOTH),
    "index_weird1": grid(score="of an index", paged=BOTH),
    "index_weird2": grid(score="of a captured index", paged=BOTH),
    "skip_odd_keys": grid(score="even keys", dtype=DTYPES, paged=BOTH),
    "function_composition": grid(score="composed", dtype=DTYPES, paged=BOTH),
    "captured_buffers_all_dims": grid(score="all dims", dtype=DTYPES, paged=BOTH),
    "seq_masking": grid(score="halves", paged=BOTH),
    "load_from_bias_seq_only": grid(score="bias (q, k)", paged=BOTH),
    "load_from_bias_seq_batch": grid(score="bias (b, q, k)", paged=BOTH),
    "load_from_bias_head_seq_batch": grid(score="bias (b, h, q, k)", paged=BOTH),
    "load_from_view_buffer": grid(score="decomposed", lengths=(32, 32)),
    "load_rel_bias": grid(score="relative table", paged=BOTH),
    "dependent_causal_bidirectional": grid(score="two-sided prefix", paged=BOTH),
    "natten_2d": grid(score="natten", paged=BOTH),
    "silu_on_score": grid(score="silu", paged=BOTH),
    "padded_dense_causal": grid(score="padded"),
    "captured_scale": grid(score="captured number", paged=BOTH),
    "captured_scalar_grad": grid(score="learned (1)"),
    "recompile_changed_score_mod": grid(score=["captured number", "captured factor"], paged=BOTH),
    "dynamic_captured_buffer": grid(score="learned factor (h)", heads=[(4, 4), (8, 8), (16, 16)]),
    "mask_mod_handles_symint_addition": grid(
        mask="sizes",
        batch=(1, 1),
        heads=(2, 2),
        head_dims=(32, 32),
        lengths=[(192, 128), (160, 96)],
    ),
    "inputs_are_realized": grid(
        score="made in the call", dtype="float32", heads=(8, 8), lengths=(1024, 1024)
    ),
    "mask_mod_combiners": grid(
        mask=["causal window", "causal or not", "nothing"], lengths=(2048, 2048)
    ),
    "njt_causal": grid(score="nested", dtype=DTYPES, paged=BOTH),
    "non_equal_head_dims": grid(
        score=BUILTIN, dtype=DTYPES, head_dims=[(64, 32), (32, 64)], paged=BOTH
    ),
    "causal_block": grid(mask="causal"),
    "causal_block_paged_attention": grid(mask="causal", paged=True),
    "new_empty_mask_mod": grid(
        score="added bool", mask="read by zeros", batch=(4, 4), heads=(1, 1), lengths=(128, 128)
    ),
    "non_pow_2_headdim": grid(score="relative", head_dims=[(x, x) for x in (17, 24, 94, 121)]),
    "document_masking_edge_case": grid(
        mask="documents of a batch", heads=(1, 1), lengths=(128, 128), head_dims=(4, 4)
    ),
    "fully_masked_out_rows": grid(mask="first half", dtype="float32"),
    "block_mask_non_divisible": grid(mask="documents", lengths=(1023, 1023)),
    "causal_block_non_divisible": grid(**ODD),
    "causal_block_non_divisible_with_captured_buffer": grid(
        score="offsets", dtype="bfloat16", **ODD | {"lengths": (253, 253)}
    ),
    "non_divisible_with_captured_buffer": grid(lengths=(259, 259), **CAPTURED_ODD),
    "modular_indexing": grid(
        score="regrouped", dtype="bfloat16", heads=(12, 12), lengths=(128, 128)
    ),
    "invalid_block_size": grid(heads=(8, 8), lengths=(128, 128), block=96),
    "dynamic_shapes_bug_dynamic_batch": grid(mask="padding", batch=(16, 16), lengths=(12, 12)),
    "num_warps_8_error": grid(mask="none", head_dims=(128, 128), lengths=(128, 128)),
    "free_symbol_dynamic": grid(mask="queries", batch=[(4, 4), (16, 16)], heads=(8, 8)),
    "symbol_closure_in_score_mod": grid(score="a size", batch=[(4, 4), (16, 16)], heads=(8, 8)),
    "custom_score_mod_layout_freeze": grid(
        score="gated positions", lengths=(18, 18), head_dims=(32, 32)
    ),
    "validate_small_embedding_size_error_message": grid(head_dims=(8, 8), dtype="float32"),
    "mask_mod_functools_partial": grid(mask="partial", heads=(8, 8), lengths=(64, 64)),
    "reduction_unrolled": grid(score="by distance", dtype="bfloat16"),
    "upcast_appropriately": grid(score="log of mass", lengths=(128, 128), head_dims=(16, 16)),
    "doc_mask_clamped_repro": grid(
        mask="clamped documents",
        dtype="float32",
        heads=(12, 12),
        lengths=[(1024, 1024), (1027, 1027)],
    ),
    "eager_tracing_correctness": grid(heads=(4, 2), head_dims=(64, 128)),
    "paged_builtin_score_mods": grid(
        Case(mask="causal", batch=(4, 4), lengths=(512, 512), head_dims=(16, 16), paged=True),
        score=BUILTIN,
        dtype=DTYPES,
    ),
    "relative_1d_bias": learning("learned |q - k|"),
    "absolute_2d_bias": learning("learned (q, k)"),
    "head_specific_bias": learning("learned (h, q, k)"),
    "batch_head_bias": learning("learned (b, h, q, k)"),
    "multiplicative_bias": learning("learned factor (q)"),
    "local_window_bias": learning("learned window"),
    "global_tokens_bias": learning("learned (k)"),
    "weird_bias": learning("learned, fixed index"),
    "indirect_bias": learning("learned, indirect"),
    "symmetric_bias": learning("learned (q) + (k)"),
    "flipped_indexed_bias": learning("learned (k, q)"),
    "head_specific_gate": learning("learned gate (h)"),
    "distinct_biases": learning("learned, distinct"),
    "learnable_bias_global_compiled": learning(
        "learned (b, h, q, k)", dtype="float32", lengths=(128, 128), heads=(1, 1)
    ),
    "backprop_error_case": learning("learned, of a product", dtype="float32", lengths=(16, 16)),
    "inspect_bug": grid(mask="partial with a tensor", lengths=(1024, 1024)),
    "head_bias_req_grad": grid(score="learned (h)", batch=(1, 1)),
    "comparison_vs_sdpa_with_learnable_bias": grid(score=VS_SDPA, heads=(1, 1), batch=(1, 1))
    + grid(score="learned (h, k, q)", heads=(8, 8), batch=(4, 4)),
}

DECODE = Case(batch=(4, 4), heads=(16, 8), lengths=(1, 2048), backward=False)
WITH_WINDOW = [*BUILTIN, "windowed"]
HEADS = [(16, 1), (8, 2), (16, 16)]


def decoding(**fields):
    return grid(DECODE, **fields)


DECODING = {
    "bw_decoding_fails": grid(lengths=(8, 128), heads=(2, 2), head_dims=(4, 4)),
    "builtin_score_mods": decoding(score=WITH_WINDOW, dtype=DTYPES, heads=HEADS, paged=BOTH),
    "paged_attention_page_size": decoding(
        score=WITH_WINDOW, mask="until", heads=HEADS, block=[64, 128, 256], paged=True
    ),
    "builtin_score_mods_different_block_size": decoding(
        score=WITH_WINDOW, dtype=DTYPES, block=[64, 128, (128, 64)]
    ),
    "kv_batch_broadcast": decoding(
        score=WITH_WINDOW, heads=HEADS, batch=[(3, 1), (5, 1), (8, 1), (16, 1)]
    ),
    "skip_odd_keys": decoding(score="even keys", dtype=DTYPES, paged=BOTH),
    "function_composition": decoding(score="composed", dtype=DTYPES, paged=BOTH),
    "captured_buffers": decoding(score="of heads", dtype=DTYPES, paged=BOTH),
    "captured_buffers_all_dims": decoding(score="all dims and keys", dtype=DTYPES, paged=BOTH),
    "seq_masking": decoding(score="halves", paged=BOTH),
    "non_divisible_offset_mask": decoding(mask="after", lengths=(1, 2045)),
    "non_divisible_offset_mask_with_captured_buffer": decoding(
        score="offset of keys", mask="after", lengths=(1, 2045)
    ),
    "non_divisible_multi_token_offset_mask": decoding(mask="after", lengths=(3, 2045)),
    "non_divisible_multi_token_offset_mask_with_captured_buffer": decoding(
        score="offsets", mask="after", lengths=(3, 2045)
    ),
    "load_from_bias_seq_only": decoding(score="bias (q, k)", paged=BOTH),
    "load_from_bias_seq_batch": decoding(score="bias (b, q, k)", paged=BOTH),
    "load_from_bias_head_seq_batch": decoding(score="bias (b, h, q, k)", paged=BOTH),
    "non_equal_head_dims": decoding(
        score=WITH_WINDOW, dtype=DTYPES, head_dims=[(64, 32), (32, 64)], paged=BOTH
    ),
    "head_dependent_mask_mod": decoding(score=WITH_WINDOW, mask="heads", heads=HEADS),
    "silu_on_score": decoding(score="silu", paged=BOTH),
    "padded_dense_causal": decoding(score="padded", paged=BOTH),
    "captured_scale": decoding(score="captured number", paged=BOTH),
    "recompile_changed_score_mod": decoding(
        score=["captured number", "captured factor"], paged=BOTH
    ),
    "non_pow_2_headdim": decoding(
        score="relative", lengths=(2048, 2048), head_dims=[(x, x) for x in (17, 24, 94, 121)]
    ),
    "njt_causal": decoding(score="nested", dtype=DTYPES, paged=BOTH),
    "windowed_no_mask_vs_sdpa": decoding(
        score="windowed", mask="none", heads=(16, 16), lengths=(8, 2048)
    ),
    "windowed_full_mask_vs_sdpa": decoding(
        score="windowed", mask="windowed", heads=(16, 16), lengths=(8, 2048)
    ),
    "windowed_partial_block_vs_sdpa": decoding(mask="windowed", heads=(16, 16), lengths=(8, 2048)),
    "windowed_no_mask_vs_sdpa_paged_attention": decoding(
        score="windowed", heads=(16, 16), lengths=(8, 2048), paged=True
    ),
    "windowed_full_mask_vs_sdpa_paged_attention": decoding(
        score="windowed", mask="windowed", heads=(16, 16), lengths=(8, 2048), paged=True
    ),
    "windowed_partial_block_vs_sdpa_paged_attention": decoding(
        mask="windowed", heads=(16, 16), lengths=(8, 2048), paged=True
    ),
    "not_pw_of_two": decoding(
        dtype="float32", batch=(1, 1), heads=(12, 2), lengths=(1, 128), head_dims=(16, 16)
    ),
    "non_sparse_mulitple_block_size": decoding(
        mask="until",
        dtype="float32",
        batch=(1, 1),
        heads=(1, 1),
        lengths=(1, 65),
        head_dims=(16, 16),
    ),
    "multi_block_m": decoding(
        mask="causal",
        dtype="float32",
        batch=(1, 1),
        heads=(32, 8),
        lengths=[(x, 128) for x in (4, 8, 16, 23, 64)],
        head_dims=(128, 128),
        block=16,
    ),
    "larger_block_mask_bug": decoding(
        mask="causal", batch=(2, 2), heads=(1, 1), lengths=(2, 2), head_dims=(16, 16)
    ),
    "decode_at_different_input_position": decoding(
        score=BUILTIN,
        mask="until",
        heads=(4, 4),
        lengths=(1, 512),
        head_dims=(16, 16),
        block=64,
        paged=True,
    ),
}

# By the functions of test_flex_calls.py, or test_case of test_flex_cases.py, that have what these
# tests are about.
ELSEWHERE = {
    "test_strided_inputs": "strided_inputs",
    "test_results_have_the_order_of_their_operands": """flex_attention_stride_ordering
        flex_attention_backward_stride_ordering""",
    "test_columns_apart": "non_contiguous_last_dim",
    "test_slices_of_one_projection": "eager_backward_strides",
    "test_keys_of_a_longer_cache": "strided_backwards",
    "test_aux": "return_max return_aux logsumexp_correctness force_write_lse",
    "test_one_way_to_ask_for_lse": "return_aux_deprecation_warnings",
    "test_autocast": "autocast",
    "test_calls_with_several_scores": """multiple_score_mod_calls multiple_score_mod_calls2
        multiple_score_mod_calls_paged_attention multiple_score_mod_calls2_paged_attention""",
    "test_two_masks": "multiple_mask_calls",
    "test_parts_are_merged_by_their_lse": "lse_masked_output",
    "test_gradcheck": """aot_eager_gradcheck captured_score_mod_aot_eager_gradcheck
        differentiable_logsumexp_gradcheck""",
    "test_gradients_of_lse": "differentiable_logsumexp_compiled",
    "test_queries_that_see_nothing": "fully_masked_out_rows_0_check",
    "test_one_query_and_key": "small_q_kv_len",
    "test_no_queries": "zero_length_sequence_error",
    "test_poison": """flex_attention_poisoned_rel_logits flex_attention_poison_mod_fwd
        flex_attention_poison_mod_bwd""",
    "test_lists_of_blocks": """custom_block_mask_generator forward_pass_with_none_q_indices
        backward_error_with_none_q_indices""",
    "test_a_row_of_a_mask": "broadcasted_head_block_mask",
    "test_narrow_keys_and_values": """mixed_dtypes_eager mixed_dtypes_compiled
        mixed_dtypes_sqnr_per_tensor mixed_dtypes_sqnr_per_head mixed_dtype_backwards_eager
        mixed_dtype_backwards_compiled""",
    "test_lengths_and_devices_are_checked": """block_mask_vs_sequence_lengths
        sliced_blockmask_mask_mod_error qkv_and_block_mask_on_the_same_device
        mixed_device_error_message""",
    "test_captured_on_another_device": "captured_wrong_device_error_message",
    "test_checkpoint": "selective_ac",
    "test_more_heads_than_a_dimension_of_a_grid": "large_batch_heads_grid_dimension",
    "test_case": "relative_1d_bias_only_grad",
}
DECODING_ELSEWHERE = {
    "test_strided_inputs": "strided_inputs tma_decoding",
    "test_calls_with_several_scores": """multiple_score_mod_calls multiple_score_mod_calls2
        multiple_score_mod_calls_paged_attention multiple_score_mod_calls_paged_attention2""",
    "test_narrow_keys_and_values": """mixed_dtypes mixed_dtypes_sqnr_per_tensor
        mixed_dtypes_sqnr_per_head mixed_dtype_backwards""",
    "test_queries_that_see_nothing": "fully_masked_out_rows_0_check_gqa",
    "test_case": "logsumexp_correctness",
}

# What compat.flex refuses, by the functions that assert it. torch's own tests expect that two of
# them fail, captured_reduction and cant_lower_error_message.
REFUSED = {
    "test_reductions_are_refused": "captured_reduction cant_lower_error_message",
    "test_gradients_that_are_not_traced_are_refused": "autograd_function_in_score_mod",
}
DECODING_REFUSED = {"test_reductions_are_refused": "captured_reduction"}

NOT_APPLICABLE = {
    "options of torch's kernels": """kernel_options_argument_is_respected
        backend_auto_matches_triton_large backend_triton_decode_matches_auto
        backend_triton_decode_errors_when_not_supported
        backend_triton_decode_errors_with_non_power_of_two_gqa
        backend_rejects_legacy_force_use_flag backend_defaults_and_rejects_invalid
        dynamic_shapes_with_custom_kernel_options triton_template_warp_specialization
        tma_with_customer_kernel_options float32_matmul_precision""",
    "the code, the log or the graphs of torch's compiler": """subgraph_respect_decompostion
        epilogue_fused logsumexp_only_return fw_bw_graph_correctness flex_attention_logging
        tensor_subclass_dispatch_order debug_flag_disables_internal_compilation
        cpu_error_message_return_lse""",
    "recompilation and dynamic shapes": "dynamic_divisibility_guards small_block_mask",
    "autotuning": """max_autotune max_autotune_with_captured dynamic_shapes_with_max_autotune
        selective_ac_with_max_autotune_short_query flex_attention_with_dynamic_max_autotune
        flex_attention_with_dynamic_max_autotune_graph_partition""",
    "create_block_mask and BlockMask, which are torch's own": """make_block_mask
        block_mask_attributes block_size_changes getitem block_mask_device_change
        compiling_create_block_mask compiling_create_block_mask_no_recompile block_mask_viz
        from_kv_blocks block_size init_mismatched_full_kv init_mismatched_full_q
        create_is_cuda_graphable from_kv_blocks_without_q_computation
        block_mask_operations_with_none_q_indices pytree_flatten_unflatten
        pytree_flatten_with_keys pytree_preserves_new_attributes""",
    "PagedAttention, which is torch's own": """page_allocation allocate
        convert_logical_block_mask convert_mask_mod update""",
    "two GPUs": "device_cuda_1",
}
DECODING_NOT_APPLICABLE = {
    "the code, the log or the graphs of torch's compiler": """subgraph_respect_decompostion
        logsumexp_only_return""",
    "recompilation and dynamic shapes": "do_not_trigger_dynamic_shapes_on_empty_block_mask",
    "autotuning": "max_autotune max_autotune_with_captured",
}
