"""An attention backend of vLLM.

    vllm serve MODEL --attention-backend CUTLASS_ATTN

vLLM finds it by the entry point of this package. In a program that vLLM's plugins do not reach,
`cutlass_attn.compat.vllm.register()` does the same. `backend` has the classes.
"""

from __future__ import annotations

from .._versions import check_version, plugin_of

NAME = "CUTLASS_ATTN"
SUPPORTED = (0, 33), (0, 34)  # tested with 0.33.0
_BACKEND = f"{__name__}.backend.CutlassAttnBackend"


def register(*, any_version: bool = False) -> None:
    """Adds the backend "CUTLASS_ATTN" to vLLM. May be called again.

    Args:
        any_version: warn, instead of raising, about a version of vLLM that is not supported.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: this version of vLLM is not supported.
    """
    import vllm

    check_version(vllm, *SUPPORTED, any_version)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, _BACKEND)


plugin = plugin_of(register)
