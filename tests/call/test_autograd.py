"""Gradients of attention and attention_varlen, against torch's of the same in plain operations."""

import cases
import cutlass_attn
import gradients
import pytest
from cases import torch
from cutlass_attn import attention, attention_varlen
from cutlass_attn._call.operator import ATTENTION
from cutlass_attn._call.serving_operator import VARLEN

# On the CPU in float32, where the backward pass itself is the same as in half precision.
DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}


def randn(*shape, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + len(shape) + 7 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def operands(heads=4, heads_kv=2, seqlen_q=13, seqlen_k=17, head_dim=16, head_dim_v=24, **kind):
    return (
        randn(2, heads, seqlen_q, head_dim, **kind).requires_grad_(),
        randn(2, heads_kv, seqlen_k, head_dim, **kind, seed=1).requires_grad_(),
        randn(2, heads_kv, seqlen_k, head_dim_v, **kind, seed=2).requires_grad_(),
    )


# Options; tensors as functions of a device and a dtype.
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "chunk": {"attention_chunk": 5, "causal": True},
    "scale": {"softmax_scale": -0.3},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.5},
    "alibi": {"alibi_slopes": lambda **kind: randn(4, device=kind["device"]).abs()},
    "bias": {"bias": lambda **kind: randn(2, 4, 13, 17, **kind)},
    "mask": {"mask": lambda **kind: randn(2, 1, 13, 17, **kind) > 0},
    "sinks": {"sinks": lambda **kind: randn(4, device=kind["device"], dtype=kind["sinks"])},
    "dropout": {
        "dropout_p": 0.3,
        "rng_state": lambda **kind: torch.tensor([5, 9], device=kind["device"]),
    },
    "all": {
        "causal": True,
        "window": (9, 0),
        "softcap": 2.0,
        "bias": lambda **kind: randn(1, 4, 13, 1, **kind),
        "mask": lambda **kind: randn(13, 17, **kind) > -1,
        "sinks": lambda **kind: randn(4, device=kind["device"], dtype=kind["sinks"]),
        "dropout_p": 0.2,
        "rng_state": lambda **kind: torch.tensor([1, 2], device=kind["device"]),
    },
}
DIFFERENTIABLE = ("bias", "sinks")


def options_of(name, device="cpu", dtype=torch.float32):
    sinks = torch.float64 if dtype is torch.float64 else torch.float32
    kind = {"device": device, "dtype": dtype}
    options = {}
    for option, x in OPTIONS[name].items():
        if callable(x):
            x = x(**kind, sinks=sinks) if option == "sinks" else x(**kind)
        options[option] = x.requires_grad_() if option in DIFFERENTIABLE else x
    return options


def inputs_of(q, k, v, options):
    return [q, k, v, *(options[name] for name in DIFFERENTIABLE if name in options)]


