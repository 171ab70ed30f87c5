"""The private functions of compat.flash_attn: what their callers rely on, by the public ones."""

import importlib.metadata
import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from cutlass_attn.compat.flash_attn import flash_attn_interface as flash  # noqa: E402

INF = float("inf")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def names(function):
    return inspect.getfullargspec(function).args


def test_names_that_callers_read():
    """By introspection, or by position: ring-flash-attention, yunchang, diffusers."""
    scores = "dropout_p softmax_scale causal window_size_left window_size_right softcap "
    forward = f"q k v {scores}alibi_slopes return_softmax"
    assert names(flash._flash_attn_forward) == forward.split()
    backward = f"dout q k v out softmax_lse dq dk dv {scores}alibi_slopes deterministic rng_state"
    assert names(flash._flash_attn_backward) == backward.split()
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    assert " ".join(names(flash._flash_attn_varlen_forward)) == (
        f"q k v {lengths}{scores}alibi_slopes return_softmax block_table leftpad_k seqused_k "
        "zero_tensors num_splits"
    )
    assert " ".join(names(flash._flash_attn_varlen_backward)) == (
        f"dout q k v out softmax_lse dq dk dv {lengths}{scores}alibi_slopes deterministic "
        "rng_state zero_tensors"
    )
    assert flash._wrapped_flash_attn_forward is flash._flash_attn_forward
    assert flash._wrapped_flash_attn_varlen_backward is flash._flash_attn_varlen_backward


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("window", [(-1, -1), (3, -1)])
@pytest.mark.parametrize("softcap, sloped", [(0.0, False), (2.0, False), (0.0, True)])
def test_dense(dim, window, softcap, sloped):
    q, k, v = (randn(2, 9, heads, dim, seed=heads) for heads in (4, 2, 2))
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4]) if sloped else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = {"causal": True, "window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    due, due_lse, _ = flash.flash_attn_func(*leaves, **options, return_attn_probs=True)
    dout = randn(2, 9, 4, dim, seed=9)
    due_grads = torch.autograd.grad(due, leaves, dout)

    scores = (0.0, dim**-0.5, True, *window, softcap, slopes)
    out, lse, record, state = flash._flash_attn_forward(q, k, v, *scores, False)
    assert torch.equal(out, due) and torch.equal(lse, due_lse)
    assert record.numel() == 0 and (state.dtype, state.shape) == (torch.int64, (2,))
    wide = torch.full((3, 2, 12, 4, dim), 7.0).half()
    dq, dk, dv = wide[0][:, :9], wide[1][:, :9, :2], wide[2][:, :9, :2]
    flash._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *scores, False, None)
    for grad, due_grad in zip((dq, dk, dv), due_grads):
        assert torch.equal(grad, due_grad)
    assert (wide[:, :, 9:] == 7).all() and (wide[1:, :, :, 2:] == 7).all()
    only = torch.empty_like(k)
    flash._flash_attn_backward(dout, q, k, v, out, lse, None, only, None, *scores, True)
    assert torch.equal(only, due_grads[1])


def test_merged_results_give_gradients_of_all_keys():
    """Two halves of the keys, merged as ring libraries do, and the backward pass of each half."""
    q, k, v = (randn(1, 8, 2, 16, seed=i) for i in range(3))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    p = torch.einsum("bihd,bjhd->bhij", *leaves[:2]).mul(0.25).softmax(-1)
    dout = randn(1, 8, 2, 16, seed=5)
    due_out = torch.einsum("bhij,bjhd->bihd", p, leaves[2])
    due = torch.autograd.grad(due_out, leaves, dout.double())
    scores = (1e-30, 0.25, False, -1, -1, 0.0, None)  # no dropout, as diffusers says it
    halves = [
        flash._flash_attn_forward(q, k[:, at], v[:, at], *scores, True)
        for at in (slice(4), slice(4, 8))
    ]
    lse = torch.logaddexp(halves[0][1], halves[1][1])
    weights = [torch.exp(x[1] - lse).transpose(1, 2)[..., None] for x in halves]
    out = sum(x[0] * w for x, w in zip(halves, weights)).half()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for at in (slice(4), slice(4, 8)):
        dq, dk, dv = (torch.empty_like(x) for x in (q, k[:, at], v[:, at]))
        operands = (dout, q, k[:, at], v[:, at], out, lse, dq, dk, dv)
        flash._flash_attn_backward(*operands, *scores, False)
        grads[0] += dq
        grads[1][:, at], grads[2][:, at] = dk, dv
    for grad, due_grad in zip(grads, due):
        torch.testing.assert_close(grad.double(), due_grad, atol=5e-3, rtol=0)


