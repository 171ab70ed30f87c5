"""Judges results by the rule of `cutlass_attn.testing`: all of a result, or both of its ends.

The time of a wrong result means nothing. Other libraries are judged too: one may be built for
another GPU, or be called wrongly here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...quantized import operands
from ...testing import Accuracy, Reference, judge, reference
from .problems import Inputs, Shape

# Queries of a head that are compared; of few queries, as many more heads or entries.
_ROWS = 32

_Index = tuple[slice, slice, slice]  # batch, heads, rows
_ALL = slice(None)


@dataclass(frozen=True)
class _Part:
    """A part of the result, and its expected values."""

    at: _Index
    expected: Reference


class Yardstick:
    """Expected results in fp64, for problems without an option.

    If `whole`, of everything; else of the first queries of the first heads and the last queries of
    the last heads, in each packed sequence. With `quantize` they are computed from q and k after
    rounding; for "int8" and "fp8" the yardstick also rounds P and V.
    """

    def __init__(
        self,
        inputs: Inputs,
        accumulate: str = "fp32",
        whole: bool = False,
        quantize: str | None = None,
    ) -> None:
        shape = inputs.problem.dense
        self._shape = (shape.batch, shape.heads_q, shape.seqlen_q, inputs.problem.head_dim_v)
        self._dtype = inputs.problem.dtype
        self._accumulate, self._quantize = accumulate, quantize
        self._whole = whole
        self._parts: list[_Part] = []
        for at, at_kv, all_keys in _compared(inputs, whole):
            q, k, v = (
                to_numpy(x[i]) for x, i in ((inputs.q, at), (inputs.k, at_kv), (inputs.v, at_kv))
            )
            scale, unit = q.shape[-1] ** -0.5, 0.0
            if quantize is not None:
                # The keys that a mask hides count as well.
                rounded = operands(q, to_numpy(inputs.k[at_kv[0], at_kv[1], all_keys]))
                unit = rounded.unit() * scale
                q, k = rounded.columns(q, k.shape[2])
            expected = reference(
                q,
                k,
                v,
                self._dtype,
                causal=shape.causal,
                softmax_scale=scale,
                accumulate=accumulate,
                rounds_weights=quantize if quantize in ("int8", "fp8") else None,
            )
            # verify() says what a unit of the integers has to do with it.
            expected = expected._replace(lse_error=expected.lse_error + unit)
            self._parts.append(_Part(at, expected))

    def judge(self, out: Any, lse: Any = None) -> Accuracy:
        """Judges a (B, H, S, D) result by its worst part. It must be finite everywhere.

        The log-sum-exp is judged only if the whole result is. Raises ValueError for another shape.
        """
        if tuple(out.shape) != self._shape:
            raise ValueError(f"the result has shape {tuple(out.shape)}, not {self._shape}")
        found = []
        for part in self._parts:
            exact, unfused = part.expected.exact, part.expected.unfused
            found.append(
                judge(to_numpy(out[part.at]), exact, unfused, self._dtype, self._accumulate)
            )
        worst = min(found, key=lambda accuracy: (accuracy.ok, -accuracy.rms))
        if worst.ok and not self._whole and not bool(out.isfinite().all()):
            return replace(worst, reason="the result is not finite everywhere")
        if worst.ok and self.allclose(out) is False:
            return replace(worst, reason="not allclose(atol=1e-3, rtol=1e-3)")
        if worst.ok and self._whole and lse is not None:
            for part in self._parts:
                given, expected = to_numpy(lse[part.at]), part.expected
                if not expected.confirms_lse(given):
                    with np.errstate(invalid="ignore"):
                        off = np.nanmax(np.abs(given - expected.lse))
                    return replace(worst, reason=f"log-sum-exp is off by up to {off:.3g}")
        return worst

    def allclose(self, out: Any) -> bool | None:
        """Whether all of a float16 result (16-bit products, fp32 sums) is within 1e-3 of fp64; None
        for other results."""
        kind = self._dtype, self._accumulate, self._quantize
        if not self._whole or kind != ("float16", "fp32", None):
            return None
        return all(
            np.allclose(to_numpy(out[part.at]), part.expected.exact, atol=1e-3, rtol=1e-3)
            for part in self._parts
        )


def _compared(inputs: Inputs, whole: bool) -> Iterator[tuple[_Index, _Index, slice]]:
    """Indices of parts of the result, of the keys they depend on, and of their whole sequence."""
    first_q = first_k = 0
    for sequence in inputs.problem.sequences:
        for at, at_kv in [((_ALL,) * 3, (_ALL,) * 3)] if whole else _ends(sequence):
            yield (
                (*at[:2], _moved(at[2], first_q, sequence.seqlen_q)),
                (*at_kv[:2], _moved(at_kv[2], first_k, sequence.seqlen_k)),
                _moved(_ALL, first_k, sequence.seqlen_k),
            )
        first_q += sequence.seqlen_q
        first_k += sequence.seqlen_k


def _moved(rows: slice, by: int, length: int) -> slice:
    """Rows of a sequence of this length as rows of the packed tensor, shifted `by` rows."""
    begin, end, _ = rows.indices(length)
    return slice(by + begin, by + end)


def _ends(shape: Shape) -> list[tuple[_Index, _Index]]:
    """Indices of both ends of a dense result, and of the keys that they depend on."""
    rows = min(_ROWS, shape.seqlen_q)
    group = shape.heads_q // shape.heads_kv
    entries = min(shape.batch, max(1, _ROWS // (rows * group)))
    heads_kv = min(shape.heads_kv, max(1, _ROWS // (rows * entries * group)))
    heads = heads_kv * group
    # The keys that a causal mask leaves to the first queries. Cut after them, the mask is again
    # aligned with the last key.
    keys = shape.seqlen_k
    if shape.causal:
        keys = max(0, rows + shape.seqlen_k - shape.seqlen_q)
    first, last = slice(0, entries), slice(shape.batch - entries, None)
    return [
        ((first, slice(0, heads), slice(0, rows)), (first, slice(0, heads_kv), slice(0, keys))),
        (
            (last, slice(shape.heads_q - heads, None), slice(shape.seqlen_q - rows, None)),
            (last, slice(shape.heads_kv - heads_kv, None), _ALL),
        ),
    ]


def to_numpy(x: Any) -> np.ndarray:
    """As float32."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float32)
    return np.asarray(x.detach().float().cpu().numpy())
