"""Maps of bool masks that forward calls keep for later ones, on kernels that run on the CPU.

A write that torch does not count shows whether a call has read its mask: then it sees the write.
"""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from reference import attention as formula

torch = pytest.importorskip("torch", reason="only torch counts writes")

from cutlass_attn import _C, attention, explain  # noqa: E402

KERNELS = ["sm80/mask-simt", "sm90/mask-simt"]
pytestmark = pytest.mark.skipif(
    not all(any(v["kernel"] == k and v["compiled"] for v in _C.variants()) for k in KERNELS),
    reason="this build has no kernels with masks for the CPU",
)


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


def operands(seqlen_q=70, seqlen_k=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 2, seqlen_q, 64), (2, 2, seqlen_k, 64), (2, 2, seqlen_k, 64)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float16) for shape in shapes)
    return q, k, v, torch.rand(seqlen_q, seqlen_k, generator=generator) > 0.4


def is_right(q, k, v, mask, out, **options):
    arrays = (x.numpy() for x in (q, k, v))
    expected = formula(*arrays, "float16", mask=mask.numpy(), **options).exact
    return np.allclose(out.float().numpy(), expected, atol=4e-3)


def is_kept(q, k, v, mask, kernel, **options):
    [chosen] = [x for x in explain(q, k, v, mask=mask, kernel=kernel, **options) if x.chosen]
    return chosen.mask_is_kept


def test_later_calls_do_not_read_the_mask(kernel):
    q, k, v, mask = operands()
    assert not is_kept(q, k, v, mask, kernel)
    first = attention(q, k, v, mask=mask, kernel=kernel)
    assert is_kept(q, k, v, mask, kernel)
    assert "mask's map is kept" in str(explain(q, k, v, mask=mask, kernel=kernel))
    assert is_right(q, k, v, mask, first)
    mask.data.logical_not_()  # not counted
    assert torch.equal(attention(q, k, v, mask=mask, kernel=kernel), first)
    other_q = q.flip(2)  # of another layer, say
    assert is_right(other_q, k, v, ~mask, attention(other_q, k, v, mask=mask, kernel=kernel))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:40], lambda x: x.t()])
def test_a_counted_write_is_seen(kernel, view):
    q, k, v, mask = operands()
    attention(q, k, v, mask=mask, kernel=kernel)
    view(mask).logical_not_()
    assert not is_kept(q, k, v, mask, kernel)
    out = attention(q, k, v, mask=mask, kernel=kernel)
    assert is_right(q, k, v, mask, out)
    assert is_kept(q, k, v, mask, kernel)


def test_views_share_the_map_of_their_base(kernel):
    q, k, v, mask = operands()
    wide = torch.cat([mask, mask], 1)
    keys = k.shape[2]
    first = attention(q, k, v, mask=wide[None, None, :, :keys], kernel=kernel)
    assert is_kept(q, k, v, wide[None, None, :, :keys], kernel)
    wide.data.logical_not_()
    again = attention(q, k, v, mask=wide[None, None, :, :keys], kernel=kernel)
    assert torch.equal(again, first)
    other = wide[:, 1 : keys + 1]  # other memory
    assert not is_kept(q, k, v, other, kernel)
    assert is_right(q, k, v, other, attention(q, k, v, mask=other, kernel=kernel))


def test_another_tensor_with_the_memory_has_a_counter_of_its_own(kernel):
    q, k, v, mask = operands()
    other = torch.from_numpy(mask.numpy())
    attention(q, k, v, mask=mask, kernel=kernel)
    mask.logical_not_()
    assert not is_kept(q, k, v, other, kernel)
    assert is_right(q, k, v, mask, attention(q, k, v, mask=other, kernel=kernel))


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (20, 3)}, {"attention_chunk": 32}, {"causal": True, "window": 9}],
)
def test_other_intervals_have_maps_of_their_own(kernel, options):
    q, k, v, mask = operands()
    attention(q, k, v, mask=mask, kernel=kernel)
    assert not is_kept(q, k, v, mask, kernel, **options)
    for _ in range(2):
        out = attention(q, k, v, mask=mask, kernel=kernel, **options)
        assert is_right(q, k, v, mask, out, **options)
    assert is_kept(q, k, v, mask, kernel, **options) and is_kept(q, k, v, mask, kernel)


def test_other_sizes_and_strides_have_maps_of_their_own(kernel):
    q, k, v, mask = operands(90, 90)
    for of_call in (mask, mask.t(), mask[:1], mask[:, :1], mask[None, None]):
        out = attention(q, k, v, mask=of_call, kernel=kernel)
        assert is_right(q, k, v, of_call, out)
    for length in (64, 90):
        out = attention(q[:, :, :1], k[:, :, :length], v[:, :, :length], mask=mask[:1, :length],
                        kernel=kernel)  # fmt: skip
        assert is_right(q[:, :, :1], k[:, :, :length], v[:, :, :length], mask[:1, :length], out)
    one_head = [x[:, :1] for x in (q, k, v)]
    assert is_right(*one_head, mask, attention(*one_head, mask=mask, kernel=kernel))


