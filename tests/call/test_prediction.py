"""The error in 8 bits is never above what is predicted: of inputs that broke that, of a search for
others, and by the definition of a prediction."""

import json
import math
import os
from pathlib import Path

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
import quantize_reference
from cases import torch
from cutlass_attn import attention, explain
from cutlass_attn._call.call import Call
from cutlass_attn.verify import predicted_errors

from dev.accuracy import adversarial

MODES = ("qk", "int8", "fp8")
modes = pytest.mark.parametrize("mode", MODES)
WORST = json.loads(Path(__file__).with_name("worst_cases.json").read_text())
# Cases of the search, each in all modes; CUTLASS_ATTN_SEARCH makes it longer.
SEARCHED = int(os.environ.get("CUTLASS_ATTN_SEARCH", "1000"))
# The largest ratio of an error to its prediction where that is from a sample of the queries, and
# the largest share of such heads above 1.
SAMPLED_RATIO, SAMPLED_SHARE = 4.0, 0.01


def normal(keys, *, queries=64, of_keys=0.3):
    """q, k, v of one head with a head dim of 64, as those who found the inputs below made them."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, queries, 64).half()
    q[..., 0] = 8
    k = torch.randn(1, 1, keys, 64).half() * of_keys
    k[..., 0] = 0
    return q, k


def few_keys_have_values(keys, others=0.0):
    """One key in 64 has a logit that is 3 larger; values of the others are small."""
    q, k = normal(keys)
    k[:, :, ::64, 0] = 3
    v = (torch.randn(1, 1, keys, 64) * others).half()
    v[:, :, ::64] = torch.randn(64)
    return q, k, v


def a_tenth_have_values():
    q, k = normal(2048)
    large = torch.rand(2048) < 0.1
    k[:, :, large, 0] = 3
    v = torch.randn(1, 1, 2048, 64).half()
    v[:, :, ~large] *= 0.03
    return q, k, v


def a_dominant_key(keys, place, nats=9.5):
    q, k = normal(keys, of_keys=0.5)
    k[:, :, place, 0] = nats
    return q, k, (torch.randn(1, 1, keys, 64) + 0.5).half()


def constant_values():
    q, k = normal(300)
    return q, k, torch.full((1, 1, 300, 64), 0.75).half()


REPORTED = {
    "zero values, 64 keys": lambda: few_keys_have_values(64),
    "zero values, 256 keys": lambda: few_keys_have_values(256),
    "zero values, 4096 keys": lambda: few_keys_have_values(4096),
    "small values": lambda: few_keys_have_values(64, 0.02),
    "small values, a tenth of the keys": a_tenth_have_values,
    "the last key": lambda: a_dominant_key(4096, -1),
    "the last key, 16384 keys": lambda: a_dominant_key(16384, -1),
    "the last key, 65536 keys": lambda: a_dominant_key(65536, -1),
    "a key in the middle": lambda: a_dominant_key(4096, 2048),
    "the first key": lambda: a_dominant_key(1024, 0),
    "the last key, 14 nats": lambda: a_dominant_key(16384, -1, 14.0),
    "constants": constant_values,
}


@modes
@pytest.mark.parametrize("name", REPORTED)
def test_reported(name, mode):
    """RMS errors of 128 % with "int8" and 90 % with "fp8" were predicted as 1.3 and 3.8 %, as row
    sums were those of rounded weights, and e4m3 weights relative to the row max."""
    q, k, v = REPORTED[name]()
    expected = adversarial.exact(q, k, v, {})
    found = attention(q, k, v, quantize=mode).double()
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt().item()
    predicted = explain(q, k, v, quantize=mode).predicted_error
    assert error <= predicted < 2.0 * error + 4e-3
    assert error < {"qk": 0.012, "int8": 0.015, "fp8": 0.045}[mode]


@modes
def test_a_limit_is_kept(mode):
    """By what is predicted, an error that 8 bits cannot avoid included: values that cancel."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 64).half() for _ in range(3))
    k = torch.cat([k, k + 0.01 * torch.randn_like(k)], dim=2)
    v = torch.cat([v, -v], dim=2)
    expected = adversarial.exact(q, k, v, {})
    for max_error in (0.02, 0.05):
        found = attention(q, k, v, quantize=mode, max_error=max_error).double()
        assert (found - expected).norm() <= max_error * expected.norm()
    in_8_bits = attention(q, k, v, quantize=mode).double()
    assert (in_8_bits - expected).norm() > 0.3 * expected.norm()


