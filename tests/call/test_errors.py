"""Every kind of bad input, and that the message names the argument, what came and what may."""

import case_list
import cases
import cutlass_attn
import numpy as np
import pytest
from cases import torch

attention = cutlass_attn.attention


def tensor(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


Q = tensor(2, 4, 6, 64)
K = tensor(2, 2, 8, 64)


class Unwilling:
    def __index__(self):
        raise ZeroDivisionError("no number today")


def call(q=Q, k=K, v=K, **options):
    return attention(q, k, v, **options)


WRONG = [
    # Operands
    (lambda: call(q=Q[0]), ValueError, r"4 dimensions.*q \(4, 6, 64\)"),
    (lambda: call(v=K[..., None]), ValueError, r"4 dimensions.*v \(2, 2, 8, 64, 1\)"),
    (lambda: call(k=K[:1]), ValueError, "one batch size, got 2, 1, 2"),
    (lambda: call(v=K[:1]), ValueError, "one batch size, got 2, 2, 1"),
    (lambda: call(k=K[..., :32]), ValueError, "q and k must have one head dim, got 64 and 32"),
    (lambda: call(v=K[:, :1]), ValueError, "equal numbers of heads, got 2 and 1"),
    (lambda: call(v=K[:, :, :7]), ValueError, "equal lengths, got 8 and 7"),
    (lambda: call(q=Q[:, :3]), ValueError, "num_heads_q is 3.*multiple of num_heads_kv.* 2"),
    (lambda: call(k=K[:, :0], v=K[:, :0]), ValueError, "num_heads_q is 4"),
    (lambda: call(k=K.float()), ValueError, "one dtype, got torch.float16, torch.float32"),
    (lambda: call(v=K.bfloat16()), ValueError, "one dtype"),
    (lambda: call(Q.int(), K.int(), K.int()), TypeError, "q must be float16.*float64, got.*int32"),
    (lambda: call(Q.int(), K.int(), K.int()), TypeError, "q must be float16.*int32"),
    (lambda: call(k=K.to("meta")), ValueError, "one device, got cpu, meta, cpu"),
    (lambda: call(k=K.tolist()), TypeError, "or all numpy arrays, got torch.Tensor, list, torch"),
    (lambda: call(q=[[1.0]]), TypeError, "arrays, got list, torch"),
    (lambda: call(q=None), TypeError, "NoneType"),
    (lambda: call(q=Q.repeat(1, 1, 1, 2)[..., ::2]), ValueError, "last dimension of q.*stride 2"),
    (lambda: call(v=K.mT.contiguous().mT), ValueError, "last dimension of v.*stride 8"),
    (
        lambda: call(*(tensor(1, 1, 1, 584) for _ in range(3))),
        ValueError,
        "head_dim is 584, allowed: 1 to 576",
    ),
    (
        lambda: call(v=tensor(2, 2, 8, 600)),
        ValueError,
        "head_dim_v is 600, allowed: 1 to 576",
    ),
    (lambda: call(*(tensor(1, 1, 1, 0) for _ in range(3))), ValueError, "head_dim is 0"),
    (
        lambda: call(tensor(1, 6, 4, 64), *(tensor(1, 9, 2, 64),) * 2),
        ValueError,
        r'num_heads_q and num_heads_kv are 6 and 9 by layout="bhsd", .* would be 4 and 2 by '
        r'layout="bshd", \(batch, seqlen, heads, head_dim\)',
    ),
    # Options
    (lambda: call(layout="sbhd"), ValueError, """layout must be "bhsd" or "bshd", got 'sbhd'"""),
    (
        lambda: call(kernel="\ud800"),
        ValueError,
        r"kernel must be text that UTF-8 can encode, got '.ud800'",
    ),
    (lambda: call(v=K.to_sparse()), TypeError, "dense, got one of layout torch.sparse_coo"),
    (lambda: call(softmax_scale=10**400), ValueError, "softmax_scale is beyond any float"),
    # What the package passes on to itself is nobody else's.
    (lambda: call(device="sm_89"), TypeError, r"attention\(\).*keyword argument 'device'"),
    (lambda: call(dispatched=True), TypeError, r"attention\(\).*keyword argument 'dispatched'"),
    (lambda: call(causal="yes"), TypeError, "causal must be True or False, got 'yes'"),
    (lambda: call(causal=None), TypeError, "causal must be True or False, got None"),
    (lambda: call(window=-2), ValueError, "window counts keys.*got -2"),
    (lambda: call(window=(3, -5)), ValueError, r"window counts keys.*got \(3, -5\)"),
    (lambda: call(window=(1, 2, 3)), ValueError, r"pair \(left, right\), got \(1, 2, 3\)"),
    (lambda: call(attention_chunk=True), TypeError, "attention_chunk must be an int or None.*True"),
    (lambda: call(attention_chunk=1.5), TypeError, "attention_chunk must be an int or None.*1.5"),
    (lambda: call(attention_chunk=np.ones(3, int)), TypeError, "attention_chunk must be an int"),
    (lambda: call(attention_chunk=0), ValueError, "attention_chunk is 0, allowed: 1 to 268435456"),
    (lambda: call(attention_chunk=-1), ValueError, "attention_chunk is -1, allowed: 1 to"),
    (lambda: call(attention_chunk=2**28 + 1), ValueError, "attention_chunk is 268435457, allowed"),
    (lambda: call(window=np.ones(2, int)), TypeError, "window must be an int or a pair.*1, 1"),
    (lambda: call(window=(3, True)), TypeError, r"window must be an int or a pair.*\(3, True\)"),
    (lambda: call(attention_chunk=Unwilling()), ZeroDivisionError, "no number today"),
    (lambda: call(return_lse="no"), TypeError, "return_lse must be True or False, got 'no'"),
    (lambda: call(verify="no"), TypeError, "verify must be True or False, got 'no'"),
    (lambda: call(window=1.5), TypeError, "window must be an int.*got 1.5"),
    (lambda: call(window="all"), TypeError, "window must be an int.*got 'all'"),
    (lambda: call(softmax_scale="big"), TypeError, "softmax_scale must be a number, got 'big'"),
    (lambda: call(softmax_scale=float("nan")), ValueError, "softmax_scale is nan"),
    (lambda: call(softmax_scale=float("inf")), ValueError, "softmax_scale is inf"),
    (lambda: call(softmax_scale=10**400), ValueError, "softmax_scale is beyond any float"),
    (lambda: call(softcap=-1.0), ValueError, "softcap is -1"),
    (lambda: call(softcap=float("inf")), ValueError, "softcap is inf"),
    (lambda: call(softcap=1e5), ValueError, "softcap is 100000, allowed: up to 4096, .* 0 for no"),
    (lambda: call(softcap=None), TypeError, "softcap must be a number, got None"),
    (lambda: call(window_size=3), TypeError, "window_size"),
    (lambda: call(scale=3), TypeError, "scale"),
    (lambda: call(cu_seqlens_q=Q), TypeError, r"attention\(\) has no 'cu_seqlens_q': packed seq"),
    (lambda: attention(Q, K), TypeError, r"attention\(\) needs q, k, v"),
    # Kernels
    (lambda: call(kernel="sm81"), ValueError, 'kernel is "sm81", allowed: "auto", .*"sm80",'),
    (lambda: call(kernel=3), TypeError, "kernel must be a string.*got 3"),
    (lambda: call(kernel="cpu/bf16"), ValueError, "needs bfloat16, got float16"),
    (
        lambda: call(kernel="sm80"),
        ValueError,
        "needs operands on a CUDA device, got them on the CPU",
    ),
    # Output
    (
        lambda: call(out=tensor(2, 4, 5, 64)),
        ValueError,
        r"out must have shape \(2, 4, 6, 64\), got",
    ),
    (lambda: call(out=Q.float()), ValueError, "out must be float16 like q, got torch.float32"),
    (lambda: call(out=Q.to("meta")), ValueError, "out must be on cpu like q, got meta"),
    (lambda: call(out=Q.tolist()), TypeError, "out must be.*got list"),
    (lambda: call(out=Q), ValueError, "out overlaps q"),
    (lambda: call(v=Q[:, :2], k=Q[:, :2], q=Q.clone(), out=Q), ValueError, "out overlaps k"),
    (
        lambda: call(out=tensor(1, 4, 6, 64).expand(2, 4, 6, 64)),
        ValueError,
        "rows of out.* overlap each other",
    ),
    (
        lambda: call(out=tensor(2, 4, 6, 128)[..., ::2]),
        ValueError,
        "last dimension of out.*stride 2",
    ),
    (
        lambda: call(out=tensor(2, 4, 6, 64).requires_grad_()),
        ValueError,
        "out must not require a gradient",
    ),
    # Options that are arrays, and dropout
    (
        lambda: call(bias=tensor(2, 4, 6, 7)),
        ValueError,
        r"bias must have 1 to 4 dim.*\(2, 4, 6, 8\), got shape \(2, 4, 6, 7\)",
    ),
    (lambda: call(bias=tensor(1, 1, 1, 1, 8)), ValueError, "bias must have 1 to 4 dimensions"),
    (lambda: call(bias=tensor()), ValueError, r"bias must have 1 to 4.*got shape \(\)"),
    (lambda: call(bias=tensor(2, 1, 1)), ValueError, "bias must .* broadcast"),
    (lambda: call(bias=tensor(8).double()), ValueError, "bias must be float16 like q, or float32"),
    (lambda: call(bias=tensor(8).bfloat16()), ValueError, "bias must be.*got torch.bfloat16"),
    (
        lambda: call(*(x.float() for x in (Q, K, K)), bias=tensor(8)),
        ValueError,
        "bias must be float32 like q, got torch.float16",
    ),
    (lambda: call(bias=0.5), TypeError, "bias must be an array of the same library.*float"),
    (lambda: call(bias=tensor(8).to("meta")), ValueError, "bias must be on cpu like q, got meta"),
    (lambda: call(bias=tensor(8).bool()), ValueError, "got torch.bool; a bool mask is the option"),
    (lambda: call(mask=tensor(8)), ValueError, "mask must be bool.*got torch.float16; what is add"),
    (lambda: call(mask=tensor(7).bool()), ValueError, r"mask must have.*got shape \(7,\)$"),
    (
        lambda: call(mask=tensor(2, 8).bool()),
        ValueError,
        r"got shape \(2, 8\); for a padding mask \(batch, seqlen_k\) pass mask\[:, None, None, :\]",
    ),
    (
        lambda: call(alibi_slopes=tensor(2, dtype=torch.float32)),
        ValueError,
        r"alibi_slopes must have shape .*\(4,\) or .*\(2, 4\), got \(2,\)",
    ),
    (lambda: call(alibi_slopes=tensor(4)), ValueError, "alibi_slopes must be float32, got"),
    (
        lambda: call(alibi_slopes=tensor(8, dtype=torch.float32)[::2]),
        ValueError,
        "last dimension of alibi_slopes must be contiguous.*stride 2",
    ),
    (lambda: call(sinks=tensor(1, 4)), ValueError, r"sinks must have shape .*\(4,\), got"),
    (lambda: call(sinks=tensor(4)), ValueError, "sinks must be float32, got torch.float16"),
    (
        lambda: call(sinks=tensor(8, dtype=torch.float32)[::2]),
        ValueError,
        "last dimension of sinks must be contiguous.*stride 2",
    ),
    (
        lambda: call(dropout_p=1.5),
        ValueError,
        "dropout_p is 1.5.*a probability from 0 to 1",
    ),
    (lambda: call(dropout_p=-0.1), ValueError, "dropout_p is -0.1"),
    (lambda: call(dropout_p=float("nan")), ValueError, "dropout_p is nan"),
    (lambda: call(dropout_p="half"), TypeError, "dropout_p must be a number, got 'half'"),
    (lambda: call(dropout_p=None), TypeError, "dropout_p must be a number, got None"),
    (
        lambda: call(dropout_p=0.1, rng_state=tensor(3, dtype=torch.int64)),
        ValueError,
        r"rng_state must have shape \(2,\), a seed and an offset, or \(6,\), .*, got \(3,\)",
    ),
    *(
        (
            lambda part=part: call(dropout_p=0.1, rng_state=torch.tensor([1, 2, *part])),
            ValueError,
            message,
        )
        for part, message in (
            ((3, 0, 0, 0), r"rng_state\[2\] is 3, allowed: at least 4, the query heads of q"),
            ((9, 6, 0, 0), r"rng_state\[3\] is 6, allowed: 0 to 5, a first head"),
            ((9, -1, 0, 0), r"rng_state\[3\] is -1, allowed: 0 to 5"),
            ((4, 0, 8, 0), r"rng_state\[4\] is 8, allowed: a multiple of 16"),
            ((4, 0, -16, 0), r"rng_state\[4\] is -16, allowed: a multiple of 16"),
            ((4, 0, 0, 16), r"rng_state\[5\] is 16, allowed: a multiple of 32"),
            ((4, 0, 0, 2**31), r"rng_state\[5\] is 2147483648, allowed: a multiple of 32"),
        )
    ),
    (
        lambda: call(dropout_p=0.1, rng_state=tensor(2, dtype=torch.int32)),
        ValueError,
        "rng_state must be int64 or uint64, got torch.int32",
    ),
    (
        lambda: call(dropout_p=0.1, rng_state=tensor(4, dtype=torch.int64)[::2]),
        ValueError,
        "last dimension of rng_state must be contiguous.*stride 2",
    ),
    # Gradients
    (
        lambda: call(alibi_slopes=tensor(4, dtype=torch.float32).requires_grad_()),
        NotImplementedError,
        r"attention has no gradient of alibi_slopes, which requires a gradient.*torch.no_grad\(\)",
    ),
    (
        lambda: call(deterministic="yes"),
        TypeError,
        "deterministic must be True or False, got 'yes'",
    ),
    # numpy
    (lambda: call(*(x.numpy()[:, ::-1, :, ::-1] for x in (Q, K, K))), ValueError, "stride -1"),
    (lambda: call(*(x.numpy().astype(">f2") for x in (Q, K, K))), TypeError, "q must be float16"),
    (lambda: call(*(_misaligned(x) for x in (Q, K, K))), ValueError, "no multiple of 2 bytes"),
    (
        lambda: call(*(x.numpy() for x in (Q, K, K)), out=_read_only(Q)),
        ValueError,
        "out must be writable",
    ),
]


def _misaligned(x):
    raw = np.zeros(x.numel() * 2 + 1, np.uint8)
    return raw[1:].view(np.float16).reshape(x.shape)


def _read_only(x):
    array = np.zeros(x.shape, np.float16)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_bad_input(wrong, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        wrong()


def test_explain_rejects_unknown_keywords():
    with pytest.raises(TypeError, match="softmax_sclae"):
        cutlass_attn.explain(Q, K, K, softmax_sclae=2.0)


def test_explain_rejects_unknown_devices():
    with pytest.raises(ValueError, match=r"device must be .*got 'tpu'"):
        cutlass_attn.explain(Q, K, K, device="tpu")


@pytest.mark.parametrize("variant", cases.all_variants())
def test_forced_kernel_refuses_another_dtype(variant):
    other = torch.float16 if variant.dtype != "float16" else torch.bfloat16
    q = torch.zeros(1, 1, 4, variant.head_dim or 64, dtype=other, device=variant.device)
    with pytest.raises(ValueError, match=f"needs {variant.dtype}"):
        attention(q, q, q, **cases.own(variant))


@pytest.mark.parametrize(
    "variant", cases.all_variants(lambda v: v.kernel.startswith(("sm80", "wmma")))
)
def test_forced_kernel_refuses_other_head_dims(variant):
    dtype = getattr(torch, variant.dtype)
    for head_dim in (variant.head_dim - 4, variant.head_dim + 8):
        q = torch.zeros(1, 1, 4, head_dim, dtype=dtype, device=variant.device)
        allowed = f"a multiple of 8 up to {variant.head_dim}, got {head_dim}"
        with pytest.raises(ValueError, match=f"needs head_dim {allowed}"):
            attention(q, q, q, **cases.own(variant))
    q = torch.zeros(1, 1, 4, variant.head_dim, dtype=dtype, device=variant.device)
    v = torch.zeros(1, 1, 4, variant.head_dim_v - 4, dtype=dtype, device=variant.device)
    with pytest.raises(ValueError, match="needs head_dim_v a multiple of 8 up to"):
        attention(q, q, v, **cases.own(variant))


LACKING = {
    "bias": {"bias": "qk"},
    "mask": {"mask": "qk"},
    "alibi_slopes": {"alibi": "h"},
    "attention_chunk": {"attention_chunk": 5},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        pytest.param(variant, name, id=f"{variant.key}-{name}", marks=cases.needs(variant))
        for variant in cases.compiled_variants()
        for name in sorted(cases.ALL_OPTIONS - cases.options_of(variant))
        if not (variant.quantize and name == "dropout")  # which no call may have
    ],
)
def test_forced_kernel_refuses_options_that_it_lacks(variant, name):
    case = case_list.Case("lacks", "", **LACKING[name])
    q, k, v, _ = cases.tensors(case, variant.dtype, variant.head_dim or 64, variant.device)
    options = cases.keywords(case, variant.dtype, variant.device)
    with pytest.raises(ValueError, match=f"does not implement {name}"):
        attention(q, k, v, **options, **cases.own(variant))


def test_no_gradient_needed():
    """Parameters are fine where no gradient is recorded."""
    q = torch.nn.Parameter(Q.clone())
    with torch.no_grad():
        assert not attention(q, K, K).requires_grad


@cases.needs_gpu
def test_mixed_devices():
    with pytest.raises(ValueError, match="one device, got cuda:0, cpu, cpu"):
        call(q=Q.cuda())
    with pytest.raises(ValueError, match="out must be on cuda:0 like q, got cpu"):
        call(Q.cuda(), K.cuda(), K.cuda(), out=Q.clone())


@cases.needs_gpu
def test_cpu_kernel_refuses_gpu_tensors():
    with pytest.raises(ValueError, match="needs operands on the CPU"):
        call(Q.cuda(), K.cuda(), K.cuda(), kernel="cpu")
