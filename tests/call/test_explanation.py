"""What print(explain(...)) and repr show, and the errors of kernels asked for by name."""

import re

import cutlass_attn
import pytest
import torch
from cutlass_attn import attention, devices, explain, jit
from cutlass_attn._explanation import MOST_REASONS


def qkv(head_dim=64, dtype=torch.bfloat16, device="meta"):
    q = torch.empty(2, 8, 512, head_dim, dtype=dtype, device=device)
    kv = torch.empty(2, 2, 512, head_dim, dtype=dtype, device=device)
    return q, kv, kv


@pytest.fixture
def no_nvrtc(monkeypatch):
    def fail():
        raise jit.CompilerNotFound("no NVRTC")

    monkeypatch.setattr(jit, "_compiler", fail)


@pytest.fixture
def nvrtc():
    if jit.available():
        pytest.skip("no NVRTC here")


def needs_gpu_kernels():
    if not cutlass_attn.build_info().cuda:
        pytest.skip("a build without GPU kernels")


CALL = "bfloat16, q (2, 8, 512, 64), k (2, 2, 512, 64), v (2, 2, 512, 64)"


def test_text_on_a_cpu():
    text = str(explain(*qkv(), causal=True, device="cpu"))
    assert text == f"{CALL}, causal on cpu\n-> cpu/bf16  runs"


def test_text_for_an_ada_gpu(nvrtc):
    needs_gpu_kernels()
    explanation = explain(*qkv(), device="RTX 4090")
    first, runs, *passed_over = str(explanation).splitlines()
    assert first == f"{CALL} on RTX 4090 (sm_89, 128 SMs)"
    tile = explanation.chosen.tile
    assert runs == f"-> sm80/bf16/d64/{tile}  runs, tile {tile}, 1 launch"
    assert len(passed_over) <= MOST_REASONS + 1
    reason = "needs compute capability 9.0, the device has 8.9"
    [hopper] = [x for x in explanation.passed_over if x.kernel == "sm90"]
    assert reason in hopper.reason and hopper.count >= 1
    assert sum(reason in line for line in passed_over) == 1  # once, for all kernels of Hopper
    assert not any("needs float16" in line for line in passed_over)


def test_text_for_a_hopper_gpu(nvrtc):
    needs_gpu_kernels()
    explanation = explain(*qkv(128), device="H100")
    assert explanation.device == "H100 (sm_90, 132 SMs)"
    assert explanation.chosen.arch == "90a"
    assert f"-> {explanation.chosen.key}  runs" in str(explanation)
    assert all("no NVRTC" not in x.reason for x in explanation.passed_over)


def test_text_for_a_hopper_gpu_without_nvrtc(no_nvrtc):
    needs_gpu_kernels()
    if any(v.compiled and v.device == "cuda" and v.arch == "90a" for v in cutlass_attn.variants()):
        pytest.skip("this build has kernels for Hopper")
    explanation = explain(*qkv(128), device="sm_90")
    assert explanation.chosen.kernel == "sm80"
    text = str(explanation)
    assert text.count("no NVRTC") == 1 and len(text.splitlines()) <= 3 + MOST_REASONS
    line = next(line for line in text.splitlines() if "no NVRTC" in line)
    assert "sm90" in line.partition(":")[0].strip().split(", ")


