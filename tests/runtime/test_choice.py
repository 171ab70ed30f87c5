"""Which kernel runs a call on which GPU, as docs/kernels.md tells: no GPU is needed to ask."""

import numpy
import pytest
from cutlass_attn import explain, jit, variants

torch = pytest.importorskip("torch")

HEADS, SEQLEN = 8, 2048

# call, kernel on GPUs but Hopper, score; a bias and a mask are (1, 1, Sq, Sk) unless said otherwise
FORWARD = [
    ({"mask": "bool"}, "sm80/mask", "mask"),
    ({"mask": "bool", "causal": True, "window": (99, 0)}, "sm80/mask", "mask"),
    ({"mask": "bool", "attention_chunk": 64}, "sm80/mask", "mask"),  # chunks are in the map
    ({"mask": "bool", "alibi_slopes": True, "softcap": 9.0}, "sm80/mask", "softcap_alibi_mask"),
    ({"mask": "bool", "sk": 2047}, "sm80/mask", "mask"),
    ({"bias": "float16"}, "sm80/bias", "bias"),
    ({"bias": "float16", "attention_chunk": 64}, "sm80/bias", "bias_chunk"),
    ({"bias": "float16", "mask": "bool"}, "sm80/bias_mask", "bias_mask"),
    ({"attention_chunk": 64}, "sm80", "chunk"),
    ({"attention_chunk": 64, "alibi_slopes": True}, "sm80", "alibi_chunk"),
    ({"mask": "bool", "head_dim": 200}, "sm80/mask", "mask"),
    ({"dropout_p": 0.1, "softcap": 9.0}, "sm80/dropout", "softcap"),
    ({"mask": "bool", "dropout_p": 0.1}, "sm80/mask_dropout", "mask"),
    (
        {"bias": "float16", "dropout_p": 0.1, "attention_chunk": 64},
        "sm80/bias_dropout",
        "bias_chunk",
    ),
    ({"bias": "float16", "mask": "bool", "dropout_p": 0.1}, "sm80/bias_mask_dropout", "bias_mask"),
    ({"bias": "float32"}, "sm80/any_bias", "bias"),
    (
        {"bias": "float32", "softcap": 9.0, "mask": "bool"},
        "sm80/any_bias_mask",
        "softcap_bias_mask",
    ),
    ({"bias": "float16", "sk": 2047}, "sm80/any_bias", "bias"),
    ({"bias": "float32", "dropout_p": 0.1}, "sm80/any_bias_dropout", "bias"),
    ({"mask": "bool", "head_dim": 512}, "sm80/mask", "mask"),
    ({"bias": "float16", "head_dim": 512}, "sm80/bias", "bias"),
    ({"bias": "float32", "mask": "bool", "head_dim": 512}, "sm80/any_bias_mask", "bias_mask"),
    ({"dropout_p": 0.1, "head_dim": 512}, "sm80/dropout", "identity"),
]

BACKWARD = [
    # call, kernel on Hopper, kernel on Ada
    ({"head_dim": 128}, "sm90/backward_wgmma", "sm80/backward"),
    ({"head_dim": 64}, "sm90/backward_wgmma_q128", "sm80/backward"),
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
    (
        {"head_dim": 64, "bias": "trained", "deterministic": True},
        "sm90/backward_wgmma_bias_grad_ordered",
        "scalar/backward",
    ),
    ({"head_dim": 128, "dropout_p": 0.1}, "sm90/backward_wgmma_dropout", "sm80/backward_dropout"),
    (
        {"head_dim": 128, "mask": True, "dropout_p": 0.1},
        "sm90/backward_wgmma_mask_dropout",
        "sm80/backward_mask_dropout",
    ),
    (
        {"head_dim": 256, "bias": "kept", "dropout_p": 0.1},
        "sm80/backward_with_bias_dropout",
        "sm80/backward_with_bias_dropout",
    ),
    ({"head_dim": 128, "attention_chunk": 64}, "sm90/backward_two_pass", "sm80/backward_general"),
    ({"head_dim": 136}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 192, "head_dim_v": 128}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 256}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 256, "deterministic": True}, "sm90/backward_two_pass", "sm80/backward_ordered"),
    ({"head_dim": 256, "window": (128, 0)}, "sm90/backward_two_pass", "sm80/backward"),
    ({"head_dim": 256, "softcap": 20.0}, "sm90/backward", "sm80/backward"),
    ({"head_dim": 256, "mask": True}, "sm80/backward_mask", "sm80/backward_mask"),
    ({"head_dim": 512}, "sm80/backward", "sm80/backward"),
    ({"head_dim": 512, "mask": True}, "sm80/backward_general", "sm80/backward_general"),
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


