"""warmup: kernels compiled ahead, by name or by an example call."""

import cutlass_attn
import numpy as np
import pytest
from cutlass_attn import _C, jit
from cutlass_attn.jit import cache
from cutlass_attn.tools import cli
from stubs import ARCH, StubCompiler, made_row

pytestmark = pytest.mark.usefixtures("fresh")


def test_warmup_refuses_unknown_names():
    text = r"'warp/9' is neither a key of variants\(\) nor a kernel; allowed: .*sm80, .*, or a key"
    with pytest.raises(ValueError, match=text):
        cutlass_attn.warmup(names=["warp/9"], device=ARCH)


@pytest.mark.parametrize("device", ["cpu", "sm89x", "cuda:", -1])
def test_warmup_refuses_devices_that_are_no_gpu(device):
    with pytest.raises(ValueError, match=r"device .*\"cuda\".*\"sm_89\""):
        cutlass_attn.warmup(names="sm80", device=device)


def test_warmup_says_which_variants_have_no_source(monkeypatch):
    monkeypatch.setattr(jit, "units", dict)
    rows = [made_row("fast/f16", "fast", False)]
    monkeypatch.setattr(_C, "variants", lambda: rows)
    with pytest.raises(ValueError, match=r"fast/f16 cannot be compiled at run time: .*CUDA=ON"):
        cutlass_attn.warmup(names="fast", device=ARCH)


def test_the_command_warmup(stub, monkeypatch, capsys):
    rows = [
        made_row("fast/f16/d64/64x64x4", "fast", False),
        made_row("slow/f16", "slow", False),
        made_row("slow/f32", "slow", True),
    ]
    monkeypatch.setattr(_C, "variants", lambda: rows)
    assert cli.main(["warmup", "fast", "slow", "--device", ARCH]) == 0
    assert capsys.readouterr().out == f"2 kernels ready for {ARCH}, kept in {cache.folder()}\n"
    assert cli.main(["warmup", "slow/f32", "--device", ARCH]) == 0
    assert capsys.readouterr().out == "nothing to do: this build compiled them all\n"
    assert cli.main(["warmup", "warp", "--device", ARCH]) == 2
    assert "'warp' is neither" in capsys.readouterr().err


def test_the_command_warmup_without_nvrtc(stub, no_nvrtc, monkeypatch, capsys):
    rows = [made_row("slow/f16", "slow", False)]
    monkeypatch.setattr(_C, "variants", lambda: rows)
    assert cli.main(["warmup", "slow", "--device", ARCH]) == 1
    assert capsys.readouterr().err.strip() == "cutlass-attn warmup: no NVRTC"


def test_warmup_of_what_is_compiled_needs_nothing(monkeypatch):
    monkeypatch.setattr(jit, "_compiler", lambda: pytest.fail("asked for a compiler"))
    compiled = [
        variant.key
        for variant in cutlass_attn.variants()
        if variant.compiled and variant.key not in jit.units()
    ]
    cutlass_attn.warmup(names=compiled, device=ARCH)


def test_warmup_compiles_each_left_out_variant_once(stub, monkeypatch):
    rows = [
        made_row("fast/f16/d64/64x64x4", "fast", False),
        made_row("slow/f16", "slow", False),
        made_row("slow/f32", "slow", True),
    ]
    monkeypatch.setattr(_C, "variants", lambda: rows)
    cutlass_attn.warmup(names=["slow", "slow/f16", "slow/f32"], device=ARCH)
    assert stub.calls == 1
    cutlass_attn.warmup(names="fast", device=ARCH)
    assert stub.calls == 2


@pytest.mark.parametrize("grad", [False, True])
def test_warmup_of_a_call_compiles_what_it_would_run(monkeypatch, grad):
    made = StubCompiler()
    monkeypatch.setattr(jit, "_compiler", lambda: made)
    q, k, v = np.zeros((3, 1, 2, 100, 256), np.float16)
    call = {"causal": True, "device": "sm_90"}
    found = [cutlass_attn.explain(q, k, v, grad=of, **call) for of in (False, True)[: 1 + grad]]
    wanted = [f"{one.chosen.key}+{one.score}" for one in found]
    assert cutlass_attn.warmup(q, k, v, grad=grad, **call) == wanted
    assert made.calls == len(wanted)


@pytest.mark.parametrize(("kernel", "arch"), [("sm80", "sm_89"), ("sm90", "sm_90")])
def test_warmup_compiles_the_terms_of_a_call_alone(monkeypatch, kernel, arch):
    made, sources = StubCompiler(), []
    monkeypatch.setattr(made, "compile", lambda source, arch: sources.append(source) or b"code")
    monkeypatch.setattr(jit, "_compiler", lambda: made)
    q = np.zeros((2, 8, 4096, 64), np.float16)
    slopes = np.ones(8, np.float32)
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": slopes, "device": arch}
    explanation = cutlass_attn.explain(q, q, q, **options)
    key = explanation.chosen.key
    if f"{key}+softcap_alibi" not in jit.entries(key):
        pytest.skip(f"this build has {key}")
    assert (explanation.chosen.kernel, explanation.score) == (kernel, "softcap_alibi")
    assert "runs, compiled at first use" in str(explanation)
    assert cutlass_attn.warmup(q, q, q, **options) == [f"{key}+softcap_alibi"]
    (source,) = sources
    (entry,) = [line for line in source.splitlines() if line.startswith("CA_KERNEL_ENTRY")]
    assert entry.endswith("Score<Softcap, Alibi>)")


def test_warmup_of_a_call_needs_nvrtc(no_nvrtc):
    """Or it would make ready what runs without."""
    q, k, v = np.zeros((3, 1, 2, 100, 256), np.float16)
    with pytest.raises(jit.CompilerNotFound, match="no NVRTC"):
        cutlass_attn.warmup(q, k, v, device="sm_90")


def test_warmup_of_a_call_that_no_kernel_takes(stub):
    q, k, v = np.zeros((3, 1, 2, 100, 64), np.float64)
    with pytest.raises(ValueError, match="no kernel takes this call"):
        cutlass_attn.warmup(q, k, v, device="sm_90")


def test_warmup_without_a_gpu_says_how_to_name_one(stub):
    if not _C.device_info(1, 0)["unavailable"]:
        pytest.skip("there is a GPU")
    q = np.zeros((1, 2, 100, 64), np.float16)
    with pytest.raises(RuntimeError, match=r'; for a GPU elsewhere pass device="sm_90"'):
        cutlass_attn.warmup(q, q, q)


def test_warmup_takes_a_call_or_names():
    q = np.zeros((1, 2, 100, 64), np.float16)
    with pytest.raises(TypeError, match=r"warmup\(q, k, v, causal=True\).*neither is given"):
        cutlass_attn.warmup()
    with pytest.raises(TypeError, match=r"names=.*both are"):
        cutlass_attn.warmup(q, q, q, names="sm80")
