"""Which options a score_mod becomes, and when it stays a function to compile."""

import pytest

torch = pytest.importorskip("torch")

from cutlass_attn import _modified  # noqa: E402
from cutlass_attn._mods.masks import Lengths  # noqa: E402
from cutlass_attn._mods.translate import Mods, translate  # noqa: E402

Q = torch.zeros(2, 4, 8, 16, dtype=torch.float16)
LENGTHS = Lengths(2, 4, 8, 8)
BIAS = torch.zeros(4, 8, 8, dtype=torch.float16)


def relative(score, b, h, q, k):
    return score + (q - k) * 0.01


def of_dtype(score, b, h, q, k):
    return score + BIAS[h, q, k]


@pytest.mark.parametrize("may_compile", [False, True])
def test_a_bias_that_only_slow_kernels_take_is_compiled_where_that_is_possible(may_compile):
    found = translate(Q, LENGTHS, Mods(relative), may_compile=may_compile)
    assert (found.score is not None) == may_compile
    assert ("bias" in found.options) == (not may_compile)


def test_a_bias_of_the_dtype_of_q_stays_one():
    found = translate(Q, LENGTHS, Mods(of_dtype), may_compile=True)
    assert found.score is None
    assert found.options["bias"].dtype == torch.float16


def test_a_bias_with_a_gradient_stays_one():
    table = torch.zeros(4, 8, 8, requires_grad=True)
    found = translate(Q, LENGTHS, Mods(lambda s, b, h, q, k: s + table[h, q, k]), may_compile=True)
    assert found.score is None
    assert found.options["bias"].requires_grad


class Operand:
    """What compiles_well() looks at of a CUDA tensor."""

    def __init__(self, shape=(2, 4, 8, 64), stride=(2048, 512, 64, 1), dtype=torch.float16):
        self.shape, self.dtype, self._stride = shape, dtype, stride
        self.device = torch.device("cuda", 0)

    def stride(self, dim=None):
        return self._stride if dim is None else self._stride[dim]

    def storage_offset(self):
        return 0


@pytest.mark.parametrize(
    ("more", "due"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"stride": (2048, 512, 65, 1)}, False),
        ({"stride": (2048, 512, 64, 8)}, False),
        ({"shape": (2, 4, 8, 264)}, False),
    ],
)
def test_operands_that_fast_kernels_take(more, due, monkeypatch):
    monkeypatch.setattr("cutlass_attn.jit.available", lambda index: "")
    assert _modified.compiles_well(Operand(**more), Operand(), Operand()) == due
    assert not _modified.compiles_well(Q, Q, Q)  # on a CPU
