"""Attention backends of vLLM.

    vllm serve MODEL --attention-backend CUTLASS_ATTN

and for models with latent attention (MLA), of DeepSeek or Kimi:

    vllm serve MODEL --attention-backend CUTLASS_ATTN_MLA -ac.mla_prefill_backend=CUTLASS_ATTN

vLLM finds them by the entry point of this package. In a program that vLLM's plugins do not reach,
`cutlass_attn.compat.vllm.register()` does the same. `backend` and `mla` have the classes.
"""

from __future__ import annotations

from .._versions import check_version, plugin_of

NAME = "CUTLASS_ATTN"
NAME_MLA = "CUTLASS_ATTN_MLA"
SUPPORTED = (0, 33), (0, 34)  # tested with 0.33.0
_BACKENDS = {
    NAME: f"{__name__}.backend.CutlassAttnBackend",
    NAME_MLA: f"{__name__}.mla.CutlassAttnMLABackend",
}
_MLA_PREFILL = f"{__name__}.mla.CutlassAttnPrefillBackend"


def register(*, any_version: bool = False) -> None:
    """Adds the backends "CUTLASS_ATTN" and "CUTLASS_ATTN_MLA", and "CUTLASS_ATTN" for the prefill
    of MLA models, to vLLM. May be called again.

    Args:
        any_version: warn, instead of raising, about a version of vLLM that is not supported.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: this version of vLLM is not supported.
    """
    import vllm

    check_version(vllm, *SUPPORTED, any_version)
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in _BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
    if NAME not in MLAPrefillBackendEnum.__members__:
        register_mla_prefill_backend(NAME, _MLA_PREFILL)


plugin = plugin_of(register)