def in_double(x):
    """A copy in float64, with a gradient of its own; other things as they are."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def assert_close(got, due, dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 2e-2)
    for a, b in zip(got, due, strict=True):
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0, atol=tolerance * size, check_device=False
        )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device, name):
    """Through the result and the log-sum-exp at once."""
    dtype = DTYPES[device]
    q, k, v = operands(device=device, dtype=dtype)
    options = options_of(name, device, dtype)
    results = attention(q, k, v, **options, return_lse=True)
    grads = [torch.randn_like(x) for x in results]
    grads[1][results[1].isinf()] = 0
    inputs = inputs_of(q, k, v, options)
    got = torch.autograd.grad(results, inputs, grads)
    for x, grad in zip(inputs, got):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)

    exact = [in_double(x) for x in (q, k, v)]
    exact_options = {n: in_double(x) for n, x in options.items()}
    due = torch.autograd.grad(
        gradients.attention(*exact, **exact_options),
        inputs_of(*exact, exact_options),
        [x.double() for x in grads],
    )
    assert_close(got, due, dtype)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name):
    """Against differences of the forward pass, in float64."""
    sizes = {"seqlen_q": 4, "seqlen_k": 5, "head_dim": 3, "head_dim_v": 2}
    q, k, v = operands(**sizes, dtype=torch.float64)
    options = options_of(name, dtype=torch.float64)
    for n in ("bias", "mask"):
        if n in options:
            x = options[n].detach()[..., :4, :5]
            options[n] = x.clone().requires_grad_(n == "bias")
    names = [name for name in DIFFERENTIABLE if name in options]

    def call(q, k, v, *more):
        given = {**options, **dict(zip(names, more))}
        out, lse = attention(q, k, v, **given, return_lse=True)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    torch.autograd.gradcheck(call, inputs_of(q, k, v, options))


@pytest.mark.parametrize(
    "shape", [(17,), (13, 17), (1, 17), (13, 1), (4, 1, 1), (1, 4, 13, 17), (2, 1, 1, 17), (1,) * 4]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_bias_is_summed_over_what_it_is_broadcast_over(shape, dtype):
    q, k, v = (x.detach().half() for x in operands())
    bias = randn(*shape, dtype=dtype).requires_grad_()
    (got,) = torch.autograd.grad(attention(q, k, v, bias=bias).float().square().sum(), bias)
    assert (got.shape, got.dtype) == (bias.shape, dtype)
    exact = in_double(bias)
    out, _ = gradients.attention(q.double(), k.double(), v.double(), bias=exact)
    (due,) = torch.autograd.grad(out.square().sum(), exact)
    assert_close([got], [due], torch.float16)


def test_one_tensor_as_several_inputs():
    """Its gradient is the sum of theirs, that of the bias among them."""
    x = randn(1, 1, 8, 8).requires_grad_()
    copies = [x.detach().clone().requires_grad_() for _ in range(4)]
    (got,) = torch.autograd.grad(attention(x, x, x, bias=x).square().sum(), x)
    q, k, v, bias = copies
    due = torch.autograd.grad(attention(q, k, v, bias=bias).square().sum(), copies)
    assert_close([got], [sum(due)], torch.float32)


def test_strides():
    """Rows with gaps, heads inside the sequence, gradients that are one number for all."""
    packed = randn(2, 9, 3, 4, 16).requires_grad_()
    x = in_double(packed)
    out = attention(*packed.unbind(2), layout="bshd", causal=True)
    (got,) = torch.autograd.grad(out.sum(), packed)
    exact, _ = gradients.attention(*(y.transpose(1, 2) for y in x.unbind(2)), causal=True)
    assert_close([got], torch.autograd.grad(exact.sum(), x), torch.float32)
    k = randn(2, 1, 9, 16).requires_grad_()
    q = randn(2, 4, 9, 16)
    of_one = torch.autograd.grad(attention(q, k, k).square().sum(), k)
    expanded = k.expand(2, 4, 9, 16)
    assert_close(
        torch.autograd.grad(attention(q, expanded, expanded).square().sum(), k),
        of_one,
        torch.float32,
    )


def asked_of(more):
    """Names of the gradients that a backward pass is given and of those that it is to make."""
    wanted = [f"grad_{x}" for x, y in zip(("q", "k", "v", *DIFFERENTIABLE), more["wanted"]) if y]
    return {*wanted, *(x for x in more if x.startswith("grad_") and more[x] is not None)}


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "sinks", "lse"])
def test_computes_no_more_than_is_asked(which, monkeypatch):
    asked = []

    def spy(*args, **more):
        asked.append(asked_of(more))
        return cutlass_attn._C.backward(*args, **more)

    monkeypatch.setattr(ATTENTION, "run_backward", spy)
    q, k, v = (x.detach() for x in operands())
    given = {"q": q, "k": k, "v": v, "bias": randn(4, 1, 17), "sinks": randn(4)}
    wanted = "q" if which == "lse" else which
    given[wanted] = given[wanted].requires_grad_()
    out, lse = attention(**given, return_lse=True)
    (grad,) = torch.autograd.grad((lse if which == "lse" else out).sum(), given[wanted])
    assert asked == [{"grad_softmax_lse" if which == "lse" else "grad_out", f"grad_{wanted}"}]
    assert grad.isfinite().all()


def test_nothing_is_kept_where_no_gradient_is_needed():
    q, k, v = operands()
    with torch.no_grad():
        assert attention(q, k, v).grad_fn is None
    assert attention(q.detach(), k.detach(), v.detach()).grad_fn is None


@pytest.mark.parametrize("call", [attention, lambda *x: attention_varlen(*x, offsets([4, 5]))])
def test_a_second_derivative_is_refused(call):
    """Also where the first one's gradient is a constant, by which torch would lose the way."""
    shape = (9, 2, 8) if call is not attention else (1, 2, 9, 8)
    q, k = randn(*shape).requires_grad_(), randn(*shape, seed=1).requires_grad_()
    for square in (False, True):
        out = call(q, k, k)
        total = (out.square() if square else out).sum()
        (grad,) = torch.autograd.grad(total, q, create_graph=True)
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            torch.autograd.grad(grad.sum(), k)