def call_of(head_dim=64, sk=SEQLEN, alibi_slopes=False, **options):
    """Arguments of explain(): for a bias or a mask its dtype, for slopes whether there are some."""
    q, k, v = (numpy.empty((2, HEADS, n, head_dim), numpy.float16) for n in (SEQLEN, sk, sk))
    for name in ("bias", "mask"):
        if name in options:
            options[name] = numpy.empty((SEQLEN, sk), options[name])
    if alibi_slopes:
        options["alibi_slopes"] = numpy.ones(HEADS, numpy.float32)
    return (q, k, v), options


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize(("call", "kernel", "score"), FORWARD, ids=lambda x: str(x))
def test_a_bias_a_mask_and_chunks_have_kernels_of_their_own(call, kernel, score, device):
    if reason := jit.available():
        pytest.skip(reason)
    operands, options = call_of(**call)
    found = explain(*operands, device=device, **options)
    assert (found.chosen.kernel, found.score) == (kernel, score)


def test_few_queries_with_a_mask_decode():
    q, k = (numpy.empty((2, HEADS, n, 64), numpy.float16) for n in (4, SEQLEN))
    mask = numpy.empty((4, SEQLEN), bool)
    assert explain(q, k, k, mask=mask, device="sm_89").chosen.kernel == "sm80/decode"


@pytest.mark.parametrize(("queries", "heads_kv"), [(8, 1), (16, 2), (64, 8)])
def test_up_to_64_rows_of_a_kv_head_decode(queries, heads_kv):
    """Queries times query heads of a KV head: what the kernel's parameters say (DecodeParams)."""
    if reason := jit.available():
        pytest.skip(reason)
    assert {v.max_rows for v in variants() if v.kernel.startswith("sm80/decode")} == {64}
    k = numpy.empty((128, heads_kv, SEQLEN, 64), numpy.float16)
    for more, kernel in ((0, "sm80/decode"), (1, "sm80")):
        q = numpy.empty((128, HEADS, queries + more, 64), numpy.float16)
        assert explain(q, k, k, device="sm_89").chosen.kernel == kernel


def test_a_bias_in_odd_places_is_read_an_entry_at_a_time():
    if reason := jit.available():
        pytest.skip(reason)
    (q, k, v), options = call_of(bias="float16")
    options["bias"] = numpy.empty((SEQLEN, SEQLEN + 1), numpy.float16)[:, 1:]
    found = explain(q, k, v, device="sm_89", **options)
    assert found.chosen.kernel == "sm80/any_bias"
    (reason,) = {x.reason for x in found.verdicts if x.variant.key == "sm80/bias/f16/d64/64x64x4"}
    assert "bias's query stride is 2049 elements, allowed: multiples of 2" in reason


@pytest.mark.parametrize(("call", "hopper", "ada"), BACKWARD)
def test_a_backward_pass_has_the_kernel_that_the_docs_name(call, hopper, ada):
    if reason := jit.available():
        pytest.skip(reason)
    assert chosen("sm_90", **call).kernel == hopper
    assert chosen("sm_89", **call).kernel == ada


@pytest.mark.parametrize(
    ("heads", "lengths", "head_dim", "options", "kernel"),
    [
        # docs/notes/hopper.md: the two-pass kernel wherever the tiles of keys leave SMs idle.
        ((8, 8), (512, 512), 128, {}, "sm90/backward_two_pass"),
        ((8, 8), (1024, 1024), 128, {}, "sm90/backward_wgmma"),
        ((8, 8), (1024, 1024), 128, {"causal": True}, "sm90/backward_two_pass"),
        ((32, 8), (1024, 1024), 128, {"causal": True}, "sm90/backward_two_pass"),
        ((8, 8), (4096, 4096), 128, {"causal": True}, "sm90/backward_wgmma"),
        ((8, 8), (1024, 1024), 96, {"causal": True}, "sm90/backward_two_pass"),
        ((32, 8), (1024, 1024), 64, {"causal": True}, "sm90/backward_two_pass"),
        ((8, 8), (2048, 2048), 64, {"causal": True}, "sm90/backward_wgmma_q128"),
        ((8, 8), (1024, 1024), 64, {}, "sm90/backward_wgmma_q128"),
        ((8, 8), (512, 512), 64, {}, "sm90/backward_two_pass"),
        # Bottom-right: 16 queries see nearly all keys.
        ((8, 8), (16, 1024), 128, {"causal": True}, "sm90/backward_wgmma"),
        ((8, 8), (1024, 1024), 128, {"window": (64, 0)}, "sm90/backward_two_pass"),
        (
            (8, 8),
            (1024, 1024),
            128,
            {"causal": True, "deterministic": True},
            "sm90/backward_two_pass",
        ),
        # The two-pass kernel lacks these, and mma.sync is no better.
        ((8, 8), (512, 512), 128, {"softcap": 20.0}, "sm90/backward_wgmma"),
        ((8, 8), (512, 512), 64, {"softcap": 20.0}, "sm90/backward_wgmma"),
    ],
)
def test_few_tiles_of_keys_have_a_kernel_without_additions(
    heads, lengths, head_dim, options, kernel
):
    if reason := jit.available():
        pytest.skip(reason)
    q, k = (
        torch.empty((1, h, n, head_dim), dtype=torch.float16)
        for h, n in zip(heads, lengths, strict=True)
    )
    assert explain(q, k, k, device="H200", grad=True, **options).chosen.kernel == kernel


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
