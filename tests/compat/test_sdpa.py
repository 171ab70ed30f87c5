"""compat.sdpa against torch's own function, in fp32 by its math backend."""

import warnings

import cutlass_attn
import pytest
from pairwise import pairwise

torch = pytest.importorskip("torch")
F = torch.nn.functional

from cutlass_attn.compat import sdpa  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402


def expected(q, k, v, attn_mask=None, **options):
    """By torch's math backend in fp32; `attn_mask` as given."""
    q, k, v = (x.float() for x in (q, k, v))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.float()
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, **options)


def assert_equal(result, due, dtype):
    assert result.shape == due.shape
    assert result.dtype == dtype
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(result.float(), due.float(), rtol=tolerance, atol=tolerance)


FACTORS = {
    "dtype": [torch.float16, torch.bfloat16],
    "ndim": [4, 2, 3, 5],
    "lengths": [(7, 7), (1, 9), (5, 12), (12, 5), (4, 0)],
    "heads": [(4, 4, 4), (4, 1, 1), (1, 4, 4), (4, 4, 1), (4, 1, 4), (4, 2, 2)],  # the last: GQA
    "batch": [(2, 2, 2), (1, 2, 2), (2, 1, 1), (2, 2, 1)],
    "dims": [(16, 16), (16, 24), (5, 5)],
    "mask": [None, "causal", "bool", "float", "float32", "rows", "keys", "heads", "hidden row"],
    "order": ["bhsd", "bshd", "sbhd", "column"],
    "scale": [None, 0.3],
}


def operands(case, seed=0):
    """The three of the case, query in the memory order that it asks for, and the keywords."""
    generator = torch.Generator().manual_seed(seed)
    seqlen_q, seqlen_k = case["lengths"]
    head_dim, head_dim_v = case["dims"]
    tensors = []
    for i, (seqlen, d) in enumerate(
        ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v))
    ):
        leading = {5: (3, case["batch"][i]), 4: (case["batch"][i],)}.get(case["ndim"], ())
        heads = (case["heads"][i],) if case["ndim"] > 2 else ()
        x = torch.randn(*leading, *heads, seqlen, d, generator=generator).to(case["dtype"])
        tensors.append(x)
    q = tensors[0]
    if case["order"] == "column":
        tensors = [x.mT.contiguous().mT for x in tensors]
    elif case["ndim"] == 4 and case["order"] != "bhsd":
        order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[case["order"]]
        tensors[0] = torch.empty_permuted(q.shape, order, dtype=q.dtype).copy_(q)
    options = {"scale": case["scale"]}
    if case["ndim"] > 2 and case["heads"] == (4, 2, 2):
        options["enable_gqa"] = True
    if case["mask"] == "causal":
        options["is_causal"] = True
    elif case["mask"]:
        options["attn_mask"] = mask_of(case, tensors, generator)
    return tensors, options


