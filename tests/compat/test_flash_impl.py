"""The entry in torch's registry of flash attention implementations, as far as a CPU goes.

torch activates it for CUDA alone. Here the same kernels are put under the CPU's key, where torch
has none of its own, and called as torch's CUDA code calls them; that SDPA calls on a GPU reach
them is not tested.
"""

import cutlass_attn
import pytest

torch = pytest.importorskip("torch")
registry = pytest.importorskip("torch.nn.attention._registry")

from cutlass_attn.compat import _flash_impl, sdpa  # noqa: E402

ops = torch.ops.aten


@pytest.fixture
def active():
    handle = _flash_impl._activate("CPU")
    yield
    handle.remove()


def half(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def test_registered_by_name():
    sdpa.register_flash_impl()
    try:
        assert "cutlass_attn" in torch.nn.attention.list_flash_attention_impls()
        torch.nn.attention.activate_flash_attention_impl("cutlass_attn")
        assert torch.nn.attention.current_flash_attention_impl() == "cutlass_attn"
        if not torch.cuda.is_available():  # its kernels are there, and are called for no CPU tensor
            assert torch._C._dispatch_has_kernel_for_dispatch_key(
                "aten::_flash_attention_forward", "CUDA"
            )
        torch.nn.attention.restore_flash_attention_impl()
        assert torch.nn.attention.current_flash_attention_impl() is None
    finally:
        registry._FLASH_ATTENTION_IMPLS.pop("cutlass_attn", None)


def test_old_torch(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"torch 2\.10 or later, this is torch 2"):
        sdpa.register_flash_impl()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_dense_of_sdpa(active, causal, scale):
    q = half(2, 9, 3, 16).transpose(1, 2)
    k, v = half(2, 2, 3, 9, 16, seed=1)
    result = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    out, lse, cum_q, cum_k, max_q, max_k, state, unused, debug = result
    due, lse_due = cutlass_attn.attention(
        q, k, v, causal=causal, softmax_scale=scale, return_lse=True
    )
    assert torch.equal(out, due)
    assert out.stride() == q.stride()
    assert torch.equal(lse, lse_due)
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 9, 9)
    assert (state.shape, state.dtype, unused.shape) == ((2,), torch.uint64, ())
    assert debug.numel() == 0


def test_dense(active):
    q, k = half(2, 5, 4, 16), half(2, 9, 2, 16, seed=1)
    options = {"scale": 0.2, "window_size_left": 3, "window_size_right": -1}
    out, lse, *_ = ops._flash_attention_forward(
        q, k, k, None, None, 5, 9, 0.0, True, False, **options
    )
    due, lse_due = cutlass_attn.attention(
        q, k, k, causal=True, window=(3, -1), softmax_scale=0.2, layout="bshd", return_lse=True
    )
    assert torch.equal(out, due)
    assert torch.equal(lse, lse_due)
    if "_flash_attention_forward_no_dropout_inplace" not in _flash_impl.known_operators():
        return
    into = torch.empty_like(out)
    lse = ops._flash_attention_forward_no_dropout_inplace(
        into, q, k, k, None, None, 5, 9, 0.0, True, False, **options
    )
    assert torch.equal(into, due)
    assert torch.equal(lse, lse_due)


def test_packed(active):
    """As torch.nn.attention.varlen.varlen_attn calls it."""
    q, k = half(8, 4, 16), half(11, 2, 16, seed=1)
    at_q, at_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 8], [0, 9, 11]))
    out, lse, *_ = ops._flash_attention_forward(
        q, k, k, at_q, at_k, 5, 9, 0.0, True, False, window_size_left=-1, window_size_right=0
    )
    assert lse.shape == (4, 8)
    for b in range(2):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        due = cutlass_attn.attention(
            q[None, rows], k[None, keys], k[None, keys], causal=True, layout="bshd"
        )
        torch.testing.assert_close(out[None, rows], due)
    known = {x.name for x in ops._flash_attention_forward.default._schema.arguments}
    if "block_table" not in known:
        return
    pages, table = k[:9].view(3, 3, 2, 16), torch.tensor([[2, 1], [0, 0]], dtype=torch.int32)
    used = torch.tensor([4, 2], dtype=torch.int32)
    out, *_ = ops._flash_attention_forward(
        q, pages, pages, at_q, None, 5, 9, 0.0, False, False, seqused_k=used, block_table=table
    )
    keys = torch.cat([pages[2], pages[1, :1]])[None]
    due = cutlass_attn.attention(q[None, :5], keys, keys, layout="bshd")
    torch.testing.assert_close(out[None, :5], due)