@pytest.mark.parametrize("dim", [16, 12])
def test_packed(dim):
    q, k, v = (randn(11, heads, dim, seed=heads) for heads in (4, 2, 2))
    at_q, at_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 9], [0, 3, 10]))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = (at_q, at_k, 5, 7)
    due, due_lse, _ = flash.flash_attn_varlen_func(
        *leaves, *lengths, causal=True, return_attn_probs=True
    )
    dout = randn(11, 4, dim, seed=9)
    due_grads = torch.autograd.grad(due, leaves, dout)
    out, lse, _, _ = flash._flash_attn_varlen_forward(
        q, k, v, *lengths, dropout_p=0.0, softmax_scale=None, causal=True
    )
    assert torch.equal(out, due) and torch.equal(lse, due_lse) and lse.shape == (4, 11)
    assert (lse[:, :2] == INF).all()  # queries that see no key
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    flash._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, *lengths, 0.0, None, True, -1, -1, 0.0, None, False
    )
    for grad, due_grad, end in zip(grads, due_grads, (9, 10, 10)):
        assert torch.equal(grad[:end], due_grad[:end])
        assert (grad[end:] == 7).all()  # rows of no sequence
    with pytest.raises(NotImplementedError, match="leftpad_k must be None"):
        flash._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, None, True, leftpad_k=at_q)


def test_pages():
    q, pages = randn(5, 4, 16), randn(3, 4, 2, 16, seed=1)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    at_q, at_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 7))
    keys = torch.cat([pages[2], pages[0, :3]])
    due = flash._flash_attn_varlen_forward(q, keys, keys, at_q, at_k, 5, 7, 0.0, None, True)
    paged = (q, pages, pages, at_q, at_k, 5, 7, 0.0, None, True)
    out = flash._flash_attn_varlen_forward(*paged, block_table=table)
    torch.testing.assert_close(out[0], due[0])


def test_dropout_is_that_of_the_state():
    q, k, v = (randn(1, 40, 2, 16, seed=i) for i in range(3))
    scores = (0.3, 0.25, False, -1, -1, 0.0, None)
    torch.manual_seed(5)
    out, lse, record, state = flash._flash_attn_forward(q, k, v, *scores, True)
    assert record.shape == (1, 2, 128, 128) and (record < 0).any()
    torch.manual_seed(5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    due = flash.flash_attn_func(*leaves, dropout_p=0.3, return_attn_probs=True)[0]
    assert torch.equal(out, due)
    due_grads = torch.autograd.grad(due, leaves, torch.ones_like(due))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    operands = (torch.ones_like(out), q, k, v, out, lse, *grads)
    flash._flash_attn_backward(*operands, *scores, False, state)
    for grad, due_grad in zip(grads, due_grads):
        assert torch.equal(grad, due_grad)
    with pytest.raises(ValueError, match="rng_state must be that of the forward pass"):
        flash._flash_attn_backward(*operands, *scores, False)


INSTALLED = """
import importlib.metadata, cutlass_attn.compat.flash_attn as ours
ours.install()
ours.install()
import flash_attn
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_backward
from flash_attn.bert_padding import pad_input
from flash_attn_2_cuda import varlen_bwd
assert flash_attn is ours and flash_attn.__version__ == "2.8.3"
assert importlib.metadata.version("flash-attn") == "2.8.3"
assert importlib.metadata.version("flash_attn") == "2.8.3"
assert "flash_attn" in importlib.metadata.packages_distributions()
try:
    varlen_bwd()
except NotImplementedError as error:
    assert "_flash_attn_varlen_backward" in str(error)
"""


def test_install():
    subprocess.run([sys.executable, "-c", INSTALLED], check=True, timeout=100)


def test_install_refuses_to_hide_a_package(tmp_path):
    try:
        importlib.metadata.version("flash-attn")
        pytest.skip("flash_attn is installed")
    except importlib.metadata.PackageNotFoundError:
        pass
    (tmp_path / "flash_attn.py").write_text("")
    code = "import cutlass_attn.compat.flash_attn as ours; ours.install()"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "RuntimeError: the package flash_attn is installed" in found.stderr
