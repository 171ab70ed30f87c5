"""Kernels with a user's score_mod, as NVRTC makes them, without a GPU."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import cutlass_attn  # noqa: E402
from cutlass_attn import _compiled, jit, tuning  # noqa: E402
from cutlass_attn._call.call import Call  # noqa: E402
from cutlass_attn._mods.tracing import trace  # noqa: E402
from cutlass_attn.jit import sources  # noqa: E402
from cutlass_attn.tools.tune import spills  # noqa: E402

SLOPES = torch.ones(8)
DISTANCES = torch.ones(8, 600)
KERNELS = {
    "sm90/bf16/d64/128x128x8": "sm_90a",
    "sm80/f16/d64/64x64x4": "sm_80",
    "sm80/backward/f16/d64/64x128x4": "sm_80",
}


def mod_of(function, *wanted):
    graph = trace(function, "score_mod")
    return _compiled.made(graph, wanted, graph)


def alibi(s, b, h, q, k):
    return s - SLOPES[h] * abs(q - k)


def decay(s, b, h, q, k):
    """None that is an option, as ALiBi is."""
    return s * SLOPES[h] - 0.5 * (q - k)


needs_nvrtc = pytest.mark.skipif(bool(jit.available()), reason=jit.available() or "-")


@needs_nvrtc
@pytest.mark.parametrize("key", KERNELS)
def test_nvrtc_takes_it(key, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path))
    assert len(jit.cubin(f"{key}+identity+{mod_of(alibi).name}", KERNELS[key])) > 10_000


WITH_CAPTURES = {
    "sm80/backward/f16/d64/64x128x4": "sm_80",
    "sm80/backward/bf16/d128/32x128x8": "sm_89",
    "sm80/backward/f16/d512/16x32x8": "sm_80",
    "sm90/backward_wgmma/f16/d64/64x192x12": "sm_90a",
    "sm90/backward_wgmma/bf16/d128/64x128x8": "sm_90a",
}
FUNCTIONS = {
    "distances": lambda s, b, h, q, k: s + DISTANCES[h, q - k + 300],
    "temperature": lambda s, b, h, q, k: s * SLOPES[h],
}


@needs_nvrtc
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("key", WITH_CAPTURES)
def test_nvrtc_takes_gradients_of_captured_tensors(key, name):
    """In Hopper's kernels without local memory, where the score is not needed."""
    mod = mod_of(FUNCTIONS[name], 0)
    source = jit._source(f"{key}+identity+{mod.name}")
    _, log = jit._compiler().compile_with_log(source, WITH_CAPTURES[key])
    assert "C75" not in log  # wgmma in sequence
    assert not (spills(log) and key.startswith("sm90") and name == "distances")


def test_numbers_and_tensors_are_no_part_of_the_name():
    other = torch.zeros(3)
    first = mod_of(lambda s, b, h, q, k: s + other[h] * 0.5)
    second = mod_of(lambda s, b, h, q, k: s + SLOPES[h] * 0.25)
    assert first.name == second.name and first.operands != second.operands
    assert mod_of(lambda s, b, h, q, k: s + other.half()[h] * 0.5).name != first.name


def test_a_source_without_the_score_is_an_error():
    with pytest.raises(ValueError, match="the source has no score 'alibi'"):
        sources.with_score_mod("namespace cutlass_attn {\n}", "alibi", "struct Mod {};")


def operands(seqlen=256, dtype=torch.float16):
    q = torch.zeros(2, 8, seqlen, 64, dtype=dtype)
    return q, q[:, :4], q[:, :4]


@needs_nvrtc
@pytest.mark.parametrize(
    ("device", "grad", "options", "kernel"),
    [
        ("sm_90", False, {}, "sm90"),
        ("sm_90", False, {"causal": True, "attention_chunk": 64}, "sm90"),
        ("sm_90", False, {"mask_mod": lambda b, h, q, k: (q + k) % 3 == 0}, "sm90/mask"),
        ("sm_90", True, {"mask_mod": lambda b, h, q, k: (q + k) % 3 == 0}, "sm90/backward_wgmma"),
        ("sm_80", False, {"mask_mod": lambda b, h, q, k: (q + k) % 3 == 0}, "sm80"),
        ("sm_80", True, {"causal": True}, "sm80/backward"),
        ("sm_80", True, {"deterministic": True}, "sm80/backward_ordered"),
        ("sm_89", False, {"attention_chunk": 64}, "sm80"),
    ],
)
def test_explain(device, grad, options, kernel):
    found = cutlass_attn.explain(
        *operands(2048), score_mod=lambda s, b, h, q, k: s * s, device=device, grad=grad, **options
    )
    assert found.chosen is not None, found.table()
    assert found.chosen.kernel == kernel
    assert found.score_mod.startswith("mod_") and found.score_mod in str(found)
    assert next(x for x in found.verdicts if x.chosen).at_first_use


