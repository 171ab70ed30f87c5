"""Which kernels are tested with which calls of case_list.py, and how to make their inputs."""

from __future__ import annotations

import functools
import zlib

import cutlass_attn
import numpy as np
import pytest
import reference
import storage
from case_list import Case
from cutlass_attn import jit, testing

torch = pytest.importorskip("torch", reason="the kernels are tested on torch tensors")


# What kernels take of the options that a kernel may lack. Stated here, as the rest of takes() is,
# so that a kernel cannot excuse itself.
ALL_OPTIONS = {"bias", "mask", "attention_chunk", "alibi_slopes", "sinks", "dropout"}
DROPOUT = {"dropout", "sinks", "attention_chunk", "alibi_slopes"}
MAX_LOGIT = {"return_max_logit", "sinks", "attention_chunk", "alibi_slopes"}
OPTIONS = {
    "sm90": {"sinks", "attention_chunk", "alibi_slopes"},
    "sm90/split_keys": {"sinks", "alibi_slopes"},
    "sm90/bias": {"bias", "sinks", "attention_chunk", "alibi_slopes"},
    "sm90/mask": {"mask", "sinks", "attention_chunk", "alibi_slopes"},
    "sm90/bias_mask": {"bias", "mask", "sinks", "attention_chunk", "alibi_slopes"},
    "sm90/varlen": {"sinks", "attention_chunk", "alibi_slopes"},
    "sm90/paged": {"sinks", "attention_chunk", "alibi_slopes"},
    "sm90/dropout": DROPOUT,
    "sm90/mask_dropout": DROPOUT | {"mask"},
    "sm90/varlen_dropout": DROPOUT,
    "sm90/max_logit": MAX_LOGIT,
    "sm90/mask_max_logit": MAX_LOGIT | {"mask"},
    "sm90/varlen_max_logit": MAX_LOGIT,
    "sm90/int8_fp8": {"sinks", "attention_chunk", "alibi_slopes"},
    "sm80/split_keys": {"sinks", "alibi_slopes"},
    "sm80": {"sinks", "alibi_slopes", "attention_chunk"},
    "sm80/bias": {"bias", "sinks", "attention_chunk", "alibi_slopes"},
    "sm80/any_bias": {"bias", "sinks", "attention_chunk", "alibi_slopes"},
    "sm80/mask": {"mask", "sinks", "attention_chunk", "alibi_slopes"},
    "sm80/bias_mask": {"bias", "mask", "sinks", "attention_chunk", "alibi_slopes"},
    "sm80/any_bias_mask": {"bias", "mask", "sinks", "attention_chunk", "alibi_slopes"},
    "sm80/dropout": DROPOUT,
    "sm80/bias_dropout": DROPOUT | {"bias"},
    "sm80/any_bias_dropout": DROPOUT | {"bias"},
    "sm80/mask_dropout": DROPOUT | {"mask"},
    "sm80/bias_mask_dropout": DROPOUT | {"bias", "mask"},
    "sm80/any_bias_mask_dropout": DROPOUT | {"bias", "mask"},
    "sm80/varlen_dropout": DROPOUT,
    "sm80/max_logit": MAX_LOGIT,
    "sm80/bias_max_logit": MAX_LOGIT | {"bias"},
    "sm80/any_bias_max_logit": MAX_LOGIT | {"bias"},
    "sm80/mask_max_logit": MAX_LOGIT | {"mask"},
    "sm80/bias_mask_max_logit": MAX_LOGIT | {"bias", "mask"},
    "sm80/any_bias_mask_max_logit": MAX_LOGIT | {"bias", "mask"},
    "sm80/varlen_max_logit": MAX_LOGIT,
    "sm80/general": ALL_OPTIONS,
    "sm80/decode": ALL_OPTIONS - {"dropout"},
    "sm90/latent": {"sinks", "return_max_logit"},
    "sm90/wide": {"sinks", "alibi_slopes", "attention_chunk"},
    "sm80/latent": {"sinks", "return_max_logit"},
    "sm80/latent_64": {"sinks", "return_max_logit"},
    "sm80/varlen": {"sinks", "alibi_slopes", "attention_chunk"},
    "sm80/paged": {"sinks", "alibi_slopes", "attention_chunk"},
    "sm80/paged_general": ALL_OPTIONS,
    "sm80/fp16": {"sinks"},
    "sm80/fp16_qk": {"sinks"},
    "sm80/fp16_pv": {"sinks"},
    "sm80/int8_qk": {"sinks"},
    "sm80/int8_qk_general": ALL_OPTIONS - {"dropout"},
    "sm80/int8": {"sinks"},
    "sm80/int8_general": ALL_OPTIONS - {"dropout"},
    "sm80/wide": ALL_OPTIONS - {"dropout"},
    "sm80/wide_64": ALL_OPTIONS - {"dropout"},
    "sm89/int8_fp8": {"sinks"},
    "sm89/int8_fp8_general": ALL_OPTIONS - {"dropout"},
    "wmma": {"sinks"},
    "wmma/8x32x16": {"sinks"},
    "scalar/vectorized": ALL_OPTIONS,
    "scalar/tiled": ALL_OPTIONS,
    "scalar/minimal": ALL_OPTIONS | {"return_max_logit"},
    "cpu": ALL_OPTIONS | {"return_max_logit"},
    "cpu/int8_qk": ALL_OPTIONS - {"dropout"},
    "cpu/int8": ALL_OPTIONS - {"dropout"},
    "cpu/int8_fp8": ALL_OPTIONS - {"dropout"},
    "sm90/backward_wgmma": {"sinks", "alibi_slopes"},
    "sm90/backward_wgmma_q128": {"sinks"},
    "sm90/backward_wgmma_varlen": {"sinks", "alibi_slopes"},
    "sm90/backward_wgmma_mask": {"mask", "sinks", "alibi_slopes", "attention_chunk"},
    "sm90/backward_wgmma_with_bias": {"bias", "sinks", "alibi_slopes"},
    "sm90/backward_wgmma_with_bias_mask": {
        *("bias", "mask", "sinks", "alibi_slopes", "attention_chunk"),
    },
    "sm90/backward_wgmma_bias_grad": {"bias", "sinks", "alibi_slopes"},
    "sm90/backward_wgmma_mask_bias_grad": {
        *("bias", "mask", "sinks", "alibi_slopes", "attention_chunk"),
    },
    "sm90/backward_wgmma_dropout": {"dropout", "sinks", "alibi_slopes"},
    "sm90/backward_wgmma_varlen_dropout": {"dropout", "sinks", "alibi_slopes"},
    "sm90/backward_wgmma_mask_dropout": {
        *("mask", "dropout", "sinks", "alibi_slopes", "attention_chunk"),
    },
    "sm90/backward_wgmma_ordered": {"sinks", "alibi_slopes"},
    "sm90/backward_wgmma_with_bias_ordered": {"bias", "sinks", "alibi_slopes"},
    "sm90/backward_wgmma_bias_grad_ordered": {"bias", "sinks", "alibi_slopes"},
    "sm90/backward_two_pass": {"sinks", "attention_chunk"},
    "sm90/backward_two_pass_varlen": {"sinks", "attention_chunk"},
    "sm90/backward": {"sinks", "alibi_slopes"},
    "sm90/backward_dropout": {"sinks", "alibi_slopes", "dropout"},
    "sm80/backward": {"sinks", "alibi_slopes"},
    "sm80/backward_with_bias": {"sinks", "alibi_slopes", "bias"},
    "sm80/backward_mask": {"sinks", "alibi_slopes", "mask"},
    "sm80/backward_with_bias_mask": {"sinks", "alibi_slopes", "bias", "mask"},
    "sm80/backward_dropout": {"sinks", "alibi_slopes", "dropout"},
    "sm80/backward_with_bias_dropout": {"sinks", "alibi_slopes", "dropout", "bias"},
    "sm80/backward_mask_dropout": {"sinks", "alibi_slopes", "dropout", "mask"},
    "sm80/backward_varlen_dropout": {"sinks", "alibi_slopes", "dropout"},
    "sm80/backward_general": ALL_OPTIONS,
    "sm80/backward_bias": ALL_OPTIONS,
    "sm80/backward_varlen": {"sinks", "alibi_slopes"},
    "sm80/backward_varlen_general": ALL_OPTIONS,
    "sm80/backward_ordered": {"sinks", "alibi_slopes"},
    "sm80/backward_general_ordered": ALL_OPTIONS,
    "scalar/backward": ALL_OPTIONS,
    "cpu/backward": ALL_OPTIONS,
}


