"""With NVRTC, no call of those that models make runs a scalar kernel, on any class of GPU."""

import pytest
from cutlass_attn import explain, jit

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    bool(jit.available()), reason="needs NVRTC, and GPU kernels of the build"
)
DEVICES = ["sm_80", "sm_89", "sm_90", "sm_120"]


def meta(*shape, dtype=torch.bfloat16, **more):
    return torch.empty(*shape, dtype=dtype, device="meta", **more)


def dense(head_dim, **options):
    """Prefill or training of a model with GQA."""
    q, k = meta(2, 16, 2048, head_dim), meta(2, 4, 2048, head_dim)
    return (q, k, k), {"causal": True, **options}


def packed(head_dim, **options):
    q, k = meta(2048, 16, head_dim), meta(2048, 4, head_dim)
    ends = meta(5, dtype=torch.int32)
    return (q, k, k), {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **options}


def paged(queries, head_dim, dtype=torch.bfloat16, **options):
    """`queries` new tokens of each sequence with a cache in pages of 16 tokens."""
    q, pages = meta(8, queries, 16, head_dim), meta(2048, 16, 4, head_dim, dtype=dtype)
    table = {"block_table": meta(8, 256, dtype=torch.int32)}
    return (q, pages, pages), {"cache_seqlens": meta(8, dtype=torch.int32), **table, **options}


SLOPES = meta(16, dtype=torch.float32)
CALLS = {
    "forward, head dim 64": dense(64),
    "forward, head dim 128": dense(128),
    "forward, head dim 256": dense(256),
    "backward, head dim 128": dense(128, grad=True),
    "backward, head dim 256": dense(256, grad=True),
    "deterministic backward": dense(128, grad=True, deterministic=True),
    "gradient of a bias": dense(128, grad=True, bias=meta(16, 2048, 2048, requires_grad=True)),
    "packed sequences with ALiBi": packed(128, causal=True, alibi_slopes=SLOPES),
    "packed sequences, head dim 256": packed(256, causal=True),
    "prefill with a paged cache": paged(512, 128),
    "prefill in attention chunks": paged(512, 128, attention_chunk=1024),
    "prefill with an fp8 cache": paged(512, 128, dtype=torch.float8_e4m3fn),
    "decode, head dim 128": paged(1, 128),
    "decode, head dim 256": paged(1, 256),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
def test_a_common_call_runs_on_tensor_cores(call, device):
    arrays, options = CALLS[call]
    chosen = explain(*arrays, **options, device=device).chosen
    assert chosen is not None and not chosen.kernel.startswith("scalar/"), chosen
