"""Padding as lengths: batch entries whose queries and keys are intervals of rows. Every kernel
that takes packed sequences, against the oracle, entry by entry. Padding is NaN."""

import re

import backward_reference
import cases
import cutlass_attn
import numpy as np
import pytest
import reference
import serving
from cases import torch
from cutlass_attn import _C, attention, testing
from serving import Batch, int32

DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]
RAGGED = ((3, 0, 70, 1, 5), (7, 4, 131, 90, 0))
CASES = [
    Batch("ragged", "no length like another; no queries; no keys", *RAGGED),
    Batch("causal", "bottom-right in every entry", *RAGGED, causal=True),
    Batch("more_queries", "first rows see no key", (40, 9), (9, 3), causal=True),
    Batch("none", "an entry that is all padding", (0, 5), (0, 9)),
    Batch("window", "both ends move", (60, 33), (90, 20), window=(9, 4)),
    Batch("chunk", "chunks count from an entry's first key", *RAGGED, attention_chunk=7),
    Batch("softcap", "another score", *RAGGED, softcap=2.5, softmax_scale=0.3),
    Batch("alibi", "distances of an entry", *RAGGED, alibi="h", causal=True),
    Batch("alibi_per_batch", "a slope per entry and head", *RAGGED, alibi="bh"),
    Batch("sinks", "also where no key is", *RAGGED, sinks=True, causal=True),
    Batch("dropout", "by an entry's own rows", *RAGGED, dropout_p=0.3),
    Batch("mqa", "one KV head", *RAGGED, heads=5, heads_kv=1),
    Batch("few_queries", "as in decoding", (1, 1, 1), (131, 3, 70), causal=True, heads=4),
    Batch("wider_v", "V wider than K", *RAGGED, head_dim=16, head_dim_v=40),
]
FEW = ("ragged", "causal", "window", "sinks", "dropout", "mqa")
SIDES = ("left", "right", "both")
KINDS = ("q", "k")