def options_of(variant):
    """What the variant takes of ALL_OPTIONS and return_max_logit."""
    return OPTIONS[variant.kernel.removesuffix("-simt")]


# Kernels that access 16 bytes at a time.
ALIGNED = ("sm90", "sm89", "sm80", "wmma", "scalar/vectorized")


def takes(variant, case):
    """Should the variant run the case?"""
    asks_for = case.asks_for
    if variant.op == "backward" and case.bias:
        asks_for = asks_for | {"bias_grad"}  # the bias has a gradient where the kernel gives it
    if not (set(variant.needs) <= asks_for and case.asks_for <= options_of(variant)):
        return False
    if variant.kernel.startswith("sm90") and case.bias and not _has_bias_for_tma(case):
        return False
    if not all(_has_pairs(case, x) for name, x in PAIRS if variant.kernel.startswith(name)):
        return False
    of_identity = variant.accumulate != "fp32" or variant.kernel.startswith(WITHOUT_SOFTCAP)
    if of_identity and not case.is_identity:
        return False
    if variant.max_rows and case.seqlen_q * case.heads // case.heads_kv > variant.max_rows:
        return False
    if variant.head_dim == 0:
        return True
    fits = fits_head_dims(variant, case)
    if not fits or not variant.kernel.startswith(ALIGNED):
        return fits
    takes_elements = variant.kernel.startswith(
        ("sm80/general", "sm80/int8_qk_general", "sm80/int8_general", "sm89/int8_fp8_general")
    )
    return case.has_whole_vectors and (case.is_aligned or takes_elements)


