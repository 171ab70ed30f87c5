"""The classes that vLLM loads for latent attention (MLA): a backend, and one for its prefill.

vLLM's base classes write the cache, divide a step into decoding and prefill, expand latents for
prefill and merge the parts of a context. Here are `attention_decode` over latents and
`attention_varlen` over expanded keys, which plan nothing on the host.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

import cutlass_attn

from . import NAME, NAME_MLA

_MAX_EXPANDED_HEAD_SIZE = 256
_DS_MLA = "fp8_ds_mla"  # 656 bytes a token, for 576 columns of bfloat16


class CutlassAttnMLABackend(MLACommonBackend):
    """What vLLM asks before it builds a model. Blocks of the cache may have any size."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", _DS_MLA]

    @staticmethod
    def get_name() -> str:
        return NAME_MLA

    @staticmethod
    def get_impl_cls() -> type[CutlassAttnMLAImpl]:
        return CutlassAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CutlassAttnMLAMetadataBuilder]:
        return CutlassAttnMLAMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a step of decoding has equally many queries of each sequence

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        if kv_cache_dtype == _DS_MLA and (head_size, dtype) != (576, torch.bfloat16):
            return (
                f"head_size is {head_size} and dtype {dtype}; allowed with kv_cache_dtype "
                f"{_DS_MLA}: 576 and torch.bfloat16"
            )
        return None


class CutlassAttnMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's own: decoding needs its block table and lengths, and nothing else."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM


class CutlassAttnMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """Attention of one layer: decoding over latents. Prefill is that of the base class.

    Args:
        num_heads: Hq, of this rank.
        head_size: columns of a latent, rotated ones included.
        scale: factor of the products.
        num_kv_heads: 1.
        alibi_slopes: must be None, as must sliding_window and logits_soft_cap.
        sliding_window: see alibi_slopes.
        kv_cache_dtype: as in `CutlassAttnMLABackend.supported_kv_cache_dtypes`.
        logits_soft_cap: see alibi_slopes.
        attn_type: must be that of a decoder.
        kv_sharing_target_layer_name: must be None.
        mla_args: of vLLM's base class.

    Raises:
        NotImplementedError: an argument has another value; sparse attention is among them.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        for name, given, allowed in (
            ("head_size", head_size, CutlassAttnMLABackend.get_supported_head_sizes()),
            ("alibi_slopes", alibi_slopes, [None]),
            ("sliding_window", sliding_window, [None]),
            ("kv_cache_dtype", kv_cache_dtype, CutlassAttnMLABackend.supported_kv_cache_dtypes),
            ("logits_soft_cap", logits_soft_cap, [None]),
            ("attn_type", attn_type, [AttentionType.DECODER.value]),
            ("indexer", mla_args.get("indexer"), [None]),
            ("topk_indices_buffer", mla_args.pop("topk_indices_buffer", None), [None]),
        ):
            if given not in allowed:
                raise NotImplementedError(
                    f"backend {NAME_MLA} does not support {name}={given!r:.40}; allowed: "
                    f"{', '.join(map(str, allowed))}"
                )
        super().__init__(
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
            **mla_args,
        )
        self.supports_quant_query_input = False  # queries keep their 16 bits with an 8-bit cache

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a step's decoding queries over the cache.

        Args:
            q: (T, Hq, columns), float16 or bfloat16, after absorption, or its latent and its
                rotated part; T is the number of sequences that decode, times the queries of each.
            kv_c_and_k_pe_cache: (blocks, block size, columns) in q's dtype; with "fp8_ds_mla"
                (blocks, block size, 656) bytes.
            attn_metadata: of `CutlassAttnMLAMetadataBuilder`.
            layer: not read.

        Returns:
            (T, Hq, kv_lora_rank), and the log-sum-exp, natural, (T, Hq) float32. A sequence without
            keys gets 0 and -inf, as the padding of a CUDA graph does.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        step = attn_metadata.decode
        assert step is not None
        latents = kv_c_and_k_pe_cache.unsqueeze(2)
        is_ds_mla = self.kv_cache_dtype == _DS_MLA
        out, lse = cutlass_attn.attention_decode(
            q.unflatten(0, (attn_metadata.num_decodes, -1)),
            latents,
            latents if is_ds_mla else latents[..., : self.kv_lora_rank],
            step.seq_lens,
            block_table=step.block_table,
            kv_format="ds_mla" if is_ds_mla else None,
            softmax_scale=self.scale,
            return_lse=True,
        )
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


class CutlassAttnPrefillBackend(MLAPrefillBackend):
    """Attention of prefill over expanded keys (T, Hq, D) and values (T, Hq, Dv): 192 and 128
    columns in DeepSeek's models."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major >= 8

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        head_dim = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return all(
            n % 8 == 0 and n <= _MAX_EXPANDED_HEAD_SIZE
            for n in (head_dim, mla_dimensions.v_head_dim)
        )

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Causal attention of the new tokens of each sequence among themselves.

        Args:
            q: (T, Hq, D), float16 or bfloat16, as k, v and out.
            k: (T, Hq, D).
            v: (T, Hq, Dv).
            return_softmax_lse: whether to return the log-sum-exp as well.
            out: (T, Hq, Dv), written and returned if given.
            output_scale: must be None.

        Returns:
            (T, Hq, Dv); with `return_softmax_lse` also the natural log-sum-exp, (Hq, T) float32.

        Raises:
            NotImplementedError: output_scale is given.
        """
        if output_scale is not None:
            raise NotImplementedError(
                f"MLA prefill backend {NAME} does not quantize its output: output_scale is given; "
                "allowed: None"
            )
        starts = self._prefill_metadata.query_start_loc
        return cutlass_attn.attention_varlen(
            q,
            k,
            v,
            starts,
            starts,
            causal=True,
            softmax_scale=self.scale,
            return_lse=return_softmax_lse,
            out=out,
        )

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Attention of new tokens, q (T, Hq, D), over a part of their context, k (Tk, Hq, D) and
        v (Tk, Hq, Dv): (T, Hq, Dv) and the natural log-sum-exp, (Hq, T) float32."""
        return cutlass_attn.attention_varlen(
            q,
            k,
            v,
            chunk.query_start_loc,
            chunk.cu_seq_lens,
            softmax_scale=self.scale,
            return_lse=True,
            out=out,
        )