class Padded:
    """The entries of a case in batches of equal lengths, each after and before rows of NaN."""

    def __init__(self, case, side, dtype, head_dim, device):
        self.case, self.dtype, self.device = case, dtype, device
        self.entries = serving.values(case, dtype, head_dim)
        lengths = {"q": case.seqlens_q, "k": case.seqlens_k}
        self.rows, self.options = {}, serving.keywords(case, device)
        for name, of_entries in lengths.items():
            room = 0 if side == "both" and name == "q" and case.name == "few_queries" else 3
            rows = max(of_entries) + room
            spare = [rows - n for n in of_entries]
            first = [{"left": x, "right": 0, "both": x // 2}[side] for x in spare]
            self.rows[name] = [slice(a, a + n) for a, n in zip(first, of_entries, strict=True)]
            if side != "right":
                self.options[f"leftpad_{name}"] = int32(first, device)
            if side != "left":
                ends = [x.stop for x in self.rows[name]]
                self.options[f"seqused_{name}"] = int32(ends, device)
            setattr(self, f"total_{name}", rows)
        self.q, self.k, self.v = (self.pad(i, name) for i, name in enumerate("qkk"))

    def pad(self, i, name, parts=None):
        """(B, H, S, D) of arrays (H, rows, D) of each entry."""
        parts = [entry[i] for entry in self.entries] if parts is None else parts
        heads, _, columns = parts[0].shape
        x = np.full(
            (len(parts), heads, getattr(self, f"total_{name}"), columns), np.nan, np.float32
        )
        for b, (own, part) in enumerate(zip(self.rows[name], parts, strict=True)):
            x[b, :, own] = part
        return torch.from_numpy(x).to(self.device, getattr(torch, self.dtype))

    def parts(self, x, name):
        """Each entry's rows of a result."""
        x = x.float().cpu().numpy()
        return [x[b][:, own] for b, own in enumerate(self.rows[name])]

    def beside(self, x, name):
        """What is in the rows of padding."""
        x = x.float().cpu().numpy().copy()
        inside = np.zeros(x.shape, bool)
        for b, own in enumerate(self.rows[name]):
            inside[b, :, own] = True
        return x[~inside]


def fits(variant, case):
    return "varlen" not in variant.needs and serving.fits(variant, case, max(case.seqlens_q) + 3)


def pairs(op, which):
    return [
        pytest.param(variant, case, side, id=f"{variant.key}-{case}-{side}", marks=marks)
        for variant in cases.compiled_variants(op, special=True)
        for marks in [cases.needs(variant)]
        for case in which
        for side in (SIDES if case.name in ("ragged", "causal") else SIDES[2:])
        if fits(variant, case)
    ]


@pytest.mark.parametrize(("variant", "case", "side"), pairs("forward", CASES))
def test_forward(variant, case, side):
    head_dim = cases.head_dim_of(variant, case)
    padded = Padded(case, side, variant.dtype, head_dim, variant.device)
    out, lse = attention(
        padded.q, padded.k, padded.v, **padded.options, return_lse=True, kernel=variant.key
    )
    serving.judge(case, variant.dtype, head_dim, padded.parts(out, "q"), padded.parts(lse, "q"))
    assert (padded.beside(out, "q") == 0).all()
    assert (padded.beside(lse, "q") == -np.inf).all()


def due_of(padded, grad_out, grad_lse):
    """Of each entry what the oracle says."""
    case = padded.case
    found = {name: x for name, x in serving.arrays(case).items() if name != "rng_state"}
    slopes = found.pop("alibi_slopes", None)
    results = []
    for b, (q, k, v) in enumerate(padded.entries):
        options = {**case.scalars, **found}
        if slopes is not None:
            options["alibi_slopes"] = np.broadcast_to(slopes, (case.batch, case.heads))[b : b + 1]
        if case.dropout_p:
            shape = (case.batch, case.heads, q.shape[1], k.shape[1])
            state = serving.arrays(case)["rng_state"]
            options["kept"] = testing.dropout_mask(state, shape, case.dropout_p)[b : b + 1]
            options["dropout_p"] = case.dropout_p
        of_entry = (x[None] for x in (q, k, v, grad_out[b], grad_lse[b][..., 0]))
        results.append(backward_reference.gradients(*of_entry, padded.dtype, **options))
    return results


@pytest.mark.parametrize(
    ("variant", "case", "side"), pairs("backward", [x for x in CASES if x.name in FEW])
)
def test_backward(variant, case, side):
    head_dim = cases.head_dim_of(variant, case)
    padded = Padded(case, side, variant.dtype, head_dim, variant.device)
    rng = np.random.default_rng(7)
    grad_out, grad_lse = (
        [
            reference.round_to(rng.standard_normal((case.heads, n, columns)), dtype)
            for n in case.seqlens_q
        ]
        for columns, dtype in ((padded.v.shape[3], padded.dtype), (1, "float32"))
    )
    due = due_of(padded, grad_out, grad_lse)
    lse, of_lse = (
        padded.pad(0, "q", [np.asarray(x, np.float32) for x in parts]).float()[..., 0].contiguous()
        for parts in ([x.lse[0][..., None] for x in due], grad_lse)
    )
    if padded.dtype != "float32":  # which pad() has rounded
        for b, own in enumerate(padded.rows["q"]):
            lse[b, :, own] = torch.from_numpy(due[b].lse[0].astype(np.float32)).to(lse)
            of_lse[b, :, own] = torch.from_numpy(grad_lse[b][..., 0]).to(lse)
    grads = {f"grad_{n}": torch.full_like(getattr(padded, n), torch.nan) for n in "qkv"}
    if case.sinks:
        grads["grad_sinks"] = torch.full((case.heads,), torch.nan, device=variant.device)
    _C.backward(
        padded.q,
        padded.k,
        padded.v,
        {**padded.options, "kernel": variant.key},
        grad_out=padded.pad(0, "q", grad_out),
        out=padded.pad(0, "q", [x.out[0] for x in due]),
        softmax_lse=lse,
        grad_softmax_lse=of_lse,
        **grads,
    )
    for name in "qkv":
        kind = "q" if name == "q" else "k"
        assert (padded.beside(grads[f"grad_{name}"], kind) == 0).all(), name
        got = np.concatenate([x.ravel() for x in padded.parts(grads[f"grad_{name}"], kind)])
        exact, unfused = (
            np.concatenate([np.asarray(getattr(x, name)[i]).ravel() for x in due]) for i in (0, 1)
        )
        check(name, got, exact, unfused, padded.dtype)
    if case.sinks:
        exact = sum(x.sinks.exact.sum(axis=(0, 2, 3)) for x in due)
        got = grads["grad_sinks"].cpu().numpy()
        assert np.abs(got - exact).max() <= 0.02 * np.abs(exact).max()


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.key, marks=cases.needs(variant))
        for variant in cases.compiled_variants("backward")
        if "varlen" in variant.options
    ],
)
def test_entries_without_queries_or_keys_have_gradients_of_zero(variant):
    """Which kernels write: where only one side of a call has lengths nothing else does."""
    cu_q, cu_k = (int32(x, variant.device) for x in ([0, 5, 5, 9], [0, 70, 140, 140]))
    like = {"device": variant.device, "dtype": getattr(torch, variant.dtype)}
    q, k = (torch.randn(rows, 2, variant.head_dim or 64, **like) for rows in (9, 140))
    v = k[..., : variant.head_dim_v or None].contiguous()
    out, lse = cutlass_attn.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    grads = {f"grad_{n}": torch.full_like(x, 7.0) for n, x in zip("qkv", (q, k, v), strict=True)}
    options = {"kernel": variant.key, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    _C.backward_varlen(q, k, v, options, grad_out=out, out=out, softmax_lse=lse, **grads)
    assert (grads["grad_q"][5:] == 0).all()
    assert (grads["grad_k"][70:] == 0).all()
    assert (grads["grad_v"][70:] == 0).all()


def check(name, actual, exact, unfused, dtype):
    """Errors up to twice those of the yardstick, and what is left to the last roundings."""
    assert np.isfinite(actual).all(), name
    error, yardstick = np.abs(actual - exact), np.abs(unfused - exact)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-18}[dtype]
    slack = np.abs(exact).max(initial=0.0) * unit + 2.0**-24
    assert error.max(initial=0.0) <= 2 * yardstick.max(initial=0.0) + slack, name


