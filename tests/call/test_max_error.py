"""`max_error=`: heads of which a larger error is predicted run in 16 bits, the others in 8."""

import cases
import cutlass_attn
import numpy as np
import pytest
from cutlass_attn import attention, explain, prequantize
from cutlass_attn._call import call
from cutlass_attn._call.operator import ATTENTION
from cutlass_attn.verify import predicted_errors

torch = cases.torch
on_engine = pytest.mark.skipif(
    cutlass_attn.build_info().simt != "all", reason="a build without GPU kernels on the CPU"
)
# Between what is predicted of ordinary heads and of peaked ones.
LIMITS = {"qk": 0.018, "int8": 0.019, "fp8": 0.05}
# Kernels with a limit, and those that they are made of: in 8 bits, and in 16.
ON_ENGINE = {
    "sm80/int8_qk_limited-simt": ("sm80/int8_qk-simt", "sm80-simt", "128x64x4"),
    "sm80/int8_limited_general-simt": (
        "sm80/int8_general-simt",
        "sm80/general-simt",
        "64x64x4",
    ),
    "sm89/int8_fp8_limited-simt": ("sm89/int8_fp8-simt", "sm80-simt", "128x64x4"),
}
ON_CPU = {name: (name, "cpu", "") for name in ("cpu/int8_qk", "cpu/int8", "cpu/int8_fp8")}
KERNELS = [
    *(pytest.param(name, *of, id=name, marks=on_engine) for name, of in ON_ENGINE.items()),
    *(pytest.param(name, *of, id=name) for name, of in ON_CPU.items()),
]
CASES = [
    {"seqlen_q": 33, "seqlen_k": 50},
    {"seqlen_q": 140, "seqlen_k": 200, "causal": True, "layout": "bshd"},
    {"seqlen_q": 9, "seqlen_k": 130, "softcap": 3.0, "window": 40},
    {"seqlen_q": 5, "seqlen_k": 70, "sinks": True, "strided": True},
]


def mode_of(kernel):
    return next(v.quantize for v in cutlass_attn.variants() if v.kernel == kernel)


def key_of(kernel, tile):
    return f"{kernel}/f16/d64/{tile}" if tile else f"{kernel}/f16"


def inputs(given, batch=2, heads=4, heads_kv=2, head_dim=64, peaked=((0, 1), (1, 2)), factor=4):
    """q, k, v of a case, its options, and which heads run in 16 bits: those that share a key head
    with a peaked one."""
    options = dict(given)
    shape = {x: options.pop(x) for x in given if x.startswith("seqlen")}
    q, k, v = cases.qkv(head_dim=head_dim, batch=batch, heads=heads, heads_kv=heads_kv, **shape)
    in_16_bits = torch.zeros(batch, heads, dtype=torch.bool)
    group = heads // heads_kv
    for b, h in peaked:
        q[b, h] *= factor
        in_16_bits[b, h // group * group : (h // group + 1) * group] = True
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, heads)
    if options.pop("strided", False):
        k, v = (torch.cat([x, x], dim=3)[..., : x.shape[3]] for x in (k, v))
    if options.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q, k, v), options, in_16_bits


def split(tensors, options, mode, is_gpu=False):
    """A limit in the widest gap between the predictions of key heads, and which query heads are
    beyond it."""
    errors = predicted_errors(call.Call(*tensors, {**options, "quantize": mode}), is_gpu)
    of_groups = errors.reshape(2, 2, 2).max(axis=2)
    ends = np.sort(of_groups, axis=None)
    at = int(np.argmax(ends[1:] / ends[:-1]))
    assert ends[at + 1] > 1.03 * ends[at]
    limit = float(np.sqrt(ends[at] * ends[at + 1]))
    return limit, torch.from_numpy((of_groups > limit).repeat(2, axis=1))


def by_head(out, options):
    return out.transpose(1, 2) if options.get("layout") == "bshd" else out


