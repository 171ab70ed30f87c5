from types import ModuleType
from typing import Any, TypedDict

class _Variant(TypedDict):
    key: str
    kernel: str
    op: str
    device: str
    arch: str
    dtype: int
    head_dim: int
    head_dim_v: int
    head_dim_multiple: int
    max_rows: int
    tile: str
    accumulate: int
    quantize: int
    options: tuple[str, ...]
    needs: tuple[str, ...]
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
    simt: str

class _DeviceInfo(TypedDict):
    compute_capability: int  # 0: none is there
    unavailable: str  # why nothing can run there, or empty

class _TileRule(TypedDict):
    smem_kb: int
    kernel: str
    head_dim: int
    head_dim_v: int
    tile: str
    decode: bool

class Call:
    """What a call asks for, but for its arrays."""

    dtype: str
    accumulate: str
    quantize: str | None
    max_error: float | None
    device: str
    bshd: bool
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    softmax_scale: float
    dropout_p: float

class Verdict:
    key: str
    chosen: bool
    reason: str
    splits: int
    workspace_bytes: int
    max_launches: int
    score: str
    at_first_use: bool

class PassedOver:
    kernel: str
    reason: str
    count: int

class Explanation:
    verdicts: list[Verdict]
    chosen: Verdict | None
    passed_over: list[PassedOver]
    copied: list[str]

class PrequantizedKV:
    """K and V rounded to 8 bits, by `prequantize`: the `quantize` of calls."""

    @property
    def k(self) -> Any: ...
    @property
    def v(self) -> Any: ...
    @property
    def quantize(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

# Calls: q, k and v, then the keywords of `attention` as a dict; those given apart go before it.
def forward(q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any) -> Any: ...
def prequantize(
    q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any
) -> PrequantizedKV: ...
def predict(
    q: Any, k: Any, v: Any, options: dict[str, Any], /, *, device: Any = ..., **more: Any
) -> list[float]: ...
def describe(q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any) -> Call: ...
def explain(
    q: Any, k: Any, v: Any, options: dict[str, Any], /, *, device: Any = ..., **more: Any
) -> Explanation: ...

# Backward passes, with their keywords as a dict: see python/backward_call.hpp.
def backward(q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any) -> Any: ...
def backward_varlen(q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any) -> Any: ...
def has_mask_map(q: Any, k: Any, v: Any, options: dict[str, Any], /) -> bool: ...
def explain_backward(
    q: Any, k: Any, v: Any, options: dict[str, Any], /, *, device: Any = ..., **more: Any
) -> Explanation: ...

# Calls for serving, with their keywords as a dict: see python/serving_call.hpp.
def varlen(q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any) -> Any: ...
def decode(q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any) -> Any: ...
def decode_append(q: Any, k: Any, v: Any, options: dict[str, Any], /, **more: Any) -> Any: ...
def append(k: Any, k_cache: Any, v_cache: Any, options: dict[str, Any], /, **more: Any) -> None: ...
def explain_varlen(
    q: Any, k: Any, v: Any, options: dict[str, Any], /, *, device: Any = ...
) -> Explanation: ...
def explain_decode(
    q: Any, k: Any, v: Any, options: dict[str, Any], /, *, device: Any = ..., mask: Any = ...
) -> Explanation: ...
def merge(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, /) -> tuple[Any, Any] | None: ...
def register_torch(module: ModuleType) -> None: ...
def register_numpy(module: ModuleType) -> None: ...
def jax_handlers() -> dict[tuple[str, str], Any]: ...
def variants() -> list[_Variant]: ...
def build_info() -> _BuildInfo: ...
def kept_bytes(device_index: int) -> int: ...
def device_info(device: int, index: int) -> _DeviceInfo: ...
def set_compiler(why_not: str) -> None: ...
def refuse_kernel(key: str, why_not: str) -> None: ...
def load_kernel(key: str, device_index: int, cubin: bytes) -> None: ...
def check_tile(*, kernel: str, head_dim: int, head_dim_v: int, tile: str) -> tuple[str, bool]: ...
def add_tile(*, kernel: str, head_dim: int, head_dim_v: int, tile: str) -> None: ...
def prefer_tile(
    *,
    smem_kb: int,
    kernel: str,
    head_dim: int,
    head_dim_v: int,
    tile: str,
    decode: bool,
) -> None: ...
def tile_rules() -> list[_TileRule]: ...
def mark_failing(smem_kb: int, key: str, reason: str) -> None: ...
