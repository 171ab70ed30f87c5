"""_C.backward: every kernel with every option, against the oracle; and what callers rely on."""

import dataclasses
import functools
import itertools
import zlib

import backward_reference
import case_list
import cases
import cutlass_attn
import cutlass_attn._call.torch_library  # by which _C knows torch
import numpy as np
import pytest
import reference
from cases import Case, torch
from cutlass_attn import _C, testing

ORDER = ("q", "k", "v")
# Stated here, so that a kernel cannot excuse itself.
MORE = [
    Case("large_sinks", "sinks above all logits", sinks=True, magnitude=8.0, causal=True),
    Case("inf_rows", "all of a row's bias is -inf", bias="bhq1", bias_inf=True, seqlen_q=40),
    Case("bias_of_heads", "one number for all logits of a head", bias="1h11", batch=2),
    Case("bias_of_one", "one number for all", bias="1111", batch=2, heads=3, heads_kv=1),
    Case("bias_gqa", "heads of a group", bias="1hqk", heads=4, heads_kv=2, batch=2, dropout_p=0.2),
    Case("many_keys", "more than fits a block", seqlen_q=3, seqlen_k=300),
    Case("many_queries", "more than fits a block", seqlen_q=300, seqlen_k=3, heads=1, heads_kv=1),
]

FEW = ("ragged", "causal_no_key", "everything", "gqa", "d255")


@functools.lru_cache(maxsize=64)
def expected(case, dtype, head_dim):
    """Gradients of the output and of the LSE, and what gradients they are due to give."""
    q, k, v = cases.values(case, dtype, head_dim)
    rng = np.random.default_rng(zlib.crc32(f"{case} gradients".encode()))
    grad_out = reference.round_to(rng.standard_normal((*q.shape[:3], v.shape[3])), dtype)
    grad_lse = rng.standard_normal(q.shape[:3]).astype(np.float32)
    options = dict(cases.arrays(case, dtype))
    if case.dropout_p:
        rng_state = options.pop("rng_state")
        shape = (*q.shape[:3], k.shape[2])
        options["kept"] = testing.dropout_mask(rng_state, shape, case.dropout_p)
    gradients = backward_reference.gradients(
        q, k, v, grad_out, grad_lse, dtype, dropout_p=case.dropout_p, **case.scalars, **options
    )
    return grad_out, grad_lse, gradients


