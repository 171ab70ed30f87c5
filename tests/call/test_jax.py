"""cutlass_attn.jax against the oracles, under JAX's transformations."""

import os
import re
import shutil
import subprocess

import backward_reference
import cutlass_attn
import numpy as np
import pytest
import reference
from cutlass_attn import testing

jax = pytest.importorskip("jax")
jnp = jax.numpy
of_jax = pytest.importorskip("cutlass_attn.jax")
attention = of_jax.attention

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "two-sided": {"window": (2, 4)},
    "chunk": {"causal": True, "attention_chunk": 4},
    "scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 2.0, "causal": True},
}


def gpu():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX sees no GPU")


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    found = jax.devices("cpu")[0] if request.param == "cpu" else gpu()
    with jax.default_device(found):
        yield found


def values(
    dtype, batch=2, heads=4, heads_kv=2, seqlen_q=7, seqlen_k=11, head_dim=32, head_dim_v=32
):
    """q, k, v, grad_out, of (B, H, S, D), and grad_lse: float32 numbers that dtype has."""
    rng = np.random.default_rng(0)
    shapes = (
        (batch, heads, seqlen_q, head_dim),
        (batch, heads_kv, seqlen_k, head_dim),
        (batch, heads_kv, seqlen_k, head_dim_v),
        (batch, heads, seqlen_q, head_dim_v),
    )
    found = [reference.round_to(rng.standard_normal(shape), dtype) for shape in shapes]
    return [*found, rng.standard_normal((batch, heads, seqlen_q)).astype(np.float32)]


def arrays(parts, dtype, layout="bhsd"):
    order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    return [jnp.asarray(x.transpose(order), dtype) for x in parts]


def of(x, layout="bhsd"):
    x = np.asarray(x.astype(jnp.float32))
    return x if layout == "bhsd" else x.transpose(0, 2, 1, 3)


def judge(got, exact, unfused, dtype):
    accuracy = testing.judge(got, exact, unfused, dtype)
    assert accuracy.ok, accuracy


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_forward(device, case, dtype, layout):
    options = CASES[case]
    parts = values(dtype, head_dim_v=16)
    out, lse = attention(
        *arrays(parts[:3], dtype, layout), **options, layout=layout, return_lse=True
    )
    assert out.dtype == dtype and lse.dtype == jnp.float32
    due = reference.attention(*parts[:3], dtype, **options)
    judge(of(out, layout), due.exact, due.unfused, dtype)
    assert testing.Reference(*due[:4]).confirms_lse(np.asarray(lse))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients(device, case, dtype, with_lse):
    """Also of the log-sum-exp, with more queries than keys, some of which see none."""
    options = CASES[case]
    q, k, v, grad_out, grad_lse = values(dtype, seqlen_q=13)
    call = lambda *x: attention(*x, **options, return_lse=with_lse, deterministic=True)  # noqa: E731
    results, pull = jax.vjp(call, *arrays((q, k, v), dtype))
    cotangent = jnp.asarray(grad_out, dtype)
    if with_lse:
        grad_lse = np.where(np.isinf(np.asarray(results[1])), 0, grad_lse)
        grads = pull((cotangent, jnp.asarray(grad_lse)))
    else:
        grad_lse, grads = 0 * grad_lse, pull(cotangent)
    due = backward_reference.gradients(q, k, v, grad_out, grad_lse, dtype, **options)
    for got, expected in zip(grads, (due.q, due.k, due.v)):
        assert got.dtype == dtype
        judge(of(got), expected.exact, expected.unfused, dtype)


def test_jit_and_grad_of_it(device):
    parts = arrays(values("float32")[:3], "float32")
    jitted = jax.jit(attention, static_argnames="causal")
    assert (jitted(*parts, causal=True) == attention(*parts, causal=True)).all()

    def loss(q, k, v):
        return (attention(q, k, v, causal=True) ** 2).sum()

    plain = jax.grad(loss, (0, 1, 2))(*parts)
    for got, due in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(*parts), plain):
        np.testing.assert_allclose(got, due, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (1, 0, None)])
