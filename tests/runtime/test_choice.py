"""Which kernel runs a call on which GPU, as docs/kernels.md tells: no GPU is needed to ask."""

import pytest
from cutlass_attn import explain, jit

torch = pytest.importorskip("torch")

HEADS, SEQLEN = 8, 2048

BACKWARD = [
    # call, kernel on Hopper, kernel on Ada
    ({"head_dim": 128}, "sm90/backward_wgmma", "sm80/backward"),
    (
        {"head_dim": 128, "deterministic": True},
        "sm90/backward_wgmma_ordered",
        "sm80/backward_ordered",
    ),
    ({"head_dim": 128, "mask": True}, "sm90/backward_wgmma_mask", "sm80/backward_mask"),
    ({"head_dim": 128, "softcap": 20.0}, "sm90/backward_wgmma", "sm80/backward"),
    ({"head_dim": 64, "alibi": True}, "sm90/backward_wgmma", "sm80/backward"),
    ({"head_dim": 64, "bias": "kept"}, "sm90/backward_wgmma_with_bias", "sm80/backward_with_bias"),
    ({"head_dim": 64, "bias": "trained"}, "sm90/backward_wgmma_bias_grad", "sm80/backward_bias"),
    (
        {"head_dim": 32, "bias": "trained", "mask": True},
        "sm90/backward_wgmma_mask_bias_grad",
        "sm80/backward_bias",
    ),
    ({"head_dim": 128, "dropout_p": 0.1}, "sm90/backward_wgmma_dropout", "sm80/backward_dropout"),
    (
        {"head_dim": 128, "mask": True, "dropout_p": 0.1},
        "sm90/backward_wgmma_mask_dropout",
        "sm80/backward_general",
    ),
    ({"head_dim": 128, "attention_chunk": 64}, "sm90/backward_two_pass", "sm80/backward_general"),
    ({"head_dim": 136}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 192, "head_dim_v": 128}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 256}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 256, "deterministic": True}, "sm90/backward_two_pass", "sm80/backward_ordered"),
    ({"head_dim": 256, "window": (128, 0)}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 256, "softcap": 20.0}, "sm90/backward", "sm80/backward"),
    ({"head_dim": 256, "mask": True}, "sm80/backward_mask", "sm80/backward_mask"),
    ({"head_dim": 512}, "scalar/backward", "scalar/backward"),
]


def chosen(device, head_dim, head_dim_v=None, mask=False, alibi=False, bias=None, **options):
    """bias: "kept", or "trained", which has a gradient."""
    q, k = (torch.empty((2, HEADS, SEQLEN, head_dim), dtype=torch.float16) for _ in range(2))
    v = torch.empty((2, HEADS, SEQLEN, head_dim_v or head_dim), dtype=torch.float16)
    if mask:
        options["mask"] = torch.ones((SEQLEN, SEQLEN), dtype=torch.bool)
    if alibi:
        options["alibi_slopes"] = torch.ones(HEADS)
    if bias:
        options["bias"] = torch.ones((HEADS, SEQLEN, SEQLEN), dtype=torch.float16)
        options["bias"].requires_grad_(bias == "trained")
    return explain(q, k, v, device=device, grad=True, **options).chosen


@pytest.mark.parametrize(("call", "hopper", "ada"), BACKWARD)
def test_a_backward_pass_has_the_kernel_that_the_docs_name(call, hopper, ada):
    if reason := jit.available():
        pytest.skip(reason)
    assert chosen("sm_90", **call).kernel == hopper
    assert chosen("sm_89", **call).kernel == ada


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "of_tile"),
    [
        (136, 136, (192, 192)),
        (192, 128, (192, 128)),
        (192, 192, (192, 192)),
        (200, 200, (256, 256)),
    ],
)
def test_a_head_dim_on_hopper_runs_the_narrowest_tile_that_takes_it(head_dim, head_dim_v, of_tile):
    if reason := jit.available():
        pytest.skip(reason)
    variant = chosen("sm_90", head_dim, head_dim_v)
    assert (variant.head_dim, variant.head_dim_v) == of_tile
