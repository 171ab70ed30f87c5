"""vLLM's classes for latent attention, without context parallelism or fp8 queries, and with chunks
of a context that belong to one sequence each."""

import itertools
from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import torch

from vllm import _custom_ops as ops
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states


class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "TRITON_MLA"

    @staticmethod
    def get_builder_cls():
        return MLACommonMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls):
        return [320, 512, 576]

    @classmethod
    def is_mla(cls):
        return True


@dataclass
class MLACommonPrefillMetadata:
    @dataclass
    class ContextChunk:
        index: int
        request_slice: slice
        token_slice: slice
        continuation_token_end: int
        is_continuation: bool
        num_context_tokens: int
        query_start_loc: object
        max_query_len: int
        cu_seq_lens: object
        starts: object
        max_seq_len: int
        seq_lens: object
        token_to_seq: object
        all_rows_active: bool

        @property
        def num_requests(self):
            return self.request_slice.stop - self.request_slice.start

    @dataclass
    class ChunkedContextMetadata:
        context_lens: object
        workspace: object
        chunks: list
        context_lens_list: list
        empty_token_slices: list

    block_table: object
    query_start_loc: object
    max_query_len: int
    chunked_context: object = None
    q_data_type: object = None
    output_dtype: object = None
    prefill_backend: object = None
    query_lens_cpu: object = None


@dataclass
class MLACommonDecodeMetadata:
    block_table: object
    seq_lens: object
    dcp_tot_seq_lens: object


D = TypeVar("D")


@dataclass
class MLACommonMetadata(AttentionMetadata, Generic[D]):
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: object
    slot_mapping: object
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    causal: bool = True
    head_dim: int | None = None
    prefill: object = None
    decode: object = None


M = TypeVar("M")


def _int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def _context_of(common, first, workspace):
    starts = (common.query_start_loc_cpu[first:] - common.query_start_loc_cpu[first]).tolist()
    lengths = common.seq_lens_cpu_upper_bound[first:].tolist()
    chunks = []
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        lengths[i] -= end - begin
        for done in range(0, lengths[i], len(workspace)):
            keys = min(len(workspace), lengths[i] - done)
            chunks.append(
                MLACommonPrefillMetadata.ContextChunk(
                    index=len(chunks),
                    request_slice=slice(i, i + 1),
                    token_slice=slice(begin, end),
                    continuation_token_end=end,
                    is_continuation=done > 0,
                    num_context_tokens=keys,
                    query_start_loc=_int32([0, end - begin]),
                    max_query_len=end - begin,
                    cu_seq_lens=_int32([0, keys]),
                    starts=_int32([done]),
                    max_seq_len=keys,
                    seq_lens=_int32([keys]),
                    token_to_seq=_int32([0] * keys),
                    all_rows_active=True,
                )
            )
    if not chunks:
        return None
    return MLACommonPrefillMetadata.ChunkedContextMetadata(
        _int32(lengths), workspace, chunks, lengths, []
    )


class MLACommonMetadataBuilder(AttentionMetadataBuilder[M]):
    query_len_support = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold = 1

    def __init__(
        self,
        kv_cache_spec,
        layer_names,
        vllm_config,
        device,
        metadata_cls=None,
        supports_dcp_with_varlen=False,
    ):
        model, cache = vllm_config.model_config, vllm_config.cache_config
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.metadata_cls = metadata_cls or MLACommonMetadata
        seqs = vllm_config.scheduler_config.max_num_seqs
        rows = max(8 * model.max_model_len, 4 * seqs * cache.block_size)
        dtype = torch.bfloat16 if cache.cache_dtype == "fp8_ds_mla" else model.dtype
        columns = layer.kv_lora_rank + layer.qk_rope_head_dim
        self.workspace = torch.empty(rows, columns, dtype=dtype)
        self._prefill_backend = layer.prefill_backend.clone()
        drafts = vllm_config.speculative_config
        if drafts is not None and self.query_len_support != QueryLenSupport.SINGLE_ONLY:
            self.reorder_batch_threshold = 1 + drafts.num_speculative_tokens

    def _build_decode(
        self,
        block_table_tensor,
        seq_lens_device,
        max_seq_len,
        query_start_loc_cpu,
        query_start_loc_device,
        num_decode_tokens,
        max_query_len,
        dcp_tot_seq_lens_device,
    ):
        return MLACommonDecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        starts, table = common.query_start_loc_cpu, common.block_table_tensor
        rows = starts.diff().tolist()
        decodes = common.num_reqs
        if common.max_query_len > self.reorder_batch_threshold:
            decodes = [*[n > self.reorder_batch_threshold for n in rows], True].index(True)
        tokens = common.num_actual_tokens if decodes == common.num_reqs else int(starts[decodes])
        prefill = decode = None
        if decodes < common.num_reqs:
            prefill = MLACommonPrefillMetadata(
                block_table=table[decodes:],
                query_start_loc=common.query_start_loc[decodes:] - starts[decodes],
                max_query_len=common.max_query_len,
                chunked_context=_context_of(common, decodes, self.workspace),
                prefill_backend=self._prefill_backend,
            )
            self._prefill_backend.prepare_metadata(prefill)
        if decodes:
            decode = self._build_decode(
                table[:decodes],
                common.seq_lens[:decodes],
                common.max_seq_len,
                starts[: decodes + 1],
                common.query_start_loc[: decodes + 1],
                tokens,
                min(common.max_query_len, self.reorder_batch_threshold),
                None,
            )
        return self.metadata_cls(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=tokens,
            num_prefills=common.num_reqs - decodes,
            prefill=prefill,
            decode=decode,
        )


