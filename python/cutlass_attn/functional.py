"""Where `attention` was before it had a module of its own name."""

from .attention import attention

__all__ = ["attention"]
