from collections.abc import Callable
from typing import Any, TypedDict

class _Variant(TypedDict):
    key: str
    kernel: str
    device: str
    dtype: int
    head_dim: int
    head_dim_v: int
    head_dim_multiple: int
    tile: str
    accumulate: int
    options: tuple[str, ...]
    tier: str
    compiled: bool
    automatic: bool

class _BuildInfo(TypedDict):
    version: str
    tier: str
    cuda: str
    architectures: str
    cutlass: str
    compiler: str
    simt: bool

def forward(
    call: tuple[object, ...],
    device: int,
    device_index: int,
    stream: int,
    kernel: str,
    num_threads: int,
) -> None: ...
def explain(
    call: tuple[object, ...],
    device: int,
    device_index: int,
    compute_capability: int,
    kernel: str,
) -> list[tuple[str, bool, str]]: ...
def short_path(
    tensor: type,
    exchange_api: object,
    empty_like: Callable[..., Any],
    contiguous_format: object,
    is_neg: Callable[[Any], bool],
    is_grad_enabled: Callable[[], bool],
    num_threads: Callable[[], int],
    interceptors: tuple[Callable[[], object], ...],
) -> Callable[..., Any]: ...
def variants() -> list[_Variant]: ...
def build_info() -> _BuildInfo: ...
def device_info(device: int, index: int) -> tuple[int, str]: ...
def set_compiler(why_not: str) -> None: ...
def refuse_kernel(key: str, why_not: str) -> None: ...
def load_kernel(key: str, device_index: int, cubin: bytes) -> None: ...
def add_tile(
    kernel: str,
    head_dim: int,
    head_dim_v: int,
    tile: str,
    block_m: int,
    threads: int,
    smem_bytes: int,
) -> None: ...
def prefer_tile(
    smem_kb: int,
    kernel: str,
    head_dim: int,
    head_dim_v: int,
    tile: str,
    min_blocks_per_sm: float,
    decode: bool,
) -> None: ...
def tile_rules() -> list[tuple[int, str, int, int, str, float, bool]]: ...
def mark_failing(smem_kb: int, key: str, reason: str) -> None: ...