def test_what_it_leaves_has_no_kernel_here(active):
    q = half(2, 3, 4, 16)
    call = ops._scaled_dot_product_flash_attention
    with pytest.raises(NotImplementedError, match="does not take dropout"):
        call(q, q, q, 0.5)
    with pytest.raises(NotImplementedError, match="does not take return_debug_mask"):
        call(q, q, q, 0.0, False, True)
    rest = (q, q, q, q, q.new_zeros(2, 4, 3), None, None, 3, 3)
    with pytest.raises(NotImplementedError, match="does not take dropout"):
        ops._flash_attention_backward(q, *rest, 0.5, False, q, q)
    with pytest.raises(NotImplementedError, match=r"a gradient of torch\.int32"):
        ops._scaled_dot_product_flash_attention_backward(
            *(x.int() if isinstance(x, torch.Tensor) else x for x in (q, *rest)), 0.0, False, q, q
        )


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_sdpa(active, causal):
    leaves = [half(2, 9, 3, 16, seed=i).transpose(1, 2).requires_grad_() for i in range(3)]
    grad_out = half(2, 3, 9, 16, seed=5)
    out, *_ = ops._scaled_dot_product_flash_attention(*leaves, 0.0, causal, scale=0.3)
    grads = torch.autograd.grad(out, leaves, grad_out)
    due_out = cutlass_attn.attention(*leaves, causal=causal, softmax_scale=0.3)
    for grad, due in zip(grads, torch.autograd.grad(due_out, leaves, grad_out)):
        assert torch.equal(grad, due)


def test_gradients_dense(active):
    q, k, v = half(2, 5, 4, 16), half(2, 9, 2, 16, seed=1), half(2, 9, 2, 16, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"scale": 0.2, "window_size_left": 3, "window_size_right": -1}
    out, *_ = ops._flash_attention_forward(*leaves, None, None, 5, 9, 0.0, True, False, **options)
    grads = torch.autograd.grad(out.sum(), leaves)
    due_out = cutlass_attn.attention(
        *leaves, causal=True, window=(3, -1), softmax_scale=0.2, layout="bshd"
    )
    for grad, due in zip(grads, torch.autograd.grad(due_out.sum(), leaves)):
        assert torch.equal(grad, due)


def test_gradients_packed(active):
    leaves = [half(8, 4, 16), half(11, 2, 16, seed=1), half(11, 2, 16, seed=2)]
    leaves = [x.requires_grad_() for x in leaves]
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 8], [0, 9, 11])]
    out, *_ = ops._flash_attention_forward(
        *leaves, *offsets, 5, 9, 0.0, True, False, window_size_left=-1, window_size_right=0
    )
    grads = torch.autograd.grad(out.sum(), leaves)
    due_out = cutlass_attn.attention_varlen(*leaves, *offsets, causal=True)
    for grad, due in zip(grads, torch.autograd.grad(due_out.sum(), leaves)):
        assert torch.equal(grad, due)


@pytest.mark.skipif(
    "_flash_attention_forward_no_dropout_inplace" not in _flash_impl.known_operators(),
    reason="before torch 2.12 an operator takes one kernel from Python",
)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_leaves_to_the_kernel_before():
    """Of torch, on a GPU; here of another library."""
    calls = []

    def stock(query, key, value, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        calls.append((dropout_p, is_causal, debug, scale))
        return query, key, None, None, 1, 2, value, value, value

    name = "_scaled_dot_product_flash_attention"
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, stock, "CPU")
    handle = _flash_impl._activate("CPU")
    q = half(2, 3, 4, 16)
    try:
        getattr(ops, name)(q, q, q)
        assert not calls
        getattr(ops, name)(q, q, q, 0.5, True, scale=0.25)
        assert calls == [(0.5, True, False, 0.25)]
        getattr(ops, name)(q.clone().requires_grad_(), q, q)
        assert len(calls) == 1
        handle.remove()
        getattr(ops, name)(q, q, q)
        assert len(calls) == 2
    finally:
        handle.remove()
        library._destroy()


def schema(text):
    return torch._C.parse_schema(f"aten::_scaled_dot_product_flash_attention({text}")


FIRST = "Tensor query, Tensor key, Tensor value, float dropout_p=0."
RETURNS = ", ".join(["Tensor"] * 9)


@pytest.mark.parametrize(
    "text",
    [
        f"{FIRST}, bool is_causal=False, bool return_debug_mask=False, *, float? scale=None, "
        f"Tensor? sinks=None) -> ({RETURNS})",
        f"{FIRST}, bool return_debug_mask=False, bool is_causal=False, *, float? scale=None) "
        f"-> ({RETURNS})",
        f"{FIRST}, bool is_causal=False, bool return_debug_mask=False) -> ({RETURNS})",
        f"{FIRST}, bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) "
        "-> (Tensor, Tensor)",
    ],
    ids=["one more", "another order", "one less", "other results"],
)
def test_unknown_schema(text):
    with pytest.raises(RuntimeError, match="does not support: aten::_scaled_dot_product_flash"):
        _flash_impl.check_schema(schema(text))


def test_schemas_of_this_torch():
    operators = _flash_impl.known_operators()
    assert "_scaled_dot_product_flash_attention" in operators
    for operator in operators.values():
        _flash_impl.check_schema(operator._schema)
    # torch 2.10 had no paging in this operator.
    _flash_impl.check_schema(
        torch._C.parse_schema(
            "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, "
            "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
            "bool is_causal, bool return_debug_mask, *, float? scale=None, "
            "SymInt? window_size_left=None, SymInt? window_size_right=None, "
            "Tensor? seqused_k=None, Tensor? alibi_slopes=None) "
            "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
        )
    )