def test_vmap(device, axes):
    """Over a dimension that all operands have, or some of them; values and gradients."""
    one = arrays(values("float32")[:3], "float32")
    many = [x if a is None else jnp.stack([x, 2 * x, x - 1], a) for x, a in zip(one, axes)]

    def run(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)

    def each(i):
        return [x if a is None else jnp.take(x, i, a) for x, a in zip(many, axes)]

    mapped = jax.vmap(run, axes)
    for got, due in zip(mapped(*many), zip(*(run(*each(i)) for i in range(3)))):
        np.testing.assert_allclose(got, jnp.stack(due), rtol=1e-6, atol=1e-6)

    def loss(call):
        return lambda *x: sum((y**2).sum() for y in call(*x))

    grads = jax.grad(loss(mapped), (0, 1, 2))(*many)
    single = [jax.grad(loss(run), (0, 1, 2))(*each(i)) for i in range(3)]
    for got, a, parts in zip(grads, axes, zip(*single)):
        due = sum(parts) if a is None else jnp.stack(parts, a)
        np.testing.assert_allclose(got, due, rtol=2e-5, atol=1e-5)


def test_nested_vmap(device):
    parts = [jnp.stack([jnp.stack([x, -x])] * 3) for x in arrays(values("float32")[:3], "float32")]
    out = jax.vmap(jax.vmap(attention))(*parts)
    np.testing.assert_allclose(
        out[2, 1], attention(*(x[2, 1] for x in parts)), rtol=1e-6, atol=1e-6
    )


def test_checkpoint_and_scan(device):
    q, k, v = arrays(values("float32", heads_kv=4, seqlen_k=7)[:3], "float32")

    def layers(x):
        def layer(x, _):
            return x + attention(x, k, v, causal=True), None

        return jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0].sum()

    def unrolled(x):
        for _ in range(3):
            x = x + attention(x, k, v, causal=True)
        return x.sum()

    np.testing.assert_allclose(jax.grad(layers)(q), jax.grad(unrolled)(q), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", ["batch", "seqlen_q", "seqlen_k", "heads"])
def test_nothing(device, shape):
    sizes = {"heads": {"heads": 0, "heads_kv": 0}}.get(shape, {shape: 0})
    parts = arrays(values("float32", **sizes)[:3], "float32")
    (out, lse), pull = jax.vjp(lambda *x: attention(*x, return_lse=True), *parts)
    assert (out == 0).all() and (lse == -jnp.inf).all()
    for x, grad in zip(parts, pull((out, jnp.zeros_like(lse)))):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({0: (2, 4, 32)}, {}),
        ({1: (3, 2, 11, 32)}, {}),
        ({1: (2, 2, 11, 16)}, {}),
        ({2: (2, 2, 9, 32)}, {}),
        ({2: (2, 1, 11, 32)}, {}),
        ({2: (2, 2, 11, 600)}, {}),
        ({0: (2, 4, 7, 0), 1: (2, 2, 11, 0)}, {}),
        ({1: (2, 3, 11, 32), 2: (2, 3, 11, 32)}, {}),
        ({}, {"layout": "sbhd"}),
        ({}, {"attention_chunk": 0}),
        ({}, {"window": (-2, 0)}),
        ({}, {"softcap": 1e6}),
    ],
    ids=str,
)
def test_errors(change, options):
    """When the call is traced."""
    shapes = {0: (2, 4, 7, 32), 1: (2, 2, 11, 32), 2: (2, 2, 11, 32)} | change
    parts = [np.zeros(shapes[i], np.float32) for i in range(3)]
    with pytest.raises(ValueError) as due:
        cutlass_attn.attention(*parts, **options)
    with pytest.raises(ValueError, match=re.escape(str(due.value))):
        jax.eval_shape(lambda *x: attention(*x, **options), *parts)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3.7},
        {"window": True},
        {"window": "a"},
        {"attention_chunk": 3.7},
        {"causal": "no"},
        {"deterministic": 1},
        {"softcap": "3"},
    ],
    ids=str,
)
def test_types_are_those_of_the_torch_function(options):
    x = np.zeros((1, 1, 4, 8), np.float32)
    with pytest.raises(TypeError) as due:
        cutlass_attn.attention(x, x, x, **options)
    with pytest.raises(TypeError, match=re.escape(str(due.value))):
        attention(*[jnp.asarray(x)] * 3, **options)


@pytest.mark.parametrize("window", [[3, 0], (2**40, 0), (None, 2)], ids=str)
def test_windows(window):
    parts = values("float32")[:3]
    due = cutlass_attn.attention(*parts, window=window)
    np.testing.assert_allclose(attention(*arrays(parts, "float32"), window=window), due, atol=1e-6)