def test_rows_that_see_nothing():
    """Gradients of zero, not NaN; the sink's is that of their log-sum-exp."""
    q, k, v = operands(seqlen_q=9, seqlen_k=4)
    for options in ({"causal": True}, {"mask": torch.zeros(9, 4, dtype=torch.bool)}):
        grads = torch.autograd.grad(attention(q, k, v, **options).sum(), (q, k, v))
        assert all(x.isfinite().all() for x in grads)
        assert (grads[0][:, :, :5] == 0).all()
    sinks = randn(4).requires_grad_()
    out, lse = attention(q, k, v, mask=options["mask"], sinks=sinks, return_lse=True)
    grads = torch.autograd.grad([out.sum(), lse.sum()], (q, k, v, sinks))
    assert all((x == 0).all() for x in grads[:3])
    torch.testing.assert_close(grads[3], torch.full((4,), 18.0))


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_empty(sizes):
    batch, seqlen_q, seqlen_k = sizes
    inputs = [randn(batch, 2, n, 8).requires_grad_() for n in (seqlen_q, seqlen_k, seqlen_k)]
    inputs += [randn(2).requires_grad_(), randn(2, 1, 1).requires_grad_()]
    out = attention(*inputs[:3], sinks=inputs[3], bias=inputs[4])
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs)):
        assert grad.shape == x.shape
        assert (grad == 0).all()


def test_dropout_is_repeatable():
    """Seed and offset come from torch's generator, and the backward pass has the same."""
    q, k, v = operands()
    grads = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        out = attention(q, k, v, dropout_p=0.5)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[1]))
    assert not torch.equal(grads[0][2], grads[2][2])