def fits_head_dims(variant, case):
    """Are the head dims of the case among those that the variant is for?"""
    head_dim = case.head_dim or variant.head_dim
    head_dim_v = case.head_dim_v or head_dim
    least = 257 if variant.kernel.startswith("sm90/wide") else 1
    return least <= head_dim <= variant.head_dim and head_dim_v <= variant.head_dim_v


def head_dim_of(variant, case):
    """The case's own, or what the kernel is compiled for: 64 where that is any up to a limit. Cases
    with a head dim of their own show the limits, and the time of a call grows with it."""
    is_any = variant.head_dim == 0 or variant.kernel.startswith(("scalar/tiled", "scalar/backward"))
    return case.head_dim or (64 if is_any else variant.head_dim)


WITHOUT_SOFTCAP = ("sm90/backward_two_pass", "sm90/backward_wgmma_q128")
# Kernels, and what they read for two keys at a time.
PAIRS = (
    ("sm80/bias", ("bias",)),
    ("sm80/backward_with_bias", ("bias", "mask")),
    ("sm80/backward_mask", ("mask",)),
)


def _has_pairs(case, operands):
    """These with keys side by side, of which two lie at a multiple of their bytes."""
    given = [shape for shape in (getattr(case, name) for name in operands) if shape]
    are_rows = case.storage == "transposed" and all("q" not in shape for shape in given)
    return (
        (case.bias_dtype is None or not case.bias)
        and (case.storage not in storage.LOGITS or are_rows)  # which are as they were
        and all("k" in shape for shape in given)
        and case.seqlen_k % 2 == 0
    )


def _has_bias_for_tma(case):
    """Rows that begin at multiples of 16 bytes, of keys side by side."""
    sizes = {"b": case.batch, "h": case.heads, "q": case.seqlen_q}
    has_rows = any(size > 1 and dim in case.bias for dim, size in sizes.items())
    is_row = case.storage == "transposed" and "q" not in case.bias  # which is as it was
    return (
        case.bias_dtype is None
        and (case.storage not in storage.LOGITS or is_row)
        and ("k" in case.bias or case.seqlen_k == 1)
        and (not has_rows or case.seqlen_k % 8 == 0)
    )


def all_pairs(which):
    """pytest parameters (variant, case): every compiled variant with every case it should take.
    Those that round weights to 8 bits are for test_quantize_accuracy.py, whose oracle does.
    Variants of one case follow each other: they share its values and the oracle's answer."""
    variants = [v for v in compiled_variants(special=True) if v.quantize not in ("int8", "fp8")]
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=needs(variant))
        for case in which
        for variant in variants
        if takes(variant, case)
    ]