class Solved:
    """A case with what a forward pass hands over, and what gradients are due."""

    def __init__(self, case, dtype, head_dim, device, has_bias_grad=True):
        self.case, self.dtype, self.device = case, dtype, device
        grad_out, grad_lse, self.expected = expected(case, dtype, head_dim)
        self.qkv = cases.tensors(case, dtype, head_dim, device)[:3]
        # As their operands lie in memory; those of expanded ones have rows of their own.
        self.grads = cases.tensors(case, dtype, head_dim, device)[:3]
        if case.storage == "expanded":
            self.grads = [x.contiguous() for x in self.grads]
        if case.storage in ("dense", "expanded", "transposed"):  # perhaps the case's own values
            self.grads = [x.clone() for x in self.grads]
        bias = cases.arrays(case, dtype).get("bias")
        self.grad_bias = self.grad_sinks = None
        if bias is not None and has_bias_grad:
            self.grad_bias = torch.empty(bias.shape, device=device)
        if case.sinks:
            self.grad_sinks = torch.empty(case.heads, device=device)
        self.options = cases.keywords(case, dtype, device)
        self.given = {
            "grad_out": self.operand(grad_out),
            "out": self.operand(self.expected.out),
            "softmax_lse": torch.from_numpy(self.expected.lse.astype("float32", "C")).to(device),
            "grad_softmax_lse": torch.tensor(grad_lse, device=device),
        }

    def operand(self, x):
        """A copy: x belongs to all tests of the case."""
        x = torch.tensor(x, dtype=getattr(torch, self.dtype), device=self.device)
        return x.transpose(1, 2).contiguous() if self.case.layout == "bshd" else x

    def run(self, **more):
        """The gradients by name."""
        for x in (*self.grads, self.grad_bias, self.grad_sinks):
            if x is not None:
                x.fill_(torch.nan)
        named = {f"grad_{name}": x for name, x in zip(ORDER, self.grads, strict=True)}
        named |= {"grad_bias": self.grad_bias, "grad_sinks": self.grad_sinks}
        _C.backward(*self.qkv, self.options, **(self.given | named | more))
        return {name: x.clone() for name, x in named.items() if x is not None}

    def judge(self, grads, rounds_weights=False):
        """rounds_weights: to q's dtype, before logits have their gradients."""
        for name in ORDER:
            due = getattr(self.expected, name)
            self.check(name, cases.to_bhsd(self.case, grads[f"grad_{name}"]), *due, self.dtype)
        for name, grad in (("logits", self.grad_bias), ("sinks", self.grad_sinks)):
            if grad is None:
                continue
            exact, unfused = getattr(self.expected, name)
            shape = grad.shape if name == "logits" else (1, *grad.shape, 1, 1)
            due = _sum_to(exact, shape).reshape(grad.shape)
            chance = _error_of_sum(unfused - exact, shape).reshape(grad.shape)
            dtype = self.dtype if rounds_weights and name == "logits" else "float32"
            self.check(name, grads[_NAMES[name]].cpu().numpy(), due, due + chance, dtype)

    def check(self, name, actual, exact, unfused, dtype):
        """Errors up to twice those of the yardstick, and what is left to the last roundings."""
        assert np.isfinite(actual).all(), name
        error, yardstick = np.abs(actual - exact), np.abs(unfused - exact)
        lse = np.abs(self.expected.lse[self.expected.lse > -np.inf]).max(initial=1.0)
        # Of the result, of the LSE that the weights are computed from, and of subnormal numbers.
        unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}[dtype]
        size = np.abs(exact).max(initial=0.0)
        slack = size * (unit + 2.0**-21 * lse) + (2.0**-24 if dtype == "float16" else 1e-30)
        assert error.max(initial=0.0) <= 2 * yardstick.max(initial=0.0) + slack, name
        rms, rms_yardstick = (np.sqrt(np.mean(x**2)) if x.size else 0.0 for x in (error, yardstick))
        assert rms <= 2 * rms_yardstick + slack / 2, name


_NAMES = {"logits": "grad_bias", "sinks": "grad_sinks"}


def _summed(x, shape):
    """The dimensions over which an array of this shape is broadcast to become one like x."""
    whole = (1,) * (4 - len(shape)) + tuple(shape)
    return tuple(d for d in range(4) if whole[d] == 1 and x.shape[d] != 1)


def _sum_to(x, shape):
    return x.astype(np.float64).sum(axis=_summed(x, shape), keepdims=True)


def _error_of_sum(error, shape):
    """What independent errors add up to: twice the root of the sum of their squares. Those of a
    row's logits have one part, that of its delta, in common."""
    if _summed(error, shape) == ():
        return error
    of_rows = error.sum(axis=3, keepdims=True) if 3 in _summed(error, shape) else 0 * error
    return 2 * np.sqrt(_sum_to(error**2, shape) + _sum_to(of_rows**2, shape))


def pairs(which):
    """Variants of one case follow each other: they share what is expected of them."""
    variants = cases.compiled_variants("backward", special=True)
    return [
        pytest.param(variant, case, id=f"{variant.key}-{case}", marks=cases.needs(variant))
        for case in which
        for variant in variants
        if set(variant.needs) <= {"bias_grad", "bias", "mask"}
        and cases.takes(variant, case)
        and not (variant.kernel.endswith("-simt") and _is_slow(variant, case))
    ]


def solved_for(variant, case, head_dim):
    has_bias_grad = "bias_grad" in variant.options
    return Solved(case, variant.dtype, head_dim, variant.device, has_bias_grad)


