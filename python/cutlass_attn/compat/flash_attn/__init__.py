"""The functions of the package flash_attn (version 2), computed by cutlass_attn.

    from cutlass_attn.compat.flash_attn import flash_attn_func  # was: from flash_attn import ...

Names, arguments, defaults, layouts and results are those of flash_attn 2.8; docs/drop-in.md says
where they go beyond it (head dims up to 512, any page size, CPU tensors) and what differs.
`install()` puts them in the place of the package for libraries that import it themselves.
"""

from ._install import VERSION as __version__
from ._install import install
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
