"""What torch sees of a call: torch.compile, the operator, modes, transforms, subclasses."""

import subprocess
import sys

import cases
import cutlass_attn
import pytest
from cases import torch
from cutlass_attn._call import torch_library
from cutlass_attn._call.call import SIGNATURES
from cutlass_attn._call.operator import ATTENTION

attention = cutlass_attn.attention
qkv = cases.qkv
DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_compile(device, dynamic):
    q, k, v = qkv(device=device)

    def model(q, k, v):
        out, lse = attention(q * 2, k, v, causal=True, window=(20, None), return_lse=True)
        return out + 1, lse

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for a, b in zip(compiled(q, k, v), model(q, k, v), strict=True):
        assert torch.equal(a, b)


def test_compile_by_inductor():
    """It lowers the operator by rules of its own, one of which concerns arguments' names."""
    q, k, v = qkv()
    compiled = torch.compile(attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, causal=True), attention(q, k, v, causal=True))


def test_dynamic_sizes_compile_once():
    """The operator's fake kernel must not turn symbolic sizes into numbers."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=backend)
    q, k, v = qkv()
    attention(q, k, v)  # which has looked for torch
    for rows in (33, 20, 9):
        x = [t[:, :, :rows].clone() for t in (q, k, v)]
        options = {"window": (rows // 2, 3), "attention_chunk": rows // 3}
        assert torch.equal(compiled(*x, **options), attention(*x, **options))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"causal": 1},
        {"return_lse": 1},
        {"return_max_logit": 1},
        {"deterministic": 1},
        {"window": True},
        {"window": (3, True)},
        {"attention_chunk": True},
        {"softmax_scale": True},
        {"softcap": True},
        {"dropout_p": True},
    ],
    ids=str,
)
def test_compiled_calls_refuse_what_eager_ones_do(options):
    """The operator's schema alone would take True for 1."""
    q, k, v = qkv()
    (name,) = options
    for call in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match=f"{name} must be"):
            call(q, k, v, **options)


def test_compiled_calls_name_the_dimensions_that_lack():
    """Whose sizes are symbols."""
    compiled = torch.compile(attention, fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(Exception, match=r"q must have 4 dimensions, .* got shape \(s"):
        compiled(*torch.randn(3, 2, 40, 64))


@pytest.mark.parametrize("compiles", [False, True])
def test_what_is_a_bool_is_one_for_every_function(compiles):
    run = torch.compile(fullgraph=True, backend="aot_eager") if compiles else lambda f: f
    x = torch.zeros(1, 1, 2, 8)
    lengths = torch.tensor([0], dtype=torch.int32)
    new = dict.fromkeys(("k_new", "v_new"), x)
    new |= dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(2, 4))
    with pytest.raises(Exception, match="rotary_interleaved must be"):
        run(cutlass_attn.attention_decode)(x, x, x, lengths, **new, rotary_interleaved=1)
    bools = {
        name
        for signature in SIGNATURES.values()
        for name, parameter in signature.parameters.items()
        if parameter.annotation == "bool"
    }
    # Those of no operator's schema are looked at before.
    assert bools - {"verify", "validate"} == set(torch_library._BOOLS)


def test_a_tangent_is_not_lost():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative yet"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(attention(q, k, v), attention(q, k, v))
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative yet"):
            attention(q, k, dual)


@pytest.mark.parametrize("device", [1, True, b"cpu", torch.device("cpu")], ids=str)
def test_explain_takes_devices_by_name(device):
    with pytest.raises(TypeError, match='device must be a string such as "cuda:1"'):
        cutlass_attn.explain(*qkv(), device=device)
    for name in ("", "cuda:99999999999"):
        with pytest.raises(ValueError, match='device must be "cpu", "cuda"'):
            cutlass_attn.explain(*qkv(), device=name)