def _is_slow(variant, case):
    """What takes minutes on the CPU and shows nothing that other cases do not. At a head dim of 512
    sm80/backward_general has all cases; those that add to the rows in order, or read them from
    packed sequences, have all at 64."""
    is_wide = variant.head_dim == 512 and variant.kernel.startswith(AS_GENERAL)
    few = (variant.dtype == "float32" or is_wide) and case not in MORE and case.name not in FEW
    return few or case.name.startswith("wide")


AS_GENERAL = ("sm80/backward_general_ordered", "sm80/backward_varlen_general")


@pytest.mark.parametrize(("variant", "case"), pairs([*case_list.CASES, *MORE, *case_list.PAIRWISE]))
def test_case(variant, case):
    head_dim = cases.head_dim_of(variant, case)
    solved = solved_for(variant, case, head_dim)
    solved.judge(solved.run(kernel=variant.key), rounds_weights="bias_grad" in variant.needs)


@pytest.mark.parametrize("case", [*case_list.CASES, *MORE, *case_list.PAIRWISE], ids=str)
def test_gpu_variants_take_what_they_should(case):
    """pairs() has the calls that takes() grants. Here, without a GPU, the library grants them."""
    variants = [
        variant
        for variant in cutlass_attn.variants("backward")
        if (variant.device, variant.dtype) == ("cuda", "float16")
        and set(variant.needs) <= {"bias_grad", "bias", "mask"}
    ]
    for head_dim, trains_bias in itertools.product(
        [case.head_dim] if case.head_dim else [64, 128, 256],
        [False, True] if case.bias else [False],
    ):
        q, k, v, _ = cases.tensors(case, "float16", head_dim, "cpu", False)
        options = cases.keywords(case, "float16", "cpu")
        if case.bias:
            options["bias"].requires_grad_(trains_bias)
        found = cutlass_attn.explain(q, k, v, device="sm_90", grad=True, **options)
        reasons = {x.variant.key: x.reason for x in found.verdicts}
        for variant in variants:
            if case.bias and ("bias_grad" in variant.options) != trains_bias:
                continue  # as in Solved
            if not case.head_dim and variant.head_dim not in (0, head_dim):
                continue
            reason = reasons[variant.key]
            runs = not reason or reason.startswith("could run")
            takes = cases.takes(variant, case)
            # Copies of operands make more calls run than a kernel takes.
            assert runs == takes if not found.copied else runs or not takes, (variant.key, reason)


def all_variants(*options):
    return [
        pytest.param(variant, id=variant.key, marks=cases.needs(variant))
        for variant in cases.compiled_variants("backward")
        if set(options) <= set(variant.options)
    ]


VARIANTS = all_variants()
SMALL = Case(
    "small",
    "",
    batch=2,
    heads=4,
    heads_kv=2,
    seqlen_q=37,
    seqlen_k=70,
    head_dim=40,
    head_dim_v=24,
    causal=True,
    bias="1hqk",
    sinks=True,
    dropout_p=0.2,
)


PLAIN = dataclasses.replace(SMALL, name="small_plain", bias=None, dropout_p=0.0)


def small(variant):
    return solved_for(variant, SMALL if cases.takes(variant, SMALL) else PLAIN, 40)


