"""compat.diffusers: the backend against diffusers' own native one."""

import inspect
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import diffusers  # noqa: E402
from cutlass_attn.compat import diffusers as compat  # noqa: E402
from cutlass_attn.compat import sdpa  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def registered():
    compat.register()
    compat.register()


def operands(heads_kv=4, dtype=torch.float16, seqlen_q=6, seqlen_k=9):
    generator = torch.Generator().manual_seed(0)
    shapes = (seqlen_q, 4), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    return [torch.randn(2, *shape, 16, generator=generator).to(dtype) for shape in shapes]


def masks():
    mask = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    keys = torch.arange(9) < torch.tensor([[9], [4]])
    return {
        "none": None,
        "bool": mask,
        "added": torch.where(mask, 0.5, -torch.inf).half(),
        "keys": keys,
        "keys, added": torch.where(keys, 0.0, -torch.inf).half(),
        "queries and keys": mask[0, 0],
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_equals_native(name, heads_kv):
    options = {"attn_mask": masks()[name], "scale": 0.3, "enable_gqa": heads_kv == 2}
    query, key, value = operands(heads_kv)
    due = dispatch.dispatch_attention_fn(query, key, value, **options)
    with sdpa.route(devices=("cpu",), report=False) as report:  # nothing goes to torch
        out = dispatch.dispatch_attention_fn(
            query, key, value, **options, backend=dispatch.AttentionBackendName("cutlass_attn")
        )
    assert not report.taken
    assert not report.passed_on
    assert out.is_contiguous()
    torch.testing.assert_close(out, due, rtol=2e-3, atol=2e-3)


def test_causal_is_aligned_top_left():
    due = dispatch.dispatch_attention_fn(*operands(), is_causal=True)
    out = compat.attention(*operands(), is_causal=True)
    torch.testing.assert_close(out, due, rtol=2e-3, atol=2e-3)


def test_log_sum_exp_and_window():
    query, key, value = operands()
    out, lse = compat.attention(query, key, value, return_lse=True)
    logits = torch.einsum("bihd,bjhd->bhij", query.float(), key.float()) / 4
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-3, atol=1e-3)
    due = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), value.float())
    torch.testing.assert_close(out.float(), due, rtol=2e-3, atol=2e-3)

    query = operands(seqlen_q=9)[0]
    out = compat.attention(query, key, value, window_size=(2, 1))
    logits = torch.einsum("bihd,bjhd->bhij", query.float(), key.float()) / 4
    seen = torch.ones(9, 9, dtype=torch.bool).triu(-2).tril(1)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    due = torch.einsum("bhij,bjhd->bihd", weights, value.float())
    torch.testing.assert_close(out.float(), due, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", [{"return_lse": True}, {"window_size": (2, 0)}])
def test_autocast(options):
    query, key, value = (x.float() for x in operands(seqlen_k=6))
    cast = [x.bfloat16() for x in (query, key, value)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compat.attention(query, key, value, **options)
    torch.testing.assert_close(found, compat.attention(*cast, **options), atol=0, rtol=0)


@pytest.mark.parametrize("window_size", [2, (2,), (1, 1, 1), None])
def test_a_window_is_a_pair(window_size):
    with pytest.raises(ValueError, match=r"window_size is .*, allowed: a pair"):
        compat.attention(*operands(), window_size=window_size)


def test_what_is_left_to_torch():
    """float32: the native backend's very numbers."""
    query, key, value = operands(dtype=torch.float32)
    due = dispatch.dispatch_attention_fn(query, key, value)
    assert torch.equal(compat.attention(query, key, value), due)


@pytest.mark.parametrize("name", masks())
def test_gradients(name):
    inputs = [x.requires_grad_() for x in operands()]
    grads = []
    for call in (compat.attention, dispatch.dispatch_attention_fn):
        out = call(*inputs, attn_mask=masks()[name])
        grads.append(torch.autograd.grad(out.float().square().sum(), inputs))
    for got, due in zip(*grads):
        torch.testing.assert_close(got, due, rtol=1e-2, atol=1e-2)


def test_refuses():
    query, key, value = operands()
    degrees = SimpleNamespace(ring_degree=2, ulysses_degree=1)
    ring = SimpleNamespace(context_parallel_config=degrees)
    for options, why in (
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": masks()["keys"]}, "an attn_mask under ring attention"),
        ({"window": (2, 2)}, "a window_size under ring attention"),
    ):
        with pytest.raises(NotImplementedError, match=f"no context parallelism with {why}"):
            compat._forward(None, query, key, value, **options, _parallel_config=ring)
    with pytest.raises(ValueError, match=r"return_lse or window_size here: dtype torch.float32"):
        compat.attention(query.float(), key.float(), value.float(), return_lse=True)
    with pytest.raises(ValueError, match="window_size or is_causal, not both"):
        compat.attention(query, key, value, is_causal=True, window_size=(3, 0))


def test_takes_every_argument_of_the_others():
    """diffusers drops, silently, what a backend has no argument for."""
    ours = set(inspect.signature(compat.attention).parameters)
    for name, function in dispatch._AttentionBackendRegistry._backends.items():
        if name.value in ("native", "flash", "xformers", "_native_flash", "sage"):
            assert set(inspect.signature(function).parameters) <= ours, name


def test_names_of_all_ways():
    """Of the context manager, of a model, and of the enumeration."""
    names = dispatch.AttentionBackendName
    assert names("cutlass_attn") is names.CUTLASS_ATTN is names["CUTLASS_ATTN"]
    assert names.CUTLASS_ATTN in list(names)
    assert list(names).count(names.CUTLASS_ATTN) == 1
    assert names.CUTLASS_ATTN == "cutlass_attn"
    with dispatch.attention_backend("cutlass_attn"):
        active, function = dispatch._AttentionBackendRegistry.get_active_backend()
        assert active is names.CUTLASS_ATTN
        assert function is compat.attention


def test_a_model():
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).half().eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4).half(),
        "encoder_hidden_states": torch.randn(1, 5, 32).half(),
        "pooled_projections": torch.randn(1, 32).half(),
        "timestep": torch.tensor([1.0]).half(),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(5, 3),
    }
    with torch.no_grad():
        due = model(**inputs).sample
        model.set_attention_backend("cutlass_attn")
        with sdpa.route(devices=("cpu",), report=False) as report:
            out = model(**inputs).sample
    assert not report.taken
    torch.testing.assert_close(out, due, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0"])
def test_versions(monkeypatch, version):
    monkeypatch.setattr(sys.modules["diffusers"], "__version__", version)
    with pytest.raises(
        RuntimeError, match=rf"supports diffusers from 0\..*; {version} is installed"
    ):
        compat.register()
