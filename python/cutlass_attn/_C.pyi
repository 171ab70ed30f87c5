from typing import TypedDict

class _Variant(TypedDict):
    key: str
    kernel: str
    device: str
    dtype: int
    head_dim: int
    tile: str
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
    compute_capability: int,
    unavailable: str,
    kernel: str,
) -> list[tuple[str, bool, str]]: ...
def variants() -> list[_Variant]: ...
def build_info() -> _BuildInfo: ...
def device_info(device: int, index: int) -> tuple[int, str]: ...