# --- Which head runs in what ----------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "narrow", "wide", "tile"), KERNELS)
@pytest.mark.parametrize("given", CASES, ids=str)
def test_heads_are_bitwise_those_of_one_kernel_or_the_other(kernel, narrow, wide, tile, given):
    tensors, options, _ = inputs(given)
    mode = mode_of(kernel)
    limit, in_16_bits = split(tensors, options, mode, "-simt" in kernel)
    small = {"return_lse": True, **options}
    own = {"kernel": key_of(kernel, tile), "quantize": mode, **small}
    in_8 = attention(*tensors, **own | {"kernel": key_of(narrow, tile)})
    in_16 = attention(*tensors, kernel=key_of(wide, tile), **small)
    found = attention(*tensors, **own, max_error=limit)
    for x, x8, x16 in zip(found, in_8, in_16, strict=True):
        x, x8, x16 = (y if y.dim() == 3 else by_head(y, options) for y in (x, x8, x16))
        assert torch.equal(x[in_16_bits], x16[in_16_bits])
        assert torch.equal(x[~in_16_bits], x8[~in_16_bits])
    assert not torch.equal(in_8[0], in_16[0])
    for max_error, due in ((10.0, in_8), (1e-5, in_16)):
        for x, expected in zip(attention(*tensors, **own, max_error=max_error), due, strict=True):
            assert torch.equal(x, expected)


@pytest.mark.parametrize(("kernel", "narrow", "wide", "tile"), KERNELS)
def test_other_numbers_in_the_same_memory_are_decided_anew(kernel, narrow, wide, tile):
    (q, k, v), _, _ = inputs({"seqlen_q": 33, "seqlen_k": 70}, peaked=())
    mode = mode_of(kernel)
    own = {"kernel": key_of(kernel, tile), "quantize": mode}
    peaked = q.clone()
    peaked[1, 3] *= 32
    ends = [predicted_errors(call.Call(x, k, v, own), "-simt" in kernel) for x in (q, peaked)]
    assert ends[1][1, 3] > 1.05 * ends[0].max()
    own["max_error"] = float(np.sqrt(ends[1][1, 3] * ends[0].max()))
    out = torch.empty_like(q)
    attention(q, k, v, **own, out=out)
    before = out.clone()
    q[1, 3] *= 32
    attention(q, k, v, **own, out=out)
    in_16 = attention(q, k, v, kernel=key_of(wide, tile))
    assert torch.equal(out[0], before[0]) and torch.equal(out[1, :2], before[1, :2])
    assert torch.equal(out[1, 2:], in_16[1, 2:])
    q[1, 3] /= 32
    attention(q, k, v, **own, out=out)
    assert torch.equal(out, before)


@pytest.mark.parametrize(("kernel", "narrow", "wide", "tile"), KERNELS)
def test_nothing_to_do_and_nothing_to_see(kernel, narrow, wide, tile):
    (q, k, v), _, _ = inputs({"seqlen_q": 5, "seqlen_k": 70})
    own = {"kernel": key_of(kernel, tile), "quantize": mode_of(kernel), "max_error": 0.02}
    assert attention(q[:, :, :0], k, v, **own).shape == (2, 4, 0, 64)
    assert attention(q[:0], k[:0], v[:0], **own).shape == (0, 4, 5, 64)
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], return_lse=True, **own)
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize(("kernel", "narrow", "wide", "tile"), KERNELS)
def test_what_is_not_finite_runs_in_16_bits(kernel, narrow, wide, tile):
    """Where 8 bits would spoil 16 keys, it is one."""
    (q, k, v), _, _ = inputs({"seqlen_q": 33, "seqlen_k": 70}, peaked=())
    k[0, 1, 5, 3] = float("inf")
    mode = mode_of(kernel)
    own = {"kernel": key_of(kernel, tile), "quantize": mode, "max_error": LIMITS[mode]}
    out = attention(q, k, v, causal=True, **own)
    in_16 = attention(q, k, v, causal=True, kernel=key_of(wide, tile))
    torch.testing.assert_close(out[0, 2:], in_16[0, 2:], rtol=0, atol=0, equal_nan=True)
    assert out[0, :2].isfinite().all() and out[1].isfinite().all()


