"""Float masks of compat.sdpa: a bool mask beside the bias changes nothing, and both are kept."""

import gc

import cutlass_attn
import pytest

torch = pytest.importorskip("torch")

from cutlass_attn.compat import _translate, sdpa  # noqa: E402


def values(*shape, seed=0, dtype=torch.float16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def padding(dtype, low):
    """Of two entries: 30 keys, and queries without a key; NaN, and a finite number that is low."""
    mask = torch.zeros(2, 1, 70, 90, dtype=dtype)
    mask[0, :, :, 30:] = low
    mask[0, :, 60:] = low
    mask[1, :, :, :65] = low
    mask[1, :, 3, 80] = torch.nan
    mask[1, :, 5, 70:] = -30000.0
    return mask


@pytest.mark.parametrize("low", ["-inf", "lowest"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["auto", "sm80/bias_mask-simt", "sm90/bias_mask-simt"])
def test_no_result_changes(kernel, dtype, low):
    if kernel != "auto" and (cutlass_attn.build_info().simt != "all" or dtype == torch.bfloat16):
        pytest.skip("this build has no such kernel for the CPU")
    mask = padding(dtype, -torch.inf if low == "-inf" else torch.finfo(dtype).min)
    # Padded to whole vectors, as kernels read a bias.
    mask = torch.nn.functional.pad(mask, (0, 6))[..., :90]
    q, k, v = (values(2, 2, n, 64, seed=n, dtype=dtype) for n in (70, 90, 90))
    options = _translate.with_visible(mask)
    assert options["mask"].dtype == torch.bool and options["mask"].shape == mask.shape
    hidden = ~options["mask"]
    is_sure = low == "-inf" or dtype == torch.bfloat16
    assert hidden[0, 0, :60, 30:].all() == is_sure and not hidden[0, 0, 60:].any()
    assert hidden[1, 0, :, :65].all() == is_sure and not hidden[1, 0, :, 65:].any()
    due = cutlass_attn.attention(q, k, v, bias=options["bias"])
    if kernel != "auto":
        options["bias"] = torch.nn.functional.pad(options["bias"], (0, 6))[..., :90]
    out = cutlass_attn.attention(q, k, v, kernel=kernel, **options)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(out, due, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert due[1, :, 3].isnan().all() and due.isnan().sum() == 2 * 64


@pytest.fixture
def gpu(monkeypatch):
    """Calls as on a GPU; what reads masks, by how often it did."""
    read = []

    def with_visible(mask, own=_translate.with_visible):
        read.append(mask)
        return own(mask)

    monkeypatch.setattr(_translate, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(_translate, "_is_capturing", lambda: False)
    monkeypatch.setattr(_translate.torch_library, "current_stream", lambda device: 1)
    monkeypatch.setattr(_translate, "with_visible", with_visible)
    monkeypatch.setattr(_translate, "_kept", [])
    with torch.no_grad():
        yield read


def test_layers_read_a_mask_once(gpu, monkeypatch):
    mask = padding(torch.float16, -torch.inf).nan_to_num(neginf=-torch.inf)
    q, k, v = (values(2, 2, n, 64, seed=n) for n in (70, 90, 90))
    due = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q, k, v)), mask.float()
    )

    def layer():
        out = sdpa.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(out.float(), due.nan_to_num(), rtol=2e-3, atol=2e-3)

    for _ in range(3):
        layer()
    assert len(gpu) == 1
    sdpa.scaled_dot_product_attention(q, k, v, mask[:, :, :1])  # another view
    layer()
    assert len(gpu) == 2
    monkeypatch.setattr(_translate.torch_library, "current_stream", lambda device: 2)
    layer()
    assert len(gpu) == 3


def test_a_write_is_seen(gpu):
    mask = padding(torch.float16, -torch.inf)
    first = _translate.float_mask(mask)
    assert torch.equal(_translate.float_mask(mask)["mask"], first["mask"]) and len(gpu) == 1
    mask[0, :, :5] = 0
    again = _translate.float_mask(mask)
    assert len(gpu) == 2 and again["mask"][0, :, :5].all() and not first["mask"][0, :, :5].all()
    assert len(_translate._kept) == 1  # the old one is not kept beside it


def test_a_mask_that_dies_is_forgotten(gpu):
    mask = padding(torch.float16, -torch.inf)
    _translate.float_mask(mask)
    del mask
    gpu.clear()
    gc.collect()
    assert not _translate._kept
    masks = [padding(torch.float16, -torch.inf) for _ in range(6)]
    for mask in masks:
        _translate.float_mask(mask)
    assert len(_translate._kept) == 4


def test_what_is_not_read(gpu):
    """Masks of several heads, of float32, or with gradients stay biases alone."""
    for mask in (values(2, 3, 7, 9), values(2, 1, 7, 9).float()):
        assert list(_translate.float_mask(mask)) == ["bias"]
    shared = values(2, 1, 7, 9)
    assert set(_translate.float_mask(shared.expand(2, 3, 7, 9))) == {"bias", "mask"}
    with torch.enable_grad():
        assert list(_translate.float_mask(shared)) == ["bias"]


def test_a_tensor_of_inference_mode_is_read_in_each_call(gpu):
    with torch.inference_mode():
        mask = padding(torch.float16, -torch.inf)
        for _ in range(2):
            assert set(_translate.float_mask(mask)) == {"bias", "mask"}
    assert len(gpu) == 2 and not _translate._kept