# --- What callers rely on -------------------------------------------------------------------------


def batch(device="cpu", dtype=torch.float32, seqlen_q=9, seqlen_k=11):
    """Operands of three entries."""
    torch.manual_seed(0)
    return [
        torch.randn(3, heads, rows, 16, device=device, dtype=dtype)
        for heads, rows in ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))
    ]


PADDING = {
    "leftpad_q": [0, 2, 9],
    "leftpad_k": [3, 0, 5],
    "seqused_q": [9, 7, 9],
    "seqused_k": [11, 6, 8],
}


def slices(b):
    return (slice(PADDING[f"leftpad_{x}"][b], PADDING[f"seqused_{x}"][b]) for x in KINDS)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 4}, {"layout": "bshd"}])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_entries_alone(device, options):
    """By torch's autograd, with lists for lengths and NaN for padding."""
    inputs = batch(device, torch.float64 if device == "cpu" else torch.float16)
    axis = 1 if options.get("layout") == "bshd" else 2
    if axis == 1:
        inputs = [x.transpose(1, 2).contiguous() for x in inputs]
    for b in range(3):
        for x, own in zip(inputs, [*slices(b), list(slices(b))[1]], strict=True):
            rows = x[b].movedim(axis - 1, 0)
            rows[: own.start] = torch.nan
            rows[own.stop :] = torch.nan
    for x in inputs:
        x.requires_grad_()
    out, lse = attention(*inputs, **options, **PADDING, return_lse=True)
    weight = torch.randn_like(out)
    seen = lse.isfinite()
    total = (out * weight).sum() + lse.masked_fill(~seen, 0.0).sum()
    got = torch.autograd.grad(total, inputs)
    due = [torch.zeros_like(x) for x in inputs]
    for b in range(3):
        own = list(slices(b))
        of_entry = [own[0], own[1], own[1]]
        parts = [
            x.detach()[b : b + 1].movedim(axis, 0)[rows].movedim(0, axis).requires_grad_()
            for x, rows in zip(inputs, of_entry, strict=True)
        ]
        alone, alone_lse = attention(*parts, **options, return_lse=True)
        at = (slice(b, b + 1), own[0]) if axis == 1 else (slice(b, b + 1), slice(None), own[0])
        torch.testing.assert_close(out[at], alone)
        loss = (alone * weight[at]).sum()
        loss = loss + alone_lse.masked_fill(alone_lse.isinf(), 0.0).sum()
        for x, grad, rows in zip(due, torch.autograd.grad(loss, parts), of_entry, strict=True):
            x[b : b + 1].movedim(axis, 0)[rows] = grad.movedim(axis, 0)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {}
    for x, y in zip(got, due, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_given_out_has_zeros_for_padding(device):
    q, k, v = batch(device, torch.float16)
    out = torch.full_like(q, 7.0)
    lengths = int32([4, 0, 9], device)
    assert attention(q, k, v, seqused_q=lengths, out=out) is out
    for b, n in enumerate(lengths.tolist()):
        assert (out[b, :, n:] == 0).all()
        assert not (out[b, :, :n] == 7.0).any()


def test_numpy_and_torch_agree():
    inputs = batch()
    as_arrays = {name: np.array(x, np.int32) for name, x in PADDING.items()}
    out = attention(*(x.numpy() for x in inputs), **as_arrays)
    np.testing.assert_array_equal(out, attention(*inputs, **PADDING).numpy())


def test_equals_a_mask():
    """True in the interval: a mask of (B, 1, 1, Sk)."""
    q, k, v = batch()
    ends = int32([11, 4, 0])
    mask = torch.arange(11) < ends[:, None]
    due, due_lse = attention(q, k, v, mask=mask[:, None, None], return_lse=True)
    out, lse = attention(q, k, v, seqused_k=ends, return_lse=True)
    torch.testing.assert_close(out, due)
    torch.testing.assert_close(lse, due_lse)


def test_compiled():
    inputs = [x.requires_grad_() for x in batch()]
    lengths = {name: int32(x) for name, x in PADDING.items()}
    compiled = torch.compile(
        lambda q, k, v, lengths: attention(q, k, v, causal=True, **lengths),
        fullgraph=True,
        backend="aot_eager",
    )
    due = attention(*inputs, causal=True, **lengths)
    torch.testing.assert_close(compiled(*inputs, PADDING), due)  # lists of int
    out = compiled(*inputs, lengths)
    torch.testing.assert_close(out, due)
    for x, y in zip(
        torch.autograd.grad(out.square().sum(), inputs),
        torch.autograd.grad(due.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("given", [[3, 99, 1], [3, 4.5, 1], "ab"], ids=str)
def test_wrong_lengths_are_refused_alike_in_compiled_calls(given):
    torch.compiler.reset()
    compiled = torch.compile(lambda *qkv: attention(*qkv, seqused_k=given), backend="eager")
    with pytest.raises((TypeError, ValueError)) as of_eager:
        attention(*batch(), seqused_k=given)
    with pytest.raises(of_eager.type, match=re.escape(str(of_eager.value))):
        compiled(*batch())


@pytest.mark.parametrize("name", PADDING)
def test_one_int_is_that_of_all_entries(name):
    inputs = batch()
    assert torch.equal(attention(*inputs, **{name: 4}), attention(*inputs, **{name: [4] * 3}))
    with pytest.raises(ValueError, match=rf"{name}\[0\] is 12, allowed: 0 to"):
        attention(*inputs, **{name: 12})


def test_one_int_is_that_of_all_sequences():
    x = torch.randn(7, 2, 16)
    offsets = [0, 3, 7]
    due = cutlass_attn.attention_varlen(x, x, x, offsets, seqused_k=[2, 2])
    for given in (offsets, int32(offsets)):
        out = cutlass_attn.attention_varlen(x, x, x, given, seqused_k=2)
        assert torch.equal(out, due)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_lists_are_checked_where_no_kernel_runs(layout):
    inputs = [x.to("meta") for x in batch()]
    if layout == "bshd":
        inputs = [x.transpose(1, 2).contiguous() for x in inputs]
    for of_k, message in ((11, r"\[1\] is 12, allowed: 0 to 11"), ([8, 9, 10], "allowed: 0 to 9")):
        with pytest.raises(ValueError, match=message):
            cutlass_attn.explain(
                *inputs, layout=layout, seqused_k=of_k, leftpad_k=[8, 12, 0], device="sm_90"
            )
    assert cutlass_attn.explain(*inputs, layout=layout, device="sm_90", **PADDING).chosen


def test_vmap():
    q, k, v = (torch.stack([x, x.flip(0)]) for x in batch())
    lengths = int32([11, 4, 0])
    got = torch.vmap(lambda q, k, v: attention(q, k, v, seqused_k=lengths))(q, k, v)
    due = torch.stack([attention(*x, seqused_k=lengths) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(got, due)


@pytest.mark.parametrize("device", DEVICES)
def test_verify(device):
    inputs = batch(device, torch.float16)
    inputs[1][1, :, 6:] = torch.nan
    inputs[2][1, :, 6:] = torch.nan
    minimal = "scalar/minimal" if device == "cuda" else "scalar/minimal-simt"
    for kernel in ("auto", minimal):
        attention(*inputs, **PADDING, verify=True, kernel=kernel)
    with pytest.raises(ValueError, match="verify=True with quantize and padding"):
        attention(*inputs, **PADDING, verify=True, quantize="qk")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["qk", "int8"])
def test_quantized_entries_are_those_of_dense_calls(mode, device):
    """What is padding takes part in no scale and no mean."""
    q, k, v = batch(device, torch.float16, 70, 130)
    first, end = [5, 0, 60], [130, 64, 70]
    for b in range(3):
        for x in (k, v):
            x[b, :, : first[b]] = torch.nan
            x[b, :, end[b] :] = torch.nan
    out = attention(q, k, v, leftpad_k=first, seqused_k=end, quantize=mode)
    for b in range(3):
        keys = slice(first[b], end[b])
        parts = q[b : b + 1], k[b : b + 1, :, keys], v[b : b + 1, :, keys]
        torch.testing.assert_close(out[b : b + 1], attention(*parts, quantize=mode))
    padding = {"leftpad_k": first, "seqused_k": end}
    assert cutlass_attn.explain(q, k, v, **padding, quantize=mode).predicted_error is None
    with pytest.raises(ValueError, match=r"max_error is 0\.1 with packed sequences"):
        attention(q, k, v, **padding, quantize=mode, max_error=0.1)


def test_explain_names_a_kernel():
    q = torch.empty(2, 4, 512, 64, dtype=torch.float16, device="meta")
    used = torch.empty(2, dtype=torch.int32, device="meta")
    found = cutlass_attn.explain(q, q, q, seqused_k=used, device="sm_80")
    assert found.chosen.kernel == "sm80/varlen"
    backward = cutlass_attn.explain(q, q, q, seqused_k=used, device="sm_90", grad=True)
    assert "varlen" in backward.chosen.kernel


@pytest.mark.gpu
def test_graph_reads_lengths_anew():
    inputs = batch("cuda", torch.float16)
    lengths = int32([11, 4, 0], "cuda")
    attention(*inputs, seqused_k=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*inputs, seqused_k=lengths)
    lengths.copy_(int32([2, 9, 11]))
    graph.replay()
    assert torch.equal(out, attention(*inputs, seqused_k=lengths))


@pytest.mark.gpu
def test_lengths_beyond_the_rows_end_there():
    q, k, v = batch("cuda", torch.float16)
    out = attention(
        q, k, v, seqused_k=int32([99, -5, 4], "cuda"), leftpad_k=int32([-3, 0, 9], "cuda")
    )
    assert torch.equal(out[:1], attention(q[:1], k[:1], v[:1], seqused_k=[11]))
    assert (out[1:] == 0).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seqused_q": int32([1, 2, 10])}, ValueError, r"seqused_q\[2\] is 10, but q has 9 rows"),
        ({"seqused_k": int32([12, 2, 3])}, ValueError, r"seqused_k\[0\] is 12, but k has 11 rows"),
        ({"leftpad_k": int32([0, 12, 0])}, ValueError, r"leftpad_k\[1\] is 12, allowed: 0 to 11"),
        (
            {"seqused_q": [1, 2, 10]},
            ValueError,
            r"seqused_q\[2\] is 10, allowed: 0 to 9, the",
        ),
        (
            {"seqused_k": [-1, 2, 3]},
            ValueError,
            r"seqused_k\[0\] is -1, allowed: 0 to 11, the",
        ),
        ({"seqused_k": [1, 2**40, 3]}, ValueError, r"seqused_k\[1\] is 1099511627776, allowed"),
        ({"leftpad_k": [0, 12, 0]}, ValueError, r"leftpad_k\[1\] is 12, allowed: 0 to 11"),
        ({"leftpad_q": [0, -1, 0]}, ValueError, r"leftpad_q\[1\] is -1, allowed: 0 to 9"),
        (
            {"leftpad_k": [0, 5, 0], "seqused_k": [9, 4, 9]},
            ValueError,
            r"leftpad_k\[1\] is 5, allowed: 0 to 4, the end of the valid rows of k",
        ),
        ({"seqused_k": [1, 2]}, ValueError, r"seqused_k must have shape \(batch,\) = \(3,\), got"),
        ({"leftpad_k": torch.zeros(3)}, ValueError, "leftpad_k must be int32"),
        (
            {"leftpad_k": "left"},
            TypeError,
            "leftpad_k must be an array.* allowed: .* an int",
        ),
        (
            {"seqused_k": [1, 2, 3], "mask": torch.ones(11, dtype=torch.bool)},
            ValueError,
            "seqused_k and mask are both given; allowed: one of them",
        ),
        (
            {"leftpad_k": [1, 2, 3], "bias": torch.zeros(11)},
            ValueError,
            "leftpad_k and bias are both given; allowed: one of them",
        ),
        ({"seqused_k": [1, 2, 3], "kernel": "scalar/tiled-simt"}, ValueError, "implement varlen"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        attention(*batch(), **options)
