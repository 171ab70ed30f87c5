from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MLADimensions:
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class MLAPrefillBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name(): ...

    @classmethod
    def supports_compute_capability(cls, device_capability):
        return True

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions):
        return True

    def supports_out(self):
        return False

    def __init__(
        self,
        num_heads,
        scale,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
        vllm_config,
    ):
        given = num_heads, scale, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.given, self.scale = (*given, vllm_config), scale

    def clone(self):
        return self.__class__(*self.given)

    def prepare_metadata(self, prefill_metadata):
        self._prefill_metadata = prefill_metadata

    @abstractmethod
    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None): ...

    @abstractmethod
    def run_prefill_context_chunk(self, chunk, q, k, v, out=None): ...