# --- The prediction -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "narrow", "wide", "tile"), KERNELS)
@pytest.mark.parametrize("shape", [(300, 600), (33, 70)])
def test_the_device_predicts_what_the_host_does(kernel, narrow, wide, tile, shape):
    """A bit beside the number that the host has, the other kernel runs: the order of sums is the
    lanes', and a weight on the edge is rounded the other way."""
    seqlen_q, seqlen_k = shape
    given = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    tensors, _, _ = inputs(given, batch=1, heads=2, heads_kv=1, peaked=((0, 1),), factor=1.7)
    tensors[1][:] += 2  # what all keys have in common costs nothing
    mode = mode_of(kernel)
    own = {"kernel": key_of(kernel, tile), "quantize": mode}
    errors = predicted_errors(call.Call(*tensors, own), is_gpu="-simt" in kernel)
    assert errors[0, 1] > errors[0, 0] > 0
    due = [
        attention(*tensors, kernel=key_of(x, tile), quantize=y)
        for x, y in ((narrow, mode), (wide, None))
    ]
    for factor, expected in zip((1.01, 0.99), due, strict=True):
        found = attention(*tensors, **own, max_error=errors.max() * factor)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_explain_says_which(mode, layout):
    given = {"seqlen_q": 300, "seqlen_k": 600, "layout": layout}
    tensors, options, _ = inputs(given)
    limit, in_16_bits = split(tensors, options, mode)
    own = {"quantize": mode, "max_error": limit, **options}
    found = explain(*tensors, **own)
    np.testing.assert_array_equal(found.in_16_bits, in_16_bits)
    assert found.predicted_errors.shape == (2, 4) and found.max_error == pytest.approx(limit)
    assert found.predicted_error == found.predicted_errors.max()
    count = int(in_16_bits.sum())
    assert f"{count} of 8 heads are beyond max_error={found.max_error:g}" in str(found)
    arrays = explain(*(x.numpy() for x in tensors), **own)
    np.testing.assert_array_equal(arrays.in_16_bits, in_16_bits)
    without = explain(*tensors, quantize=mode, **options)
    assert without.in_16_bits is None and without.max_error is None
    np.testing.assert_array_equal(without.predicted_errors, found.predicted_errors)
    nowhere = explain(*(x.to("meta") for x in tensors), **own, device="sm_89")
    assert nowhere.in_16_bits is None and "was found for normal inputs" in str(nowhere)


@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize(("head_dim", "option"), [(64, {}), (128, {"softcap": 2.0}), (200, {})])
def test_a_gpu_has_a_kernel(mode, head_dim, option):
    x = torch.zeros(1, 2, 300, head_dim, dtype=torch.bfloat16, device="meta")
    mask = {"mask": torch.ones(300, 300, dtype=torch.bool, device="meta")}
    for options in (option, mask):
        verdicts = explain(x, x, x, device="sm_89", quantize=mode, max_error=0.02, **options)
        limited = [
            v for v in verdicts if "_limited" in v.variant.key and "max_error" not in v.reason
        ]
        lacks = ("not compiled into this build", "could run")
        assert verdicts.chosen or any(v.reason.startswith(lacks) for v in limited), verdicts
    for verdict in explain(x, x, x, device="sm_89", quantize=mode):
        if "_limited" in verdict.variant.key and verdict.variant.device == "cuda":
            assert "runs only calls with max_error" in verdict.reason


# --- The argument ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "max_error is 0.02, but quantize is None; allowed: a mode"),
        ({"max_error": 0.0}, ValueError, "max_error is 0.0, allowed: a finite number above 0"),
        ({"max_error": -0.1}, ValueError, "max_error is -0.1, allowed: a finite number above 0"),
        ({"max_error": 1e-60}, ValueError, "max_error is 1e-60, allowed"),
        ({"max_error": float("nan")}, ValueError, "max_error is nan, allowed"),
        ({"max_error": float("inf")}, ValueError, "max_error is inf, allowed"),
        ({"max_error": "small"}, TypeError, "max_error must be a number, got 'small'"),
        ({"max_error": True}, TypeError, "max_error must be a number, got"),
        (
            {"quantize": "qk", "kernel": "sm80/int8_qk-simt"},
            ValueError,
            "does not implement max_error",
        ),
        (
            {"quantize": "qk", "kernel": "sm80/int8_qk_limited-simt", "max_error": None},
            ValueError,
            "runs only calls with max_error",
        ),
    ],
)
def test_errors_name_the_argument(given, error, message):
    q, k, v = cases.qkv(head_dim=64)
    given = {"max_error": 0.02, **given}
    with pytest.raises(error, match=message):
        attention(q, k, v, **given)
    with pytest.raises(error, match=message):
        attention(*(x.numpy() for x in (q, k, v)), **given)