def test_deterministic(monkeypatch):
    asked = []

    def spy(*args, **more):
        asked.append(more.get("deterministic", args[3].get("deterministic", False)))
        return cutlass_attn._C.backward(*args, **more)

    monkeypatch.setattr(ATTENTION, "run_backward", spy)
    q, k, v = operands()
    attention(q, k, v).sum().backward()
    attention(q, k, v, deterministic=True).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        attention(q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


def test_the_forward_kernel_is_not_the_backward_one():
    q, k, v = operands()
    (due,) = torch.autograd.grad(attention(q, k, v).sum(), q)
    (got,) = torch.autograd.grad(attention(q, k, v, kernel="cpu").sum(), q)
    assert torch.equal(got, due)
    explained = cutlass_attn.explain(q, k, v, grad=True, kernel="cpu", accumulate="fp32")
    assert explained.chosen.op == "backward"
    assert {x.variant.op for x in explained} == {"backward"}
    assert str(explained).startswith("gradients of float32, q (2, 4, 13, 16)")


def test_out():
    q, k, v = operands()
    buffer = torch.zeros(2, 8, 13, 24)
    out = buffer[:, :4]
    assert attention(q, k, v, out=out) is out
    expected = attention(q, k, v)
    assert torch.equal(out, expected)
    due = torch.autograd.grad(expected.square().sum(), q)
    assert torch.equal(torch.autograd.grad(buffer.square().sum(), q)[0], due[0])


def test_inputs_that_changed():
    """torch notices, as it does for its own functions."""
    q, k, v = operands()
    k = k.detach()
    out = attention(q, k, v)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.skipif(cutlass_attn.build_info().simt == "none", reason="needs a kernel on the CPU")
def test_verify():
    q, k, v = operands()
    (due,) = torch.autograd.grad(attention(q, k, v).sum(), q)
    (got,) = torch.autograd.grad(attention(q, k, v, verify=True).sum(), q)
    assert torch.equal(got, due)


def test_slopes_have_no_gradient():
    q, k, v = operands()
    slopes = randn(4).requires_grad_()
    with pytest.raises(NotImplementedError, match="attention has no gradient of alibi_slopes"):
        attention(q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        attention(q, k, v, alibi_slopes=slopes)


# --- attention_varlen -----------------------------------------------------------------------------


def offsets(lengths, device="cpu"):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device, torch.int32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 2.0},
        {"dropout_p": 0.4},
        {"window": 3, "deterministic": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_varlen(device, options):
    """As a dense call of each entry; rows of no entry get gradients of zero."""
    dtype = DTYPES[device]
    lengths_q, lengths_k = (5, 0, 6), (6, 3, 4)
    kind = {"device": device, "dtype": dtype}
    q = randn(12, 4, 16, **kind).requires_grad_()
    k, v = (randn(14, 2, d, **kind).requires_grad_() for d in (16, 24))
    sinks = randn(4, device=device).requires_grad_()
    inputs = (q, k, v, sinks)
    at_q, at_k = offsets(lengths_q, device), offsets(lengths_k, device)
    if "dropout_p" in options:
        options = options | {"rng_state": torch.tensor([3, 4], device=device)}
    results = attention_varlen(q, k, v, at_q, at_k, **options, sinks=sinks, return_lse=True)
    grads = [torch.randn_like(x) for x in results]
    got = torch.autograd.grad(results, inputs, grads)

    options = {name: x for name, x in options.items() if name != "deterministic"}
    exact = [in_double(x) for x in inputs]
    due = [torch.zeros_like(x) for x in exact]
    for b in range(3):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        entry = [exact[0][rows], exact[1][keys], exact[2][keys]]
        # The weights that dropout takes are those of batch entry b of a dense call.
        dense = [torch.stack([x.transpose(0, 1)] * 3) for x in entry]
        out, lse = gradients.attention(*dense, **options, sinks=exact[3])
        pairs = [out[b].transpose(0, 1), lse[b]]
        of_entry = torch.autograd.grad(
            pairs, exact, [grads[0][rows].double(), grads[1][:, rows].double()]
        )
        due = [a + b for a, b in zip(due, of_entry)]
    assert_close(got, due, dtype)
    assert (got[0][11:] == 0).all()
    assert (got[1][13:] == 0).all()


def test_varlen_of_pages_runs_forward():
    q = randn(3, 2, 16).requires_grad_()
    pages = randn(4, 2, 2, 16)
    table, used = torch.arange(2, dtype=torch.int32)[None], torch.tensor([3], dtype=torch.int32)
    out = attention_varlen(q, pages, pages, offsets([3]), block_table=table, seqused_k=used)
    with pytest.raises(NotImplementedError, match="no backward pass with block_table"):
        out.sum().backward()


def test_varlen_seqused():
    q, k = randn(5, 2, 8).requires_grad_(), randn(9, 2, 8).requires_grad_()
    used = torch.tensor([4, 2], dtype=torch.int32)
    out = attention_varlen(q, k, k, offsets([3, 2]), offsets([5, 4]), seqused_k=used)
    (got,) = torch.autograd.grad(out.square().sum(), k)
    assert (got[4] == 0).all()
    assert (got[7:] == 0).all()
    rest = torch.tensor([0, 1, 2, 3, 5, 6])
    out = attention_varlen(q, k[rest], k[rest], offsets([3, 2]), offsets([4, 2]))
    (due,) = torch.autograd.grad(out.square().sum(), k)
    assert_close([got], [due], torch.float32)


def test_varlen_computes_no_more_than_is_asked(monkeypatch):
    asked = []

    def spy(*args, **more):
        asked.append(asked_of(more))
        return cutlass_attn._C.backward_varlen(*args, **more)

    monkeypatch.setattr(VARLEN, "run_backward", spy)
    q, k = randn(5, 2, 8), randn(5, 2, 8).requires_grad_()
    attention_varlen(q, k, q, offsets([5])).sum().backward()
    assert asked == [{"grad_out", "grad_k"}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (50, 0)}])
def test_more_tiles_of_keys_than_multiprocessors(device, head_dim, options):
    """So that blocks of a GPU take several. With the window the first keys have no queries."""
    batch, heads, rows, keys = (12, 6, 160, 400) if device == "cuda" else (2, 2, 60, 130)
    torch.manual_seed(0)
    shapes = (batch, heads, rows, head_dim), *[(batch, heads // 2, keys, head_dim)] * 2
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = [torch.randn(x, device=device).to(dtype).requires_grad_() for x in shapes]
    weight = torch.randn(shapes[0], device=device).to(dtype)
    grads = torch.autograd.grad(attention(*inputs, **options), inputs, weight)

    at = torch.arange(rows, device=device)[:, None] + keys - rows
    of = torch.arange(keys, device=device)
    visible = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if options:
        visible &= of <= at
    if "window" in options:
        visible &= of >= at - 50
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = exact[0], *(x.repeat_interleave(2, dim=1) for x in exact[1:])
    scores = (q @ k.mT / head_dim**0.5).masked_fill(~visible, -torch.inf)
    due = torch.autograd.grad(scores.softmax(-1) @ v, exact, weight.double())
    for ours, right in zip(grads, due, strict=True):
        error = (ours.double() - right).norm() / right.norm()
        assert error < (2e-2 if device == "cuda" else 1e-5)
