"""`attention(..., verify=True)`: the same call once more with a scalar kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _C, quantized
from ._call.call import Call

# Half the spacing of numbers around 1: how far rounding to the dtype moves a value. For float32
# the order of summation matters more than its rounding, 2^-24; 2^-18 covers sums of 10^5 terms.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-18}
SUMMATION = 2.0**-18
# Of calls with products in 8 bits: the baseline takes 512 columns.
_MAX_ROUNDED_HEAD_DIM = 256


class VerificationError(RuntimeError):
    """A kernel and the scalar baseline disagree by more than rounding explains."""


def require_plain(q: Any) -> None:
    """Raises ValueError where results are not to be had on the host."""
    library = library_of(q)
    if not isinstance(q, np.ndarray) and isinstance(q, library.ARRAY) and library.must_see(q, None):
        raise ValueError(library.NO_VERIFY)


def verified(call: Call) -> Any:
    """The call's result; raises VerificationError unless a scalar kernel confirms it. Gradients of
    it, which the result has if inputs need one, are not looked at.

    What two right kernels may differ by, per element, with u the dtype's rounding:

    - a weight that is rounded before it meets V moves an output by at most u * max|V|, and each of
      the two outputs is rounded once: u * max|V| + 2 u * |O|;
    - a logit is good to a few ulp of what it is summed from, at most scale * |q| * |k| + |ALiBi| +
      |bias|, and the exponential turns its absolute error e into a relative one: 2 e * max|V|; LSE
      moves by e;
    - Q.K^T in fp16 is rounded once or twice per 16 products, by 2^-11 of a partial sum of at most
      |q| * |k|: D/8 * 2^-11 * scale * |q| * |k| in a logit;
    - P.V in fp16 is rounded as often in a key block of up to 32 keys, by 2^-11 of at most
      its weights times max|V|. All key blocks' weights are 1 together: 4 * 2^-11 * max|V|;
    - fp32 sums in another order: 2^-18 relative, in LSE and (below the dtype's u) in O;
    - with products in 8 bits the other kernel gets q and k as they are after rounding, in float32
      (quantized.py). Weights are computed by a multiply-add of integers of 24 bits, which may be
      off by a unit of those of q.k, scale * max|q| * max|k| / 127^2, in a logit, where max|k| is
      that of k without the mean: at most twice that of k;
    - dropout multiplies the weights that it keeps, so that |V| counts that many times.

    max|V|, |q| and |k| are taken per batch entry and head, over finite values. Infinities and NaN
    must be in the same places.
    """
    facts = call.facts()
    if facts.quantize not in (None, "qk"):
        raise ValueError(
            f'verify=True with quantize="{facts.quantize}": how far rounded weights move an '
            'element has no bound that would show a fault; allowed: quantize=None or "qk"'
        )
    if facts.quantize is not None and facts.head_dim > _MAX_ROUNDED_HEAD_DIM:
        raise ValueError(
            f"verify=True with quantize: head_dim is {facts.head_dim}, and the baseline's columns "
            f"are twice as many; allowed: up to {_MAX_ROUNDED_HEAD_DIM}"
        )
    lib = library_of(call.q)
    if facts.dropout_p > 0 and call.options.get("rng_state") is None:
        call = call.with_options(rng_state=lib.random_state(call.q))  # one for both
    out, lse = call.run(return_lse=True)
    tested = next(verdict.key for verdict in call.verdicts(out=out) if verdict.chosen)
    baseline = _baseline(facts.device, tested)
    same = call if facts.quantize is None else _with_rounded_operands(call, lib, facts)
    expected, expected_lse = same.run(kernel=baseline, accumulate="fp32", out=None, return_lse=True)

    heads_axis = 2 if facts.bshd else 1
    arrays = [lib.to_float32(x) for x in (call.q, call.k, call.v, out, expected)]
    q_, k_, v_, out_, expected_ = (np.moveaxis(x, heads_axis, 1) for x in arrays)
    group = facts.num_heads_q // max(facts.num_heads_kv, 1)
    size_v = np.repeat(_largest_per_head(np.abs(v_)), group, axis=1)
    size_q = _largest_per_head(np.linalg.norm(q_, axis=-1, keepdims=True))
    size_k = np.repeat(_largest_per_head(np.linalg.norm(k_, axis=-1, keepdims=True)), group, axis=1)
    size_logit = abs(facts.softmax_scale) * size_q * size_k + _size_of_terms(
        lib, facts, call.options
    )
    logit_error = 2.0**-21 * size_logit
    if facts.accumulate in ("fp16", "fp16_qk"):
        steps = -(-facts.head_dim // 8)
        logit_error = logit_error + steps * 2.0**-11 * facts.softmax_scale * size_q * size_k
    if facts.quantize is not None:
        largest_q = _largest_per_head(np.abs(q_))
        largest_k = np.repeat(_largest_per_head(np.abs(k_)), group, axis=1)
        unit = abs(facts.softmax_scale) * largest_q * largest_k / 127**2
        logit_error = logit_error + 2 * unit  # without the shift keys are up to twice as large
    pv_error = 0.0
    if facts.accumulate in ("fp16", "fp16_pv"):
        pv_error = 4 * 2.0**-11
    size_v *= 1.0 / max(1.0 - facts.dropout_p, 2.0**-16)

    u = ROUNDING[facts.dtype]
    names = f"{tested} and {baseline}"
    tolerance = (u + 2 * logit_error + pv_error) * size_v + 2 * u * np.abs(expected_)
    order = ("batch", "head", "query", "column")
    compare("out", names, order, out_, expected_, tolerance)
    lse_, expected_lse_ = lib.to_float32(lse), lib.to_float32(expected_lse)
    tolerance = logit_error[..., 0] + SUMMATION * (1 + np.abs(expected_lse_))
    compare("lse", names, order[:3], lse_, expected_lse_, tolerance)
    return (out, lse) if call.options.get("return_lse") else out


def _with_rounded_operands(call: Call, lib: Any, facts: _C.Call) -> Call:
    """The same in float32 and without `quantize`, of q and k as that rounds them. What a row's
    logits have in common is there as further columns: of q, and the shift in every key."""
    heads_axis = 2 if facts.bshd else 1
    q, k = (np.moveaxis(lib.to_float32(x), heads_axis, 1) for x in (call.q, call.k))
    both = quantized.operands(q, k).columns(q, facts.seqlen_k)
    arrays = [np.ascontiguousarray(np.moveaxis(x, 1, heads_axis)) for x in both]
    arrays.append(np.ascontiguousarray(lib.to_float32(call.v)))
    options = {**call.options, "quantize": None, "softmax_scale": facts.softmax_scale}
    if options.get("bias") is not None:
        options["bias"] = lib.from_float32(call.q, lib.to_float32(options["bias"]))
    q, k, v = (lib.from_float32(call.q, x) for x in arrays)
    return Call(q, k, v, options)


def library_of(x: Any) -> Any:
    """numpy_library or torch_library."""
    if isinstance(x, np.ndarray):
        from ._call import numpy_library as library
    else:
        from ._call import torch_library as library  # type: ignore[no-redef]
    return library


def _size_of_terms(lib: Any, facts: _C.Call, options: dict[str, Any]) -> float:
    """The most that ALiBi and bias add to a logit, over finite values."""
    size = 0.0
    if options.get("bias") is not None:
        size += largest(np.abs(lib.to_float32(options["bias"])))
    if options.get("alibi_slopes") is not None:
        distance = facts.seqlen_q + facts.seqlen_k
        size += largest(np.abs(lib.to_float32(options["alibi_slopes"]))) * distance
    return size


def _baseline(device: str, tested: str) -> str:
    """A scalar kernel other than the tested one."""
    if device == "cpu":
        preferred, other = "scalar/minimal-simt", "scalar/tiled-simt"  # the plainest there is
    else:
        preferred, other = "scalar/tiled", "scalar/minimal"  # takes every call; fast
    return other if tested.startswith(preferred + "/") else preferred


def largest(x: np.ndarray) -> float:
    """Largest finite value; 0 if there is none."""
    return float(np.where(np.isfinite(x), x, 0.0).max(initial=0.0))


def _largest_per_head(x: np.ndarray) -> np.ndarray:
    """Largest finite value per batch entry and head, shape (B, H, 1, 1); 0 if there is none."""
    finite = np.where(np.isfinite(x), x, 0.0)
    return finite.max(axis=(2, 3), keepdims=True, initial=0.0).astype(np.float64)


def compare(
    what: str,
    kernels: str,
    order: tuple[str, ...],
    actual: np.ndarray,
    expected: np.ndarray,
    tolerance: np.ndarray,
) -> None:
    finite = np.isfinite(actual) & np.isfinite(expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        excess = np.where(finite, np.abs(actual - expected) - tolerance, np.where(same, 0, np.inf))
    if excess.size == 0 or (excess <= 0).all():
        return
    at = np.unravel_index(int(np.argmax(excess)), excess.shape)
    coordinates = ", ".join(f"{name} {int(i)}" for name, i in zip(order, at, strict=True))
    raise VerificationError(
        f"{kernels} disagree on {what} in {int((excess > 0).sum())} of {excess.size} elements; "
        f"the worst, at {coordinates}: {actual[at]:.9g} and {expected[at]:.9g}, allowed "
        f"difference {float(np.broadcast_to(tolerance, excess.shape)[at]):.3g}"
    )