def test_what_does_not_go_with_it_is_refused():
    q, k, v = cases.qkv(head_dim=64)
    kept = prequantize(k, v, quantize="qk")
    with pytest.raises(ValueError, match="but quantize is a PrequantizedKV; allowed: a mode"):
        attention(q, k, v, quantize=kept, max_error=0.02)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_error'"):
        prequantize(k, v, quantize="qk", max_error=0.02)
    with pytest.raises(NotImplementedError, match="no gradient with quantize='qk'"):
        attention(q.requires_grad_(), k, v, quantize="qk", max_error=0.02)
    q = torch.zeros(4, 1, 64, dtype=torch.float16)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_error'"):
        cutlass_attn.attention_varlen(q, q, q, ends, max_error=0.02)
    cache = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_error'"):
        cutlass_attn.attention_decode(cache[:, :, :1], cache, cache, ends[1:], max_error=0.02)


# --- Other ways in --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LIMITS)
def test_arrays_threads_and_the_operator_are_the_same(mode):
    tensors, options, _ = inputs(CASES[1])
    options |= {"quantize": mode, "max_error": LIMITS[mode]}
    expected = attention(*tensors, **options)
    arrays = attention(*(x.numpy() for x in tensors), **options)
    np.testing.assert_array_equal(arrays, expected.numpy())

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q, k, v):
        return attention(q, k, v, **options)

    assert torch.equal(compiled(*tensors), expected)
    names = dict(zip("qkv", tensors, strict=True))
    if mode == "qk":  # which takes seconds
        torch.library.opcheck(ATTENTION.forward, ATTENTION.schema.arguments(**names, **options))
    mapped = torch.vmap(lambda q, k, v: attention(q, k, v, **options))
    assert torch.equal(mapped(*(x[None] for x in tensors))[0], expected)
    with pytest.raises(Exception, match="max_error is -1"):
        torch.compile(backend="eager", fullgraph=True)(
            lambda q, k, v: attention(q, k, v, quantize=mode, max_error=-1.0)
        )(*tensors)
    torch.compiler.reset()


@on_engine
@pytest.mark.parametrize(
    "kernel", ["cpu/int8_qk", "cpu/int8", "cpu/int8_fp8", "sm80/int8_qk_limited-simt"]
)
@pytest.mark.parametrize("given", [CASES[1], CASES[3]], ids=str)
def test_verify_confirms_it(kernel, given):
    tensors, options, _ = inputs(given)
    mode = mode_of(kernel)
    options |= {"quantize": mode, "max_error": LIMITS[mode], "kernel": kernel}
    due = attention(*tensors, **options)
    assert torch.equal(attention(*tensors, verify=True, **options), due)


@on_engine
@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize("ran_in", [8, 16])
def test_verify_takes_a_head_on_the_limit_for_what_it_is(monkeypatch, mode, ran_in):
    """Where the host and the device disagree a bit."""
    tensors, _, _ = inputs(CASES[0], peaked=((0, 1),), factor=1.5)
    options = {"quantize": mode, "kernel": "auto"}
    limit = predicted_errors(call.Call(*tensors, options)).max()
    run = call.Call.run

    def on_the_other_side(self, **instead):
        if self.options.get("quantize") is None:
            return run(self, **instead)
        return run(
            self.with_options(max_error=limit * (1.001 if ran_in == 8 else 0.999)), **instead
        )

    monkeypatch.setattr(call.Call, "run", on_the_other_side)
    for factor in (0.9999, 1.0001):
        attention(*tensors, **options, verify=True, max_error=limit * factor)


@on_engine
@pytest.mark.parametrize("mode", LIMITS)
def test_verify_of_nothing(mode):
    tensors, _, _ = inputs({"seqlen_q": 0, "seqlen_k": 70})
    assert attention(*tensors, quantize=mode, max_error=0.02, verify=True).shape == (2, 4, 0, 64)
    q, k, v = inputs({"seqlen_q": 5, "seqlen_k": 0})[0]
    assert (attention(q, k, v, quantize=mode, max_error=0.02, verify=True) == 0).all()