def test_dtypes():
    x = jnp.zeros((1, 1, 4, 8))
    with pytest.raises(ValueError, match="q, k and v must have one dtype, got float32, float16"):
        attention(x, x.astype(jnp.float16), x)
    with pytest.raises(ValueError, match="q is int32; allowed: float16, bfloat16, float32"):
        attention(*[x.astype(jnp.int32)] * 3)


def test_errors_when_it_runs():
    """Of a call that was not checked when it was traced."""
    x = jnp.zeros((1, 1, 4, 600))
    options = of_jax._Options(False, -1, -1, 0, 1.0, 0.0, False, False)
    with pytest.raises(Exception, match="cutlass_attn: head_dim is 600, allowed: 1 to 576"):
        jax.block_until_ready(of_jax._forward(x, x, x, options))


PAIRS = """
Extension Extension_Base size struct_size type type next next
Version Api_Version major major_version minor minor_version
Metadata Metadata version api_version traits traits
MetadataExtension Metadata_Extension metadata metadata
Buffer Buffer dtype dtype data data rank rank dims dims
Text ByteSpan data ptr length len
Scalar Scalar dtype dtype value value
Buffers Args count size types types items args
Buffers Rets count size types types items rets
Attributes Attrs count size types types names names items attrs
CreateError Error_Create_Args message message code errc
DestroyError Error_Destroy_Args error error
GetStream Stream_Get_Args context ctx stream stream
AllocateMemory DeviceMemory_Allocate_Args context ctx bytes size alignment alignment data data
FreeMemory DeviceMemory_Free_Args context ctx bytes size data data
GetDevice DeviceOrdinal_Get_Args context ctx ordinal device_ordinal
Api Api version api_version create_error XLA_FFI_Error_Create
Api Api get_stream XLA_FFI_Stream_Get allocate_memory XLA_FFI_DeviceMemory_Allocate
Api Api free_memory XLA_FFI_DeviceMemory_Free get_device XLA_FFI_DeviceOrdinal_Get
Api Api destroy_error XLA_FFI_Error_Destroy
CallFrame CallFrame api api context ctx stage stage arguments args results rets attributes attrs
"""


def test_interface_of_xla(tmp_path):
    """python/xla_ffi.hpp has the layouts and numbers of jaxlib's header."""
    if not (compiler := shutil.which("g++")):
        pytest.skip("without g++")
    checks = [
        # XLA takes handlers of older minor versions.
        "static_assert(kMajor == XLA_FFI_API_MAJOR && kMinor <= XLA_FFI_API_MINOR);",
        "static_assert(int(DataType::kF16) == XLA_FFI_DataType_F16);",
        "static_assert(int(DataType::kBF16) == XLA_FFI_DataType_BF16);",
        "static_assert(int(DataType::kF32) == XLA_FFI_DataType_F32);",
        "static_assert(kMetadata == XLA_FFI_Extension_Metadata);",
        "static_assert(kScalar == XLA_FFI_AttrType_SCALAR);",
        "static_assert(int(ErrorCode::kInternal) == XLA_FFI_Error_Code_INTERNAL);",
        "static_assert(int(ErrorCode::kUnimplemented) == XLA_FFI_Error_Code_UNIMPLEMENTED);",
    ]
    for line in PAIRS.split("\n"):
        ours, theirs, *fields = line.split() or (None, None)
        for mine, other in zip(fields[::2], fields[1::2]):
            checks.append(
                f"static_assert(offsetof({ours}, {mine}) == offsetof(XLA_FFI_{theirs}, {other}));"
            )
    assert len(checks) > 50
    source = tmp_path / "check.cpp"
    source.write_text(
        '#include "xla_ffi.hpp"\n#include "xla/ffi/api/c_api.h"\n'
        "#if XLA_FFI_API_MINOR >= 4\n"
        "using XLA_FFI_Extension_Base = XLA_FFI_InternalExtension;\n"
        "#endif\n"
        "using namespace cutlass_attn::xla;\n" + "\n".join(checks)
    )
    root = os.path.join(os.path.dirname(__file__), "..", "..", "python")
    include = ["-I", root, "-I", jax.ffi.include_dir()]
    subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", *include, source],
        check=True,
    )
