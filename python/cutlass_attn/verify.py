"""`attention(..., verify=True)`: runs the call again with a scalar kernel and compares."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from . import _C, quantized, testing
from ._call.call import PADDING, Call
from ._call.keywords import refuse_nested

LOG = logging.getLogger("cutlass_attn")

# Half the spacing of numbers around 1: how far rounding to the dtype moves a value. For float32
# the order of summation matters more than its rounding, 2^-24; 2^-18 covers sums of 10^5 terms.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-18}
SUMMATION = 2.0**-18
_WEIGHTS_SUMMATION = 2.0**-10  # of weights in fp16, before they are rounded to 8 bits
# Of calls with products in 8 bits: the baseline doubles the head dim, up to 512.
_MAX_ROUNDED_HEAD_DIM = 256
# Queries of a head, evenly spread, that are compared if the kernel rounds the weights.
_QUERIES = 64
_COLUMNS = 256  # of weights that the baseline computes at a time
_HAIR = 0.05  # relative; by which the predictions of a GPU and of the host may differ


class VerificationError(RuntimeError):
    """The result of a kernel and that of a scalar kernel differ by more than rounding explains."""


def require_plain(q: Any) -> None:
    """Raises ValueError if results cannot be read on the host, or no scalar kernel takes them."""
    _require_dtype(str(getattr(q, "dtype", "")).removeprefix("torch."))
    library = library_of(q)
    if not isinstance(q, np.ndarray) and isinstance(q, library.ARRAY) and library.must_see(q):
        raise ValueError(library.NO_VERIFY)


def _require_dtype(dtype: str) -> None:
    if dtype == "float64":
        raise ValueError(
            f"verify=True: q is {dtype}, which no scalar kernel computes in; allowed: "
            f"{', '.join(ROUNDING)}"
        )


def verified(call: Call) -> Any:
    """Run the call, and raise VerificationError unless a scalar kernel confirms the result.

    Gradients are not verified. Two correct kernels may differ, per element, by the sum of these
    terms, with u the rounding of the dtype:

    - a weight that is rounded before the product with V moves an output by at most u * max|V|, and
      each of the two outputs is rounded once: u * max|V| + 2 u * |O|;
    - a logit is accurate to a few ulp of its summands, at most scale * |q| * |k| + |ALiBi| +
      |bias|, and the exponential turns its absolute error e into a relative one: 2 e * max|V|; LSE
      moves by e;
    - Q.K^T in fp16 is rounded once or twice per 16 products, by 2^-11 of a partial sum of at most
      |q| * |k|: D/8 * 2^-11 * scale * |q| * |k| in a logit;
    - P.V in fp16 is rounded as often in a key block of up to 32 keys, by 2^-11 of at most its
      weights times max|V|. All key blocks' weights are 1 together: 4 * 2^-11 * max|V|;
    - fp32 sums in another order: 2^-18 relative, in LSE and (below the dtype's u) in O;
    - with products in 8 bits the scalar kernel gets q and k after rounding, in float32
      (quantized.py). Weights are computed by a multiply-add of integers of 24 bits, which may be
      off by a unit of those of q.k, scale * max|q| * max|k| / 127^2, in a logit, where max|k| is
      that of k without the mean: at most twice that of k;
    - if the weights and v are rounded too, up to 64 queries of each head, evenly spread, must
      satisfy the rule of testing.py against the scalar kernel's weights, which it computes as
      products with unit vectors: RMS at most 1.5 times the effect of rounding those and v, the
      largest at most twice. Heads with a v that is not all finite are left out;
    - dropout multiplies the weights that it keeps, and so max|V| in these terms.

    max|V|, |q| and |k| are taken per batch entry and head, over finite values. Infinities and NaN
    must be in the same places.

    With `quantize` a further call computes the distance to the scalar kernel's result for q, k and
    v as given; the logger "cutlass_attn" reports it at level INFO, and it is not judged. With
    `max_error` heads in 16 bits, by predictions in numpy, must satisfy the bound of a call without
    `quantize`. Where the rounding of a prediction may have decided, a head counts as what its
    result is closer to. For the other heads the RMS of that distance must not exceed max_error,
    relative to the RMS of the result.
    """
    refuse_nested(call.q, {"verify": False})
    facts = call.facts()
    _require_dtype(facts.dtype)
    lib = library_of(call.q)
    if facts.dropout_p > 0 and call.options.get("rng_state") is None:
        call = call.with_options(rng_state=lib.random_state(call.q))  # one state for both runs
    out, lse, *max_logit = call.run(return_lse=True)
    verdicts = call.explained(out=out).verdicts
    tested = next(verdict.key for verdict in verdicts if verdict.chosen)
    confirm(call, tested, out, lse, *max_logit)
    more = (lse, *max_logit) if call.options.get("return_lse") else max_logit
    return (out, *more) if more else out


def confirm(call: Call, tested: str, out: Any, lse: Any, max_logit: Any = None) -> None:
    """Compares the result, log-sum-exp and largest logits of the kernel `tested` as `verified`
    describes."""
    facts = call.facts()
    if facts.quantize is not None and facts.head_dim > _MAX_ROUNDED_HEAD_DIM:
        raise ValueError(
            f"verify=True with quantize: head_dim is {facts.head_dim}, and the baseline's columns "
            f"are twice as many; allowed: up to {_MAX_ROUNDED_HEAD_DIM}"
        )
    padding = [name for name in PADDING if call.options.get(name) is not None]
    if facts.quantize is not None and padding:
        raise ValueError(
            f"verify=True with quantize and padding: {padding[0]} is given, and the baseline "
            "rounds whole batch entries; allowed: attention_varlen, or one of the two"
        )
    lib = library_of(call.q)
    baseline = _baseline(facts.device, tested, bool(padding))
    as_given = call.with_options(quantize=None, max_error=None)
    same = call if facts.quantize is None else _with_rounded_operands(as_given, lib, facts)
    on_baseline = {"kernel": baseline, "accumulate": "fp32", "out": None, "return_lse": False}
    expected, expected_lse, *expected_max = same.run(**{**on_baseline, "return_lse": True})
    on_baseline["return_max_logit"] = False

    heads_axis = 2 if facts.bshd else 1
    arrays = [lib.to_float32(x) for x in (call.q, call.k, call.v, out, expected)]
    q_, k_, v_, out_, expected_ = (np.moveaxis(x, heads_axis, 1) for x in arrays)
    lse_, expected_lse_ = lib.to_float32(lse), lib.to_float32(expected_lse)
    is_wide = np.full(lse_.shape[:2], facts.quantize is None)
    errors = None if facts.max_error is None else predicted_errors(call)
    if errors is not None:
        given, given_lse = as_given.run(**{**on_baseline, "return_lse": True})
        given_ = np.moveaxis(lib.to_float32(given), heads_axis, 1)
        is_wide = _ran_in_16_bits(facts, errors, out_, given_, expected_)
        expected_ = np.where(is_wide[..., None, None], given_, expected_)
        expected_lse_ = np.where(is_wide[..., None], lib.to_float32(given_lse), expected_lse_)
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
        unit[is_wide] = 0.0
        logit_error = logit_error + 2 * unit  # keys without their mean: up to twice as large
    pv_error = 0.0
    if facts.accumulate in ("fp16", "fp16_pv"):
        pv_error = 4 * 2.0**-11
    size_v *= 1.0 / max(1.0 - facts.dropout_p, 2.0**-16)

    u = ROUNDING[facts.dtype]
    names = f"{tested} and {baseline}"
    order = ("batch", "head", "query", "column")
    tolerance = logit_error[..., 0] + SUMMATION * (1 + np.abs(expected_lse_))
    of_out = (u + 2 * logit_error + pv_error) * size_v + 2 * u * np.abs(expected_)
    if facts.quantize in ("int8", "fp8"):
        _confirm_rounded_weights(
            same, on_baseline, lib, facts, names, out_, v_.astype(np.float64), is_wide
        )
        tolerance = tolerance + _WEIGHTS_SUMMATION
        of_wide = np.where(is_wide[..., None, None], out_, expected_)
        compare("out", names, order, of_wide, expected_, of_out)
    else:
        compare("out", names, order, out_, expected_, of_out)
    compare("lse", names, order[:3], lse_, expected_lse_, tolerance)
    if max_logit is not None:
        theirs = lib.to_float32(expected_max[0])
        limit = logit_error[..., 0, 0].max(axis=0, initial=0.0) + SUMMATION * (1 + np.abs(theirs))
        compare("max_logit", names, ("head",), lib.to_float32(max_logit), theirs, limit)
    if errors is not None and not is_wide.all():
        _require_within(facts.max_error or 0.0, tested, out_, given_, errors, is_wide)
    if facts.quantize is not None and LOG.isEnabledFor(logging.INFO):
        given = as_given.run(**on_baseline)
        _report(names, facts, lib.to_float32(out), lib.to_float32(given))


def _confirm_rounded_weights(
    same: Call,
    on_baseline: dict[str, Any],
    lib: Any,
    facts: _C.Call,
    names: str,
    out: np.ndarray,
    v: np.ndarray,
    is_wide: np.ndarray,
) -> None:
    """Judges out, (B, Hq, Sq, Dv), by the rule of testing.py and the baseline's weights.

    Args:
        same: the call with rounded q and k, for which the baseline computes the weights.
        v: the call's v.
        is_wide: (B, Hq) bool: heads that ran in 16 bits, which are skipped.
    """
    queries = np.unique(np.arange(_QUERIES) * facts.seqlen_q // _QUERIES)[: facts.seqlen_q]
    p = _weights(same, on_baseline, lib, facts, queries)
    group = facts.num_heads_q // max(facts.num_heads_kv, 1)
    exact = np.zeros((*p.shape[:3], v.shape[3]))
    unfused = np.zeros(exact.shape)
    actual = out[:, :, queries].astype(np.float64)
    for b, h in np.ndindex(p.shape[:2]):
        p_, v_ = p[b, h], v[b, h // group]
        if is_wide[b, h] or not np.isfinite(v_).all():
            actual[b, h] = 0.0
            continue
        exact[b, h] = p_ @ v_
        with np.errstate(invalid="ignore"):
            rounded, v_ = quantized.weights_and_values(p_, v_, facts.quantize or "")
        unfused[b, h] = testing.round_to(rounded @ v_, facts.dtype)  # p_ and a sink add up to 1
    accuracy = testing.judge(actual, exact, unfused, facts.dtype)
    if not accuracy.ok:
        raise VerificationError(
            f"{names} disagree on out, in {len(queries)} evenly spread queries of each head, by "
            f"more than rounding of weights and v explains: {accuracy.reason}"
        )


def _weights(
    same: Call, on_baseline: dict[str, Any], lib: Any, facts: _C.Call, queries: np.ndarray
) -> np.ndarray:
    """Weights of these queries, (B, Hq, queries, Sk) in fp64: products with the unit matrix."""
    rows = 1 if facts.bshd else 2
    result = []
    for first in range(0, facts.seqlen_k, _COLUMNS):
        size = min(_COLUMNS, facts.seqlen_k - first)
        unit = lib.from_float32(same.q, np.eye(facts.seqlen_k, size, -first, np.float32))
        shape = (*same.k.shape[:3], size)
        unit = lib.broadcast_to(unit[:, None] if facts.bshd else unit, shape)
        columns = Call(same.q, same.k, unit, same.options).run(**on_baseline)
        taken = lib.to_float32(lib.take(columns, queries, rows))
        result.append(np.moveaxis(taken, 3 - rows, 1).astype(np.float64))
    nothing = np.zeros((same.q.shape[0], facts.num_heads_q, len(queries), 0))
    return np.concatenate([nothing, *result], axis=3)


def _require_within(
    max_error: float,
    tested: str,
    out: np.ndarray,
    given: np.ndarray,
    errors: np.ndarray,
    is_wide: np.ndarray,
) -> None:
    """Raises VerificationError if a head in 8 bits has an error beyond max_error."""
    finite = np.isfinite(out) & np.isfinite(given)
    out, given = (np.where(finite, x, 0.0).astype(np.float64) for x in (out, given))
    size = np.sum(np.square(given), axis=(2, 3))
    found = np.sqrt(np.sum(np.square(out - given), axis=(2, 3)) / np.where(size > 0, size, 1.0))
    found[is_wide] = 0.0
    b, h = np.unravel_index(int(np.argmax(found)), found.shape)
    if found[b, h] > max_error:
        raise VerificationError(
            f"{tested}: batch {b}, head {h} ran in 8 bits with an RMS error of {found[b, h]:.2%}, "
            f"relative to the RMS of the result in 16 bits, but max_error is {max_error:g}; "
            f"{errors[b, h]:.2%} was predicted, which is an estimate"
        )


# Options that a prediction depends on.
_OF_PREDICTION = (
    *("causal", "window", "attention_chunk", "softmax_scale", "softcap", "bias", "mask"),
    *("alibi_slopes", "sinks", "layout"),
)


def predicted_errors(call: Call, is_gpu: bool | None = None) -> np.ndarray | None:
    """Predicted error of each head, (B, Hq), as kernels compute it for `max_error`
    (kernels/core/predict.hpp): on the host, from copies of the call's arrays.

    Args:
        is_gpu: whether a GPU's kernel runs; by default where the arrays are.

    None for a call with padding, which `max_error` does not allow, and if values cannot be read on
    the host.
    """
    library = library_of(call.q)
    has_padding = any(call.options.get(name) is not None for name in PADDING)
    if has_padding or not library.has_numbers(call.q):
        return None
    facts = call.facts()
    given = {name: call.options[name] for name in _OF_PREDICTION if name in call.options}
    options = {name: library.on_host(x) for name, x in given.items()} | {"quantize": facts.quantize}
    q, k, v = (library.on_host(x) for x in (call.q, call.k, call.v))
    is_gpu = facts.device == "cuda" if is_gpu is None else is_gpu
    errors = np.array(_C.predict(q, k, v, options, device=True if is_gpu else None))
    return errors.reshape(len(q), facts.num_heads_q)


def beyond(facts: _C.Call, errors: np.ndarray) -> np.ndarray:
    """Which heads run in 16 bits by these predictions, (B, Hq) bool: heads that share a KV head are
    decided together. NaN exceeds any `max_error`."""
    group = facts.num_heads_q // max(facts.num_heads_kv, 1)
    is_beyond = ~(errors <= (facts.max_error or np.inf))
    of_groups = is_beyond.reshape(len(errors), facts.num_heads_kv, group).any(axis=2)
    return np.asarray(of_groups.repeat(group, axis=1))


def _ran_in_16_bits(
    facts: _C.Call, errors: np.ndarray, out: np.ndarray, given: np.ndarray, expected: np.ndarray
) -> np.ndarray:
    """beyond(), except for heads with a prediction so close to `max_error` that rounding may have
    decided: those ran in 16 bits if their result is closer to the 16-bit one, or, where weights are
    rounded too, closer than a quarter of the predicted error."""
    is_near = beyond(facts, errors * (1 + _HAIR)) & ~beyond(facts, errors * (1 - _HAIR))
    with np.errstate(invalid="ignore"):
        of_given, of_rounded = (
            np.nansum(np.square(out - x), axis=(2, 3)) for x in (given, expected)
        )
        size = np.nansum(np.square(given), axis=(2, 3))
    if facts.quantize != "qk":
        of_rounded = np.square(errors / 4) * size
    return np.where(is_near, of_given < of_rounded, beyond(facts, errors))


def _report(names: str, facts: _C.Call, out: np.ndarray, given: np.ndarray) -> None:
    """Logs how far apart the results are."""
    tested, baseline = names.split(" and ")
    finite = np.isfinite(out) & np.isfinite(given)
    out, given = (x[finite].astype(np.float64) for x in (out, given))
    error = np.abs(out - given)
    size = np.sqrt(np.mean(np.square(given))) if given.any() else 1.0
    norms = np.sqrt(np.sum(np.square(out)) * np.sum(np.square(given)))
    LOG.info(
        "%s, quantize=%r: RMS error %.2f %%, the largest %.2f %%, of the result's RMS; cosine %.6f;"
        " against %s of q, k and v as given",
        tested,
        facts.quantize,
        100 * np.sqrt(np.mean(np.square(error))) / size if error.size else 0.0,
        100 * error.max(initial=0.0) / size,
        np.sum(out * given) / norms if norms else 1.0,
        baseline,
    )


def _with_rounded_operands(call: Call, lib: Any, facts: _C.Call) -> Call:
    """The call in float32, without `quantize`, of q and k after rounding.

    The shift was subtracted from all keys, which changes all logits of a row by one number. That
    number is restored by further columns: q as given, and the shift in every key.
    """
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


def _baseline(device: str, tested: str, has_padding: bool) -> str:
    """A scalar kernel other than the tested one; with padding the only one that takes it."""
    if has_padding:
        return "scalar/minimal-simt" if device == "cpu" else "scalar/minimal"
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