def all_variants(where=lambda variant: True, special=False):
    """pytest parameters (variant): every compiled variant of a kind; special: see below."""
    return [
        pytest.param(variant, id=variant.key, marks=needs(variant))
        for variant in compiled_variants(special=special)
        if where(variant)
    ]


def compiled_variants(op="forward", special=False):
    """Those of the build; on a GPU with NVRTC, which compiles them at first use, also those that
    the build has compiled for the CPU alone, and on Hopper its own. With `special` also those that
    take only calls with a certain option. Those of float64, in which there is no yardstick, have
    tests of their own: test_float64.py."""
    there = cutlass_attn.variants(op)
    on_cpu = {variant.key for variant in there if variant.compiled and variant.device == "cpu"}
    if no_gpu() or jit.available():
        on_cpu = set()
    return [
        variant
        for variant in there
        if (variant.compiled or _simt_key(variant) in on_cpu or _is_for_this_hopper(variant))
        and variant.dtype != "float64"
        and (special or not variant.needs)
    ]


def own(variant):
    """Keywords of attention() for this variant."""
    return {
        "kernel": variant.key,
        "accumulate": variant.accumulate,
        "quantize": variant.quantize,
    }


def _simt_key(variant):
    return variant.key.replace(variant.kernel, f"{variant.kernel}-simt", 1)


def _is_for_this_hopper(variant):
    """Is it one of those that a build with no code for Hopper compiles at first use there?"""
    is_hopper = variant.kernel.startswith("sm90") and not variant.kernel.endswith("-simt")
    is_here = is_hopper and variant.tier == "core" and not no_gpu() and not jit.available()
    return is_here and torch.cuda.get_device_capability() == (9, 0)