@pytest.mark.parametrize("variant", all_variants("deterministic"))
def test_the_same_bits_again(variant):
    solved = small(variant)
    first = solved.run(kernel=variant.key, deterministic=True)
    for _ in range(3):
        again = solved.run(kernel=variant.key, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_any_number_of_threads():
    solved = Solved(
        case_list.Case("threads", "", batch=3, heads=6, heads_kv=3, seqlen_q=300),
        "float32",
        64,
        "cpu",
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = solved.run()
        torch.set_num_threads(5)
        again = solved.run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("variant", all_variants("deterministic"))
@pytest.mark.parametrize("wanted", ["grad_q", "grad_k", "grad_v", "grad_bias", "grad_sinks"])
def test_one_gradient_alone(variant, wanted):
    solved = small(variant)
    all_of_them = solved.run(kernel=variant.key)
    if wanted not in all_of_them:
        pytest.skip("the kernel has no such gradient")
    others = dict.fromkeys(set(all_of_them) - {wanted})
    assert torch.equal(solved.run(kernel=variant.key, **others)[wanted], all_of_them[wanted])


@pytest.mark.parametrize("variant", all_variants("deterministic"))
def test_no_gradient_of_the_lse_is_one_of_zero(variant):
    solved = small(variant)
    zero = torch.zeros_like(solved.given["grad_softmax_lse"])
    first = solved.run(kernel=variant.key, grad_softmax_lse=zero)
    again = solved.run(kernel=variant.key, grad_softmax_lse=None)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_without_a_key_are_zero(variant):
    """Their LSE is -inf, and whatever is given for them says nothing."""
    case = Case("no_key", "", seqlen_q=70, seqlen_k=20, causal=True)
    solved = solved_for(variant, case, 64)
    solved.given["grad_out"][:, :, :50] = 1e4
    grads = solved.run(kernel=variant.key)
    assert (solved.given["softmax_lse"][:, :, :50] == -torch.inf).all()
    assert (grads["grad_q"][:, :, :50] == 0).all()
    assert all(torch.isfinite(x).all() for x in grads.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_logits(variant):
    """Logits of several hundred, whose weights are one-hot."""
    case = Case("huge", "", seqlen_q=40, seqlen_k=70, magnitude=12.0)
    solved = solved_for(variant, case, 64)
    assert np.abs(solved.expected.lse).max() > 200
    solved.judge(solved.run(kernel=variant.key))


def test_packed_sequences_are_those_of_each():
    """Rows of no sequence, and keys that do not count, keep what is there."""
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 47], [0, 9, 20, 81]))
    used = torch.tensor([9, 3, 60], dtype=torch.int32)
    q, grad_out = torch.randn(50, 4, 24), torch.randn(50, 4, 16)
    k, v = torch.randn(83, 2, 24), torch.randn(83, 2, 16)
    options = {"causal": True, "sinks": torch.randn(4)}
    out, lse = cutlass_attn.attention_varlen(
        q, k, v, cu_q, cu_k, seqused_k=used, return_lse=True, **options
    )
    grads = {f"grad_{n}": torch.full_like(x, 7.0) for n, x in zip(ORDER, (q, k, v), strict=True)}
    grads["grad_sinks"] = torch.empty(4)
    where = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": used}
    given = {"grad_out": grad_out, "out": out, "softmax_lse": lse}
    _C.backward_varlen(q, k, v, {**options, **where}, **given, **grads)

    due = {name: torch.full_like(x, 7.0) for name, x in grads.items()}
    due["grad_sinks"] = torch.zeros(4)
    for entry in range(3):
        rows = slice(cu_q[entry], cu_q[entry + 1])
        keys = slice(cu_k[entry], cu_k[entry] + used[entry])
        parts = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        given = {
            "grad_out": grad_out[rows].transpose(0, 1)[None],
            "out": out[rows].transpose(0, 1)[None],
            "softmax_lse": lse[None, :, rows].contiguous(),
        }
        of_entry = {f"grad_{n}": torch.empty_like(x) for n, x in zip(ORDER, parts, strict=True)}
        of_entry["grad_sinks"] = torch.empty(4)
        _C.backward(*parts, options, **given, **of_entry)
        due["grad_q"][rows] = of_entry["grad_q"][0].transpose(0, 1)
        due["grad_k"][keys] = of_entry["grad_k"][0].transpose(0, 1)
        due["grad_v"][keys] = of_entry["grad_v"][0].transpose(0, 1)
        due["grad_sinks"] += of_entry["grad_sinks"]
    for name in ("grad_q", "grad_k", "grad_v"):
        assert torch.equal(grads[name], due[name]), name
    torch.testing.assert_close(grads["grad_sinks"], due["grad_sinks"])


