"""Tolerances for attention kernels, a reference to judge them by, and the mask of dropout.

The yardstick is an unfused reference: attention in exact arithmetic with two roundings to the
inputs' dtype, of the weights P and of the output O. A fused kernel keeps at least that precision,
so its errors must be close to those of the reference, both measured against fp64: the RMS error at
most 1.5 times, the largest error at most twice plus one unit in the last place of the output.
Infinities and NaN must be where the reference has them.

A kernel with fp16 accumulation (``accumulate=``, docs/accumulation.md) has larger errors, which
follow from where it rounds sums. An m16n8k16 instruction adds 16 products to an fp16 number and
rounds the sum to nearest at the end. Whether it also rounds after the first 8 is not documented, so
the yardstick rounds there too. With u = 2^-11 and s_t the sum after 8 t products, |error| <= u *
sum_t |s_t|, and the errors of different t are practically independent:

- q.k, of D products, has D / 8 roundings. Scaled, that is the error e of a logit. It multiplies the
  weight by exp(e), and moves the log-sum-exp, by a weighted mean of the logits' errors, by at most
  the largest |e| of the row. `Reference.lse_error` is that bound.
- weights times v has 4 roundings in each key block of 32. Key blocks are added in fp32. A sum is
  never larger than its key block, so all of them together are off by at most
  4 u * sum_j p_j |v_j| <= 4 u * max|v|, as sum_j p_j = 1: for any number of keys.

The reference computes with these roundings, from weights relative to the largest of the row and
rounded to fp16, as kernels do; its own error is then the yardstick. A kernel that rounds after 16
products has about 0.7 of it; one that adds all keys in fp16 exceeds it after a few hundred keys. If
the sums of q.k are in fp16, the RMS factor is 2 too: with large logits nearly all the error is in
the few rows whose two largest logits are close, and there two correct orders of summation differ
as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .quantized import weights_and_values

RMS_FACTOR, MAX_FACTOR = 1.5, 2.0
RMS_FACTOR_FP16_QK = 2.0

# Significant bits and the exponent of the smallest subnormal.
_BITS = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149)}


class Reference(NamedTuple):
    """Attention of (B, H, S, D) arrays in fp64, its log-sum-exp, and the unfused yardstick."""

    exact: np.ndarray
    lse: np.ndarray
    unfused: np.ndarray
    lse_error: np.ndarray  # what fp16 accumulation may move lse by; 0 in fp32

    def confirms_lse(self, lse: np.ndarray) -> bool:
        """Is this log-sum-exp of a kernel, (B, H, S), within the tolerance?"""
        close = np.isclose(lse, self.lse, atol=1e-5, rtol=1e-5)
        with np.errstate(invalid="ignore"):  # -inf - -inf
            close |= np.abs(lse - self.lse) <= 1e-5 + 1e-5 * np.abs(self.lse) + self.lse_error
        return bool(close.all())


@dataclass(frozen=True)
class Accuracy:
    """Errors of a result against fp64, what the yardstick allows, and why it fails, if it does."""

    max: float
    mean: float
    rms: float
    max_allowed: float
    rms_allowed: float
    rms_yardstick: float  # the unfused reference's own
    reason: str  # empty: passed

    @property
    def ok(self) -> bool:
        return not self.reason


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the nearest values of `dtype`, a name; ties to even. Returns float32."""
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return x.astype(np.float16).astype(np.float32)
        x = x.astype(np.float32)
    if dtype == "float32":
        return x
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def ulp(x: np.ndarray, dtype: str) -> np.ndarray:
    """Spacing of the numbers of `dtype`, a name, at x."""
    bits, smallest = _BITS[dtype]
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    return np.ldexp(1.0, np.maximum(exponent - bits, smallest))


