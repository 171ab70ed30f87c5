"""Memory that a call may not touch, or must tell torch of: tensors without storage, caches that
overlap, calls that are refused, version counters, masked arrays, stubs of torch."""

import subprocess
import sys

import numpy as np
import pytest
from cutlass_attn import append_kv, attention, attention_decode, attention_varlen, prequantize

torch = pytest.importorskip("torch")

sdpa = torch.nn.functional.scaled_dot_product_attention
SHAPE = (1, 2, 8, 16)


def operands(requires_grad=False):
    return [torch.randn(SHAPE, requires_grad=requires_grad) for _ in range(3)]


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


# --- No memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_freed_operand(name):
    q, k, v = operands()
    given = {"q": q, "k": k, "v": v, "out": torch.empty(SHAPE)}
    given[name] = freed(given[name])
    with pytest.raises(ValueError, match=f"^{name} has elements but no memory"):
        attention(**given)


@pytest.mark.parametrize(
    "name, x",
    [
        ("bias", torch.zeros(8, 8)),
        ("mask", torch.ones(8, 8, dtype=torch.bool)),
        ("sinks", torch.zeros(2)),
        ("alibi_slopes", torch.zeros(2)),
        ("rng_state", torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_freed_option(name, x):
    more = {"dropout_p": 0.5} if name == "rng_state" else {}
    with pytest.raises(ValueError, match=f"^{name} has elements but no memory"):
        attention(*operands(), **{name: freed(x)}, **more)


def test_freed_storage_with_an_offset():
    whole = torch.zeros(2, *SHAPE[1:])
    part = whole[1:]
    whole.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^q has elements but no memory"):
        attention(part, *operands()[1:])


def test_freed_saved_tensor():
    q, k, v = operands(requires_grad=True)
    out = attention(q, k, v)
    out.grad_fn.saved_tensors[1].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^softmax_lse has elements but no memory"):
        torch.autograd.grad(out.sum(), q)


def test_efficient_zero_gradient():
    q, k, v = operands(requires_grad=True)
    grads = torch.autograd.grad(attention(q, k, v), (q, k, v), torch._efficientzerotensor(SHAPE))
    assert all(x.shape == SHAPE and not x.any() for x in grads)


def test_efficient_zero_bias():
    q, k, v = operands()
    out = attention(q, k, v, bias=torch._efficientzerotensor((1, 2, 8, 8)))
    torch.testing.assert_close(out, attention(q, k, v))


def test_batched_gradients():
    q, k, v = operands(requires_grad=True)
    grad_out = torch.randn(3, *SHAPE)
    got, due = (
        torch.autograd.grad(f(q, k, v), (q, k, v), grad_out, is_grads_batched=True)
        for f in (attention, sdpa)
    )
    torch.testing.assert_close(got, due)


def test_vectorized_jacobian():
    q, k, v = operands()

    def jacobian(f):
        return torch.autograd.functional.jacobian(lambda x: f(x, k, v), q, vectorize=True)

    torch.testing.assert_close(jacobian(attention), jacobian(sdpa))


@pytest.mark.parametrize("transform", ["jacrev", "vmap"])
def test_transformed_gradients(transform):
    """The LSE comes as an expanded view of one entry."""
    q, k, v = operands()

    def gradient(f):
        def of_q(x):
            return f(x, k, v)

        if transform == "jacrev":
            return torch.func.jacrev(of_q)(q)
        return torch.vmap(lambda g: torch.func.vjp(of_q, q)[1](g)[0])(torch.ones(1, *SHAPE))

    torch.testing.assert_close(gradient(attention), gradient(sdpa))


# --- Nothing is written by a call that is refused -------------------------------------------------


def step():
    """q, the caches, lengths and new keys of a decoding step."""
    caches = torch.zeros(1, 32, 2, 16), torch.zeros(1, 32, 2, 16)
    new = {"k_new": torch.ones(1, 1, 2, 16), "v_new": torch.ones(1, 1, 2, 16)}
    return torch.randn(1, 1, 2, 16), *caches, torch.tensor([3], dtype=torch.int32), new


@pytest.mark.parametrize(
    "name, value",
    [
        ("kernel", "none"),
        ("out", torch.zeros(3)),
        ("out", torch.zeros(1, 1, 1, 16).expand(1, 1, 2, 16)),
        ("softcap", -1.0),
        ("sinks", torch.zeros(5)),
    ],
)
def test_refused_step_writes_nothing(name, value):
    q, k, v, lengths, new = step()
    with pytest.raises(ValueError, match=name):
        attention_decode(q, k, v, lengths, **new, **{name: value})
    assert not k.any() and not v.any()
    assert (k._version, v._version) == (0, 0)


def test_refused_out_writes_nothing_by_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    q, k, v, lengths, new = step()
    with Passing(), pytest.raises(ValueError, match=r"^out must have shape"):
        attention_decode(q, k, v, lengths, **new, out=torch.zeros(3))
    assert not k.any() and not v.any()


def test_overlapping_caches_of_a_step():
    q, k, v, lengths, new = step()
    expanded = torch.zeros(1, 32, 1, 16).expand(1, 32, 2, 16)
    for operands_, more, message in (
        ((q, expanded, v), {}, "rows of k_cache overlap"),
        ((q, k, expanded), {}, "rows of v_cache overlap"),
        ((q, k, k), {}, "v_cache overlaps k_cache"),
        ((q, k, v), {"k_new": k[:, :1]}, "k_new overlaps k_cache"),
        ((q, k, v), {"v_new": k[:, 4:5]}, "v_new overlaps k_cache"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_decode(*operands_, lengths, **{**new, **more})
        assert not k.any() and not v.any()


def test_interleaved_caches_are_apart():
    q, k, v, lengths, new = step()
    both = torch.zeros(1, 32, 2, 2, 16)
    got = attention_decode(q, both[:, :, 0], both[:, :, 1], lengths, **new)
    torch.testing.assert_close(got, attention_decode(q, k, v, lengths, **new))


def test_out_may_be_q_where_q_is_rotated():
    q, k, v, lengths, new = step()
    more = {**new, "rotary_cos": torch.rand(32, 8), "rotary_sin": torch.rand(32, 8)}
    due = attention_decode(q, k.clone(), v.clone(), lengths, **more)
    torch.testing.assert_close(attention_decode(q, k, v, lengths, out=q, **more), due)


def test_overlapping_caches_of_append_kv():
    _, k, v, _, new = step()
    rows, values = new["k_new"][0], new["v_new"][0]
    slots = torch.tensor([1])
    expanded = torch.zeros(1, 32, 1, 16).expand(1, 32, 2, 16)
    for args, message in (
        ((rows, values, expanded, v), "rows of k_cache overlap"),
        ((rows, values, k, k), "v_cache overlaps k_cache"),
        ((k[0, :1], values, k, v), "k overlaps k_cache"),
        ((rows, k[0, :1], k, v), "v overlaps k_cache"),
    ):
        with pytest.raises(ValueError, match=message):
            append_kv(*args, slots)
        assert not k.any() and not v.any()


# --- torch is told of writes ----------------------------------------------------------------------


def writes():
    q, k, v = operands()
    rows = [torch.randn(8, 2, 16) for _ in range(3)]
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    step_q, k_cache, v_cache, lengths, new = step()
    cached = (step_q, k_cache, v_cache, lengths)
    pairs = new["k_new"][0], new["v_new"][0]
    out = torch.empty
    return {
        "attention": (lambda x: attention(q, k, v, out=x), out(SHAPE)),
        "varlen": (lambda x: attention_varlen(*rows, offsets, out=x), out(8, 2, 16)),
        "decode": (lambda x: attention_decode(*cached, out=x), out(1, 1, 2, 16)),
        "k_new": (lambda x: attention_decode(step_q, x, v_cache, lengths, **new), k_cache),
        "v_new": (lambda x: attention_decode(step_q, k_cache, x, lengths, **new), v_cache),
        "append_k": (lambda x: append_kv(*pairs, x, v_cache, torch.tensor([1])), k_cache),
        "append_v": (lambda x: append_kv(*pairs, k_cache, x, torch.tensor([1])), v_cache),
    }


@pytest.mark.parametrize("name", list(writes()))
def test_overwritten_saved_tensor_raises(name):
    write, x = writes()[name]
    factor = torch.ones(x.shape, requires_grad=True)
    product = (factor * x).sum()  # keeps x
    write(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("name", list(writes()))
def test_inference_tensor_is_written_in_inference_mode_alone(name):
    write, like = writes()[name]
    with torch.inference_mode():
        x = torch.zeros_like(like)
        write(x)
        x.zero_()
    with pytest.raises(RuntimeError, match="is an inference tensor"):
        write(x)
    assert not x.any()


def test_out_that_requires_a_gradient():
    q, k, v = operands()
    out = torch.zeros(SHAPE, requires_grad=True)
    with pytest.raises(ValueError, match="out must not require a gradient"):
        attention(q, k, v, out=out)
    with torch.no_grad():
        attention(q, k, v, out=out)
    assert out._version == 1 and out.any()


def test_prequantize_notices_writes_of_the_library():
    q, k, v = (x.half() for x in operands())
    kept = prequantize(k, v, quantize="qk")
    attention(q, k.clone(), v, out=k)
    with pytest.raises(ValueError, match="k was written to after prequantize"):
        attention(q, k, v, quantize=kept)


# --- numpy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "out"])
def test_masked_arrays(name):
    q, k, v = (x.numpy() for x in operands())
    bias, out = np.zeros((8, 8), np.float32), np.empty(SHAPE, np.float32)
    given = {"q": q, "k": k, "v": v, "bias": bias, "out": out}
    due = attention(**given).copy()
    given[name] = np.ma.masked_array(given[name])
    np.testing.assert_array_equal(np.asarray(attention(**given)), due)
    given[name][..., 0] = np.ma.masked
    with pytest.raises(ValueError, match=f"^{name} is a masked array"):
        attention(**given)


@pytest.mark.parametrize("stub", ["ModuleType('torch')", "MagicMock()", "None"])
def test_stub_of_torch(stub):
    program = f"""
import sys
from types import ModuleType
from unittest.mock import MagicMock
sys.modules["torch"] = {stub}
import numpy as np
import cutlass_attn
x = np.ones((1, 1, 4, 16), np.float32)
assert (cutlass_attn.attention(x, x, x) == 1).all()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