def mask_of(case, tensors, generator):
    q, k, _ = tensors
    seqlen_q, seqlen_k = case["lengths"]
    leading = q.shape[:-2]
    if case["ndim"] > 2:
        heads = max(q.shape[-3], k.shape[-3])
        leading = (*torch.broadcast_shapes(q.shape[:-3], k.shape[:-3]), heads)
    full = (*leading, seqlen_q, seqlen_k)
    shape = {
        "rows": (*leading, seqlen_q, 1),
        "keys": (*leading[:1], *[1] * (len(leading) - 1), 1, seqlen_k),
        "heads": (*leading[-1:], seqlen_q, seqlen_k),
        "float32": (1, seqlen_k),
        "hidden row": (seqlen_q, seqlen_k),
    }.get(case["mask"], full)
    if case["mask"].startswith("float"):
        mask = torch.randn(shape, generator=generator)
        mask[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
        return mask if case["mask"] == "float32" else mask.to(case["dtype"])
    mask = torch.rand(shape, generator=generator) < 0.7
    if case["mask"] == "hidden row":
        mask[0] = False
    return mask


CASES = pairwise(FACTORS, seed=3)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_torch(number):
    case = CASES[number]
    tensors, options = operands(case, number)
    try:
        due = expected(*tensors, **options)
    except RuntimeError:  # torch refuses it, and so must we
        with pytest.raises(RuntimeError):
            sdpa.scaled_dot_product_attention(*tensors, **options)
        return
    assert (sdpa.why_not(*tensors, **options) is None) == (case["lengths"] != (4, 0)), case
    assert_equal(sdpa.scaled_dot_product_attention(*tensors, **options), due, case["dtype"])


def test_cases_say_something():
    """Most of the cases above are ones that torch computes."""
    taken = sum(sdpa.why_not(*operands(case)[0], **operands(case)[1]) is None for case in CASES)
    assert taken > 0.6 * len(CASES)


def half(*shape, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_result_lies_in_memory_as_query(order):
    q = torch.empty_permuted((2, 3, 5, 8), order, dtype=torch.float16).normal_()
    k, v = half(2, 2, 3, 7, 8)
    result = sdpa.scaled_dot_product_attention(q, k, v)
    assert result.stride() == F.scaled_dot_product_attention(q, k, v).stride() == q.stride()
    assert_equal(result, expected(q, k, v), torch.float16)


@pytest.mark.parametrize("make", [lambda q: q[:1].expand_as(q), lambda q: q[:, :, :5]])
def test_result_of_a_view(make):
    q = make(half(2, 3, 9, 8))
    result = sdpa.scaled_dot_product_attention(q, q, q)
    assert result.stride() == F.scaled_dot_product_attention(q, q, q).stride()
    assert_equal(result, expected(q, q, q), torch.float16)


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("lowest", [-1e9, -3e15, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lowest_number_as_mask(dtype, lowest, scale):
    """Rows of a large negative number alone are an average, in the kernels for GPUs as well."""
    lowest = torch.finfo(dtype).min if lowest is None else lowest
    mask = torch.zeros(2, 1, 6, 20, dtype=dtype)
    mask[0, :, :3] = lowest
    mask[1, :, :, 4:] = lowest
    mask[1, :, 5] = -torch.inf
    q, k, v = scale * half(2, 4, 6, 16), *half(2, 2, 4, 20, 16)
    if dtype == torch.bfloat16:
        q, k, v = (x.bfloat16() for x in (q, k, v))
    # -1e9 does not absorb the logits of float64.
    due = expected(q, k, v, mask.masked_fill(mask == lowest, torch.finfo(dtype).min))
    assert (due[1, :, 5] == 0).all()
    assert_equal(sdpa.scaled_dot_product_attention(q, k, v, mask), due, q.dtype)
    if dtype == torch.float32 and cutlass_attn.build_info().simt == "all":
        bias = sdpa.mask_or_bias(mask.expand(2, 4, 6, 20))["bias"]
        assert bias.shape == mask.shape
        result = cutlass_attn.attention(q, k, v, bias=bias, kernel="sm80/general-simt")
        assert_equal(result, due, q.dtype)


REASONS = {
    "dtype torch.float32": lambda q: {"query": q.float(), "key": q.float(), "value": q.float()},
    "dtypes of query, key and value differ": lambda q: {"key": q.float()},
    "attn_mask and is_causal are both given": lambda q: {
        "attn_mask": torch.ones(4, 4, dtype=torch.bool),
        "is_causal": True,
    },
    "dtype of attn_mask": lambda q: {"attn_mask": torch.ones(4, 4, dtype=torch.int32)},
    "attn_mask does not broadcast to the logits": lambda q: {
        "attn_mask": torch.ones(2, 4, dtype=torch.bool)
    },
    "an argument has fewer than two dimensions": lambda q: {
        "attn_mask": torch.ones(4, dtype=torch.bool)
    },
    "numbers of heads do not fit": lambda q: {"key": q[:, :2], "value": q[:, :2]},
    "shapes do not fit": lambda q: {"value": q[:, :, :3]},
    "shapes do not broadcast": lambda q: {"key": torch.cat([q, q, q])},
    "dropout_p is not within 0 to 1": lambda q: {"dropout_p": 1.5},
    "query has no elements": lambda q: {"query": q[:, :, :0]},
    "head_dim is beyond 512, or 0": lambda q: dict.fromkeys(
        ("query", "key", "value"), torch.cat([q] * 65, dim=-1)
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_leaves_to_torch(reason):
    """The result, or the error, is torch's own."""
    q = half(2, 3, 4, 8)
    arguments = {"query": q, "key": q, "value": q} | REASONS[reason](q)
    assert sdpa.why_not(**arguments) == reason
    try:
        due = F.scaled_dot_product_attention(**arguments)
    except Exception as error:
        with pytest.raises(type(error)) as raised:
            sdpa.scaled_dot_product_attention(**arguments)
        assert str(raised.value) == str(error)
    else:
        result = sdpa.scaled_dot_product_attention(**arguments)
        assert torch.equal(result, due)
        assert result.requires_grad == due.requires_grad


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float", "float32", "expanded"])
@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd", "3-d"])
def test_gradients(mask, order):
    """Of query, key, value and an added mask, as torch has them; the result's memory, too."""
    orders = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "3-d": (0, 1, 2, 3)}
    dims, tensors = orders[order], []
    for i, seqlen in enumerate((5, 7, 7)):
        x = half(2, 4, seqlen, 16) * (1 + i)
        x = x.permute(dims).contiguous().permute([dims.index(d) for d in range(4)])
        tensors.append((x[0] if order == "3-d" else x).requires_grad_())
    masks = {
        "bool": torch.rand(5, 7, generator=torch.manual_seed(0)) > 0.3,
        "float": half(4, 5, 7).requires_grad_(),
        "float32": half(4, 1, 7).float().requires_grad_(),
    }
    attn_mask = masks.get(mask)
    inputs = tensors + [x for x in [attn_mask] if x is not None and x.requires_grad]
    if mask == "expanded":
        inputs.append(half(1, 5, 7).requires_grad_())
        attn_mask = inputs[-1].expand(4, 5, 7)
    options = {"attn_mask": attn_mask, "is_causal": mask == "causal"}
    assert sdpa.why_not(*tensors, **options) is None
    out = sdpa.scaled_dot_product_attention(*tensors, **options)
    if order == "bshd":
        assert out.transpose(1, 2).is_contiguous()
    due = expected(*tensors, **options)
    assert_equal(out, due, torch.float16)
    weight = torch.randn(out.shape, generator=torch.manual_seed(1))
    got, due = (torch.autograd.grad((x.float() * weight).sum(), inputs) for x in (out, due))
    for a, b in zip(got, due):
        assert a.dtype == b.dtype
        # Their rows are small differences of what comes from an output in half precision.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * b.abs().max().item())


@pytest.mark.parametrize("lowest", [-1e9, -3e15, -3.38e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_beside_rows_of_the_lowest_number(dtype, lowest):
    """Such rows are padding: nobody reads them, and their gradient is 0 and not NaN."""
    inputs = [
        x.bfloat16().requires_grad_() for x in (6 * half(2, 4, 6, 16), *half(2, 2, 4, 20, 16))
    ]
    mask = torch.zeros(2, 1, 6, 20, dtype=dtype)
    mask[..., :3, :] = lowest
    mask[1, ..., 9:] = lowest
    out = sdpa.scaled_dot_product_attention(*inputs, mask)
    got = torch.autograd.grad(out[:, :, 3:].float().square().sum(), inputs)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    visible = mask == 0
    visible[..., :3, :] = True
    out = F.scaled_dot_product_attention(*doubles, visible)
    due = torch.autograd.grad(out[:, :, 3:].square().sum(), doubles)
    for x, y in zip(got, due, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=2e-2 * y.abs().max().item())


def test_leaves_gradients_to_torch_where_there_is_no_kernel(monkeypatch):
    q = half(2, 3, 4, 8).requires_grad_()
    monkeypatch.setattr(sdpa, "_HAVE_BACKWARD", set())
    reason = "an input requires a gradient, and there is no backward kernel of cpu"
    assert sdpa.why_not(q, q, q) == reason
    assert sdpa.why_not(q.detach(), q.detach(), q.detach()) is None
    out = sdpa.scaled_dot_product_attention(q, q, q)
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q))


def test_leaves_other_numbers_of_value_heads_to_torch():
    """torch repeats keys and values each by a factor of its own."""
    q, k, v = half(2, 8, 4, 8), half(2, 2, 4, 8), half(2, 4, 4, 8)
    assert sdpa.why_not(q, k, v, enable_gqa=True) == "numbers of heads do not fit"
    result = sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(result, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("leading", [((2,), (), ()), ((2,), (2,), ()), ((1,), (), ())])
def test_operands_of_fewer_dimensions_broadcast(leading):
    """Also where a batch of theirs has the size of the first dimension."""
    q, k, v = (torch.randn(*more, 2, 4, 5, 8).bfloat16() for more in leading)
    assert sdpa.why_not(q, k, v) is None
    result = sdpa.scaled_dot_product_attention(q, k, v)
    assert_equal(result, expected(q, k, v), torch.bfloat16)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 3, 1, 2, 4)])
@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, 0, None), (0, None, None)])
def test_vmap(order, mapped):
    """Also of a query whose memory has another order: its result is laid out as it is."""
    each = [torch.randn(3, 2, 4, 7, 16).permute(order).bfloat16() for _ in range(3)]
    each = [x.contiguous().permute([order.index(i) for i in range(5)]) for x in each]
    given = [x if by == 0 else x[0] for x, by in zip(each, mapped)]
    result = torch.vmap(sdpa.scaled_dot_product_attention, mapped)(*given)
    for i in range(3):
        one = [x[i] if by == 0 else x for x, by in zip(given, mapped)]
        assert_equal(result[i], expected(*one), torch.bfloat16)