def dropout_mask(rng_state: Any, shape: tuple[int, int, int, int], dropout_p: float) -> np.ndarray:
    """Which softmax weights dropout keeps.

    Args:
        rng_state: the `rng_state` of the call: seed and offset, two 64-bit numbers, signed or not,
            and the place of the call in a larger one, if it has six.
        shape: (B, Hq, Sq, Sk) of the logits.
        dropout_p: the `dropout_p` of the call.

    Returns:
        bool array of `shape`: True = kept. Kept weights are divided by ``kept_share(dropout_p)``.

    Raises:
        ValueError: rng_state does not have two numbers, or six.

    The algorithm: Philox of 4 words (Salmon et al., SC 2011) with 10 rounds turns the counter (low
    and high word of the offset, 0, 0) and the key (low and high word of the seed) into a state.
    With 7 rounds and key 0 it turns (key without bits 0, 3 and 4, query without bit 3, batch * Hq +
    head, 0) xor the state into the words of 16 weights. Bit 4 of the key selects words 0, 1 or
    words 2, 3; bit 3 of the query selects one of the two; bit 0 of the key selects the lower or the
    upper half of both. The number of a weight is the lower 15 bits of its half or, if bit 3 of the
    key is set, of the low byte of its half followed by the high byte of the other word's half. It
    is compared with ``2**15 * min(dropout_p, 1 - dropout_p)``, rounded: weights below it are
    dropped if dropout_p is at most 1/2, and kept otherwise.
    """
    given = tuple(np.shape(rng_state))
    if given not in ((2,), (6,)):
        raise ValueError(
            f"rng_state must have shape (2,), a seed and an offset, or (6,), got {given}"
        )
    if hasattr(rng_state, "cpu"):  # a torch tensor: those of uint64 have no int()
        rng_state = rng_state.cpu().numpy()
    batch, heads, seqlen_q, seqlen_k = shape
    whole = (heads, 0, 0, 0)
    seed, offset, of_all, first, query, key = (int(x) % 2**64 for x in (*rng_state, *whole)[:6])
    keys = (key & ~31) + np.arange(seqlen_k)[None, None, :]  # whole draws, as kernels do
    queries = (query & ~15) + np.arange(seqlen_q)[None, :, None]
    numbers = of_all * np.arange(batch)[:, None] + first + np.arange(heads)
    state = philox4x32((offset % 2**32, offset // 2**32, 0, 0), (seed % 2**32, seed // 2**32), 10)
    counter = (keys & ~25, queries & ~8, numbers.reshape(-1, 1, 1), 0)
    mixed = tuple(np.asarray(x, np.uint64) ^ s for x, s in zip(counter, state, strict=True))
    words = np.broadcast_arrays(*philox4x32(mixed, (0, 0), 7))
    at = keys // 16 % 2 * 2 + queries // 8 % 2
    shift = (keys % 2 * 16).astype(np.uint64)
    own, other = (np.choose(i, words) >> shift & np.uint64(0xFFFF) for i in (at, at ^ 1))
    bits = np.where(keys // 8 % 2, own << np.uint64(8) | other >> np.uint64(8), own)
    is_rarer = bits & np.uint64(0x7FFF) < _numbers_below(dropout_p)
    return (is_rarer == (dropout_p > 0.5)).reshape(shape)


def kept_share(dropout_p: float) -> float:
    """Share of weights that dropout keeps, a multiple of 2**-15; 1 if it would keep none."""
    rarer = _numbers_below(dropout_p) / 2**15
    return 1.0 - rarer if dropout_p <= 0.5 else rarer or 1.0


def _numbers_below(dropout_p: float) -> int:
    """How many of 2**15 numbers are the rarer outcome, in the arithmetic of fp32."""
    p = np.float32(dropout_p)
    return int((np.float32(1) - p if p > 0.5 else p) * np.float32(2**15) + np.float32(0.5))


def philox4x32(counter: tuple[Any, ...], key: tuple[int, int], rounds: int) -> list[np.ndarray]:
    """The four random words of Philox4x32 (Salmon et al., SC 2011), as uint64 arrays below 2**32.

    Args:
        counter: four words, integers or integer arrays that broadcast.
        key: two words.
        rounds: number of rounds; 10 and 7 are used here.
    """
    low = np.uint64(2**32 - 1)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    for i in range(rounds):
        k0 = np.uint64((key[0] + i * 0x9E3779B9) % 2**32)
        k1 = np.uint64((key[1] + i * 0xBB67AE85) % 2**32)
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        half = np.uint64(32)
        c0, c1, c2, c3 = b >> half ^ c1 ^ k0, b & low, a >> half ^ c3 ^ k1, a & low
    return [c0, c1, c2, c3]


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dtype: str,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    accumulate: str = "fp32",
    rounds_weights: str | None = None,
) -> Reference:
    """Exact attention and the unfused yardstick, to judge a kernel by.

    Args:
        q: (B, Hq, Sq, D) array whose values `dtype` can represent.
        k: (B, Hkv, Sk, D); Hkv divides Hq.
        v: (B, Hkv, Sk, Dv).
        dtype: "float16", "bfloat16" or "float32": what the yardstick rounds P and O to. For
            "float32" it computes in float32 throughout, since roundings of P and O alone would ask
            for more than float32 sums can deliver.
        causal: query i sees keys up to ``i + Sk - Sq``.
        softmax_scale: factor of q @ k^T; None is ``1 / sqrt(D)``.
        accumulate: "fp32", or for float16 and a positive scale "fp16", "fp16_qk" or "fp16_pv": the
            yardstick rounds its sums to fp16 where such a kernel does.
        rounds_weights: None, or "int8" or "fp8": the yardstick rounds P and V to 8 bits, as that
            `quantize` does, and tolerates twice its own error of the log-sum-exp.

    Returns:
        A `Reference`.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    group = heads // k.shape[1]
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    hidden = np.zeros((seqlen_q, seqlen_k), bool)
    if causal:
        hidden = ~np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool)

    in_fp16_qk, in_fp16_pv = accumulate in ("fp16", "fp16_qk"), accumulate in ("fp16", "fp16_pv")
    exact = np.zeros((batch, heads, seqlen_q, v.shape[3]))
    unfused = np.zeros_like(exact, dtype=np.float32)
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    lse_error = np.zeros_like(lse)
    for b, h in np.ndindex(batch, heads):
        if h % group == 0:  # the query heads of a KV head follow each other
            k64, v64 = (x[b, h // group].astype(np.float64) for x in (k, v))
        q_, k_, v_ = q[b, h].astype(np.float64), k64, v64
        p, lse[b, h] = _softmax(q_ @ k_.T * scale, hidden)
        exact[b, h] = p @ v_
        if dtype == "float32":
            q_, k_, v_ = (x.astype(np.float32) for x in (q_, k_, v_))
            p, _ = _softmax(_product_in_order(q_, k_.T) * np.float32(scale), hidden)
            unfused[b, h] = _product_in_order(p, v_)
        elif accumulate != "fp32":
            dots, error = _product_in_fp16(q_, k_.T) if in_fp16_qk else (q_ @ k_.T, 0.0)
            error = np.where(hidden, 0.0, np.abs(scale) * error)
            lse_error[b, h] = error.max(axis=1, initial=0.0)
            weights, total = _weights(dots * scale, hidden)
            rounded = round_to(weights, dtype).astype(np.float64)
            sums = _product_in_slices(rounded, v_) if in_fp16_pv else rounded @ v_
            unfused[b, h] = round_to(sums / np.where(total == 0, 1, total), dtype)
        elif rounds_weights:
            p, v_ = weights_and_values(p, v_, rounds_weights)
            total = p.sum(axis=1, keepdims=True)
            unfused[b, h] = round_to(p @ v_ / np.where(total == 0, 1, total), dtype)
            # One row sum that is rounded the other way: a weight of u8, or of e4m3.
            flipped = 2.0**-8 if rounds_weights == "int8" else 2.0**-5
            lse_error[b, h] = 2 * np.abs(np.log(np.where(total == 0, 1, total)))[:, 0] + flipped
        else:
            unfused[b, h] = round_to(round_to(p, dtype).astype(np.float64) @ v_, dtype)
    return Reference(exact, lse, unfused, lse_error)


def _product_in_fp16(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a @ b, rounded to fp16 after every 8 terms, and a bound of what the roundings change."""
    total = np.zeros((a.shape[0], b.shape[1]))
    error = np.zeros_like(total)
    for i in range(0, a.shape[1], 8):
        total = round_to(total + a[:, i : i + 8] @ b[i : i + 8], "float16").astype(np.float64)
        error += ulp(total, "float16") / 2
    return total, error


def _product_in_slices(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same within key blocks of 32 terms, which are added up exactly."""
    blocks = range(0, a.shape[1], 32)
    parts = (_product_in_fp16(a[:, i : i + 32], b[i : i + 32])[0] for i in blocks)
    return sum(parts, start=np.zeros((a.shape[0], b.shape[1])))


def _product_in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, summed term after term as a plain kernel does; a BLAS sums in a tree."""
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for i in range(a.shape[1]):
        total += a[:, i, None] * b[i]
    return total


def _softmax(logits: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of one head's logits, and its log-sum-exp; rows without a key are all 0 and -inf."""
    p, total = _weights(logits, hidden)
    top = logits.max(axis=1, initial=-np.inf, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    return p / np.where(total == 0, 1, total), lse


def _weights(logits: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """exp(logit - largest of its row), and their sums, (rows, 1); hides logits in place."""
    logits[hidden] = -np.inf
    top = logits.max(axis=1, initial=-np.inf, keepdims=True)
    p = np.exp(logits - np.where(top == -np.inf, 0, top))
    return p, p.sum(axis=1, keepdims=True)


def judge(
    actual: np.ndarray,
    exact: np.ndarray,
    unfused: np.ndarray,
    dtype: str,
    accumulate: str = "fp32",
) -> Accuracy:
    """Compare a result with `reference`, by the rule at the top of this module.

    Args:
        actual: the result, (B, H, S, D).
        exact: `Reference.exact`.
        unfused: `Reference.unfused`.
        dtype: of the result: "float16", "bfloat16" or "float32".
        accumulate: as of `reference`.

    Returns:
        An `Accuracy`; its ``reason`` is empty if the result passes.
    """
    actual, unfused = (np.asarray(x, np.float64) for x in (actual, unfused))
    finite = np.isfinite(unfused)
    same = np.where(finite, np.isfinite(actual), (actual == unfused) | np.isnan(actual))
    same &= np.isnan(actual) == np.isnan(unfused)
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        nan = math.nan
        reason = f"{actual[at]} where {unfused[at]} is due, at {at}"
        return Accuracy(nan, nan, nan, nan, nan, nan, reason)

    error = np.abs(actual - exact)[finite]
    yardstick = np.abs(unfused - exact)[finite]
    largest = float(yardstick.max(initial=0.0)) * MAX_FACTOR
    slack = ulp(exact, dtype)
    factor = RMS_FACTOR_FP16_QK if accumulate in ("fp16", "fp16_qk") else RMS_FACTOR
    rms, rms_yardstick = _rms(error), _rms(yardstick)
    rms_allowed = rms_yardstick * factor
    if dtype == "float32":
        # A GPU's exponential has an error of up to 2 ulp, in each weight and in their sum. With
        # 16-bit outputs the last rounding is larger; with float32 it is not. The error scales with
        # the summands, so the tolerance follows the largest element of a row.
        rms_allowed += _rms(4 * slack[finite])
        largest_of_row = np.abs(exact).max(axis=-1, keepdims=True, initial=0.0)
        slack = 4 * np.broadcast_to(ulp(largest_of_row, dtype), exact.shape)
    slack = slack[finite]
    excess = error - largest - slack
    reason = ""
    if error.size and excess.max() > 0:
        worst = np.unravel_index(np.flatnonzero(finite)[excess.argmax()], actual.shape)
        at = tuple(int(i) for i in worst)
        reason = f"{actual[at]:.7g} where {exact[at]:.7g} is due, at {at}"
    elif rms > rms_allowed:
        reason = f"RMS error {rms:.3g}, allowed {rms_allowed:.3g}"
    return Accuracy(
        float(error.max(initial=0.0)),
        float(error.mean()) if error.size else 0.0,
        rms,
        largest + float(slack.max(initial=0.0)),
        rms_allowed,
        rms_yardstick,
        reason,
    )


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
