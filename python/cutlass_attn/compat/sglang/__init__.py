"""An attention backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --attention-backend cutlass_attn

Models with latent attention (MLA) get a class of their own under the same name. SGLang finds them
by the entry point of this package. In a program that SGLang's plugins do not reach,
`cutlass_attn.compat.sglang.register()` does the same, before its ServerArgs are made. `backend` and
`mla` have the classes.
"""

from __future__ import annotations

from typing import Any

from .._versions import check_version, plugin_of

NAME = "cutlass_attn"
SUPPORTED = (0, 5, 23), (0, 5, 24)  # tested with 0.5.23


def register(*, any_version: bool = False) -> None:
    """Adds the backend "cutlass_attn" to SGLang. May be called again.

    Args:
        any_version: warn, instead of raising, about a version of SGLang that is not supported.

    Raises:
        ImportError: SGLang is not installed.
        RuntimeError: this version of SGLang is not supported.
    """
    import sglang

    check_version(sglang, *SUPPORTED, any_version)
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )
    from sglang.srt.server_args import (
        add_attention_backend_choices,
        add_chunked_prefix_cache_attention_backend,
    )

    if NAME not in ATTENTION_BACKENDS:
        add_attention_backend_choices([NAME])
        add_chunked_prefix_cache_attention_backend(NAME)
        register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    if runner.use_mla_backend:
        from .mla import CutlassAttnMLABackend

        return CutlassAttnMLABackend(runner)
    from .backend import CutlassAttnBackend

    return CutlassAttnBackend(runner)


plugin = plugin_of(register)
