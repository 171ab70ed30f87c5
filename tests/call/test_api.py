"""The Python interface: array libraries, options, verify, explain, threads, streams, graphs."""

import concurrent.futures
import inspect
import subprocess
import sys

import cases
import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import _C

attention = cutlass_attn.attention
qkv = cases.qkv
DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]


# --- Array libraries ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_numpy_equals_torch(dtype):
    tensors = qkv(dtype=dtype)
    arrays = [x.numpy() for x in tensors]
    out, lse = attention(*arrays, causal=True, return_lse=True)
    assert isinstance(out, np.ndarray) and out.dtype == dtype and lse.dtype == np.float32
    expected, expected_lse = attention(*tensors, causal=True, return_lse=True)
    np.testing.assert_array_equal(out, expected.numpy())
    np.testing.assert_array_equal(lse, expected_lse.numpy())


def test_numpy_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own")
    tensors = qkv(dtype="bfloat16")
    arrays = [x.float().numpy().astype(ml_dtypes.bfloat16) for x in tensors]
    out = attention(*arrays, verify=cutlass_attn.build_info().simt != "none")
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), attention(*tensors).float().numpy())


def test_numpy_negative_strides():
    q, k, v = (x.numpy() for x in qkv())
    flipped = attention(q[::-1, :, ::-1], k[::-1], v[::-1])
    np.testing.assert_array_equal(flipped[::-1, :, ::-1], attention(q, k, v))


def test_numpy_takes_read_only_arrays():
    arrays = [x.numpy() for x in qkv()]
    expected = attention(*arrays)
    for x in arrays:
        x.flags.writeable = False
    np.testing.assert_array_equal(attention(*arrays), expected)


def test_older_torch():
    """Before 2.10 tensors have no exchange table: their attributes say the same."""
    code = """
import torch
q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 7, 16)
del torch.Tensor.__dlpack_c_exchange_api__
import cutlass_attn
out, lse = cutlass_attn.attention(q, k, k, causal=True,
                                  bias=torch.zeros(7), sinks=torch.zeros(4), return_lse=True)
n = [x.numpy() for x in (q, k, k)]
expected = cutlass_attn.attention(*n, causal=True, sinks=torch.zeros(4).numpy())
print(bool((out.numpy() == expected).all()), cutlass_attn._call.torch_library.exchange_api)
"""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch is one")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True None\n", done.stderr


