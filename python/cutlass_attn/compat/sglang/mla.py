"""The attention backend of SGLang for models with latent attention (MLA).

Decoding and short contexts run over the latents of the cache. For long prefill SGLang expands keys
and values, decides as it does for FlashAttention-3, and merges the parts of a context.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    handle_attention_fa3,
)

import cutlass_attn

from . import NAME
from .backend import CutlassAttnBackend

_MAX_COLUMNS = 576

# SGLang's rule for choosing latents or expanded keys. Without this line it would use Triton's,
# which never expands a context.
AttentionBackendRegistry.register(NAME, handle_attention_fa3)


class CutlassAttnMLABackend(CutlassAttnBackend):
    """Latent attention of a model: extend, decode, mixed batches; CUDA graphs of decode.

    Args:
        model_runner: SGLang's, with its pools.

    Raises:
        NotImplementedError: as `CutlassAttnBackend`, or attention is sparse (DSA), or latents have
            too many columns.
    """

    cache_dtypes = torch.float16, torch.bfloat16
    plain: ClassVar[dict[str, Any]] = {
        **CutlassAttnBackend.plain,
        "attn_type": AttentionType.DECODER,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "use_irope": False,
    }

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        config = model_runner.model_config
        columns = config.kv_lora_rank + config.qk_rope_head_dim
        for what, is_there in (
            ("sparse attention (DSA)", getattr(self.token_to_kv_pool, "use_dsa", False)),
            (
                f"latents of {columns} columns (kv_lora_rank + qk_rope_head_dim); allowed: up to "
                f"{_MAX_COLUMNS}",
                columns > _MAX_COLUMNS,
            ),
        ):
            if is_there:
                raise NotImplementedError(f'backend "{NAME}" has no {what}')

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Attention of a layer's queries over the latents of the cache, into which new ones go
        first, or over expanded keys and values.

        Args:
            q: (T, Hq D), or of three dimensions, float16 or bfloat16, as all others; with q_rope
                its latent columns alone. D is that of latents, or of expanded keys; rows behind
                those of the batch are padding.
            k: (T, 1, D), with k_rope its latent columns alone; None where the cache has them. Or
                (Tk, Hq, D), expanded.
            v: (T, 1, Dv), not read; or (Tk, Hq, Dv), expanded.
            layer: a RadixAttention, over latents or over expanded keys.
            forward_batch: the batch of `init_forward_metadata`.
            save_kv_cache: whether k is to be written.
            sinks: must be None.
            q_rope: (T, Hq, rotated columns), behind those of q.
            k_rope: (T, 1, rotated columns), behind those of k.

        Returns:
            (T, Hq Dv); rows of padding hold anything. Where SGLang asks for the log-sum-exp of
            expanded keys, (T, Hq, Dv) and (T, Hq) float32.

        Raises:
            NotImplementedError: another keyword than these has a value, or the layer is not
                supported.
        """
        self._require_plain(layer, {**options, "sinks": sinks})
        step, pool = self.forward_metadata, self.token_to_kv_pool
        assert step is not None
        latents = pool.get_key_buffer(layer.layer_id)
        call: dict[str, Any] = {"softmax_scale": layer.scaling}
        if layer.qk_head_dim != latents.shape[-1]:
            return self._over_expanded(q, k, v, layer, forward_batch, call)
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer)
            if k_rope is None:
                pool.set_kv_buffer(layer, where, k, v)
            else:
                pool.set_mla_kv_buffer(layer, where, k, k_rope)
        columns, heads = layer.qk_head_dim, layer.tp_q_head_num
        if q_rope is None:
            q = q.reshape(-1, heads, columns)
        else:
            parts = (q, layer.v_head_dim), (q_rope, columns - layer.v_head_dim)
            q = torch.cat([x.reshape(-1, heads, n) for x, n in parts], dim=-1)
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        keys = self._paged(latents)
        call |= {"block_table": step.pages, "causal": True}
        values = keys[..., : layer.v_head_dim]
        if forward_batch.forward_mode.is_decode():
            # Tiles of this function are those of one query a sequence.
            rows, call["out"] = q[: len(step.seq_lens), None], out[: len(step.seq_lens), None]
            cutlass_attn.attention_decode(rows, keys, values, step.seq_lens, **call)
        else:
            call |= {"seqused_k": step.seq_lens, "out": out}
            cutlass_attn.attention_varlen(q, keys, values, step.cu_seqlens_q, **call)
        return out.flatten(1)

    forward_decode = forward_extend

    def _over_expanded(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any, call: dict[str, Any]
    ) -> Any:
        """Prefill over the new tokens' keys, or all of the sequences', or a part of a context's."""
        step = self.forward_metadata
        assert step is not None
        starts = step.cu_seqlens_q
        if batch.attn_attend_prefix_cache:
            starts = batch.prefix_chunk_cu_seq_lens[batch.prefix_chunk_idx]
        elif batch.mha_one_shot:
            ends = torch.cumsum(step.seq_lens, 0, dtype=torch.int32)
            starts = torch.nn.functional.pad(ends, (1, 0))
        call |= {"causal": not batch.attn_attend_prefix_cache, "return_lse": True}
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out, lse = cutlass_attn.attention_varlen(q, k, v, step.cu_seqlens_q, starts, **call)
        return (out, lse.T.contiguous()) if batch.mha_return_lse else out.flatten(1)
