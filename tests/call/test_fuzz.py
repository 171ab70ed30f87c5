"""Random bad calls of every public function: an error is of a kind that its docstring names.

The functions and their keywords come from the package, so that a new one is called as well.
"""

import decimal
import fractions
import random
import warnings

import cutlass_attn
import numpy as np
import pytest
from cases import torch
from cutlass_attn import jit
from cutlass_attn._call.call import SIGNATURES

CALLS = 1500  # of each function and way to call it
# What `attention` documents; KeyError and the like are no kinds that a caller could expect.
DOCUMENTED = (
    TypeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    cutlass_attn.VerificationError,
)
UNNAMED = (RecursionError, UnicodeError)  # subclasses of documented kinds that no one meant

SHAPES = [
    (1, 2, 5, 16),
    (1, 1, 5, 16),
    (2, 2, 3, 8),
    (1, 2, 0, 16),
    (0, 2, 5, 16),
    (1, 2, 5, 0),
    (1, 2, 5, 600),
    (5, 16),
    (2,),
    (1,),
    (),
    (1, 1, 1, 1, 1),
]


def tensors():
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
    for shape in SHAPES:
        for kind in kinds[: 6 if shape == SHAPES[0] else 3]:
            yield torch.zeros(shape, dtype=kind)
    yield torch.zeros(SHAPES[0], device="meta", dtype=torch.float16)
    yield torch.zeros(1, 2, 5, 32, dtype=torch.float16)[..., ::2]
    yield torch.zeros(1, 2, 16, 5, dtype=torch.float16).mT
    yield torch.zeros(SHAPES[0], requires_grad=True)
    yield torch.full(SHAPES[0], float("nan"), dtype=torch.float16)
    yield torch.zeros(SHAPES[0]).to_sparse()


def arrays():
    for shape in SHAPES:
        for kind in (np.float16, np.float32, np.float64, np.uint64, bool, object):
            yield np.zeros(shape, kind)
    yield np.zeros(SHAPES[0], np.float16)[::-1]
    yield np.zeros((1, 2, 5, 16), "S3")
    yield np.zeros(SHAPES[0], ">f4")


SCALARS = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**28, 2**31, 2**63, 2**64, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "auto", "cpu", "sm80", "sm80-simt", "cpu/f16", "bhsd", "bshd", "fp16", "fp32", "cuda"),
    *("cuda:99", "sm_89", "sm_1", "meta", "a\0b", "\ud800", "ä" * 300, b"auto"),
    *((), [], {}, set(), (1,), (1, 2), (1, -5), (1, 2, 3), [None, 3], (True, 1), ("1", 2)),
    *(1j, decimal.Decimal("1e999"), fractions.Fraction(1, 3), range(3), object(), int, ...),
    *(np.float16(1), np.int8(-3), np.bool_(True), np.array(2.0), np.array([1, 2]), lambda: 0),
]


def random_calls(names, required, seed):
    """(positional, keywords): mostly a call that would do, with one to three things wrong."""
    draw = random.Random(seed)
    pools = {"torch": list(tensors()), "numpy": list(arrays())}
    good = {"torch": torch.zeros(SHAPES[0], dtype=torch.float16)}
    good["numpy"] = np.zeros(SHAPES[0], np.float16)
    anything = [*SCALARS, *pools["torch"], *pools["numpy"]]
    for _ in range(CALLS):
        library = draw.choice(["torch", "numpy"])
        operands = [good[library]] * len(required)
        if draw.random() < 0.4:
            operands[draw.randrange(len(operands))] = draw.choice(anything)
        if draw.random() < 0.1:
            operands = [draw.choice(pools[library])] * len(required)
        keywords = {}
        for name in draw.sample(names, min(len(names), draw.choice([0, 1, 1, 2, 3]))):
            pool = draw.choice([SCALARS, SCALARS, pools[library], anything])
            keywords[name] = draw.choice(pool)
        if draw.random() < 0.02:
            keywords["no_such_option"] = 1
        yield operands, keywords


def check(function, calls, allowed):
    """Calls all; AssertionError names the calls that raised another kind of error."""
    unnamed, refused = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operands, keywords in calls:
            try:
                function(*operands, **keywords)
            except allowed as error:
                refused += 1
                if isinstance(error, UNNAMED) or not str(error):
                    unnamed.append((operands, keywords, error))
            except Exception as error:
                unnamed.append((operands, keywords, error))
    lines = [f"{type(e).__name__}: {e!s:.200} from {o!r:.200}, {k!r:.300}" for o, k, e in unnamed]
    assert not lines, "\n".join(lines[:20])
    assert refused > 100


def parameters(name):
    """Its keywords, and the operands before them."""
    found = SIGNATURES[name].parameters.values()
    required = [p.name for p in found if p.default is p.empty]
    return [p.name for p in found if p.default is not p.empty], required


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_calls(name):
    function = getattr(cutlass_attn, name)
    check(function, random_calls(*parameters(name), seed=f"{name} 1"), DOCUMENTED)


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_calls_that_the_dispatcher_of_torch_sees(name):
    """Under a dispatch mode they go through the operator, whose schema has types of its own."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    function = getattr(cutlass_attn, name)

    def call(*operands, **keywords):
        with Seeing():
            function(*operands, **keywords)

    check(call, random_calls(*parameters(name), seed=f"{name} 2"), DOCUMENTED)


def test_explain():
    names, required = parameters("attention")
    calls = random_calls([*names, "device"], required, seed="explain")
    check(cutlass_attn.explain, calls, (TypeError, ValueError, NotImplementedError))


def test_warmup():
    draw = random.Random("warmup")
    values = [*SCALARS, ["cpu", 3], ("no such",), ["sm80", None]]
    calls = [
        ([], {"names": draw.choice(values), "device": draw.choice(SCALARS)}) for _ in range(CALLS)
    ]
    allowed = (TypeError, ValueError, RuntimeError, jit.CompilerNotFound, jit.CompileError)
    keys = {v.key for v in cutlass_attn.variants()}

    def names(value):
        return {value} if isinstance(value, str) else set()

    # Without what would be compiled: "sm80", for a GPU that need not be there.
    calls = [c for c in calls if not names(c[1]["names"]) & {"sm80", *keys}]
    check(cutlass_attn.warmup, calls, allowed)