@pytest.mark.parametrize("variant", [x for x in VARIANTS if "varlen" in x.id or "cpu" in x.id])
def test_rows_before_the_first_packed_sequence(variant):
    """More of them than a tile has: they are no sequence's, and stay as they are."""
    device = "cuda" if variant.device == "cuda" else "cpu"
    dtype, head_dim = getattr(torch, variant.dtype), variant.head_dim or 64
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 70], [0, 130]))
    head_dim_v = variant.head_dim_v or head_dim
    q, k, v, grad_out = (
        torch.randn(rows, 2, columns, dtype=dtype, device=device)
        for rows, columns in (
            (70, head_dim),
            (130, head_dim),
            (130, head_dim_v),
            (70, head_dim_v),
        )
    )
    out, lse = cutlass_attn.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    results = []
    for spare in (0, 300):

        def behind(x, spare=spare):
            return torch.cat([torch.full_like(x[:1], torch.nan).expand(spare, -1, -1), x])

        args = [behind(x) for x in (q, k, v)]
        given = {
            "grad_out": behind(grad_out),
            "out": behind(out),
            "softmax_lse": torch.cat([lse.new_full((2, spare), torch.nan), lse], dim=1),
        }
        grads = {f"grad_{n}": torch.full_like(x, 7.0) for n, x in zip(ORDER, args, strict=True)}
        options = {
            "kernel": variant.key,
            "cu_seqlens_q": cu_q + spare,
            "cu_seqlens_k": cu_k + spare,
        }
        _C.backward_varlen(*args, options, **given, **grads)
        assert all((x[:spare] == 7.0).all() for x in grads.values())
        results.append([x[spare:] for x in grads.values()])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)


def test_numpy():
    due = Solved(SMALL, "float32", 40, "cpu").run()
    solved = Solved(SMALL, "float32", 40, "cpu")
    solved.qkv = [x.numpy() for x in solved.qkv]
    to_numpy = lambda x: x.numpy() if isinstance(x, torch.Tensor) else x  # noqa: E731
    options = {name: to_numpy(x) for name, x in solved.options.items()}
    given = {name: to_numpy(x) for name, x in solved.given.items()}
    grads = {name: np.empty_like(x.numpy()) for name, x in due.items()}
    _C.backward(*solved.qkv, options, **given, **grads)
    for name, x in grads.items():
        assert np.array_equal(x, due[name].numpy()), name


# --- Errors ---------------------------------------------------------------------------------------


def arguments(dtype=torch.float16, **more):
    q, k, v = (torch.zeros(2, h, 5, 16, dtype=dtype) for h in (4, 2, 2))
    given = {
        "grad_out": torch.zeros_like(q),
        "out": torch.zeros_like(q),
        "softmax_lse": torch.zeros(2, 4, 5),
        **{f"grad_{n}": torch.empty_like(x) for n, x in zip(ORDER, (q, k, v), strict=True)},
    }
    return (q, k, v), {**given, **more}