@needs_nvrtc
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_explain_for_an_absent_gpu_names_what_a_gpu_would_run(where):
    """A GPU compiles what a CPU adds as a dense bias: the device asked about decides, not q's."""
    bias = torch.zeros(8, 256, 256, device=where)  # float32
    given = [x.to(where) for x in operands()]

    def biased(score, batch, head, q, k):
        return score + bias[head, q, k]

    found = cutlass_attn.explain(*given, score_mod=biased, device="sm_90")
    assert found.score_mod and found.score_mod in found.call and "bias" not in found.call
    on_cpu = cutlass_attn.explain(*given, score_mod=biased, device="cpu")
    assert not on_cpu.score_mod and "bias" in on_cpu.call, on_cpu.call


@needs_nvrtc
def test_explain_counts_gradients_of_captured_tensors():
    """Their kernel is another one, which warmup(grad=True) compiles."""
    slopes = torch.ones(8)

    def found(**options):
        return cutlass_attn.explain(
            *operands(2048),
            score_mod=lambda s, b, h, q, k: s * slopes[h],
            device="sm_90",
            grad=True,
            **options,
        )

    plain = found()
    slopes.requires_grad_()
    assert found().score_mod != plain.score_mod and found().chosen.key == plain.chosen.key
    with pytest.raises(ValueError, match=r"deterministic is True.*captures a tensor of shape"):
        found(deterministic=True)


@needs_nvrtc
@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_score_that_needs_no_softcap_has_none(scale):
    found = cutlass_attn.explain(
        *operands(2048), score_mod=decay, softmax_scale=scale, device="sm_80", grad=True
    )
    assert found.score == "identity"


TUNED = """
[smem_100."sm80"]
d64 = ["96x64x6", "64x128x4"]
"""
ASK = """
import torch, cutlass_attn
q = torch.zeros(2, 8, 4096, 64, dtype=torch.float16)
print(cutlass_attn.explain(q, q, q, device="sm_89").chosen.key)
mod = lambda s, b, h, q, k: s * s
print(cutlass_attn.explain(q, q, q, score_mod=mod, device="sm_89").chosen.key)
"""


@needs_nvrtc
def test_a_tile_of_the_users_own_is_not_for_score_mods(tmp_path):
    path = tmp_path / "tuned.toml"
    path.write_text(TUNED)
    env = {**os.environ, tuning.VARIABLE: str(path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True
    )
    tuned, with_mod = done.stdout.split()
    assert tuned == "sm80/f16/d64/96x64x6" and with_mod == "sm80/f16/d64/64x128x4"


@needs_nvrtc
def test_warmup(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path))
    made = cutlass_attn.warmup(*operands(), score_mod=decay, device="sm_80")
    assert len(made) == 1 and made[0].endswith(mod_of(decay).name)
    assert len(list(tmp_path.glob("*.cubin"))) == 1


def test_what_no_kernel_has_is_named():
    found = cutlass_attn.explain(
        *operands(), score_mod=lambda s, b, h, q, k: s * s, dropout_p=0.5, device="sm_80"
    )
    assert found.chosen is None
    found = cutlass_attn.explain(
        *operands(dtype=torch.float32), score_mod=lambda s, b, h, q, k: s * s, device="sm_80"
    )
    assert "score_mod" in str(found)


def test_second_order_is_refused(monkeypatch):
    """Without a GPU: what the kernels return does not matter."""
    from types import SimpleNamespace

    def forward(q, k, v, options, **_):
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(q, k, v, options, **_):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None

    mod = SimpleNamespace(argument=None, sums={})
    monkeypatch.setattr(_compiled, "_C", SimpleNamespace(forward=forward, backward=backward))
    monkeypatch.setattr(_compiled, "made", lambda *_: mod)
    q, k, v = (x.clone().requires_grad_() for x in operands())
    graph = trace(decay, "score_mod")
    out, _ = _compiled.attention(Call(q, k, v), graph)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        grad.pow(2).sum().backward()
