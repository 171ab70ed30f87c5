"""A search for inputs whose error in 8 bits is above its prediction.

    python -m dev.accuracy.adversarial --count 20000 --seed 1 --keep tests/call/worst_cases.json

A case is small and is built from a few numbers that describe it: `draw` draws a case at random,
`build` makes its tensors, `measure` has the true and the predicted error of each of its heads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cutlass_attn import attention
from cutlass_attn._call.call import Call
from cutlass_attn.verify import predicted_errors

MODES = ("qk", "int8", "fp8")
SAMPLED = 32  # queries of a head that a prediction samples: kernels/core/predict.hpp
KEYS = (
    *("random", "dominant", "some", "equal", "two", "biased", "channel", "outlier", "zero"),
    "growing",
)
VALUES = (
    *("random", "one", "small", "constant", "mean", "outliers", "alternate", "column", "tiles"),
    *("opposed", "zero"),
)


@dataclass(frozen=True)
class Case:
    """One call, except for its mode.

    `keys` and `values` name changes of normal numbers: see `_change_keys`, `_change_values`.
    """

    seed: int
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    q_scale: float
    k_scale: float
    v_scale: float
    keys: str
    nats: float  # logits of dominant keys minus those of other keys
    place: float  # position of a key: 0 is the first, 1 the last
    share: float  # share of dominant keys
    values: str
    factor: float
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_seen(self) -> bool:
        """Whether the prediction samples all queries."""
        return self.seqlen_q <= SAMPLED


@dataclass(frozen=True)
class Found:
    mode: str
    head: int  # index over all batch entries
    error: float
    predicted: float
    case: Case

    @property
    def ratio(self) -> float:
        """Ratio of the error to the prediction."""
        # A NaN prediction says nothing, and max_error runs the head in 16 bits.
        says = not math.isnan(self.predicted)
        return self.error / self.predicted if says and self.error > 0 else 0.0


def draw(rng: np.random.Generator) -> Case:
    """A random case."""

    def log(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    heads_kv = int(rng.integers(1, 3))
    head_dim = int(rng.choice([8, 16, 32, 64, 64, 80, 128]))
    long = rng.random() < 0.3
    options: dict[str, Any] = {}
    chances = {
        "causal": lambda: True,
        "window": lambda: [int(rng.integers(0, 100)), int(rng.integers(-1, 30))],
        "attention_chunk": lambda: int(rng.integers(3, 100)),
        "softcap": lambda: log(0.5, 30),
        "sinks": lambda: float(rng.normal() * 4),
        "alibi_slopes": lambda: log(0.01, 1),
        "bias": lambda: log(0.1, 6),
        "mask": lambda: float(rng.uniform(0.05, 0.9)),
        "softmax_scale": lambda: log(0.02, 1) * float(rng.choice([1, 1, 1, -1])),
        "layout": lambda: "bshd",
    }
    for name, make in chances.items():
        if rng.random() < (0.35 if name == "causal" else 0.12):
            options[name] = make()
    if options.get("softmax_scale", 1.0) < 0 and "softcap" not in options:
        options["softmax_scale"] = abs(options["softmax_scale"])
    return Case(
        seed=int(rng.integers(2**31)),
        dtype=str(rng.choice(["float16", "float16", "bfloat16"])),
        batch=int(rng.integers(1, 3)),
        heads=heads_kv * int(rng.integers(1, 4)),
        heads_kv=heads_kv,
        seqlen_q=int(rng.integers(SAMPLED + 1, 150) if long else rng.integers(1, SAMPLED + 1)),
        seqlen_k=int(
            rng.choice([rng.integers(1, 20), rng.integers(20, 200), rng.integers(200, 700)])
        ),
        head_dim=head_dim,
        head_dim_v=int(rng.choice([head_dim, head_dim, 8, 64])),
        q_scale=log(0.05, 5),
        k_scale=log(0.05, 3),
        v_scale=float(rng.choice([1.0, log(1e-6, 100)])),
        keys=str(rng.choice(KEYS)),
        nats=float(rng.uniform(0.5, 18)),
        place=float(rng.choice([0.0, 1.0, rng.random()])),
        share=log(0.003, 0.7),
        values=str(rng.choice(VALUES)),
        factor=log(1e-4, 1.0),
        options=options,
    )


def _change_keys(case: Case, rng: np.random.Generator, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Changes q (B, Hq, S, D) and k (B, Hkv, Sk, D); returns which keys (Sk,) are dominant."""
    count, scale = k.shape[2], case.options.get("softmax_scale") or k.shape[3] ** -0.5
    one = np.arange(count) == round(case.place * (count - 1))
    if case.keys in ("dominant", "some"):
        if case.keys == "some":
            one = rng.random(count) < case.share
        # The softcap reduces logits.
        q[..., 0] = 8.0
        k[..., 0] = 0.0
        k[:, :, one, 0] = case.nats / 8.0 / abs(scale)
    elif case.keys == "equal":
        k[:] = k[:, :, :1]
    elif case.keys == "two":
        one = np.arange(count) % 2 == 0
        k[:, :, one], k[:, :, ~one] = k[:, :, :1], -2 * k[:, :, -1:]
    elif case.keys == "biased":
        k += 8.0 * rng.standard_normal((1, 1, 1, k.shape[3]))
    elif case.keys == "channel":
        k[..., 0] *= 30.0
    elif case.keys == "outlier":
        k[:, :, one] *= 30.0
    elif case.keys == "zero":
        k[:, :, ~one] = 0.0
    elif case.keys == "growing":
        k *= np.geomspace(0.01, 3.0, count)[:, None]
    return one