ERRORS = [
    ({"grad_out": None}, TypeError, r"backward\(\) needs grad_out, got None"),
    ({"out": None}, TypeError, r"needs out, got None"),
    ({"softmax_lse": None}, TypeError, r"needs softmax_lse, got None"),
    ({"grad_out": np.zeros(3)}, TypeError, "grad_out must be an array of the same library as q"),
    ({"grad_out": torch.zeros(2, 4, 5, 15)}, ValueError, r"grad_out must have shape \(2, 4, 5, 16"),
    ({"grad_out": torch.zeros(2, 4, 5, 16)}, ValueError, "grad_out must be float16 like q"),
    ({"out": torch.zeros(2, 4, 5)}, ValueError, r"out must have shape .* got \(2, 4, 5\)"),
    ({"softmax_lse": torch.zeros(2, 5, 4)}, ValueError, r"softmax_lse must have shape \(2, 4, 5\)"),
    ({"softmax_lse": torch.zeros(2, 4, 5).double()}, ValueError, "softmax_lse must be float32"),
    (
        {"softmax_lse": torch.zeros(2, 5, 4).mT},
        ValueError,
        r"softmax_lse must be contiguous; call .contiguous\(\)",
    ),
    ({"grad_softmax_lse": torch.zeros(3)}, ValueError, "grad_softmax_lse must have shape"),
    ({"grad_k": torch.zeros(2, 4, 5, 16).half()}, ValueError, r"grad_k must have shape \(2, 2, 5"),
    ({"grad_v": torch.zeros(2, 2, 5, 16)}, ValueError, "grad_v must be float16 like q"),
    (
        {"grad_q": torch.zeros(2, 4, 5, 32).half()[..., ::2]},
        ValueError,
        "last dimension of grad_q must be contiguous",
    ),
    ({"grad_bias": torch.zeros(5, 5)}, ValueError, "grad_bias is wanted, but the call has no bias"),
    ({"grad_bias": torch.zeros(5, 5).double()}, ValueError, "grad_bias must be float32"),
    ({"grad_bias": torch.zeros(3)}, ValueError, "grad_bias must have 1 to 4 dimensions that broad"),
    ({"grad_sinks": torch.zeros(4)}, ValueError, "grad_sinks is wanted, but the call has no sinks"),
    ({"grad_sinks": torch.zeros(3)}, ValueError, r"grad_sinks must have shape \(num_heads_q,\)"),
    ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1"),
    ({"dropout_p": 0.5}, TypeError, r"needs rng_state with dropout_p: that of the forward call"),
    ({"verify": True}, TypeError, "unexpected keyword argument 'verify'"),
    ({"kernel": "cpu"}, ValueError, 'kernel is "cpu", allowed: .*"cpu/backward"'),
]


@pytest.mark.parametrize(("more", "error", "message"), ERRORS)
def test_errors(more, error, message):
    qkv, given = arguments(**more)
    with pytest.raises(error, match=message):
        _C.backward(*qkv, {}, **given)


def test_outputs_overlap_nothing():
    (q, k, v), given = arguments()
    for name, x, message in (
        ("grad_q", q, "grad_q overlaps q"),
        ("grad_q", given["out"], "grad_q overlaps out"),
        ("grad_k", given["grad_v"], "grad_v overlaps grad_k"),
        ("grad_q", q[:1].expand(2, 4, 5, 16), "rows of grad_q"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.backward(q, k, v, {}, **{**given, name: x})


def test_read_only():
    q = np.zeros((1, 1, 3, 8), np.float32)
    lse = np.zeros((1, 1, 3), np.float32)
    out = q.copy()
    out.flags.writeable = False
    with pytest.raises(ValueError, match="grad_q must be writable"):
        _C.backward(q, q, q, {}, grad_out=q, out=q, softmax_lse=lse, grad_q=out)


def test_no_pages_and_no_scales():
    q, k = torch.zeros(5, 4, 16), torch.zeros(3, 8, 2, 16)
    cu, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5], [20]))
    table = torch.zeros(1, 3, dtype=torch.int32)
    given = {"grad_out": q, "out": q, "softmax_lse": torch.zeros(4, 5)}
    options = {"cu_seqlens_q": cu, "seqused_k": used, "block_table": table}
    with pytest.raises(ValueError, match="allowed in a backward pass: keys without pages"):
        _C.backward_varlen(q, k, k, options, **given)
    k = torch.zeros(5, 2, 16)
    with pytest.raises(ValueError, match="an operand has a scale"):
        _C.backward_varlen(q, k, k, {"cu_seqlens_q": cu, "k_scale": 0.5}, **given)


# --- Dispatch -------------------------------------------------------------------------------------


def chosen(qkv, options, **more):
    return [v.key for v in _C.explain_backward(*qkv, options, **more).verdicts if v.chosen]