@pytest.mark.parametrize("scale", [1e39, float("inf"), float("nan")])
def test_leaves_scales_that_float32_lacks_to_torch(scale):
    q = torch.randn(1, 2, 4, 8).bfloat16()
    assert sdpa.why_not(q, q, q, scale=scale) == "scale is beyond float32"
    result = sdpa.scaled_dot_product_attention(q, q, q, scale=scale)
    due = F.scaled_dot_product_attention(q, q, q, scale=scale)
    torch.testing.assert_close(result, due, equal_nan=True)


def test_leaves_arrays_to_torch():
    q = half(2, 3, 4, 8)
    assert sdpa.why_not(q, q.numpy(), q) == "an argument is not a tensor"
    with pytest.raises(TypeError, match="must be Tensor"):
        sdpa.scaled_dot_product_attention(q, q.numpy(), q)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, inside of torch
def test_forward_mode_derivative():
    q = half(2, 3, 4, 8)
    results = []
    for function in (F.scaled_dot_product_attention, sdpa.scaled_dot_product_attention):
        with sdpa_kernel(SDPBackend.MATH):
            results.append(torch.func.jvp(lambda x, f=function: f(x, x, x), (q,), (q,)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_dropout():
    q, v = half(2, 3, 64, 8), torch.ones(2, 3, 64, 8, dtype=torch.float16)
    assert (sdpa.scaled_dot_product_attention(q, q, v, dropout_p=1.0) == 0).all()
    torch.manual_seed(5)
    first = sdpa.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    torch.manual_seed(5)
    again = sdpa.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    assert torch.equal(first, again)
    assert first.std() > 0.05
    assert abs(first.float().mean() - 1) < 0.05
    torch.manual_seed(6)
    assert not torch.equal(first, sdpa.scaled_dot_product_attention(q, q, v, dropout_p=0.5))


def test_autocast():
    q = torch.randn(2, 3, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa.why_not(q, q, q) is None
        result = sdpa.scaled_dot_product_attention(q, q, q, torch.zeros(4, 4))
        assert F.scaled_dot_product_attention(q, q, q).dtype == result.dtype == torch.bfloat16
    assert_equal(result, expected(q, q, q), torch.bfloat16)


def test_compiled_without_a_graph_break():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q, mask):
        return sdpa.scaled_dot_product_attention(q, q, q, mask) + 1

    q = half(2, 3, 4, 8).transpose(1, 2)
    mask = torch.randn(3, 3)
    assert_equal(function(q, mask), expected(q, q, q, mask) + 1, torch.float16)


# --- route


def test_route_takes_calls_of_every_kind():
    early = F.scaled_dot_product_attention  # a name bound before
    q = half(2, 4, 6, 8)
    x = q.reshape(8, 6, 8).repeat(1, 1, 4)
    due, due_causal = expected(q, q, q), expected(q, q, q, is_causal=True)
    with sdpa.route(devices=("cpu",), report=False) as report:
        for function in (early, torch.ops.aten.scaled_dot_product_attention):
            assert_equal(function(q, q, q), due, torch.float16)
        compiled = torch.compile(lambda x: early(x, x, x, is_causal=True), backend="aot_eager")
        with torch.no_grad():
            assert_equal(compiled(q), due_causal, torch.float16)
            layer = torch.nn.MultiheadAttention(32, 4, batch_first=True).half().train()
            layer(x, x, x, need_weights=False)
        with torch.inference_mode():
            assert_equal(early(q, q, q), due, torch.float16)
    assert report.taken["float16, head_dim 8"] == 4
    assert report.taken["float16, head_dim 8, causal"] >= 1
    assert not report.passed_on
    before = report.taken.total()
    F.scaled_dot_product_attention(q, q, q)
    assert report.taken.total() == before


@pytest.mark.filterwarnings("error")
def test_route_passes_on(caplog, capsys):
    caplog.set_level("INFO", "cutlass_attn")
    q = half(2, 4, 6, 8)
    x = torch.randn(2, 4, 6, 8, requires_grad=True)
    half_x = x.detach().half().requires_grad_()
    with sdpa.route(devices=("cpu",)) as report:
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(x, x, x).sum().backward()
        F.scaled_dot_product_attention(half_x, half_x, half_x).sum().backward()
        with pytest.raises(RuntimeError, match="int"):
            F.scaled_dot_product_attention(q, q, q, torch.ones(6, 6, dtype=torch.int32))
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 0
    torch.testing.assert_close(half_x.grad.float(), x.grad, rtol=2e-2, atol=2e-3)
    assert report.passed_on == {
        "sdpa_kernel() allows neither flash nor memory-efficient attention": 1,
        "dtype torch.float32": 1,
        "dtype of attn_mask": 1,
    }
    assert "cutlass_attn took 1 of 4 calls" in caplog.text
    assert "1 left to torch: dtype torch.float32" in caplog.text
    assert capsys.readouterr() == ("", "")


def test_route_logs_no_report_where_none_is_asked_for(caplog):
    caplog.set_level("INFO", "cutlass_attn")
    with sdpa.route(devices=("cpu",), report=False):
        F.scaled_dot_product_attention(*[half(2, 4, 6, 8)] * 3)
    assert not caplog.records


def test_route_passes_on_what_no_kernel_takes(monkeypatch):
    q = half(2, 4, 6, 8)
    due = F.scaled_dot_product_attention(q, q, q)

    def refuse(*operands, **options):
        raise ValueError("no kernel takes this call:\n  cpu: ...")

    monkeypatch.setattr(cutlass_attn, "attention", refuse)
    with sdpa.route(devices=("cpu",), report=False) as report:
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), due)
    assert report.passed_on == {"no kernel takes this call:": 1}


def test_route_is_closed_after_an_error():
    q = half(1, 1, 4, 8)
    with pytest.raises(KeyError), sdpa.route(devices=("cpu",), report=False):
        raise KeyError
    with sdpa.route(devices=("cpu",), report=False) as report:
        F.scaled_dot_product_attention(q, q, q)
    assert report.taken.total() == 1


def test_route_leaves_other_devices():
    q = half(1, 1, 4, 8)
    with sdpa.route(report=False) as report:
        F.scaled_dot_product_attention(q, q, q)
    assert not report.taken
    assert not report.passed_on


def test_route_errors():
    with pytest.raises(ValueError, match="devices must be"), sdpa.route(devices=("tpu",)):
        pass
    due = 'devices must be a sequence of "cuda" and "cpu", got \'cpu\''
    with pytest.raises(ValueError, match=due), sdpa.route(devices="cpu"):
        pass
    with (
        sdpa.route(report=False),
        pytest.raises(RuntimeError, match="open already"),
        sdpa.route(),
    ):
        pass


def test_route_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sdpa.route(devices=("cpu", "cuda"), report=False):
            F.scaled_dot_product_attention(*[half(1, 1, 4, 8)] * 3)
