"""Where `explain` and `variants` were before they had modules of their own names."""

from .explain import Explanation, Verdict, explain
from .variants import BuildInfo, Variant, accumulate_of, build_info, variants

__all__ = [
    "BuildInfo",
    "Explanation",
    "Variant",
    "Verdict",
    "accumulate_of",
    "build_info",
    "explain",
    "variants",
]
