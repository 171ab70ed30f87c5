"""Batches of sequences of their own lengths: packed or in a cache, and what attention over each of
them is. Each case has its reason; every kernel that knows the views runs all of them.

Memory that no sequence owns is NaN: what a kernel reads beyond its operands shows."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import cases
import numpy as np
import reference
from cutlass_attn import testing

torch = __import__("pytest").importorskip("torch", reason="kernels are tested on torch tensors")

# Options that say where rows are, and what they mean.
VIEWS = {"varlen", "paged_kv", "kv_scales", "fp8_kv", "latent_kv", "indices"}


@dataclass(frozen=True)
class Batch:
    name: str
    reason: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    page: int | None = None  # keys of a page; None: packed, or an entry of the cache for each
    halves: bool = False  # K and V are halves of one row
    spare_rows: int = 0  # of q, behind the last offset
    spare_entries: int = 0  # offsets that repeat the last one
    room: int = 0  # keys of a sequence that do not count
    heads: int = 4
    heads_kv: int = 2
    head_dim: int | None = None  # None: what the kernel is compiled for, or 64
    head_dim_v: int | None = None
    causal: bool = False
    window: int | tuple | None = None
    attention_chunk: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "h" or "bh"
    sinks: bool = False
    scales: str | None = None  # "number", "one", "heads"
    dropout_p: float = 0.0
    fp8: bool = False  # K and V of float8_e4m3fn
    latent: bool = False  # V is a view of K's first columns

    @property
    def batch(self):
        return len(self.seqlens_q)

    @property
    def scalars(self):
        """Keywords of a call and of the oracle."""
        names = ("causal", "window", "attention_chunk", "softmax_scale", "softcap")
        return {name: getattr(self, name) for name in names}

    @property
    def asks_for(self):
        """Names of the options that a kernel may lack."""
        asked = {
            "varlen": True,
            "paged_kv": self.page,
            "attention_chunk": self.attention_chunk,
            "alibi_slopes": self.alibi,
            "sinks": self.sinks,
            "kv_scales": self.scales,
            "fp8_kv": self.fp8,
            "latent_kv": self.latent,
            "dropout": self.dropout_p,
            "softcap": self.softcap,
        }
        return {name for name, value in asked.items() if value}

    def __str__(self):
        return self.name


RAGGED = ((3, 0, 70, 1, 5), (7, 4, 131, 90, 0))
# As DeepSeek's absorbed attention has them; the scale is that of its 192 columns before.
LATENT = {"heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "latent": True, "softmax_scale": 0.07}
VARLEN = [
    Batch("ragged", "no length like another; no queries; no keys", *RAGGED),
    Batch("ragged_causal", "bottom-right in every entry", *RAGGED, causal=True),
    Batch("one", "a dense call", (65,), (65,), causal=True),
    Batch("none", "no sequences at all", (), ()),
    Batch("empty", "none with a row", (0, 0), (0, 0)),
    Batch("more_queries", "first rows see no key", (40, 9), (9, 3), causal=True),
    Batch("padded", "offsets end early, and repeat", *RAGGED, spare_rows=9, spare_entries=3),
    Batch("window", "both ends move", (60, 33), (90, 20), window=(9, 4)),
    Batch("chunk", "chunks count from an entry's key 0", *RAGGED, attention_chunk=7, causal=True),
    Batch("softcap", "another score", *RAGGED, softcap=2.5, softmax_scale=0.3),
    Batch("alibi", "a slope per head", *RAGGED, alibi="h", causal=True),
    Batch("alibi_per_batch", "a slope per entry and head", *RAGGED, alibi="bh"),
    Batch("sinks", "also where no key is", *RAGGED, sinks=True, causal=True),
    Batch("dropout", "by entry and its own rows", *RAGGED, dropout_p=0.3),
    Batch("mqa", "one KV head", *RAGGED, heads=5, heads_kv=1),
    Batch("mha", "as many KV heads", *RAGGED, heads=2, heads_kv=2),
    Batch("wider_v", "V wider than K", *RAGGED, head_dim=16, head_dim_v=40),
    Batch("halves", "K and V interleaved", *RAGGED, halves=True),
    Batch("used", "keys that do not count behind each entry", *RAGGED, room=3, causal=True),
    Batch("scale", "a number", *RAGGED, scales="number"),
    Batch("scale_array", "one for all heads", *RAGGED, scales="one"),
    Batch("scale_per_head", "one for each", *RAGGED, scales="heads", causal=True),
    Batch("fp8", "stored in 8 bits", *RAGGED, fp8=True, scales="heads", causal=True),
    Batch("fp8_chunk", "the general score", *RAGGED, fp8=True, scales="one", attention_chunk=33),
    Batch(
        "fp8_pages",
        "in pages, as vLLM has them",
        *RAGGED,
        fp8=True,
        page=16,
        halves=True,
        causal=True,
        softcap=3.0,
        sinks=True,
        scales="heads",
    ),
    *(
        Batch(f"pages_{page}", "of a size", *RAGGED, page=page, causal=True)
        for page in (1, 13, 16, 256)
    ),
    Batch("pages_halves", "as vLLM has them", *RAGGED, page=16, halves=True, causal=True),
    Batch("pages_room", "a table with pages to spare", *RAGGED, page=16, room=70),
    Batch("latent", "packed", *RAGGED, heads=5, causal=True, **LATENT),
    Batch("latent_pages", "in pages", *RAGGED, heads=16, page=13, causal=True, **LATENT),
    Batch(
        "pages_mixed",
        "prefill and decoding in one call, with all that a layer may ask for",
        (1, 40, 1, 17),
        (129, 40, 1, 60),
        page=13,
        causal=True,
        window=(30, None),
        softcap=3.0,
        sinks=True,
        alibi="h",
        spare_rows=5,
        spare_entries=2,
        scales="heads",
    ),
]


def fits(variant, case, rows, quantize=None):
    """Should the variant run the case, in a call with so many queries, or rows of them?"""
    if (variant.accumulate, variant.quantize) != ("fp32", quantize):
        return False
    if not case.asks_for - {"latent_kv"} <= set(variant.options):
        return False
    if not set(variant.needs) <= case.asks_for:
        return False
    if variant.max_rows and rows * case.heads // case.heads_kv > variant.max_rows:
        return False
    if variant.kernel.startswith("sm90") and case.page and case.page % 8:
        return False  # which TMA cannot copy
    return variant.head_dim == 0 or cases.fits_head_dims(variant, case)


def _all_queries(seqlen, seqlens_k):
    return (seqlen,) * len(seqlens_k), seqlens_k


LENGTHS = (70, 1, 0, 131)
DECODE = [
    Batch("one_query", "a step of a batch", *_all_queries(1, LENGTHS), room=9),
    Batch("causal", "a few queries", *_all_queries(5, LENGTHS), room=1, causal=True),
    Batch("many_queries", "more than decoding has", *_all_queries(33, (90, 40)), causal=True),
    Batch("window", "slides", *_all_queries(2, LENGTHS), window=(17, 0), causal=True),
    Batch("chunk", "of keys", *_all_queries(2, LENGTHS), attention_chunk=33, causal=True),
    Batch("softcap", "bends", *_all_queries(1, LENGTHS), softcap=2.0, softmax_scale=0.2),
    Batch("sinks", "where no key is", *_all_queries(2, LENGTHS), sinks=True, causal=True),
    Batch("alibi", "a slope per head", *_all_queries(3, LENGTHS), alibi="h", causal=True),
    Batch("alibi_per_batch", "and entry", *_all_queries(1, LENGTHS), alibi="bh"),
    Batch("mqa", "many heads share a tile", *_all_queries(2, LENGTHS), heads=9, heads_kv=1),
    Batch("scales", "per head", *_all_queries(1, LENGTHS), scales="heads"),
    Batch("fp8", "stored in 8 bits", *_all_queries(1, LENGTHS), fp8=True, room=9),
    Batch("fp8_causal", "scales", *_all_queries(5, LENGTHS), fp8=True, causal=True, scales="heads"),
    Batch("fp8_many", "prefill", *_all_queries(33, (90, 40)), fp8=True, causal=True, scales="one"),
    Batch(
        "fp8_pages",
        "what a layer may ask for",
        *_all_queries(3, LENGTHS),
        fp8=True,
        page=13,
        halves=True,
        room=20,
        causal=True,
        window=(40, None),
        softcap=3.0,
        sinks=True,
        alibi="bh",
        scales="heads",
    ),
    Batch(
        "fp8_softcap",
        "another score",
        *_all_queries(2, LENGTHS),
        fp8=True,
        page=16,
        causal=True,
        softcap=2.0,
        sinks=True,
        scales="heads",
    ),
    *(
        Batch(f"pages_{page}", "of a size", *_all_queries(2, LENGTHS), page=page, causal=True)
        for page in (1, 13, 16, 256)
    ),
    Batch("pages_halves", "as vLLM", *_all_queries(1, LENGTHS), page=16, halves=True, room=40),
    Batch("latent", "an entry each", *_all_queries(1, LENGTHS), heads=16, room=9, **LATENT),
    Batch("latent_few", "no whole tile", *_all_queries(1, LENGTHS), heads=5, page=64, **LATENT),
    Batch(
        "latent_queries",
        "tokens of a draft",
        *_all_queries(5, LENGTHS),
        heads=12,
        page=16,
        causal=True,
        sinks=True,
        room=40,
        **LATENT,
    ),
    Batch(
        "latent_many",
        "a tile for each head",
        *_all_queries(33, (90, 40)),
        heads=2,
        page=1,
        causal=True,
        window=(60, 0),
        **LATENT,
    ),
    Batch(
        "latent_512",
        "without rotated columns",
        *_all_queries(2, LENGTHS),
        page=64,
        causal=True,
        sinks=True,
        **LATENT | {"heads": 20, "head_dim": 512},
    ),
    Batch(
        "latent_320",
        "a smaller one",
        *_all_queries(1, LENGTHS),
        page=16,
        scales="one",
        **LATENT | {"heads": 8, "head_dim": 320, "head_dim_v": 256},
    ),
    Batch(
        "latent_apart",
        "V that is no view of K",
        *_all_queries(1, LENGTHS),
        heads=3,
        page=16,
        **LATENT | {"latent": False},
    ),
    Batch(
        "pages_all",
        "what a layer may ask for",
        *_all_queries(3, LENGTHS),
        page=13,
        halves=True,
        room=20,
        causal=True,
        window=(40, None),
        softcap=3.0,
        sinks=True,
        alibi="bh",
        scales="number",
    ),
]


def _rng(case, what):
    return np.random.default_rng(zlib.crc32(f"{case!r} {what}".encode()))


@functools.lru_cache(maxsize=64)
def values(case, dtype, head_dim):
    """q, k and v of each sequence as (H, S, D) float32 arrays of values that dtype represents."""
    rng = _rng(case, f"{dtype} {head_dim}")
    head_dim_v = case.head_dim_v or head_dim
    stored = "float8_e4m3fn" if case.fp8 else dtype
    found = [
        tuple(
            _rounded(rng.standard_normal(shape), kind)
            for shape, kind in (
                ((case.heads, rows, head_dim), dtype),
                ((case.heads_kv, keys, head_dim), stored),
                ((case.heads_kv, keys, head_dim_v), stored),
            )
        )
        for rows, keys in zip(case.seqlens_q, case.seqlens_k, strict=True)
    ]
    return [(q, k, k[..., :head_dim_v]) for q, k, _ in found] if case.latent else found


def _rounded(x, dtype):
    if dtype != "float8_e4m3fn":
        return reference.round_to(x, dtype)
    return torch.from_numpy(x).float().to(torch.float8_e4m3fn).float().numpy()


@functools.lru_cache(maxsize=64)
def arrays(case):
    """Options that are arrays, by keyword; scales as (Hkv,) factors."""
    rng = _rng(case, "options")
    found = {}
    if case.alibi:
        shape = (case.heads,) if case.alibi == "h" else (case.batch, case.heads)
        found["alibi_slopes"] = rng.standard_normal(shape).astype(np.float32) / 4
    if case.sinks:
        found["sinks"] = rng.standard_normal(case.heads).astype(np.float32) * 2
    if case.dropout_p:
        # A part of a larger call.
        part = (case.heads + 5, 3, 16 * 9, 32 * 11)
        found["rng_state"] = np.append(rng.integers(-(2**63), 2**63, size=2), part)
    if case.scales:
        # Powers of two: what is stored times them is as exact as what is stored.
        exponents = rng.integers(-2, 3, size=(2, case.heads_kv))
        factors = np.ldexp(np.float32(1), exponents if case.scales == "heads" else exponents[:, :1])
        found["k_scale"], found["v_scale"] = factors.astype(np.float32)
    return found


def keywords(case, device="cpu"):
    """Options of a call, the scalars among them."""
    options = dict(case.scalars)
    for name, x in arrays(case).items():
        is_number = name.endswith("_scale") and case.scales == "number"
        options[name] = float(x[0]) if is_number else torch.from_numpy(x.copy()).to(device)
    if case.alibi == "bh":
        slopes = torch.zeros(case.batch + case.spare_entries, case.heads, device=device)
        slopes[: case.batch] = options["alibi_slopes"]
        options["alibi_slopes"] = slopes
    if case.dropout_p:
        options["dropout_p"] = case.dropout_p
    return options


@functools.lru_cache(maxsize=64)
def expected(case, dtype, head_dim):
    """What the oracle says of each sequence: of (1, H, S, D) arrays."""
    found = dict(arrays(case))
    k_scale, v_scale = (
        np.broadcast_to(found.pop(name, np.float32(1)), case.heads_kv)[:, None, None]
        for name in ("k_scale", "v_scale")
    )
    rng_state = found.pop("rng_state", None)
    slopes = found.pop("alibi_slopes", None)
    if slopes is not None:
        slopes = np.broadcast_to(slopes, (case.batch, case.heads))
    results = []
    for b, (q, k, v) in enumerate(values(case, dtype, head_dim)):
        options = {**case.scalars, **found}
        if slopes is not None:
            options["alibi_slopes"] = slopes[b : b + 1]
        if case.dropout_p:
            shape = (case.batch, case.heads, q.shape[1], k.shape[1])
            options["kept"] = testing.dropout_mask(rng_state, shape, case.dropout_p)[b : b + 1]
            options["dropout_p"] = case.dropout_p
        results.append(
            reference.attention(q[None], (k * k_scale)[None], (v * v_scale)[None], dtype, **options)
        )
    return results


def judge(case, dtype, head_dim, outs, lses=None):
    """Raises unless the results (H, S, Dv) and log-sum-exps (H, S) of the sequences are right."""
    theirs = expected(case, dtype, head_dim)
    columns = case.head_dim_v or head_dim

    def rows(parts):
        joined = [np.asarray(x).reshape(-1, columns) for x in parts]
        return np.concatenate(joined) if joined else np.zeros((0, columns))

    accuracy = testing.judge(
        rows(outs), rows([x.exact for x in theirs]), rows([x.unfused for x in theirs]), dtype
    )
    assert accuracy.ok, accuracy
    for lse, x in zip(lses, theirs, strict=True) if lses is not None else ():
        assert testing.Reference(*x[:4]).confirms_lse(lse[None]), (lse, x.lse)


# --- Tensors --------------------------------------------------------------------------------------


def int32(numbers, device="cpu"):
    return torch.tensor(list(numbers), dtype=torch.int32, device=device)


def offsets(lengths, repeated=0, device="cpu"):
    """Where the rows of packed sequences begin and end."""
    ends = [0, *np.cumsum(lengths, dtype=int)]
    return int32([*ends, *ends[-1:] * repeated], device)


def _pair(case, shape, head_dims, dtype, device):
    """NaN for K and V of (..., heads, head_dim), with equal shapes but for head dims."""
    dtype = torch.float8_e4m3fn if case.fp8 else dtype
    *outer, heads = shape
    if case.latent:
        k = torch.full((*shape, head_dims[0]), torch.nan, dtype=dtype, device=device)
        return k, k[..., : head_dims[1]]
    if case.halves:
        store = torch.full((*outer, heads, sum(head_dims)), torch.nan, dtype=dtype, device=device)
        return store[..., : head_dims[0]], store[..., head_dims[0] :]
    return tuple(
        torch.full((*shape, dim), torch.nan, dtype=dtype, device=device) for dim in head_dims
    )


def _tensor(x, like):
    """(H, S, D) as rows (S, H, D)."""
    return torch.from_numpy(x).to(like).transpose(0, 1)


def packed_queries(case, dtype, head_dim, device):
    """q (T, H, D), with NaN in rows of no sequence."""
    rows = sum(case.seqlens_q) + case.spare_rows
    q = torch.full((rows, case.heads, head_dim), torch.nan, dtype=dtype, device=device)
    at = 0
    for x, _, _ in values(case, str(dtype).removeprefix("torch."), head_dim):
        q[at : at + x.shape[1]] = _tensor(x, q)
        at += x.shape[1]
    return q


def packed_keys(case, dtype, head_dim, device):
    """k and v (Tk, Hkv, D), with `room` rows of NaN behind each sequence, and their offsets."""
    lengths = [n + case.room for n in case.seqlens_k]
    dims = head_dim, case.head_dim_v or head_dim
    k, v = _pair(case, (sum(lengths), case.heads_kv), dims, dtype, device)
    begins = offsets(lengths, case.spare_entries, device)
    for begin, (_, *kv) in zip(
        begins.tolist(), values(case, str(dtype).removeprefix("torch."), head_dim), strict=False
    ):
        for x, to in zip(kv, (k, v), strict=True):
            to[begin : begin + x.shape[1]] = _tensor(x, to)
    return k, v, begins


def pages(case, dtype, head_dim, device):
    """k and v (P, page, Hkv, D) in pages of no order, and the block table, -1 where unused."""
    entries = case.batch + case.spare_entries
    needed = [-(-n // case.page) for n in case.seqlens_k] + [0] * case.spare_entries
    columns = max([0, *needed]) + -(-case.room // case.page)
    numbers = _rng(case, "pages").permutation(sum(needed) + 2)
    dims = head_dim, case.head_dim_v or head_dim
    shape = (len(numbers), case.heads_kv, case.page)  # heads outside, as in vLLM
    k, v = (x.transpose(1, 2) for x in _pair(case, shape, dims, dtype, device))
    table = torch.full((entries, columns), -1, dtype=torch.int32)
    at = 0
    for b, (_, *kv) in enumerate(values(case, str(dtype).removeprefix("torch."), head_dim)):
        own = numbers[at : at + needed[b]]
        at += needed[b]
        table[b, : needed[b]] = torch.from_numpy(own)
        for x, to in zip(kv, (k, v), strict=True):
            for j, page in enumerate(own):
                part = _tensor(x[:, j * case.page : (j + 1) * case.page], to)
                to[int(page), : part.shape[0]] = part
    return k, v, table.to(device)


def cache(case, dtype, head_dim, device):
    """k and v (B, S, Hkv, D), an entry for each sequence."""
    rows = max([0, *case.seqlens_k]) + case.room
    dims = head_dim, case.head_dim_v or head_dim
    k, v = _pair(case, (case.batch, rows, case.heads_kv), dims, dtype, device)
    for b, (_, *kv) in enumerate(values(case, str(dtype).removeprefix("torch."), head_dim)):
        for x, to in zip(kv, (k, v), strict=True):
            to[b, : x.shape[1]] = _tensor(x, to)
    return k, v


def to_numpy(x):
    return x.float().cpu().numpy()


def rotated(x, cos, sin, positions, interleaved):
    """x (B, S, H, D) in float32, by the definition: pairs turn by the angle of their position."""
    x = x.float().clone()
    half = cos.shape[1]
    a = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    b = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    c, s = (table.float()[positions][:, :, None] for table in (cos, sin))
    x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return x