def test_explain():
    qkv, given = arguments()
    assert chosen(qkv, {}) == ["cpu/backward/f16"]
    assert chosen(qkv, {}, **given, deterministic=True) == ["cpu/backward/f16"]
    meta = [x.to("meta") for x in qkv]
    cpu = cutlass_attn.devices.parse_device("cpu")[0]
    bias = {"bias": torch.zeros(5, 5, device="meta"), "sinks": torch.zeros(4, device="meta")}
    wanted = {"grad_bias": bias["bias"], "grad_sinks": bias["sinks"]}
    assert chosen(meta, bias, **wanted, device=cpu) == ["cpu/backward/f16"]
    keys = {v.key for v in _C.explain_backward(*qkv, {}).verdicts}
    assert keys == {v.key for v in cutlass_attn.variants("backward")}


def test_a_gradient_of_the_bias_has_a_kernel_of_its_own():
    """But for the same bits every time: what it is broadcast over is added up in any order."""
    qkv, given = arguments()
    device = cutlass_attn.devices.parse_device("sm_89")[0]

    def reasons(**more):
        options = {"bias": torch.zeros(5, 5)}
        verdicts = _C.explain_backward(*qkv, options, **given, **more, device=device).verdicts
        return {v.key.partition("/f16/d64/")[0]: v.reason for v in verdicts}

    grad_bias = torch.zeros(5, 5)
    assert "runs only calls with bias_grad" in reasons()["sm80/backward_bias"]
    wanted = reasons(grad_bias=grad_bias)
    assert "does not implement bias_grad" in wanted["sm80/backward_general"]
    assert "bias_grad" not in wanted["sm80/backward_bias"]
    fixed = reasons(grad_bias=grad_bias, deterministic=True)
    assert "does not implement deterministic" in fixed["sm80/backward_bias"]


def test_what_keeps_a_bias_and_a_mask_from_being_read_in_pairs():
    qkv = [torch.zeros(1, 2, 6, 64, dtype=torch.float16) for _ in range(3)]
    device = cutlass_attn.devices.parse_device("sm_89")[0]

    def reason(kernel, **options):
        verdicts = _C.explain_backward(*qkv, options, device=device).verdicts
        (found,) = {v.reason for v in verdicts if v.key.startswith(f"{kernel}/f16/d64/")}
        return found

    bias, mask = torch.zeros(6, 7, dtype=torch.float16), torch.ones(6, 7, dtype=torch.bool)
    names = [f"sm80/backward_{name}" for name in ("with_bias", "mask", "with_bias_mask")]
    assert "runs only calls with bias" in reason(names[0])
    assert "does not implement mask" in reason(names[0], bias=bias[:, :6], mask=mask[:, :6])
    odd = "query stride is 7 elements, allowed: multiples of 2"
    assert f"bias's {odd}" in reason(names[0], bias=bias[:, :6])
    assert f"mask's {odd}" in reason(names[1], mask=mask[:, :6])
    whole = {"bias": bias[:, :6].contiguous(), "mask": mask[:, :6].contiguous()}
    assert f"bias's {odd}" in reason(names[2], **{**whole, "bias": bias[:, :6]})
    assert "key stride is 6 elements, allowed: 1" in reason(names[1], mask=whole["mask"].mT)
    other = torch.zeros(6, 6)
    assert "needs a bias of float16, got float32" in reason(names[0], bias=other)
    for x in (bias.flatten()[1:37].view(6, 6), mask.flatten()[1:37].view(6, 6)):
        name = "mask" if x.dtype == torch.bool else "bias"
        text = f"{name}'s address is not a multiple of {2 * x.element_size()} bytes"
        assert text in reason(names[name == "mask"], **{name: x})
    qkv[1:] = [x[:, :, :5] for x in qkv[1:]]
    assert "needs an even seqlen_k for its mask, got 5" in reason(names[1], mask=mask[:, :5])
