# What generate.py makes of kernels/facts.toml.
DTYPES: tuple[str, ...]  # in the order of the library's DType
DTYPE_KEYS: dict[str, str]  # {"float16": "f16", ...}
ACCUMULATE: tuple[str, ...]  # in the order of the library's Accumulate
QUANTIZE: tuple[str | None, ...]  # in the order of the library's Quantize
MAX_DECODE_QUERIES: int
MIN_TILES_PER_SM: float
SMEM_CLASSES_KB: tuple[int, ...]  # GPUs as tuned.toml tells them apart