@on_engine
@pytest.mark.parametrize("mode", LIMITS)
def test_verify_sees_a_fault_in_either(monkeypatch, mode):
    tensors, _, _ = inputs(CASES[0])
    options = {"quantize": mode, "max_error": LIMITS[mode], "verify": True}
    attention(*tensors, **options)
    real = call.Call.run
    for head in range(2):  # of batch entry 1: in 8 bits; of entry 0: in 16

        def wrong(self, head=head, **instead):
            found = real(self, **instead)
            if self.options.get("quantize") is not None:
                found[0][1 - head, 1, -1] *= 1.5
            return found

        monkeypatch.setattr(call.Call, "run", wrong)
        with pytest.raises(cutlass_attn.VerificationError, match="disagree on out"):
            attention(*tensors, **options)


@on_engine
@pytest.mark.parametrize("mode", LIMITS)
def test_verify_judges_the_error_of_heads_in_8_bits(monkeypatch, mode):
    """A prediction that was too small is found out."""
    tensors, _, _ = inputs(CASES[0], peaked=())
    options = {"quantize": mode, "verify": True, "kernel": "auto"}
    real = attention(*tensors, quantize=mode)

    def as_in_8_bits(self, **instead):
        if self.options.get("quantize") is None:
            return run(self, **instead)
        return run(self.with_options(max_error=None), **instead)

    run = call.Call.run
    monkeypatch.setattr(call.Call, "run", as_in_8_bits)
    predicted = predicted_errors
    monkeypatch.setattr("cutlass_attn.verify.predicted_errors", lambda call: predicted(call) / 1000)
    message = r"batch \d, head \d ran in 8 bits .* but max_error is 0\.001; .* predicted"
    with pytest.raises(cutlass_attn.VerificationError, match=message):
        attention(*tensors, **options, max_error=0.001)
    assert real.isfinite().all()


# --- On a GPU -------------------------------------------------------------------------------------


# Each compiles its kernels at first use, up to a minute and a half for one.
@cases.needs_gpu
@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "option"),
    [("float16", 64, {"alibi": True}), ("bfloat16", 128, {}), ("float16", 256, {})],
)
def test_a_gpu_runs_peaked_heads_in_16_bits(dtype, mode, head_dim, option):
    """As far from 16 bits as those are among themselves, or as what runs in 8 bits."""
    (q, k, v), _, in_16_bits = inputs(
        {"seqlen_q": 300, "seqlen_k": 700}, head_dim=head_dim, factor=6
    )
    q, k, v = (x.to("cuda", getattr(torch, dtype)) for x in (q, k, v))
    if option.get("alibi"):
        option = {"alibi_slopes": torch.full((4,), 0.01, device="cuda")}
    limit = {"quantize": mode, "max_error": LIMITS[mode]}
    limited = explain(q, k, v, causal=True, **option, **limit).chosen.kernel
    assert "_limited" in limited
    found, in_8, in_16 = (
        attention(q, k, v, causal=True, **option, **more).float().cpu()
        for more in (
            limit,
            {"quantize": mode, "kernel": limited.replace("_limited", "")},
            {},
        )
    )
    rounding = {"float16": 1e-3, "bfloat16": 8e-3}[dtype]

    def distance(a, b, heads):
        return ((a - b)[heads].norm() / b[heads].norm()).item()

    assert distance(found, in_16, in_16_bits) < rounding
    assert distance(found, in_8, ~in_16_bits) < 2 * rounding
    assert distance(in_8, in_16, in_16_bits) > 2 * distance(found, in_16, in_16_bits)
    again = attention(q, k, v, causal=True, **limit, **option)
    assert torch.equal(again.float().cpu(), found)


@cases.needs_gpu
@pytest.mark.parametrize("mode", LIMITS)
def test_a_graph_decides_anew_in_every_replay(mode):
    (q, k, v), _, _ = inputs({"seqlen_q": 300, "seqlen_k": 700}, peaked=())
    q, k, v = (x.to("cuda") for x in (q, k, v))
    options = {"quantize": mode, "max_error": LIMITS[mode]}
    ordinary = attention(q, k, v, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, **options)
    graph.replay()
    assert torch.equal(out, ordinary)
    flat = q[1, 3].clone()
    q[1, 3] *= 6
    graph.replay()
    peaked = attention(q, k, v, **options)
    assert torch.equal(out, peaked)
    assert torch.equal(out[1, :2], ordinary[1, :2]) and not torch.equal(out[1, 2], ordinary[1, 2])
    q[1, 3] = flat  # q / 6 would round
    graph.replay()
    assert torch.equal(out, ordinary)