def _change_values(case: Case, rng: np.random.Generator, v: np.ndarray, one: np.ndarray) -> None:
    """Changes v (B, Hkv, Sk, Dv). `one`: for dominant keys."""
    count = v.shape[2]
    if case.values == "one":
        v[:, :, ~one] = 0.0
    elif case.values == "small":
        v[:, :, ~one] *= case.factor
    elif case.values == "constant":
        v[:] = v[:, :, :1]
    elif case.values == "mean":
        v[:] = v[:, :, :1] + case.factor * v
    elif case.values == "outliers":
        v[:, :, rng.random(count) > case.share] *= case.factor
    elif case.values == "alternate":
        v[:] = v[:, :, :1] * np.where(np.arange(count) % 2, 1.0, -1.0)[:, None]
    elif case.values == "column":
        v[..., 1:] *= case.factor
    elif case.values == "tiles":
        v *= np.exp(3 * rng.standard_normal(count // 64 + 1))[np.arange(count) // 64, None]
    elif case.values == "opposed":
        signs = np.where(np.arange(count) % 2, 1.0, -1.0)[:, None]
        v[:] = v[:, :, :1] * signs + case.factor * v
    elif case.values == "zero":
        v[:, :, one] = 0.0


def build(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """q, k, v in (B, H, S, D), and options with layout bhsd."""
    rng = np.random.default_rng(case.seed)
    b, s, n = case.batch, case.seqlen_q, case.seqlen_k
    q = rng.standard_normal((b, case.heads, s, case.head_dim)) * case.q_scale
    k = rng.standard_normal((b, case.heads_kv, n, case.head_dim)) * case.k_scale
    v = rng.standard_normal((b, case.heads_kv, n, case.head_dim_v))
    _change_values(case, rng, v, _change_keys(case, rng, q, k))
    v *= case.v_scale
    options = dict(case.options)
    options.pop("layout", None)
    if "window" in options:
        options["window"] = tuple(options["window"])
    if "sinks" in options:
        options["sinks"] = options["sinks"] + torch.arange(case.heads, dtype=torch.float32)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.full((case.heads,), options["alibi_slopes"])
    if "bias" in options:
        bias = torch.from_numpy(rng.standard_normal((s, n))).float()
        options["bias"] = options["bias"] * bias
    if "mask" in options:
        options["mask"] = torch.from_numpy(rng.random((s, n)) >= options["mask"])
    dtype = getattr(torch, case.dtype)
    return (*(torch.from_numpy(x).to(dtype) for x in (q, k, v)), options)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """The result in float64, layout bhsd, from the definition alone."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = q @ k.mT * (options.get("softmax_scale") or q.shape[3] ** -0.5)
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    key = torch.arange(k.shape[2])
    position = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"].double()[:, None, None]
        logits = logits - slopes * (position - key).abs()
    logits = logits + options["bias"].double() if "bias" in options else logits
    seen = options.get("mask", torch.ones(logits.shape[2:], dtype=torch.bool)).clone()
    left, right = options.get("window", (-1, -1))
    seen &= key <= position if options.get("causal") else seen
    seen &= key >= position - left if left >= 0 else seen
    seen &= key <= position + right if right >= 0 else seen
    if chunk := options.get("attention_chunk"):
        seen &= key // chunk == position.div(chunk, rounding_mode="floor")
    logits = logits.masked_fill(~seen, -math.inf)
    if "sinks" in options:
        column = options["sinks"].double()[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=3)
    weights = torch.softmax(logits, dim=3).nan_to_num(0.0)
    return weights[..., : k.shape[2]] @ v


def measure(case: Case, modes: tuple[str, ...] = MODES, device: str = "cpu") -> Iterator[Found]:
    """Errors of each mode and query head of the case."""
    q, k, v, options = build(case)
    expected = exact(q, k, v, options)
    own = {name: x.to(device) if torch.is_tensor(x) else x for name, x in options.items()}
    arrays = [x.to(device) for x in (q, k, v)]
    is_bshd = case.options.get("layout") == "bshd"
    if is_bshd:
        arrays = [x.transpose(1, 2) for x in arrays]
        own["layout"] = "bshd"
    size = expected.square().sum(dim=(2, 3))
    # Where values cancel exactly, the rest is rounding of this sum.
    size[size <= (2.0**-40 * v.abs().max().item()) ** 2] = 0.0
    for mode in modes:
        given = {**own, "quantize": mode}
        out = attention(*arrays, **given).cpu().double()
        out = out.transpose(1, 2) if is_bshd else out
        difference = (out - expected).square().sum(dim=(2, 3))
        is_there = (size > 0) | (difference > (2.0**-20 * v.abs().max().item()) ** 2)
        errors = torch.where(is_there & (difference > 0), (difference / size).sqrt(), 0.0).flatten()
        predicted = predicted_errors(Call(arrays[0], arrays[1], arrays[2], given))
        assert predicted is not None
        for head, (error, of_head) in enumerate(zip(errors.tolist(), predicted.ravel())):
            yield Found(mode, head, error, float(of_head), case)


def search(count: int, seed: int, modes: tuple[str, ...] = MODES) -> Iterator[Found]:
    """Heads of `count` cases."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield from measure(draw(rng), modes)


def worst(found: list[Found], count: int) -> list[Found]:
    """The largest ratios, one per case and mode."""
    best: dict[tuple[int, str], Found] = {}
    for x in sorted(found, key=lambda x: -x.ratio):
        best.setdefault((x.case.seed, x.mode), x)
    return list(best.values())[:count]


def named(x: Found) -> dict[str, Any]:
    """The case as stored in a file."""
    kind = "all queries seen" if x.case.is_seen else "sampled"
    name = f"{x.mode}, {x.case.keys} keys, {x.case.values} values, {kind}"
    return {"name": name, "mode": x.mode, "ratio": round(x.ratio, 3), "case": asdict(x.case)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument(
        "--keep", type=Path, help="JSON file for the four worst of each mode and kind"
    )
    options = parser.parse_args()
    modes = tuple(options.mode or MODES)
    found = list(search(options.count, options.seed, modes))
    kept = []
    for mode in modes:
        for is_seen in (True, False):
            of_kind = [x for x in found if x.mode == mode and x.case.is_seen == is_seen]
            above = sum(x.ratio > 1 for x in of_kind)
            ratios = np.array([x.ratio for x in of_kind])
            print(
                f"{mode}, {'all queries seen' if is_seen else 'sampled'}: {len(of_kind)} heads, "
                f"{above} above the prediction; ratio median {np.median(ratios):.3f}, "
                f"99.9 % {np.quantile(ratios, 0.999):.3f}, worst {ratios.max():.3f}"
            )
            of_kind = worst(of_kind, 4)
            kept += of_kind
            for x in of_kind:
                print(
                    f"  {x.ratio:.3f}  error {x.error:.3g}  predicted {x.predicted:.3g}  {x.case}"
                )
    if options.keep:
        options.keep.write_text(json.dumps([named(x) for x in kept], indent=1) + "\n")


if __name__ == "__main__":
    main()
