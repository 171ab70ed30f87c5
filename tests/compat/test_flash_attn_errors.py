"""compat.flash_attn: what it says of wrong arguments."""

import re

import pytest

torch = pytest.importorskip("torch")

from cutlass_attn.compat import flash_attn  # noqa: E402
from test_flash_attn import offsets, randn  # noqa: E402

BAD_TABLES = {
    "a sequence of block_table has -2 keys": lambda t: {"cache_seqlens": -2},
    "has 12 keys but block_table covers 8": lambda t: {"cache_seqlens": 12},
    r"block_table\[1, 0\] is 9, but there are 6 pages": lambda t: {
        "block_table": torch.tensor([[0, 1], [9, 2]], dtype=torch.int32)
    },
    r"block_table\[0, 1\] is -1": lambda t: {
        "block_table": torch.tensor([[0, -1], [3, 2]], dtype=torch.int32)
    },
    "block_table must be int32": lambda t: {"block_table": t.long()},
    "block_table has 1 rows for a batch of 2": lambda t: {"block_table": t[:1]},
}


@pytest.mark.parametrize("message", BAD_TABLES)
def test_bad_tables(message):
    table = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    arguments = {"block_table": table, "cache_seqlens": 7} | BAD_TABLES[message](table)
    pages, q = randn(6, 4, 2, 16), randn(2, 1, 2, 16)
    with pytest.raises(RuntimeError, match=message):
        flash_attn.flash_attn_with_kvcache(q, pages, pages, **arguments)
    lengths = offsets(*[arguments["cache_seqlens"]] * 2)
    one_each, table = offsets(1, 1), arguments["block_table"]
    with pytest.raises(RuntimeError, match=message):
        flash_attn.flash_attn_varlen_func(
            q[:, 0], pages, pages, one_each, lengths, 1, 1, block_table=table
        )


def test_bad_lengths():
    q, cache = randn(2, 1, 2, 16), randn(2, 6, 2, 16)
    call = flash_attn.flash_attn_with_kvcache
    with pytest.raises(RuntimeError, match="cache_seqlens has 7, but the cache has room for 6"):
        call(q, cache, cache, cache_seqlens=7)
    with pytest.raises(RuntimeError, match=r"cache_seqlens has 6, .* 6 keys, 1 of them new"):
        call(q, cache, cache, q, q, cache_seqlens=6)
    with pytest.raises(RuntimeError, match="cache_seqlens has -1"):
        call(q, cache, cache, cache_seqlens=torch.tensor([-1, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="k and v must be given together"):
        call(q, cache, cache, q)
    with pytest.raises(ValueError, match="cache_seqlens must be given"):
        call(q, cache, cache, q, q)
    with pytest.raises(ValueError, match="k and v must be given where rotary_cos is"):
        call(q, cache, cache, rotary_cos=cache, rotary_sin=cache)
    with pytest.raises(NotImplementedError, match="k_cache requires a gradient"):
        call(q, cache.clone().requires_grad_(), cache)


def test_errors_name_the_argument():
    x = torch.zeros(2, 5, 2, 16)
    cache, packed = torch.zeros(2, 8, 2, 16), torch.zeros(5, 2, 16)
    offsets, table = torch.tensor([0, 5], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    zero_d = torch.tensor(3, dtype=torch.int32)

    def decode(lengths):
        return lambda: flash_attn.flash_attn_with_kvcache(x, cache, cache, cache_seqlens=lengths)

    for call, error, message in (
        (decode(3.7), TypeError, "cache_seqlens must be an int or an int32 tensor (B,), got 3.7"),
        (decode([3, 4]), TypeError, "cache_seqlens must be an int or an int32 tensor (B,), got ["),
        (decode(True), TypeError, "cache_seqlens must be an int or an int32 tensor (B,), got True"),
        (decode(zero_d), ValueError, "cache_seqlens must have shape (B,), got ()"),
        (
            lambda: flash_attn.flash_attn_func(x, x, x, window_size=None),
            TypeError,
            "window_size must be a pair (left, right) of int, got None",
        ),
        (
            lambda: flash_attn.flash_attn_func(x, x, x, window_size=(2.7, 0)),
            TypeError,
            "window must be an int or a pair (left, right) of int, got (2.7, 0)",
        ),
        (
            lambda: flash_attn.flash_attn_func(x, x, x, softcap=None),
            TypeError,
            "softcap must be a number, got None",
        ),
        (
            lambda: flash_attn.flash_attn_varlen_func(
                packed, cache, cache, offsets, None, 5, 5, block_table=table
            ),
            TypeError,
            "cu_seqlens_k must be given with block_table, got None",
        ),
        (
            lambda: flash_attn.flash_attn_qkvpacked_func(x),
            ValueError,
            "qkv must have shape (B, S, 3, H, D), got (2, 5, 2, 16)",
        ),
        (
            lambda: flash_attn.flash_attn_varlen_kvpacked_func(
                packed, packed, offsets, offsets, 5, 5
            ),
            ValueError,
            "kv must have shape (T, 2, H, D), got (5, 2, 16)",
        ),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()
    out = flash_attn.flash_attn_func(x, x, x, window_size=(None, None))
    assert torch.equal(out, flash_attn.flash_attn_func(x, x, x))