def _expanded(impl, kv_c, k_pe):
    kv = impl.kv_b_proj(kv_c)[0].unflatten(-1, (impl.num_heads, -1))
    k, v = kv.split([impl.qk_nope_head_dim, impl.v_head_dim], dim=-1)
    k_pe = k_pe.unsqueeze(1) if k_pe.dim() == 2 else k_pe
    return torch.cat([k, k_pe.expand(-1, impl.num_heads, -1)], dim=-1), v


class MLACommonImpl(MLAAttentionImpl[M], Generic[M]):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        qk_head_dim,
        v_head_dim,
        kv_b_proj,
        indexer=None,
        q_pad_num_heads=None,
    ):
        if kv_sharing_target_layer_name is not None:
            raise NotImplementedError("KV sharing is not supported for MLA")
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.kv_lora_rank, self.kv_b_proj = kv_lora_rank, kv_b_proj
        self.qk_nope_head_dim, self.v_head_dim = qk_nope_head_dim, v_head_dim
        self.supports_quant_query_input = True

    def _compute_prefill_context(self, q, kv_c_and_k_pe_cache, attn_metadata, k_scale):
        prefill = attn_metadata.prefill
        context = prefill.chunked_context
        out = q.new_zeros(len(q), self.num_heads, self.v_head_dim)
        lse = torch.full((self.num_heads, len(q)), -torch.inf)
        for chunk in context.chunks:
            rows, at = context.workspace[: chunk.num_context_tokens], chunk.token_slice
            what = {
                "src_cache": kv_c_and_k_pe_cache,
                "dst": rows,
                "block_table": prefill.block_table[chunk.request_slice],
                "seq_starts": chunk.starts,
            }
            if self.kv_cache_dtype == "fp8_ds_mla":
                ops.cp_gather_and_upconvert_fp8_kv_cache(
                    **what, workspace_starts=chunk.cu_seq_lens, batch_size=chunk.num_requests
                )
            else:
                ops.gather_and_maybe_dequant_cache(
                    **what,
                    cu_seq_lens=chunk.cu_seq_lens,
                    token_to_seq=chunk.token_to_seq,
                    num_tokens=len(rows),
                    kv_cache_dtype=self.kv_cache_dtype,
                    scale=k_scale,
                )
            k, v = _expanded(self, rows[:, : self.kv_lora_rank], rows[:, self.kv_lora_rank :])
            part = prefill.prefill_backend.run_prefill_context_chunk(chunk=chunk, q=q[at], k=k, v=v)
            merge_attn_states(out[at], out[at], lse[:, at], *part, output_lse=lse[:, at])
        return out, lse

    def forward_mha(
        self,
        q,
        kv_c_normed,
        k_pe,
        kv_c_and_k_pe_cache,
        attn_metadata,
        k_scale,
        output,
        output_scale=None,
    ):
        prefill = attn_metadata.prefill
        k, v = _expanded(self, kv_c_normed, k_pe)
        has_context = prefill.chunked_context is not None
        found = prefill.prefill_backend.run_prefill_new_tokens(
            q=q, k=k, v=v, return_softmax_lse=has_context, out=None, output_scale=None
        )
        if not has_context:
            output.copy_(found.flatten(-2))
            return
        context = self._compute_prefill_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
        merge_attn_states(output.unflatten(-1, (self.num_heads, -1)), *context, *found)

    @abstractmethod
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...
