"""Offsets beyond 2^31 elements, one stride at a time.

On the CPU the operands lie in memory that is reserved and never touched but for a few rows; on a
GPU it has to be there.
"""

import dataclasses
import mmap
import os

import case_list
import cases
import cutlass_attn
import pytest
from cases import torch
from cutlass_attn._build.files import locked

FAR = 2**31 + 64  # elements: over 2^31, and a multiple of 16 bytes
CASE = case_list.Case("far", "", batch=2, heads=2, heads_kv=2, seqlen_q=2, seqlen_k=2)
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13
DIMENSIONS = {"batch": 0, "head": 1, "row": 2}


@pytest.fixture(autouse=True)
def _one_at_a_time(tmp_path_factory):
    """Several processes with an operand of 20 GB each would leave no GPU memory to other tests."""
    if not torch.cuda.is_available():
        yield
        return
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with locked(shared / "far_operand"):
        yield


@pytest.mark.parametrize("variant", cases.all_variants())
@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("operand", ["q", "k", "v", "out"])
def test_far_operand(variant, dimension, operand):
    head_dim = variant.head_dim or 64
    operands = dict(
        zip(["q", "k", "v", "out"], cases.tensors(CASE, variant.dtype, head_dim, variant.device))
    )
    near = cutlass_attn.attention(
        operands["q"],
        operands["k"],
        operands["v"],
        **cases.own(variant),
    )
    operands[operand] = _far_apart(operands[operand], DIMENSIONS[dimension])
    q, k, v, out = operands.values()
    cutlass_attn.attention(q, k, v, out=out, **cases.own(variant))
    assert torch.equal(out, near)


OPTION_CASES = [dataclasses.replace(CASE, name=name, **{name: "bhqk"}) for name in ("bias", "mask")]


@pytest.mark.parametrize(("variant", "case"), cases.all_pairs(OPTION_CASES))
@pytest.mark.parametrize("dimension", [*DIMENSIONS.values(), 3])
def test_far_option(variant, case, dimension):
    if dimension == 3 and variant.kernel.startswith("sm80/bias"):
        pytest.skip("keys of a bias lie side by side")
    name = case.name
    q, k, v, _ = cases.tensors(case, variant.dtype, variant.head_dim or 64, variant.device)
    option = cases.keywords(case, variant.dtype, variant.device)[name]
    near = cutlass_attn.attention(q, k, v, **cases.own(variant), **{name: option})
    far = _far_apart(option, dimension)
    assert torch.equal(
        cutlass_attn.attention(q, k, v, **cases.own(variant), **{name: far}),
        near,
    )


def _far_apart(x, dimension):
    """x with a stride of FAR elements in one dimension of size 2."""
    strides = [*(d * x.shape[3] for d in (4, 2, 1)), 1]
    strides[dimension] = FAR
    count = FAR + 16 * x.shape[3]
    if x.is_cuda:
        if torch.cuda.mem_get_info()[0] < 2 * count * x.element_size():
            pytest.skip("needs 20 GB of GPU memory")
        flat = torch.empty(count, dtype=x.dtype, device=x.device)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        flat = torch.frombuffer(mmap.mmap(-1, count * x.element_size(), flags=flags), dtype=x.dtype)
    return flat.as_strided(x.shape, strides).copy_(x)
