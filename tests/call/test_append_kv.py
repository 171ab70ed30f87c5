"""append_kv: rows go to their slots, in any layout of pages."""

import cases
import numpy as np
import pytest
import serving
from cases import torch
from cutlass_attn import append_kv, attention_decode
from serving import Batch, int32
from test_decode import call_of

DEVICES = ["cpu", pytest.param("cuda", marks=cases.needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("page", "dims"), [(1, (16, 16)), (13, (24, 8)), (16, (5, 7))])
@pytest.mark.parametrize("scaled", [False, True])
def test_append(device, dtype, page, dims, scaled):
    """Into strided halves of rows, as vLLM has them."""
    heads, pages, rows = 3, 9, 7
    store = torch.zeros(pages, heads, page, sum(dims), dtype=dtype, device=device).transpose(1, 2)
    k_cache, v_cache = store[..., : dims[0]], store[..., dims[0] :]
    k, v = (torch.randn(rows, 2 * heads, d).to(device, dtype)[:, ::2] for d in dims)
    slots = torch.randperm(pages * page)[:rows].to(device)
    slots[2] = -1
    scales = {"k_scale": 0.5, "v_scale": torch.tensor([2.0, 4.0, 0.25], device=device)}
    append_kv(k, v, k_cache, v_cache, slots, **(scales if scaled else {}))
    expected = [torch.zeros_like(x) for x in (k_cache, v_cache)]
    factors = (2.0, 1 / scales["v_scale"][:, None]) if scaled else (1.0, 1.0)
    for x, to, factor in zip((k, v), expected, factors, strict=True):
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                to[slot // page, slot % page] = (x[t].float() * factor).to(dtype)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_append_fewer_slots_than_rows():
    """What engines pad is left out."""
    k = torch.randn(5, 2, 8)
    k_cache, v_cache = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    append_kv(k, k, k_cache, v_cache, torch.tensor([6, 1]))
    assert torch.equal(k_cache[1, 2], k[0])
    assert torch.equal(k_cache[0, 1], k[1])
    assert k_cache.count_nonzero() == 32


def test_append_numpy_equals_torch():
    k, caches = torch.randn(3, 2, 8), [torch.zeros(2, 4, 2, 8) for _ in range(2)]
    slots = torch.tensor([5, -1, 0])
    append_kv(k, k, *caches, slots, k_scale=3.0)
    arrays = [np.zeros((2, 4, 2, 8), np.float32) for _ in range(2)]
    append_kv(k.numpy(), k.numpy(), *arrays, slots.numpy(), k_scale=3.0)
    for ours, theirs in zip(caches, arrays, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)


def test_decode_reads_what_was_appended():
    """A cache filled by append_kv in pages of no order; scales there and back."""
    case = Batch("filled", "", (2,) * 3, (20, 1, 33), page=4, causal=True)
    args, options = call_of(case, "float32", 16, "cpu")
    q, k, v, lengths = args
    scales = {"k_scale": torch.tensor([2.0, 0.5]), "v_scale": 4.0}
    filled = [torch.full_like(x, torch.nan) for x in (k, v)]
    for b, (_, *kv) in enumerate(serving.values(case, "float32", 16)):
        rows = [torch.from_numpy(x).transpose(0, 1) for x in kv]
        j = torch.arange(rows[0].shape[0])
        slots = options["block_table"][b, j // 4] * 4 + j % 4
        append_kv(*rows, *filled, slots.long(), **scales)
    expected = attention_decode(*args, **options)
    torch.testing.assert_close(attention_decode(q, *filled, lengths, **options, **scales), expected)


# --- Errors ---------------------------------------------------------------------------------------

PAGES, ROWS = torch.zeros(2, 4, 2, 16), torch.zeros(3, 2, 16)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"slot_mapping": torch.tensor([0, 8, 1])},
            ValueError,
            r"slot_mapping\[1\] is 8, allowed:",
        ),
        ({"slot_mapping": int32([0, 1, 2])}, ValueError, "slot_mapping must be int64"),
        ({"slot_mapping": torch.arange(4)}, ValueError, "slot_mapping must have shape"),
        ({"k": ROWS[0]}, ValueError, r"k must have 3 dimensions, \(rows, heads, head_dim\)"),
        ({"v": ROWS[:2]}, ValueError, "k and v must have one shape but for the head dim"),
        ({"k_cache": PAGES.half()}, ValueError, "k_cache must be torch.float32 like k"),
        ({"k_cache": PAGES[..., :8]}, ValueError, "k and k_cache must have one head dim"),
        (
            {"k_cache": PAGES[:, :, :1], "v_cache": PAGES[:, :, :1]},
            ValueError,
            "the heads and head",
        ),
        ({"k": ROWS.int()}, TypeError, "k must be float16, bfloat16, float32 or float64"),
        ({"k_scale": 0.0}, ValueError, "k_scale is 0.0, allowed: a finite number > 0"),
        ({"slot_mapping": None}, TypeError, r"append_kv\(\) needs slot_mapping, got None"),
    ],
)
def test_errors_of_append(given, error, message):
    good = {"k": ROWS, "v": ROWS, "k_cache": PAGES, "v_cache": PAGES.clone()}
    with pytest.raises(error, match=message):
        append_kv(**{**good, "slot_mapping": torch.arange(3), **given})
