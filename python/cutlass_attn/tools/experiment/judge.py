"""Is a result right? A quick look at both ends of it, by the rule of `cutlass_attn.testing`.

A wrong kernel's time means nothing, and it need not be one of ours: a library may be built for
another GPU, or be called in a way that it does not mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...testing import Accuracy, Reference, judge, reference
from .impls import Inputs

_ROWS = 32  # queries of a head that are compared; of few queries, as many more heads


_Index = tuple[int, slice, slice]  # batch, heads, queries


class Yardstick:
    """fp64 results of the first queries of the first heads and the last ones of the last heads."""

    def __init__(self, inputs: Inputs, accumulate: str = "fp32") -> None:
        shape = inputs.shape
        rows = min(_ROWS, shape.seqlen_q)
        group = shape.heads_q // shape.heads_kv
        heads_kv = min(shape.heads_kv, max(1, _ROWS // (rows * group)))
        heads = heads_kv * group
        self._shape = (shape.batch, shape.heads_q, shape.seqlen_q, shape.head_dim)
        self._dtype = str(inputs.q.dtype).removeprefix("torch.")
        self._accumulate = accumulate

        # Of the first queries a causal mask leaves these keys; cut there, the mask is again
        # aligned with the last key.
        first_keys = shape.seqlen_k
        if shape.causal:
            first_keys = max(0, rows + shape.seqlen_k - shape.seqlen_q)
        first = (0, slice(0, heads), slice(0, rows))
        last = (
            shape.batch - 1,
            slice(shape.heads_q - heads, None),
            slice(shape.seqlen_q - rows, None),
        )
        first_kv = (0, slice(0, heads_kv), slice(0, first_keys))
        last_kv = (shape.batch - 1, slice(shape.heads_kv - heads_kv, None), slice(None))
        self._slices: list[tuple[_Index, Reference]] = []
        for at, at_kv in ((first, first_kv), (last, last_kv)):
            q, k, v = (
                _to_numpy(x[i][None])
                for x, i in ((inputs.q, at), (inputs.k, at_kv), (inputs.v, at_kv))
            )
            expected = reference(q, k, v, self._dtype, causal=shape.causal, accumulate=accumulate)
            self._slices.append((at, expected))

    def judge(self, out: Any) -> Accuracy:
        """The worse end of a (B, H, S, D) result; it fails as well if it is not finite somewhere.

        Raises ValueError for a result of another shape.
        """
        if tuple(out.shape) != self._shape:
            raise ValueError(f"the result has shape {tuple(out.shape)}, not {self._shape}")
        found = []
        for at, expected in self._slices:
            part = _to_numpy(out[at][None])
            found.append(
                judge(part, expected.exact, expected.unfused, self._dtype, self._accumulate)
            )
        worst = min(found, key=lambda accuracy: (accuracy.ok, -accuracy.rms))
        if worst.ok and not bool(out.isfinite().all()):
            return replace(worst, reason="the result is not finite everywhere")
        return worst


def _to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach().float().cpu().numpy())