@functools.cache
def no_gpu():
    """Why GPU tests cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "needs a GPU: torch.cuda.is_available() is False"
    unavailable = cutlass_attn._C.device_info(1, 0)["unavailable"]
    return f"needs a GPU: {unavailable}" if unavailable else ""


needs_gpu = pytest.mark.gpu  # conftest.py leaves these out where there is none


def needs(variant):
    return [needs_gpu] if variant.device == "cuda" else []


def _shapes(case, head_dim):
    """Of q, k, v and the output, (B, H, S, D)."""
    head_dim_v = case.head_dim_v or head_dim
    return (
        (case.batch, case.heads, case.seqlen_q, head_dim),
        (case.batch, case.heads_kv, case.seqlen_k, head_dim),
        (case.batch, case.heads_kv, case.seqlen_k, head_dim_v),
        (case.batch, case.heads, case.seqlen_q, head_dim_v),
    )


@functools.lru_cache(maxsize=512)
def values(case, dtype, head_dim):
    """q, k, v as float32 numpy arrays (B, H, S, D) of values that dtype represents."""
    rng = np.random.default_rng(zlib.crc32(f"{case} {dtype} {head_dim}".encode()))
    q, k, v = (rng.standard_normal(shape) for shape in _shapes(case, head_dim)[:3])
    q, k = q * case.magnitude, k * case.magnitude
    if case.storage == "expanded":
        k[:], v[:] = k[:1, :1], v[:1, :1]
    return tuple(reference.round_to(x, dtype) for x in (q, k, v))


@functools.lru_cache(maxsize=512)
def arrays(case, dtype):
    """The options of the case that are arrays, by keyword; in float32 where they are numbers."""
    rng = np.random.default_rng(zlib.crc32(f"{case} {dtype} options".encode()))
    found = {}
    if case.bias:
        bias = rng.standard_normal(_shape(case, case.bias))
        if case.bias_inf:
            bias[rng.random(bias.shape) < 1 / 3] = -np.inf
        found["bias"] = reference.round_to(bias, case.bias_dtype or dtype)
    if case.mask:
        found["mask"] = _mask(case, rng)
    if case.alibi:
        shape = (case.heads,) if case.alibi == "h" else (case.batch, case.heads)
        found["alibi_slopes"] = rng.standard_normal(shape).astype(np.float32) / 4
    if case.sinks:
        found["sinks"] = rng.standard_normal(case.heads).astype(np.float32) * 2
    if case.dropout_p:
        found["rng_state"] = rng.integers(-(2**63), 2**63, size=2)
        if case.seqlen_q > 16:  # a part of a larger call
            heads = case.heads + int(rng.integers(100))
            part = (heads, heads - case.heads, *rng.integers(1 << 20, size=2) * (16, 32))
            found["rng_state"] = np.append(found["rng_state"], part)
    return found


def _mask(case, rng):
    shape = _shape(case, case.mask)
    if case.mask_block:
        b, _, q, k = np.ogrid[tuple(map(slice, (1, 1, *shape)[-4:]))]
        return ((b + q // case.mask_block + k // case.mask_block) % 3 != 0).reshape(shape)
    mask = rng.random(shape) < 0.6
    if "q" in case.mask:
        mask[..., 3::5, :] = False
    return mask


def _shape(case, dims):
    """Of an operand with these dimensions, such as "b11k"."""
    sizes = {"b": case.batch, "h": case.heads, "q": case.seqlen_q, "k": case.seqlen_k, "1": 1}
    return tuple(sizes[dim] for dim in dims)


@functools.lru_cache(maxsize=512)
def expected(case, dtype, head_dim, accumulate="fp32", quantize=None):
    options = dict(arrays(case, dtype))
    if case.dropout_p:
        rng_state = options.pop("rng_state")
        shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
        options["kept"] = testing.dropout_mask(rng_state, shape, case.dropout_p)
    q, k, v = values(case, dtype, head_dim)
    scalars = {**case.scalars, "dropout_p": case.dropout_p, "accumulate": accumulate}
    if quantize:
        return reference.attention_int8(q, k, v, dtype, **scalars, **options)
    return reference.attention(q, k, v, dtype, **scalars, **options)


def keywords(case, dtype, device):
    """Options of attention() for the case: the scalars, and tensors laid out as the case says."""
    result = {**case.scalars, "layout": case.layout, "dropout_p": case.dropout_p}
    for name, x in arrays(case, dtype).items():
        x = torch.from_numpy(x).to(device)
        if name == "bias":
            x = x.to(getattr(torch, case.bias_dtype or dtype))
        if name in ("bias", "mask") and case.storage in storage.LOGITS:
            x = storage.LOGITS[case.storage](x)
        result[name] = x
    if case.max_logit:
        result["return_max_logit"] = True
    return result


def tensors(case, dtype, head_dim, device, have_values=True):
    """q, k, v and an output full of NaN as the case lays them out in memory.

    Those that are for explain() alone need no values, which take most of the time."""
    shapes = _shapes(case, head_dim)
    if have_values:
        arrays = (*values(case, dtype, head_dim), np.full(shapes[3], np.nan, np.float32))
        dense = [torch.from_numpy(x).to(device, getattr(torch, dtype)) for x in arrays]
    else:
        dense = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape in shapes]
    heads_axis = 1
    if case.layout == "bshd":
        heads_axis = 2
        dense = [x.transpose(1, 2).contiguous() for x in dense]
    if case.storage == "expanded":  # K and V have one head, as values() made them
        one_head = [x[:1].narrow(heads_axis, 0, 1).expand_as(x) for x in dense[1:3]]
        return [dense[0], *one_head, dense[3]]
    return storage.OPERANDS[case.storage](dense)


def to_bhsd(case, x):
    """A result of the case as a float32 numpy array (B, H, S, D)."""
    x = x.transpose(1, 2) if case.layout == "bshd" else x
    return x.float().cpu().numpy()


def qkv(*, dtype="float16", head_dim=64, device="cpu", **shape):
    """q, k, v of a small ragged call with shared heads."""
    shape = {"batch": 2, "heads": 4, "seqlen_q": 33, "seqlen_k": 50, **shape}
    case = Case("api", "", **shape)
    q, k, v = values(case, dtype, head_dim)
    return [torch.from_numpy(x).to(device, getattr(torch, dtype)) for x in (q, k, v)]


def wrong_kernel(*, offset):
    """_C.forward with one element of the result moved."""

    def forward(*call, **more):
        result = real(*call, **more)
        out = result[0] if isinstance(result, tuple) else result
        (out if isinstance(out, np.ndarray) else out.numpy()).view(np.uint16)[0, 0, 0, 0] += offset
        return result

    real = cutlass_attn._C.forward
    return forward
