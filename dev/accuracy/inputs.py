"""Inputs that are easy or hard in 8 bits: how they change q, k and v, and the errors allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cutlass_attn.testing import round_to


@dataclass(frozen=True)
class Inputs:
    """One head: q (S, D), k and v (Sk, D), in float32, with values that `dtype` can hold."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray  # (Sk,), added to each query's logit of a key
    dtype: str

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[1])


Change = Callable[[np.random.Generator, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def _biased_k(rng, q, k, v, bias):  # type: ignore[no-untyped-def]
    columns = rng.choice(q.shape[1], max(q.shape[1] // 16, 1), replace=False)
    k[:, columns] += 8.0
    q[:, columns] += 0.3 * 8.0


def _outlier_v(rng, q, k, v, bias):  # type: ignore[no-untyped-def]
    v[rng.random(len(v)) < 0.003] *= 21.0


def _peaky(rng, q, k, v, bias):  # type: ignore[no-untyped-def]
    q *= 3.0


def _sink(rng, q, k, v, bias):  # type: ignore[no-untyped-def]
    bias[0] = 9.0
    v[0] *= 0.05


@dataclass(frozen=True)
class Kind:
    """A kind of inputs: standard normal numbers, and their change."""

    what: str
    change: Change | None


KINDS = {
    "random": Kind("standard normal", None),
    "biased_k": Kind("a channel in 16 of K is 8 larger, and of Q 2.4", _biased_k),
    "outlier_v": Kind("a value in 300 is 21 times as large", _outlier_v),
    "peaky": Kind("Q is 3 times as large: few keys have most of the weight", _peaky),
    "sink": Kind("key 0 has a logit 9 larger, and a value of a twentieth", _sink),
}

# RMS errors that a mode may have, relative to the result's: for standard normal inputs, for others.
LIMITS = {"qk": (0.013, 0.025), "int8": (0.016, 0.03)}


def limit(mode: str, kind: str) -> float:
    """Error that a mode may have; infinity if there is no limit."""
    of_random, of_others = LIMITS.get(mode, (math.inf, math.inf))
    return of_random if kind == "random" else of_others


def make(
    kind: str, queries: int, keys: int, head_dim: int, dtype: str = "float16", seed: int = 0
) -> Inputs:
    """Seeded inputs of a kind."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((rows, head_dim)) for rows in (queries, keys, keys))
    bias = np.zeros(keys, np.float32)
    if change := KINDS[kind].change:
        change(rng, q, k, v, bias)
    q, k, v = (round_to(x, dtype) for x in (q, k, v))
    return Inputs(q, k, v, bias, dtype)