def test_dtypes_are_named_where_they_differ_from_q():
    q, k, v = qkv()
    shape = (1, 8, 512, 512)
    for dtype, text in ((torch.bfloat16, ""), (torch.float32, " float32")):
        bias = torch.empty(shape, dtype=dtype, device="meta")
        call = explain(q, k, v, bias=bias, device="sm_90").call
        assert call.endswith(f", bias {shape}{text}")
    cache = torch.empty(2, 512, 2, 64, dtype=torch.float8_e4m3fn, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    given = {"cache_seqlens": lengths, "k_scale": 1.0, "v_scale": 1.0}
    found = explain(q[:, :, 0][:, None], cache, cache, **given, device="sm_90")
    assert f"k_cache {tuple(cache.shape)} float8_e4m3fn, v_cache" in found.call


def test_text_of_a_refused_call():
    explanation = explain(*qkv(dtype=torch.float64), device="sm_89")
    lines = str(explanation).splitlines()
    assert explanation.chosen is None and explanation.max_launches == 0
    assert lines[1] == "no kernel takes this call"
    assert explanation.passed_over == () and len(lines) == 2  # none is for float64 on a GPU
    old = explain(*qkv(), device="sm_75")
    assert len(str(old).splitlines()) <= 3 + MOST_REASONS
    reason = "needs compute capability >= 8.0, the device has 7.5"
    assert any(reason in x.reason for x in old.passed_over)


def test_the_table_has_every_variant():
    explanation = explain(*qkv(), device="sm_89")
    keys = [variant.key for variant in cutlass_attn.variants()]
    lines = explanation.table().splitlines()[1:]
    assert [line[3:].split()[0] for line in lines[: len(keys)]] == keys
    assert [x.variant.key for x in explanation] == keys


@pytest.mark.parametrize("device", ["cpu", "RTX 4090", "T4"])
def test_repr_is_short(device):
    text = repr(explain(*qkv(), device=device))
    assert len(text) < 200 and "\n" not in text and CALL in text


def test_launches_of_a_kernel_with_others_around_it(nvrtc):
    needs_gpu_kernels()
    explanation = explain(*qkv(), device="sm_89", grad=True)
    assert explanation.max_launches == 3
    assert "up to 3 launches" in str(explanation)


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "RTX-4090"])
def test_products_by_any_spelling(name):
    where, text = devices.parse_device(name)
    assert where == devices.Device(devices.CUDA, 0, 89, 128)
    assert text == "RTX 4090 (sm_89, 128 SMs)"


@pytest.mark.parametrize("name", ["sm_90", "sm90", "sm_90a", "9.0"])
def test_compute_capabilities_by_any_spelling(name):
    assert devices.parse_device(name) == (devices.Device(devices.CUDA, 0, 90), "sm_90")


def test_products_have_names_of_their_own():
    assert len(devices._BY_PLAIN_NAME) == len(devices.PRODUCTS)
    for name, (capability, num_sms) in devices.PRODUCTS.items():
        assert devices.parse_device(name)[0][2:] == (capability, num_sms)


def test_an_unknown_product_is_answered_by_the_closest():
    with pytest.raises(ValueError, match=r"got 'RTX 4091'; did you mean 'RTX 4090'"):
        devices.parse_device("RTX 4091")


def test_the_number_of_sms_counts(nvrtc):
    """Keys are split until there are blocks for all SMs: more SMs, more splits."""
    needs_gpu_kernels()
    q = torch.empty(4, 1, 8, 128, dtype=torch.float16, device="meta")
    cache = torch.empty(4, 8192, 2, 128, dtype=torch.float16, device="meta")
    lengths = torch.empty(4, dtype=torch.int32, device="meta")
    splits = [
        explain(q, cache, cache, cache_seqlens=lengths, device=device).splits
        for device in ("RTX 4060", "RTX 4090")
    ]
    assert 1 <= splits[0] < splits[1]


# --- errors ---------------------------------------------------------------------------------------


def refused(**options):
    q, k, v = (torch.zeros(x.shape, dtype=torch.float16) for x in qkv())
    with pytest.raises(ValueError) as error:
        attention(q, k, v, **options)
    return str(error.value)


def test_a_kernel_for_another_device_says_so_once():
    count = sum(v.kernel == "sm80" for v in cutlass_attn.variants())
    assert refused(kernel="sm80") == (
        'kernel "sm80" does not take this call:\n'
        f"  sm80 ({count} variants): needs operands on a CUDA device, got them on the CPU\n"
        'kernel "cpu" would take it'
    )


def test_an_unknown_kernel_names_families():
    text = refused(kernel="flash")
    assert len(text) < 400
    assert text.startswith('kernel is "flash", allowed: "auto", ')
    families = re.findall(r'"(\w+)/\.\.\." \((\d+)\)', text)
    kernels = {v.kernel for v in cutlass_attn.variants()}
    assert families
    for family, count in families:
        assert sum(kernel.startswith(family + "/") for kernel in kernels) == int(count)
    singles = {kernel for kernel in kernels if "/" not in kernel}
    assert all(f'"{kernel}"' in text for kernel in singles)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sm81", "sm80"),
        ("scalar/tield", "scalar/tiled"),
        ("minimal", "scalar/minimal"),
        ("cpu/fp16", "cpu/f16"),
    ],
)
def test_a_misspelt_kernel_is_answered_by_the_closest(name, meant):
    assert f'; did you mean "{meant}"' in refused(kernel=name)