@modes
@pytest.mark.parametrize("factor", [0.0, 1e-3, 1.0, 30.0])
def test_the_lse_does_not_depend_on_v(mode, factor):
    q, k, v = few_keys_have_values(300, 1.0)
    _, lse = attention(q, k, v, quantize=mode, return_lse=True)
    other = v.clone()
    other[:, :, ::2] *= factor
    _, found = attention(q, k, other, quantize=mode, return_lse=True)
    assert torch.equal(found, lse)
    other[0, 0, 7, 3] = math.nan
    _, found = attention(q, k, other, quantize=mode, return_lse=True)
    assert torch.equal(found, lse)


@pytest.mark.skipif(
    cutlass_attn.build_info().simt != "all", reason="a build without GPU kernels on the CPU"
)
@pytest.mark.parametrize(
    "kernel",
    [
        "sm80/int8-simt",
        "sm80/int8_general-simt",
        "sm89/int8_fp8-simt",
        "sm89/int8_fp8_general-simt",
        "sm90/int8_fp8-simt",
    ],
)
@pytest.mark.parametrize("name", list(REPORTED)[:2] + list(REPORTED)[3:4] + ["the first key"])
def test_reported_on_gpu_kernels(kernel, name):
    q, k, v = REPORTED[name]()
    mode = "fp8" if "fp8" in kernel else "int8"
    options = {"quantize": mode, "kernel": kernel, "return_lse": True}
    expected = adversarial.exact(q, k, v, {})
    out, lse = attention(q, k, v, **options)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error <= explain(q, k, v, quantize=mode).predicted_error
    _, found = attention(q, k, v * 0 + 1, **options)
    assert torch.equal(found, lse)


# --- The definition -------------------------------------------------------------------------------


NAMES = ["ragged", "causal", "window_causal", "chunk_causal", "gqa", "softcap", "bias_inf", "mask"]
NAMES += ["alibi", "sinks", "scale_negative", "causal_more_queries", "bshd_gqa"]
CASES = [case for case in case_list.CASES if case.name in NAMES]


@modes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_definition(mode, case):
    """With masks, terms and sinks: from results in fp64."""
    q, k, v, _ = cases.tensors(case, "float16", 64, "cpu")
    options = cases.keywords(case, "float16", "cpu")
    found = predicted_errors(Call(q, k, v, {**options, "quantize": mode}))
    arrays, given = cases.values(case, "float16", 64), cases.arrays(case, "float16")
    due = quantize_reference.predicted(*arrays, "float16", mode, **case.scalars, **given)
    # Of a sample there is a bit more: an error for keys that had no weight in it.
    assert (found >= 0.98 * due).all() and (found <= 1.1 * due).all()


def test_of_queries_and_keys():
    given = torch.randn(3, 1, 1, 128, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = given.half()

    def predicted(q, k, mode="qk", **options):
        return predicted_errors(Call(q, k, v[:, :, : k.shape[2]], {"quantize": mode, **options}))

    plain = predicted(q, k)
    assert predicted(q, k, softmax_scale=0.25) == pytest.approx(2 * plain, rel=0.25)
    assert predicted(q, (k.float() + 4).half()) == pytest.approx(plain, rel=0.15)
    assert predicted(q, 0 * k) < 5e-4  # what a result in fp16 is rounded by
    assert predicted(q, k[:, :, :0]) == 0 and predicted(q[:, :, :0], k) == 0
    assert plain < predicted(q, k, "int8") < 1.5 * plain
    assert 0.035 < predicted(q, k, "fp8") < 0.05


# --- The search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", WORST, ids=lambda kept: kept["name"])
def test_worst_cases(kept):
    """What the search has found: the largest ratios of the error to the prediction."""
    case = adversarial.Case(**kept["case"])
    most = 1.0 if case.is_seen else SAMPLED_RATIO
    for found in adversarial.measure(case, (kept["mode"],)):
        assert found.ratio <= most


def test_search():
    found = list(adversarial.search(SEARCHED, seed=2026))
    for mode in MODES:
        seen = [x.ratio for x in found if x.mode == mode and x.case.is_seen]
        assert len(seen) > SEARCHED and max(seen) <= 1.0, max(found, key=lambda x: x.ratio)
        # Predictions are of use: few are far too large.
        assert np.median(seen) > 0.8
        sampled = np.array([x.ratio for x in found if x.mode == mode and not x.case.is_seen])
        assert sampled.max() <= SAMPLED_RATIO and (sampled > 1).mean() <= SAMPLED_SHARE