def test_works_without_torch():
    code = """
import sys
sys.modules["torch"] = None  # importing torch now fails
import numpy as np, cutlass_attn
q = np.ones((1, 2, 5, 16), np.float32)
assert np.allclose(cutlass_attn.attention(q, q, q), 1)
assert cutlass_attn.explain(q, q, q).chosen.kernel == "cpu"
try:
    cutlass_attn.attention([1], [1], [1])
except TypeError:
    print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_import_leaves_torch_alone():
    code = "import sys, cutlass_attn; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_importing_needs_numpy_alone():
    code = (
        "import sys; before = {*sys.modules}; import cutlass_attn; print(*{*sys.modules} - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert "cutlass_attn" in imported
    others = imported - sys.stdlib_module_names - {"numpy", "cutlass_attn"}
    assert not {name for name in others if not name.startswith(("_", "sitecustomize"))}


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_defaults(device):
    q, k, v = qkv(device=device)
    out = attention(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    explicit, lse = attention(
        q, k, v, causal=False, window=(None, -1), softmax_scale=64**-0.5, return_lse=True
    )
    assert torch.equal(out, explicit)
    assert lse.shape == (2, 4, 33) and lse.dtype == torch.float32 and lse.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_agree(device):
    q, k, v = qkv(device=device)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    moved = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out2, lse2 = attention(*moved, causal=True, return_lse=True, layout="bshd")
    assert out2.is_contiguous()
    assert torch.equal(out, out2.transpose(1, 2)) and torch.equal(lse, lse2)


@pytest.mark.parametrize("device", DEVICES)
def test_out_is_used_and_returned(device):
    q, k, v = qkv(device=device)
    out = torch.full_like(q, torch.nan)
    assert attention(q, k, v, out=out) is out
    assert torch.equal(out, attention(q, k, v))


def test_windows_mean_the_same():
    q, k, v = qkv()
    assert torch.equal(attention(q, k, v, window=7), attention(q, k, v, window=[7, 7]))
    assert torch.equal(attention(q, k, v, window=2**40), attention(q, k, v))
    assert torch.equal(
        attention(q, k, v, causal=True, window=np.int64(7)),
        attention(q, k, v, window=(7, 0)),
    )


def test_one_thread_gives_the_same_bits():
    q, k, v = qkv()
    expected = attention(q, k, v)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(attention(q, k, v), expected)
    finally:
        torch.set_num_threads(threads)


# --- verify ---------------------------------------------------------------------------------------

needs_simt = pytest.mark.skipif(
    cutlass_attn.build_info().simt == "none",
    reason="`verify` runs a simt kernel",
)
VERIFIABLE = [
    pytest.param("cpu", marks=needs_simt),
    pytest.param("cuda", marks=cases.needs_gpu),
]


@pytest.mark.parametrize(
    "variant",
    cases.all_variants(lambda v: "/minimal" not in v.kernel and v.quantize not in ("int8", "fp8")),
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_verify_accepts_right_results(variant, layout):
    if variant.device == "cpu" and cutlass_attn.build_info().simt == "none":
        pytest.skip("on the CPU the scalar baseline is a simt kernel")
    head_dim = variant.head_dim or 64
    rows = 9 if variant.max_rows else 33
    tensors = qkv(dtype=variant.dtype, head_dim=head_dim, device=variant.device, seqlen_q=rows)
    if layout == "bshd":
        tensors = [x.transpose(1, 2) for x in tensors]
    options = {"causal": True, "layout": layout, **cases.own(variant)}
    if variant.accumulate == "fp32":
        options["softcap"] = 4.0
    out = attention(*tensors, **options, verify=True)
    assert torch.equal(out, attention(*tensors, **options))


@pytest.mark.parametrize("kernel", ["scalar/minimal", "scalar/tiled", "scalar/vectorized"])
@pytest.mark.parametrize("device", VERIFIABLE)
def test_verify_uses_another_kernel(monkeypatch, kernel, device):
    """The baseline must not be the tested kernel itself."""
    asked = []

    def spy(q, k, v, options, **more):
        asked.append((options | more)["kernel"])
        return real(q, k, v, options, **more)

    real = _C.forward
    monkeypatch.setattr(_C, "forward", spy)
    kernel += "-simt" * (device == "cpu")
    attention(*qkv(device=device), kernel=kernel, verify=True)
    assert asked[0] == kernel and asked[1] != kernel and asked[1].startswith("scalar/")


@pytest.mark.parametrize("what", ["out", "lse", "nan"])
@pytest.mark.parametrize("device", VERIFIABLE)
def test_verify_catches_a_corrupted_result(monkeypatch, what, device):
    """One element off by one per cent, or not a number, as if the kernel had put it there."""
    q, k, v = qkv(device=device)
    real, made = _C.forward, []

    def corrupt(*call, **more):
        results = real(*call, **more)
        if not made:  # the first call is the kernel's, the second the baseline's
            made.append(call)
            target = results[what == "lse"]
            at = (1, 2, 30, 17)[: target.ndim]
            target[at] = torch.nan if what == "nan" else target[at] + 0.05
        return results

    monkeypatch.setattr(_C, "forward", corrupt)
    order = "batch 1, head 2, query 30" + ", column 17" * (what != "lse")
    name = "lse" if what == "lse" else "out"
    with pytest.raises(cutlass_attn.VerificationError, match=f"on {name} in 1 of .*{order}: "):
        attention(q, k, v, verify=True)


@pytest.mark.parametrize("device", VERIFIABLE)
def test_verify_catches_a_mask_off_by_one(monkeypatch, device):
    q, k, v = qkv(device=device)
    real, seen = _C.forward, []

    def shifted(q, k, v, options, **more):
        seen.append(options)
        if len(seen) == 1:
            more["window"] = (None, 19)
        return real(q, k, v, options, **more)

    monkeypatch.setattr(_C, "forward", shifted)
    with pytest.raises(cutlass_attn.VerificationError, match="disagree on"):
        attention(q, k, v, window=(None, 20), verify=True)


# --- explain, variants, build_info ----------------------------------------------------------------


def test_signatures():
    ours, explains = map(inspect.signature, (attention, cutlass_attn.explain))
    assert list(explains.parameters) == [*ours.parameters, "device", "grad"]
    assert "bias" in ours.parameters and ours.parameters["layout"].default == "bhsd"


def test_explain_names_the_kernel_and_every_reason():
    q, k, v = qkv()
    explanation = cutlass_attn.explain(q, k, v, causal=True)
    assert explanation.chosen.key == "cpu/f16"
    assert [x.variant for x in explanation] == cutlass_attn.variants()
    assert all(bool(x.reason) != x.chosen for x in explanation)
    text = explanation.table()
    assert text.startswith("float16, q (2, 4, 33, 64), k (2, 2, 50, 64), v (2, 2, 50, 64), causal")
    assert "-> cpu/f16" in text and "needs operands on a CUDA device" in text


def test_explain_about_an_absent_gpu():
    """Asked on any machine about an Ada GPU; what this build leaves out is named as such."""
    build = cutlass_attn.build_info()
    fp16 = cutlass_attn.explain(*qkv(), device="sm_89")
    fp32 = cutlass_attn.explain(*qkv(dtype="float32"), device="sm_89")
    if build.cuda:
        assert fp16.chosen.kernel == "sm80" and fp16.chosen.head_dim == 64
        assert fp32.chosen.kernel == "scalar/vectorized"
    else:
        assert fp16.chosen is None and "not compiled into this build" in str(fp16)
    assert "needs float16, got float32" in fp32.table()
    old = cutlass_attn.explain(*qkv(), device="sm_75")
    assert old.chosen is None
    assert "needs compute capability >= 8.0, the device has 7.5" in str(old)
    assert old.table().endswith("no kernel takes this call")


def test_explain_takes_tensors_without_memory():
    q, k, v = (x.to("meta") for x in qkv())
    assert cutlass_attn.explain(q, k, v, device="cpu").chosen.key == "cpu/f16"


def odd_rows(dtype):
    """q, k and v of 64 columns whose rows begin at odd elements."""
    return (torch.zeros(2, 4, 33, 65, dtype=getattr(torch, dtype))[..., 1:] for _ in "qkv")


def test_explain_says_what_alignment_lacks():
    q, k, v = odd_rows("float16")
    found = cutlass_attn.explain(q, k, v, device="sm_89", kernel="sm80/general")
    assert found.chosen.kernel == "sm80/general" and not found.copied
    options = {"out": torch.zeros(2, 4, 33, 65, dtype=q.dtype)[..., 1:]}
    verdicts = {
        x.variant.kernel: x for x in cutlass_attn.explain(q, k, v, device="sm_89", **options)
    }
    assert "out's address is not a multiple of 16 bytes" in verdicts["sm80"].reason
    assert "out's row stride of 65 elements" in verdicts["sm80"].reason
    assert "multiple" not in verdicts["sm80/general"].reason


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpu_copies_unaligned_inputs_and_runs_its_fast_kernels(dtype):
    if not cutlass_attn.build_info().cuda:
        pytest.skip("a build without GPU kernels")
    aligned = torch.zeros(2, 4, 33, 64, dtype=getattr(torch, dtype))
    q, k, v = odd_rows(dtype)
    for device in ("sm_80", "sm_89", "sm_90"):
        for grad in (False, True):
            found = cutlass_attn.explain(q, k, v, device=device, grad=grad)
            fast = cutlass_attn.explain(aligned, aligned, aligned, device=device, grad=grad)
            assert found.chosen.key == fast.chosen.key and not fast.copied
            assert found.copied == ("q", "k", "v")
            assert "q, k and v are copied first" in str(found)
            assert "q, k and v are copied first" in found.table()
    one = cutlass_attn.explain(aligned, aligned, v, device="sm_89")
    assert one.copied == ("v",) and "v is copied first" in str(one)


def test_what_no_copy_helps_is_not_copied():
    q, k, v = odd_rows("float16")
    assert not cutlass_attn.explain(q, k, v, device="cpu").copied
    odd = [x[..., :63] for x in (q, k, v)]
    assert not cutlass_attn.explain(*odd, device="sm_89").copied
    floats = odd_rows("float32")
    assert not cutlass_attn.explain(*floats, device="sm_89").copied


@cases.needs_gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_and_gradients_of_unaligned_inputs(layout):
    def run(shift, grad):
        made = torch.Generator("cuda").manual_seed(7)
        given = []
        for _ in "qkv":
            dense = torch.randn(2, 70, 4, 64, generator=made, device="cuda", dtype=torch.float16)
            x = torch.full((2, 70, 4, 64 + shift), float("nan"), device="cuda", dtype=dense.dtype)
            x[..., shift:] = dense
            x = x[..., shift:] if layout == "bshd" else x[..., shift:].transpose(1, 2)
            given.append(x.detach().requires_grad_(grad))
        out = cutlass_attn.attention(*given, causal=True, layout=layout)
        if not grad:
            return [out]
        weights = torch.ones(2, 70, 4, 64 + shift, device="cuda", dtype=out.dtype)[..., shift:]
        weights = weights if layout == "bshd" else weights.transpose(1, 2)
        return [out, *torch.autograd.grad(out, given, weights)]

    for grad in (False, True):
        for odd, aligned in zip(run(1, grad), run(0, grad), strict=True):
            assert torch.equal(odd, aligned)


def test_explain_about_a_missing_device():
    if not cases.no_gpu():
        pytest.skip("a GPU is there")
    explanation = cutlass_attn.explain(*qkv(), device="cuda")
    assert explanation.chosen is None


def test_variants_and_build_info():
    variants = cutlass_attn.variants()
    keys = [variant.key for variant in variants]
    assert len(set(keys)) == len(keys)
    scalar = {"scalar/vectorized", "scalar/tiled", "scalar/minimal"}
    assert scalar | {"sm80", "cpu"} <= {v.kernel for v in variants}
    assert all(v.compiled for v in variants if v.kernel == "cpu")
    variants.clear()  # a copy: the library's own list stays
    assert cutlass_attn.variants()
    assert cutlass_attn.build_info().version == cutlass_attn.__version__


@cases.needs_gpu
def test_fp32_runs_scalar_on_a_gpu():
    explanation = cutlass_attn.explain(*qkv(dtype="float32", device="cuda"))
    assert explanation.chosen.kernel == "scalar/vectorized"
    _, k, v = qkv(dtype="float32", device="cuda")
    odd = torch.zeros(2, 4, 33, 65, device="cuda")[..., 1:]  # not on 16 bytes
    assert cutlass_attn.explain(odd, k, v).chosen.kernel == "scalar/tiled"


# --- Threads, streams, graphs ---------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device):
    inputs = [qkv(device=device, magnitude=1 + i) for i in range(4)]
    expected = [attention(*x, causal=True) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            results = pool.map(lambda x: attention(*x, causal=True), inputs)
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@cases.needs_gpu
def test_runs_on_the_current_stream():
    q, k, v = qkv(device="cuda")
    expected = attention(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.empty_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)  # comes after the sleep, in this stream only
        out = attention(late, k, v)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, expected)


@cases.needs_gpu
def test_leaves_the_current_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = qkv(device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(
        attention(q, k, v).cpu(), attention(*(x.to("cuda:0") for x in (q, k, v))).cpu()
    )
    assert torch.cuda.current_device() == 0


@cases.needs_gpu
@pytest.mark.parametrize("variant", cases.all_variants(lambda v: v.device == "cuda"))
def test_graph_capture(variant):
    head_dim = variant.head_dim or 64
    rows = 9 if variant.max_rows else 33
    q, k, v = qkv(dtype=variant.dtype, head_dim=head_dim, device="cuda", seqlen_q=rows)
    out = torch.full_like(q, torch.nan)
    graph = torch.cuda.CUDAGraph()
    attention(q, k, v, out=out, **cases.own(variant))  # opts in to large shared memory
    with torch.cuda.graph(graph):
        attention(q, k, v, out=out, **cases.own(variant))
    out.fill_(torch.nan)
    q.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, attention(q, k, v, **cases.own(variant)))


@cases.needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_graph_of_split_keys_replays(head_dim):
    """The counters of splits that are done return to zero in each replay, in the graph's memory and
    in that of the calls between."""
    asked = {"kernel": "sm80/split_keys", "return_lse": True}
    q, k, v = qkv(head_dim=head_dim, device="cuda", seqlen_q=200, seqlen_k=3000)
    if cutlass_attn.explain(q, k, v, **asked).splits == 1:
        pytest.skip("this GPU has too few SMs for the keys of a tile to be shared")
    attention(q, k, v, **asked)  # opts in to large shared memory
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attention(q, k, v, out=out, **asked)
    for replays in (1, 2, 1, 3):
        for x in (q, k, v):
            x.normal_()
        for _ in range(replays):
            out.fill_(torch.nan), lse.fill_(torch.nan)
            graph.replay()
        expected, expected_lse = attention(q, k, v, **asked)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        whole, whole_lse = attention(q, k, v, **{**asked, "kernel": "sm80"})
        torch.testing.assert_close(out, whole, atol=1e-3, rtol=2e-3)
        torch.testing.assert_close(lse, whole_lse, atol=1e-4, rtol=1e-4)
