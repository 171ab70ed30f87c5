"""The calls that every kernel is tested with, each with its reason.

Sizes are small because GPU kernels also run emulated on the CPU, and awkward because tiles are
powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from pairwise import pairwise


@dataclass(frozen=True)
class Case:
    name: str
    reason: str
    batch: int = 1
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 65
    seqlen_k: int = 65
    head_dim: int | None = None  # None: what the kernel is compiled for, or 64
    head_dim_v: int | None = None  # None: as head_dim
    causal: bool = False
    window: int | tuple | None = None
    attention_chunk: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    layout: str = "bhsd"
    storage: str = "dense"
    magnitude: float = 1.0
    # Which dimensions they have, out of "bhqk"; 1 where they are broadcast: "b11k", "qk".
    bias: str | None = None
    bias_dtype: str | None = None  # None: as q
    bias_inf: bool = False  # a third of it is -inf
    mask: str | None = None
    mask_block: int = 0  # 0: keys at random; or by blocks of so many queries and keys
    alibi: str | None = None  # "h" or "bh"
    sinks: bool = False
    dropout_p: float = 0.0
    max_logit: bool = False

    @property
    def scalars(self):
        """Keywords of attention() and of the oracle."""
        return {
            "causal": self.causal,
            "window": self.window,
            "attention_chunk": self.attention_chunk,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }

    @property
    def is_aligned(self):
        """Do all rows begin at multiples of 16 bytes?"""
        return self.storage not in ("unaligned", "shifted")

    @property
    def has_whole_vectors(self):
        """Are rows made of pieces of 16 bytes?"""
        return (self.head_dim or 64) % 8 == 0 and (self.head_dim_v or 64) % 8 == 0

    @property
    def is_identity(self):
        """Is a logit q.k times a positive scale?"""
        positive = self.softmax_scale is None or self.softmax_scale > 0
        return self.softcap == 0 and positive

    @property
    def asks_for(self):
        """Names of the options that a kernel may lack."""
        asked = {
            "bias": self.bias,
            "mask": self.mask,
            "attention_chunk": self.attention_chunk,
            "alibi_slopes": self.alibi,
            "sinks": self.sinks,
            "dropout": self.dropout_p,
            "return_max_logit": self.max_logit,
        }
        return {name for name, value in asked.items() if value}

    def __str__(self):
        return self.name


CASES = [
    Case("ragged", "neither length is a multiple of a tile", seqlen_q=77, seqlen_k=131),
    Case("whole_tiles", "no residue anywhere", seqlen_q=64, seqlen_k=128),
    Case("one_over", "one query and one key beyond a tile", seqlen_q=65, seqlen_k=129),
    Case("fewer_queries", "Sq < Sk, as with cached keys", seqlen_q=9, seqlen_k=140),
    Case("more_queries", "Sq > Sk", seqlen_q=140, seqlen_k=9),
    Case("one_query", "decoding", seqlen_q=1, seqlen_k=100),
    Case("one_key", "softmax of one logit is 1", seqlen_q=33, seqlen_k=1),
    Case("one_of_each", "the smallest call", heads=1, heads_kv=1, seqlen_q=1, seqlen_k=1),
    Case("causal", "the diagonal crosses tiles", seqlen_q=130, seqlen_k=130, causal=True),
    Case("causal_fewer_queries", "the diagonal is shifted right", seqlen_k=150, causal=True),
    Case("causal_more_queries", "the first queries see no key", seqlen_q=150, causal=True),
    Case(
        "causal_no_key",
        "a whole tile of queries sees no key",
        seqlen_q=133,
        seqlen_k=5,
        causal=True,
    ),
    Case("window", "both ends of the interval move", seqlen_q=140, seqlen_k=140, window=(20, 7)),
    Case("window_int", "one number for both sides", seqlen_q=70, seqlen_k=90, window=16),
    Case("window_left", "no limit on the right", seqlen_q=70, seqlen_k=140, window=(5, None)),
    Case("window_right", "no limit on the left", seqlen_q=140, seqlen_k=70, window=(-1, 5)),
    Case("window_causal", "sliding window", seqlen_q=150, seqlen_k=150, window=33, causal=True),
    Case("chunk", "smaller than a tile, ragged", seqlen_q=140, seqlen_k=140, attention_chunk=23),
    Case("chunk_causal", "as Llama 4 has it", seqlen_k=200, attention_chunk=64, causal=True),
    Case("chunk_few", "queries before key 0", seqlen_q=90, seqlen_k=40, attention_chunk=7),
    Case(
        "chunk_packed",
        "heads share a tile; a window, too",
        heads=4,
        heads_kv=1,
        seqlen_q=9,
        seqlen_k=150,
        attention_chunk=33,
        window=(20, 3),
    ),
    Case(
        "dropout_few",
        "few queries, and nothing else that asks for the general score",
        seqlen_q=5,
        seqlen_k=90,
        dropout_p=0.4,
    ),
    Case("window_zero", "each query sees one key", window=0),
    Case("window_beyond", "some queries see no key", seqlen_q=140, seqlen_k=10, window=(3, 3)),
    Case("gqa", "query heads share a KV head", heads=6, heads_kv=2, causal=True),
    Case("mqa", "all query heads share the one KV head", heads=5, heads_kv=1, seqlen_q=20),
    Case("batches", "batch and head strides both count", batch=3, heads=3, heads_kv=3, seqlen_q=17),
    Case("bshd", "heads inside the sequence", batch=2, layout="bshd", seqlen_k=70, causal=True),
    Case("bshd_gqa", "as above, heads shared", heads=4, layout="bshd", seqlen_q=20),
    Case("transposed", "heads and rows swapped in memory", batch=2, storage="transposed"),
    Case("sliced", "gaps between rows, NaN in them", batch=2, seqlen_k=77, storage="sliced"),
    Case("packed", "q, k, v and out interleaved in one tensor", batch=2, storage="packed"),
    Case("expanded", "K and V with strides of 0", batch=2, seqlen_k=40, storage="expanded"),
    Case("unaligned", "rows at odd addresses", seqlen_k=40, storage="unaligned"),
    Case("unaligned_bshd", "heads too", batch=2, layout="bshd", seqlen_k=140, storage="unaligned"),
    Case(
        "unaligned_gqa",
        "rows of several heads",
        batch=2,
        heads=6,
        seqlen_q=20,
        seqlen_k=131,
        causal=True,
        storage="unaligned",
    ),
    Case("unaligned_d40", "narrower rows", head_dim=40, head_dim_v=24, storage="unaligned"),
    Case("shifted", "an odd address, strides that are not", seqlen_k=128, storage="shifted"),
    Case(
        "large", "nearly one-hot softmax: exponents must not overflow", magnitude=8.0, causal=True
    ),
    Case("tiny", "nearly uniform softmax", magnitude=1e-3, seqlen_k=100),
    Case("softcap", "logits bent by tanh", softcap=2.5, seqlen_k=90, causal=True),
    Case("softcap_large", "tanh saturates", softcap=30.0, magnitude=6.0),
    Case("scale", "another scale than 1/sqrt(D)", softmax_scale=0.3),
    Case("scale_negative", "the largest product has the smallest weight", softmax_scale=-0.125),
    Case("scale_negative_softcap", "both at once", softmax_scale=-0.2, softcap=3.0),
    Case("scale_zero", "uniform weights", softmax_scale=0.0, seqlen_k=70, causal=True),
    Case("empty_batch", "B = 0", batch=0),
    Case("empty_queries", "Sq = 0", seqlen_q=0),
    Case("empty_keys", "Sk = 0: O = 0 and LSE = -inf", seqlen_k=0),
    Case("empty_keys_causal", "the same behind a diagonal", seqlen_k=0, causal=True),
    Case("d1", "the smallest head dim", head_dim=1),
    Case("d8", "a head dim below every tile", head_dim=8, causal=True),
    Case("d17", "an odd head dim", head_dim=17, seqlen_k=70),
    Case("d40", "a multiple of 8, not of 16", head_dim=40),
    Case("d80", "a multiple of 16", head_dim=80),
    Case("d255", "an odd head dim near the limit", head_dim=255, seqlen_q=20, seqlen_k=20),
    *(
        Case(
            f"d{d}",
            "a head dim that kernels are compiled for",
            head_dim=d,
            seqlen_q=40,
            causal=True,
        )
        for d in (32, 64, 96, 128, 192, 256, 512)
    ),
    Case("d328", "narrower than the tiles beyond 256", head_dim=328, seqlen_q=40, causal=True),
    Case("wider_v", "V wider than K", head_dim=32, head_dim_v=72),
    Case("narrower_v", "V narrower than K", head_dim=72, head_dim_v=16),
    Case("bias", "one number for each logit", seqlen_k=70, bias="bhqk"),
    Case(
        "bias_fp32",
        "of another dtype than q",
        batch=2,
        seqlen_k=72,
        bias="1hqk",
        bias_dtype="float32",
    ),
    Case("bias_per_key", "(B, 1, 1, Sk): one row for all queries", batch=2, bias="b11k"),
    Case("bias_per_query", "what a softmax ignores, but its log-sum-exp not", bias="hq1"),
    Case("bias_of_two_dims", "no batch, no heads", seqlen_k=90, bias="qk", causal=True),
    Case("bias_of_one_dim", "a vector over keys", bias="k", heads=4),
    Case("bias_inf", "a mask by way of the bias", bias="bhqk", bias_inf=True, seqlen_k=100),
    Case("bias_of_vectors", "rows of whole 16 bytes", bias="bhqk", batch=2, seqlen_k=264),
    Case(
        "bias_inf_of_vectors",
        "the same for all batch entries",
        bias="1hqk",
        bias_inf=True,
        batch=3,
        seqlen_q=140,
        seqlen_k=200,
        causal=True,
    ),
    Case(
        "bias_of_vectors_per_key",
        "one row for all queries",
        bias="b11k",
        batch=2,
        seqlen_q=130,
        seqlen_k=328,
        softmax_scale=-0.2,
    ),
    Case(
        "bias_of_vectors_and_few_queries",
        "heads that share K and V are packed into a tile",
        bias="hqk",
        heads=8,
        heads_kv=2,
        seqlen_q=5,
        seqlen_k=144,
        sinks=True,
    ),
    Case("bias_bshd", "its dimensions stay (B, H, Sq, Sk)", layout="bshd", bias="1hqk", batch=2),
    Case("bias_sliced", "strides of its own, NaN around it", bias="bhqk", storage="sliced"),
    Case("bias_transposed", "keys are not its contiguous ones", bias="bhqk", storage="transposed"),
    Case(
        "bias_unaligned",
        "an odd address",
        bias="qk",
        bias_dtype="float32",
        seqlen_k=70,
        storage="unaligned",
    ),
    Case("mask", "a bit for each logit; a row in five sees nothing", batch=2, mask="bhqk"),
    Case(
        "mask_padding", "(B, 1, 1, Sk): as for padded batches", batch=2, seqlen_k=131, mask="b11k"
    ),
    Case("mask_causal", "on top of an interval", seqlen_k=90, mask="qk", causal=True, window=40),
    Case("mask_per_query", "whole rows of it", mask="hq1", seqlen_q=70),
    Case("mask_sliced", "strides of its own", mask="bhqk", storage="sliced", seqlen_k=70),
    Case("mask_unaligned", "an odd address", mask="bhqk", storage="unaligned", seqlen_k=70),
    Case(
        "mask_blocks",
        "documents: tiles with all, some and no keys",
        batch=2,
        mask="b1qk",
        mask_block=150,
        seqlen_q=210,
        seqlen_k=460,
    ),
    Case(
        "mask_blocks_alibi",
        "whose logits grow to the left",
        mask="qk",
        mask_block=150,
        alibi="h",
        seqlen_q=140,
        seqlen_k=460,
    ),
    Case("mask_transposed", "keys are not its contiguous ones", mask="bhqk", storage="transposed"),
    Case("alibi", "a slope per head", alibi="h", heads=4, causal=True, seqlen_q=20, seqlen_k=90),
    Case("alibi_per_batch", "a slope per batch entry and head", batch=2, alibi="bh", seqlen_q=90),
    Case("sinks", "a logit without a key", sinks=True, heads=4, seqlen_k=70),
    Case("sinks_no_key", "where queries see nothing else", sinks=True, causal=True, seqlen_k=9),
    Case("sinks_empty_keys", "O = 0, LSE is the sink", sinks=True, seqlen_k=0),
    Case("sinks_scale_negative", "in logits, whatever the scale", sinks=True, softmax_scale=-0.2),
    Case("sinks_scale_zero", "with uniform weights", sinks=True, softmax_scale=0.0),
    Case("dropout", "each weight for itself", dropout_p=0.3, batch=2, heads=3, heads_kv=3),
    Case("dropout_long", "keys of several draws", dropout_p=0.5, seqlen_q=70, seqlen_k=150),
    Case("dropout_all", "nothing is left; LSE stays", dropout_p=1.0),
    Case("dropout_hardly", "a probability of 2^-15, the least", dropout_p=2.0**-15),
    Case(
        "everything",
        "all options in one call",
        batch=2,
        heads=4,
        seqlen_k=90,
        causal=True,
        window=(50, None),
        softmax_scale=0.2,
        softcap=3.0,
        bias="1hqk",
        mask="b11k",
        alibi="h",
        sinks=True,
        dropout_p=0.25,
    ),
]

# Every pair of values of two of these occurs together in one of PAIRWISE, also with heads that fit
# into 64 alone: the only size that all kernels are compiled for on the CPU.
FACTORS = {
    "layout": ["bhsd", "bshd"],
    "storage": ["dense", "transposed", "sliced", "expanded"],
    "heads_kv": [2, 1],
    "lengths": [(33, 70), (65, 40), (3, 77), (16, 16)],
    "causal": [False, True],
    "window": [None, 9, (30, None)],
    "attention_chunk": [None, 20],
    "softcap": [0.0, 2.5],
    "softmax_scale": [None, 0.3, -0.2],
    "bias": [None, "bhqk", "1hqk", "b11k", "qk"],
    "bias_dtype": [None, "float32"],
    "mask": [None, "bhqk", "b11k", "1h1k", "qk"],
    "alibi": [None, "h", "bh"],
    "sinks": [False, True],
    "dropout_p": [0.0, 0.3],
}
HEAD_DIMS = {
    "narrow": {"head_dim": [None, 40, 8], "head_dim_v": [None, 24]},
    "wide": {"head_dim": [72, 80, 128], "head_dim_v": [None, 32, 96]},
}


def _pairwise_cases():
    for name, head_dims in HEAD_DIMS.items():
        for i, row in enumerate(pairwise({**head_dims, **FACTORS}, seed=1)):
            seqlen_q, seqlen_k = row.pop("lengths")
            yield Case(f"{name}{i}", "", batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **row)


PAIRWISE = list(_pairwise_cases())
