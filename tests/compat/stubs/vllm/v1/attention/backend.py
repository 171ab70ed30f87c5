from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def get_supported_head_sizes(cls):
        return []

    @classmethod
    def supports_head_size(cls, head_size):
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def is_mla(cls):
        return False

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_non_causal(cls):
        return False

    @classmethod
    def supports_per_head_quant_scales(cls):
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        return True

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        device_capability,
    ):
        return None


class AttentionMetadata: ...


@dataclass
class CommonAttentionMetadata:
    query_start_loc: object
    query_start_loc_cpu: object
    seq_lens: object
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: object
    slot_mapping: object
    causal: object = True
    logits_indices_padded: object = None
    num_logits_indices: object = None
    max_logits_per_req: object = None
    encoder_seq_lens: object = None
    encoder_seq_lens_cpu: object = None
    dcp_local_seq_lens: object = None
    dcp_local_seq_lens_cpu_upper_bound: object = None
    positions: object = None
    is_prefilling: object = None
    seq_lens_cpu_upper_bound: object = None


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata):
        raise NotImplementedError


class AttentionImplBase(ABC, Generic[T]):
    supports_quant_query_input = False
    can_return_lse_for_decode = False
    lse_base_on_e = True
    supports_pcp = False
    supports_dcp = False

    def process_weights_after_loading(self, act_dtype): ...


class AttentionImpl(AttentionImplBase[T], Generic[T]):
    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...


class MLAAttentionImpl(AttentionImplBase[T], Generic[T]):
    supports_pcp = True

    @abstractmethod
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
    ): ...

    @abstractmethod
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...
