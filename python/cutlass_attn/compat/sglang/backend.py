"""The attention backend of SGLang: one `attention_varlen` over pages, for extend and decode.

A step gathers the page tables of its requests on the device and nothing else, inside the graph
where there is one. SGLang's pool writes the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

import cutlass_attn

from . import NAME


@dataclass
class Metadata:
    """A batch of B sequences."""

    cu_seqlens_q: torch.Tensor  # (B + 1,) int32
    seq_lens: torch.Tensor  # (B,) int32, with the new tokens
    pages: torch.Tensor  # (B, pages) int32
    # The same of the pool for layers with a sliding window, and the slots of new tokens there.
    window_pages: torch.Tensor | None
    window_slots: torch.Tensor | None


class CutlassAttnBackend(AttentionBackend):
    """Dense attention of a model: extend, decode, mixed batches; CUDA graphs of decode.

    Args:
        model_runner: SGLang's, with its pools.

    Raises:
        NotImplementedError: the model has an encoder with cross attention, decoding is speculative
            or its context divided among GPUs, or the cache's dtype or layout is not supported.
    """

    needs_cpu_seq_lens = False
    cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
    )
    # Attributes of a layer that the backend ignores, and the only values that it accepts.
    plain: ClassVar[dict[str, Any]] = {
        "is_cross_attention": False,
        "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh",
        "xai_temperature_len": -1,
    }

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool, dtype = model_runner.token_to_kv_pool, model_runner.kv_cache_dtype
        dtypes = ", ".join(str(x).removeprefix("torch.") for x in self.cache_dtypes)
        for what, is_there in (
            ("cross attention", model_runner.model_config.is_encoder_decoder),
            ("speculative decoding", model_runner.spec_algorithm.is_speculative()),
            ("decode context parallelism", model_runner.server_args.dcp_size > 1),
            (f"cache of {dtype}; allowed: {dtypes}", dtype not in self.cache_dtypes),
        ):
            if is_there:
                raise NotImplementedError(f'backend "{NAME}" has no {what}')
        self.is_fp8 = dtype == torch.float8_e4m3fn
        self.page_size = model_runner.page_size
        self.attention_chunk = model_runner.attention_chunk_size
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = pool
        self.has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        # First rows of sequences of one query.
        sizes = self.req_to_token.shape[0] + 1
        self.each = torch.arange(sizes, dtype=torch.int32, device=self.req_to_token.device)
        self.forward_metadata: Metadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        batch, page = forward_batch, self.page_size
        if batch.forward_mode.is_decode_or_idle():
            cu_seqlens_q = self.each[: batch.batch_size + 1]
        else:
            ends = torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32)
            cu_seqlens_q = torch.nn.functional.pad(ends, (1, 0))
        # The first slot of each page; entries beyond a length are stale, and are not read.
        slots = self.req_to_token[:, ::page].index_select(0, batch.req_pool_indices)
        window_pages = window_slots = None
        if self.has_window_pool:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            window_pages = (translate(slots) // page).int()
            if batch.out_cache_loc is not None:
                window_slots = translate(batch.out_cache_loc)
        seq_lens, pages = batch.seq_lens.int(), slots // page
        self.forward_metadata = Metadata(cu_seqlens_q, seq_lens, pages, window_pages, window_slots)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: what the graph computes for itself lies in its own memory."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(
                f'backend "{NAME}" has no full CUDA graph of {forward_batch.forward_mode.name}; '
                "allowed: DECODE, IDLE"
            )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.init_forward_metadata(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of a layer's queries over the cache, into which new keys go first.

        Args:
            q: (T, Hq D), or of three dimensions; rows behind those of the batch are padding.
            k: (T, Hkv, D); None where the cache has them.
            v: (T, Hkv, Dv), or None.
            layer: a RadixAttention.
            forward_batch: the batch of `init_forward_metadata`.
            save_kv_cache: whether k and v are to be written.
            sinks: (Hq,), attention sinks.

        Returns:
            (T, Hq Dv); rows of padding hold anything.

        Raises:
            NotImplementedError: another keyword than these has a value, or the layer is not
                supported.
        """
        self._require_plain(layer, options)
        step = self.forward_metadata
        assert step is not None
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=step.window_slots)
            pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        keys = self._paged(pool.get_key_buffer(layer.layer_id))
        values = self._paged(pool.get_value_buffer(layer.layer_id))
        causal = layer.attn_type == AttentionType.DECODER
        left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        call: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "softcap": layer.logit_cap or 0.0,
            "causal": causal,
            "window": (left, -1 if left < 0 else 0 if causal else left),
        }
        if layer.use_irope:
            call["attention_chunk"] = self.attention_chunk
        if sinks is not None:
            call["sinks"] = sinks.float()
        if self.is_fp8 and layer.k_scale is not None:
            call |= {"k_scale": layer.k_scale.float(), "v_scale": layer.v_scale.float()}
        is_windowed = left >= 0 and step.window_pages is not None
        cutlass_attn.attention_varlen(
            q,
            keys,
            values,
            step.cu_seqlens_q,
            seqused_k=step.seq_lens,
            block_table=step.window_pages if is_windowed else step.pages,
            out=out,
            **call,
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def _require_plain(self, layer: Any, options: dict[str, Any]) -> None:
        """Raises NotImplementedError if the layer has another value than its entry in `plain`, or
        the call has one of these keywords."""
        asked = [(name, x, None) for name, x in options.items() if x is not False]
        asked += [(name, getattr(layer, name, x), x) for name, x in self.plain.items()]
        for name, given, allowed in asked:
            if given is not None and given != allowed:
                raise NotImplementedError(
                    f'backend "{NAME}" has no {name}, which this model uses: {given!r:.40}; '
                    f"allowed: {allowed}"
                )

    def _paged(self, buffer: torch.Tensor) -> torch.Tensor:
        """(pages, page, Hkv, D) of a pool's (slots, Hkv, D)."""
        if buffer.dim() != 3:
            raise NotImplementedError(
                f'backend "{NAME}" has no pool whose buffers have {buffer.dim()} dimensions; '
                "allowed: 3, (slots, heads, head_dim)"
            )
        return buffer.unflatten(0, (-1, self.page_size))