def test_compile_when_torch_comes_late():
    code = """
import cutlass_attn, torch
q = torch.ones(1, 2, 5, 16)
compiled = torch.compile(cutlass_attn.attention, fullgraph=True, backend="aot_eager")
print(bool((compiled(q, q, q) == 1).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_compile_writes_out():
    q, k, v = qkv()
    out = torch.full_like(q, torch.nan)

    def model(q, k, v, out):
        attention(q, k, v, out=out)
        return out * 2

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, out), attention(q, k, v) * 2)
    assert torch.equal(out, attention(q, k, v))


@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    """torch's own checks of schema, fake kernel and registration."""
    q, k, v = qkv(device=device)
    for layout, scale, return_lse in (("bhsd", None, True), ("bshd", 0.5, False)):
        x = [t.transpose(1, 2) for t in (q, k, v)] if layout == "bshd" else [q, k, v]
        options = {"causal": True, "window": [20, -1], "softmax_scale": scale, "layout": layout}
        given = dict(zip("qkv", x)) | options
        args = ATTENTION.schema.arguments(**given, return_lse=return_lse)
        torch.library.opcheck(ATTENTION.forward, args)


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(2, 4, 9, 64).half(), torch.empty(2, 2, 11, 64).half()
        out, lse = attention(q, k, k, return_lse=True)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    meta = torch.empty(2, 4, 9, 64, device="meta")
    assert attention(meta, meta, meta).device.type == "meta"
    with pytest.raises(ValueError, match="one head dim"):
        attention(meta, meta[..., :32], meta)


def test_dispatch_and_function_modes_see_the_call():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = qkv()
    expected = attention(q, k, v)
    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            assert torch.equal(attention(q, k, v), expected)
        assert any("attention_forward" in name for name in seen), mode


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    """A wrapped tensor's own memory is that of the whole batch."""
    q, k, v = qkv()
    stacked = [torch.stack([x, x / 2]) for x in (q, k, v)]
    out = torch.vmap(attention)(*stacked)
    assert torch.equal(out[0], attention(q, k, v))
    assert torch.equal(out[1], attention(q / 2, k / 2, v / 2))


def test_vmap_over_a_state_that_no_dropout_reads():
    q, _, _ = qkv()
    states = torch.zeros(2, 2, dtype=torch.int64)
    out = torch.vmap(lambda q, state: attention(q, q, q, rng_state=state))(
        torch.stack([q, q / 2]), states
    )
    assert torch.equal(out[0], attention(q, q, q)) and torch.equal(out[1], attention(*[q / 2] * 3))


def test_tensor_subclass():
    class Mine(torch.Tensor):
        pass

    q, k, v = qkv()
    out = attention(q.as_subclass(Mine), k, v)
    assert torch.equal(out.as_subclass(torch.Tensor), attention(q, k, v))


def test_lazily_negated_view():
    q, k, v = qkv(dtype="float32")
    expected = attention(-q, k, v)
    assert torch.equal(attention(torch._neg_view(q), k, v), expected)
    out = torch.empty_like(q)
    attention(-q, k, v, out=torch._neg_view(out))
    assert torch.equal(-out, expected)


def test_verify_needs_plain_tensors():
    meta = torch.empty(1, 1, 4, 64, device="meta")
    with pytest.raises(ValueError, match="verify=True reads results on the host"):
        attention(meta, meta, meta, verify=True)


@pytest.mark.parametrize("device", DEVICES)
def test_results_of_calls_share_no_memory(device):
    """The LSE is made like one that is kept, from the second call of a shape on."""
    q = torch.randn(2, 3, 5, 8, device=device, dtype=torch.float16)
    results = [attention(q, q, q, return_lse=True) for _ in range(4)]
    assert len({x.data_ptr() for result in results for x in result}) == 8
    for _out, lse in results:
        assert torch.equal(lse, results[0][1])
        assert lse.is_contiguous() and lse.untyped_storage().nbytes() == 2 * 3 * 5 * 4
