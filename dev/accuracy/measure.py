"""Errors of the modes of `quantize`, and of SageAttention 2++, against fp64 of equal inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from cutlass_attn._attention import attention
from cutlass_attn._build.facts import QUANTIZE
from cutlass_attn._explain import explain

from . import peer
from .inputs import Inputs, limit, make

PEER = "sage2++"
MODES = tuple(mode for mode in QUANTIZE if mode is not None)


@dataclass(frozen=True)
class Row:
    """Errors of one mode with one kind of inputs, relative to the result's root mean square."""

    inputs: str
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    dtype: str
    mode: str  # mode of `quantize`, "none", or PEER
    kernel: str  # a variant's key; for PEER "numpy"
    rms: float
    largest: float
    cosine: float
    predicted: float | None  # for a mode of `quantize`: the prediction of explain()
    limit: float | None  # limit of rms

    @property
    def ok(self) -> bool:
        return self.limit is None or self.rms <= self.limit


def exact(inputs: Inputs) -> np.ndarray:
    """The result in fp64."""
    q, k, v = (x.astype(np.float64) for x in (inputs.q, inputs.k, inputs.v))
    logits = q @ k.T * inputs.softmax_scale + inputs.bias
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights @ v / weights.sum(axis=1, keepdims=True))


def run(inputs: Inputs, mode: str | None, device: str) -> tuple[np.ndarray, str, float | None]:
    """The result of `attention` in a mode, in fp64, the key of its kernel, and the predicted error.

    Raises ValueError if no kernel can run the call.
    """
    arrays = [x[None, None] for x in (inputs.q, inputs.k, inputs.v, inputs.bias[None])]
    if device == "cpu" and inputs.dtype != "bfloat16":
        operands: list[Any] = [x.astype(inputs.dtype) for x in arrays[:3]]
        bias: Any = arrays[3]
    else:
        import torch

        operands = [
            torch.from_numpy(x).to(device, getattr(torch, inputs.dtype)) for x in arrays[:3]
        ]
        bias = torch.from_numpy(arrays[3]).to(device)
    options = {"quantize": mode, **({"bias": bias} if inputs.bias.any() else {})}
    out = attention(*operands, **options)
    explained = explain(*operands, **options)
    key = explained.chosen.key if explained.chosen else ""
    out = out if isinstance(out, np.ndarray) else out.float().cpu().numpy()
    return out[0, 0].astype(np.float64), key, explained.predicted_error


def measure(
    kinds: Iterable[str],
    head_dims: Iterable[int],
    modes: Iterable[str],
    *,
    queries: int,
    keys: int,
    dtype: str,
    device: str,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> list[Row]:
    """One row per kind of inputs, head dim and mode, including "none" and PEER."""
    cases = [(kind, head_dim) for kind in kinds for head_dim in head_dims]
    rows = []
    for done, (kind, head_dim) in enumerate(cases):
        progress(f"{kind}, head dim {head_dim}", done, len(cases))
        inputs = make(kind, queries, keys, head_dim, dtype, seed)
        expected = exact(inputs)
        for mode in ("none", *modes, PEER):
            if mode == PEER:
                operands = (inputs.q, inputs.k, inputs.v, inputs.bias)
                out, kernel = peer.attention(*operands, dtype, inputs.softmax_scale), "numpy"
                predicted = None
            else:
                out, kernel, predicted = run(inputs, None if mode == "none" else mode, device)
            allowed = limit(mode, kind)
            rows.append(
                Row(
                    kind,
                    head_dim,
                    queries,
                    keys,
                    dtype,
                    mode,
                    kernel,
                    *_errors(out, expected),
                    predicted,
                    allowed if np.isfinite(allowed) else None,
                )
            )
    return rows


def _errors(out: np.ndarray, expected: np.ndarray) -> tuple[float, float, float]:
    """RMS and largest error, relative to the RMS of the expected result; and the cosine."""
    size = np.sqrt(np.mean(np.square(expected)))
    error = out - expected
    cosine = np.sum(out * expected) / np.sqrt(np.sum(np.square(out)) * np.sum(np.square(expected)))
    return (
        float(np.sqrt(np.mean(np.square(error))) / size),
        float(np.abs(error).max() / size),
        float(cosine),
    )


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
