"""facts.toml as a C++ header and as a module of the Python package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BANNER = "// Generated from kernels/facts.toml by kernels/facts.py; do not edit.\n"

FACTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def module(facts: dict[str, Any]) -> str:
    """cutlass_attn/_build/facts.py."""
    limits = facts["limits"]
    values = {
        "DTYPES": tuple(facts["dtypes"]),
        "DTYPE_KEYS": {name: dtype["key"] for name, dtype in facts["dtypes"].items()},
        "ACCUMULATE": tuple(facts["accumulate"]),
        "QUANTIZE": tuple(None if name == "none" else name for name in facts["quantize"]),
        "MAX_DECODE_QUERIES": limits["max_decode_queries"],
        "MIN_TILES_PER_SM": limits["min_tiles_per_sm"],
        "SMEM_CLASSES_KB": tuple(limits["smem_classes_kb"]),
    }
    lines = (f"{name} = {value!r}\n" for name, value in values.items())
    return BANNER.replace("//", "#") + "".join(lines)


def load(name: str) -> ModuleType:
    """Registers that module under this name, for builds without an installed package."""
    generated = sys.modules[name] = ModuleType(name)
    exec(module(FACTS), vars(generated))
    return generated


def header(facts: dict[str, Any]) -> str:
    """facts.hpp."""
    dtypes, limits = facts["dtypes"], facts["limits"]
    all_dtypes = dtypes | facts["stored_dtypes"]

    def enum(name: str, enumerators: Iterable[str]) -> str:
        return f"enum class {name} : int32_t {{ {', '.join(enumerators)} }};\n"

    def array(type_: str, name: str, values: Iterable[object]) -> str:
        listed = ", ".join(str(value) for value in values)
        return f"inline constexpr {type_} {name}[] = {{{listed}}};\n"

    bits = "".join(f"  {name} = 1u << {i},\n" for i, name in enumerate(facts["options"]))
    return (
        BANNER
        + "#pragma once\n\n#include <cstdint>\n\nnamespace cutlass_attn {\n\n"
        + enum("DType", (dtype["enumerator"] for dtype in all_dtypes.values()))
        + "// The first ones are dtypes of computation.\n"
        + f"inline constexpr int kNumDTypes = {len(dtypes)};\n"
        + "// Accumulators of tensor cores: fp32, or fp16 for Q K^T, for P V, or for both.\n"
        + enum("Accumulate", facts["accumulate"].values())
        + f"inline constexpr int kNumAccumulates = {len(facts['accumulate'])};\n\n"
        + "// Products in 8 bits: none, Q K^T, or both with P and V in int8 or in e4m3.\n"
        + enum("Quantize", facts["quantize"].values())
        + f"inline constexpr int kNumQuantizes = {len(facts['quantize'])};\n\n"
        + f"inline constexpr int kMaxHeadDim = {limits['max_head_dim']};\n"
        + f"inline constexpr int32_t kMaxSeqlen = {limits['max_seqlen']};\n"
        + f"inline constexpr int32_t kMaxAttentionChunk = {limits['max_attention_chunk']};\n"
        + "// Calls with at most this many queries are decoding.\n"
        + f"inline constexpr int32_t kMaxDecodeQueries = {limits['max_decode_queries']};\n"
        + "// Calls with fewer of a tile per SM run the next one of its list in tuned.toml.\n"
        + f"inline constexpr float kMinTilesPerSm = {limits['min_tiles_per_sm']}f;\n"
        + "\n// Options of a call that a kernel may lack, as bits.\nnamespace option {\n"
        + f"enum Bit : uint32_t {{\n{bits}}};\n}}  // namespace option\n\n"
        + "// Indexed by enumerator, with Python's names.\nnamespace facts {\n"
        + array("char const*", "kDTypeNames", map(json.dumps, all_dtypes))
        + array("int", "kDTypeBytes", (dtype["bytes"] for dtype in all_dtypes.values()))
        + array("char const*", "kAccumulateNames", map(json.dumps, facts["accumulate"]))
        + array("char const*", "kQuantizeNames", map(json.dumps, facts["quantize"]))
        + array("char const*", "kOptionNames", map(json.dumps, facts["options"]))
        + array("int", "kSmemClassesKb", limits["smem_classes_kb"])
        + "}  // namespace facts\n\n}  // namespace cutlass_attn\n"
    )