def test_layers_with_other_terms_share_the_map(kernel):
    q, k, v, mask = operands()
    attention(q, k, v, mask=mask, kernel=kernel)
    mask.data.logical_not_()
    out = attention(q, k, v, mask=mask, kernel=kernel, softcap=5.0)
    assert is_right(q, k, v, ~mask, out, softcap=5.0)


def test_a_map_goes_with_its_tensor(kernel):
    q, k, v, mask = operands()
    numpy_mask = mask.numpy().copy()
    for invert in (False, True, False):  # in the same memory
        mask = torch.from_numpy(numpy_mask)
        mask.numpy()[:] ^= invert
        assert not is_kept(q, k, v, mask, kernel)
        assert is_right(q, k, v, mask, attention(q, k, v, mask=mask, kernel=kernel))
        del mask
        gc.collect()


def test_the_number_of_maps_has_a_bound(kernel):
    q, k, v, mask = operands()
    masks = [mask.clone() for _ in range(9)]
    for x in masks[:8]:
        attention(q, k, v, mask=x, kernel=kernel)
    attention(q, k, v, mask=masks[0], kernel=kernel)
    attention(q, k, v, mask=masks[8], kernel=kernel)
    kept = [is_kept(q, k, v, x, kernel) for x in masks]
    assert kept == [True, False, *[True] * 7]  # the least recently used one went


def test_maps_have_a_bound_together():
    length, kernel = 40_000, "sm80/mask-simt"  # maps of 40 MiB, most of which nobody writes
    q, k, v = (torch.zeros(1, 1, x, 64, dtype=torch.float16) for x in (1, length, length))
    batch = [x.expand(32, 1, -1, 64) for x in (q, k, v)]
    masks = [torch.zeros(32, 1, 1, length, dtype=torch.bool) for _ in range(4)]
    one_key = {"window": (0, 0)}  # the other tiles are empty without being read
    for mask in masks:
        assert not attention(*batch, mask=mask, kernel=kernel, **one_key).any()
    kept = [is_kept(*batch, mask, kernel, **one_key) for mask in masks]
    assert kept == [False, True, True, True]


def test_no_map_is_kept_where_the_environment_says_so():
    code = """
import torch, cutlass_attn
x = torch.ones(1, 1, 64, 64, dtype=torch.float16)
mask = torch.ones(64, 64, dtype=torch.bool)
for _ in range(2):
    cutlass_attn.attention(x, x, x, mask=mask, kernel="sm80/mask-simt")
    print(" kept " in str(cutlass_attn.explain(x, x, x, mask=mask, kernel="sm80/mask-simt")))
"""

    def run(value):
        environment = {**os.environ, "CUTLASS_ATTN_KEEP_MASKS": value}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    assert run("0").stdout.split() == ["False"] * 2
    assert run("1").stdout.split() == ["True"] * 2
    assert "CUTLASS_ATTN_KEEP_MASKS is 'no', allowed: 0 or 1" in run("no").stderr


def test_masks_whose_writes_nobody_counts_are_read_in_each_call(kernel):
    q, k, v, mask = operands()
    with torch.inference_mode():
        frozen = mask.clone()
        for _ in range(2):
            assert is_right(q, k, v, frozen, attention(q, k, v, mask=frozen, kernel=kernel))
            assert not is_kept(q, k, v, frozen, kernel)
            frozen.logical_not_()
    arrays = [x.numpy() for x in (q, k, v, mask)]
    for _ in range(2):
        out = attention(*arrays[:3], mask=arrays[3], kernel=kernel)
        assert is_right(q, k, v, mask, torch.from_numpy(out))
        arrays[3][:] = ~arrays[3]


def test_compiled_code_reads_the_mask_in_each_call(kernel):
    q, k, v, mask = operands()

    @torch.compile(backend="eager", fullgraph=True)
    def call(mask):
        return attention(q, k, v, mask=mask, kernel=kernel)

    for _ in range(2):
        assert is_right(q, k, v, mask, call(mask))
        assert not is_kept(q, k, v, mask, kernel)
        mask.data.logical_not_()  # as code that Inductor has made writes


def test_a_training_step_keeps_the_map(kernel):
    q, k, v, mask = operands()
    q.requires_grad_()
    for _ in range(2):
        out = attention(q, k, v, mask=mask, kernel=kernel)
        assert is_right(q.detach(), k, v, mask, out.detach())
    assert is_kept(q.detach(), k, v, mask, kernel)


def test_threads_share_maps(kernel):
    q, k, v, mask = operands()
    masks = [mask, ~mask, mask.clone(), mask.flip(0)]
    expected = [attention(q, k, v, mask=x.clone(), kernel=kernel) for x in masks]
    wrong = []

    def run(seed):
        for i in np.random.default_rng(seed).permutation(24) % len(masks):
            if not torch.equal(attention(q, k, v, mask=masks[i], kernel=kernel), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
