"""The classes that vLLM loads: backend, metadata, its builder, and the implementation of a layer.

A layer is one `append_kv`, which vLLM asks for by itself, and one `attention_varlen` for prefill,
chunked prefill and decoding. All lengths stay on the device, so a step plans nothing and a CUDA
graph replays with any lengths.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

import cutlass_attn

from . import NAME

_MAX_HEAD_SIZE = 256  # beyond it pages run on scalar kernels
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def _is_fp8(kv_cache_dtype: str | None) -> bool:
    return kv_cache_dtype in ("fp8", "fp8_e4m3")


class CutlassAttnBackend(AttentionBackend):
    """What vLLM asks before it builds a model: which calls this backend takes.

    A cache may have any block size and any of vLLM's layouts, as kernels take pages of any size
    and strides.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[CutlassAttnImpl]:
        return CutlassAttnImpl

    @staticmethod
    def get_builder_cls() -> type[CutlassAttnMetadataBuilder]:
        return CutlassAttnMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in list(AttentionType)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        if _is_fp8(kv_cache_dtype) and head_size % 16:
            return f"head_size is {head_size}; allowed with an fp8 cache: multiples of 16"
        return None


@dataclass
class CutlassAttnMetadata(AttentionMetadata):
    """A step's batch of B sequences. vLLM adds attributes for some layers."""

    num_actual_tokens: int  # rows of the batch, padding for a CUDA graph included
    query_start_loc: torch.Tensor  # (B + 1,) int32
    seq_lens: torch.Tensor  # (B,) int32, with the new tokens
    block_table: torch.Tensor  # (B, blocks) int32
    slot_mapping: torch.Tensor  # (T,) int64, negative for padding
    causal: bool


class CutlassAttnMetadataBuilder(AttentionMetadataBuilder[CutlassAttnMetadata]):
    """Passes on the tensors of vLLM, which lie in its persistent buffers."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CutlassAttnMetadata:
        """Raises NotImplementedError for cascade attention, and a causal mask per sequence."""
        batch = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(
                f"backend {NAME} has no cascade attention: common_prefix_len is "
                f"{common_prefix_len}; allowed: 0"
            )
        if not isinstance(batch.causal, bool):
            raise NotImplementedError(
                f"backend {NAME} has no causal mask of some sequences: causal is a "
                f"{type(batch.causal).__name__}; allowed: True, False"
            )
        return CutlassAttnMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
        )

    def update_block_table(
        self, metadata: CutlassAttnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CutlassAttnMetadata:
        metadata = copy.copy(metadata)  # with the attributes that vLLM added
        metadata.block_table, metadata.slot_mapping = blk_table, slot_mapping
        return metadata

    def update_draft_decode_metadata(self, metadata: CutlassAttnMetadata) -> None:
        """Nothing is derived from the tensors, which vLLM updates in place."""


class CutlassAttnImpl(AttentionImpl[CutlassAttnMetadata]):
    """Attention of one layer.

    Args:
        num_heads: Hq, of this rank.
        head_size: D.
        scale: factor of the products.
        num_kv_heads: Hkv; None: Hq.
        alibi_slopes: Hq slopes.
        sliding_window: keys that a query sees, itself among them; of an encoder also after it.
        kv_cache_dtype: as in `CutlassAttnBackend.supported_kv_cache_dtypes`.
        logits_soft_cap: if positive, a scaled logit s becomes ``softcap * tanh(s / softcap)``.
        attn_type: of `AttentionType`.
        kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM then writes none.
        sinks: (Hq,), attention sinks.

    Raises:
        NotImplementedError: a kv_cache_dtype that is not supported.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in CutlassAttnBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"backend {NAME} has no cache of kv_cache_dtype {kv_cache_dtype!r}; allowed: "
                f"{', '.join(CutlassAttnBackend.supported_kv_cache_dtypes)}"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = (-1, -1)
        if sliding_window is not None:
            is_two_sided = attn_type == AttentionType.ENCODER_ONLY
            self.window = (sliding_window - 1, sliding_window - 1 if is_two_sided else 0)
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "window": self.window,
            "softcap": logits_soft_cap or 0.0,
        }
        if alibi_slopes is not None:
            self.options["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        if sinks is not None:
            self.options["sinks"] = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks in float32, which kernels take; they have the weights' dtype before."""
        if self.sinks is not None:
            self.options["sinks"] = self.sinks.detach().float().contiguous()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CutlassAttnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the cache, or over key and value in an encoder, written to output.

        Args:
            layer: has the scales of the cache.
            query: (T or more, Hq, D).
            key: (T or more, Hkv, D); read in an encoder alone, as is value.
            value: as key.
            kv_cache: (blocks, Hkv, block size, 2 D), of any strides: K, then V.
            attn_metadata: None in vLLM's profiling run, which gets zeros.
            output: (T or more, Hq, D).
            output_scale: must be None, as must output_block_scale.

        Raises:
            NotImplementedError: output is to be quantized.
        """
        for name, x in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if x is not None:
                raise NotImplementedError(
                    f"backend {NAME} does not quantize its output: {name} is given; allowed: None"
                )
        if attn_metadata is None:
            return output.fill_(0)
        batch, rows = attn_metadata, attn_metadata.num_actual_tokens
        call: dict[str, Any] = {**self.options, "out": output[:rows]}
        if self.attn_type in _WITHOUT_CACHE:
            assert key is not None and value is not None
            k, v = key[:rows], value[:rows]
            call["causal"] = False
        else:
            k, v = self._cache(kv_cache)
            call |= {"seqused_k": batch.seq_lens, "block_table": batch.block_table}
            call |= {"causal": batch.causal, **self._scales(layer)}
        cutlass_attn.attention_varlen(query[:rows], k, v, batch.query_start_loc, **call)
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes key and value, (rows, Hkv, D), to the slots; rows beyond them are padding."""
        if self.attn_type not in _WITHOUT_CACHE:
            k, v = self._cache(kv_cache)
            cutlass_attn.append_kv(key, value, k, v, slot_mapping, **self._scales(layer))

    def _cache(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """K and V, (blocks, block size, Hkv, D)."""
        if _is_fp8(self.kv_cache_dtype):
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def _scales(self, layer: Any) -> dict[str, torch.Tensor]:
        """The scales are for the fp8 cache; vLLM's other caches ignore them."""
        if not _is_fp8(self.kv_cache_dtype):
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
