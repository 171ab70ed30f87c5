"""Problems: shapes, options, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..._build.facts import MAX_DECODE_QUERIES
from ...testing import round_to

# "forward" and "backward": `attention` and its backward pass. "decode" and "paged":
# `attention_decode` over a contiguous and a paged cache. "latent": the same over pages of latents,
# whose first LATENT_V columns are V, too. "varlen": `attention_varlen`.
OPS = ("forward", "decode", "paged", "latent", "varlen", "backward")
LATENT_V = 512
# Two products forward; backward S and dP again, and one for each of dQ, dK and dV.
_BACKWARD_OVER_FORWARD = 2.5
SHAPE_FORM = "b,hq,hkv,sq,sk,d"
SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Shape:
    """One attention problem; a causal mask is aligned bottom-right."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False

    @property
    def has_few_queries(self) -> bool:
        """Whether dispatch and gates treat the call as a step of decoding, bound by memory."""
        return self.seqlen_q <= MAX_DECODE_QUERIES

    def masked(self, causal: bool) -> Shape:
        return replace(self, causal=causal)

    @property
    def flops(self) -> float:
        """FLOP of the two products over visible keys: 4 B H S^2 D, half of it if causal."""
        pairs = float(self.seqlen_q * self.seqlen_k)
        if self.causal:
            diagonal = min(self.seqlen_q, self.seqlen_k)
            pairs = diagonal * (self.seqlen_k - diagonal / 2)
        return 4.0 * self.batch * self.heads_q * pairs * self.head_dim

    def kv_bytes(self, element_size: int) -> int:
        """K and V, each read once."""
        return 2 * self.batch * self.heads_kv * self.seqlen_k * self.head_dim * element_size

    def __str__(self) -> str:
        heads = f"{self.heads_q}" + f":{self.heads_kv}" * (self.heads_kv != self.heads_q)
        lengths = f"{self.seqlen_q}" + f":{self.seqlen_k}" * (self.seqlen_k != self.seqlen_q)
        return f"D={self.head_dim} H={heads} {self.batch}x{lengths}{' causal' * self.causal}"


class Flex(NamedTuple):
    """An option as FlexAttention's functions of the position of a logit in (B, H, Sq, Sk)."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    has_batch: bool = False  # mask_mod depends on the batch entry


class Keywords(NamedTuple):
    """The keywords of an option."""

    ours: dict[str, Any]
    torch: dict[str, Any] | None  # None: PyTorch's attention has no such option
    flex: Flex | None = None  # None: FlexAttention has no such option
    learned: tuple[Any, ...] = ()  # arrays of these that get a gradient as well


_NOTHING = Keywords({}, {}, Flex())

TOKENS, TOKEN_BYTES = "ds_mla", 656  # latents in 8 bits, with 576 columns
FP8_CACHE = "fp8_cache"  # what is in 8 bits where keys and values are stored in e4m3
_LARGEST_E4M3 = 448.0

# Options of calls, other than shapes and a causal mask, made for a problem on a device. dev/bench
# has others.
OPTIONS: dict[str, Callable[[Problem, str], Keywords]] = {"none": lambda problem, device: _NOTHING}
# The share of logits that an option leaves visible, where whole tiles of keys can be skipped.
VISIBLE: dict[str, Callable[[Shape], float]] = {}


@dataclass(frozen=True)
class Problem:
    """The problem that every implementation computes.

    With op "varlen" the shape has the longest lengths of the batch: see `sequences`.
    """

    shape: Shape
    dtype: str = "float16"
    option: str = "none"  # of OPTIONS
    op: str = "forward"  # of OPS
    page: int | None = None  # keys of a page, of op "paged" or "latent"

    @property
    def head_dim_v(self) -> int:
        return LATENT_V if self.op == "latent" else self.shape.head_dim

    def kv_bytes(self, element_size: int) -> int:
        """K and V, each read once; a latent once for both."""
        return self.shape.kv_bytes(element_size) // (2 if self.op == "latent" else 1)

    @property
    def title(self) -> str:
        """All but the dtype."""
        named = self.op in ("latent", "varlen", "backward")
        words = [f"{self.op} {self.shape}" if named else str(self.shape)]
        words += [f"pages of {self.page}"] * (self.page is not None)
        words += [self.option] * (self.option != "none")
        return ", ".join(words)

    def __str__(self) -> str:
        return f"{self.dtype} {self.title}"

    @property
    def sequences(self) -> tuple[Shape, ...]:
        """The equal dense problems: with op "varlen" one for each sequence, else the problem.

        Lengths are drawn at random from 1/64 of the longest to the longest, equal in every run.
        """
        if self.op != "varlen":
            return (self.shape,)
        longest = self.shape.seqlen_k
        rng = np.random.default_rng(0)
        lengths = rng.integers(max(1, longest // 64), longest, self.shape.batch, endpoint=True)
        return tuple(
            replace(self.shape, batch=1, seqlen_q=n, seqlen_k=n) for n in map(int, lengths)
        )

    @property
    def flops(self) -> float:
        forward = sum(sequence.flops for sequence in self.sequences)
        if self.option in VISIBLE:
            forward *= VISIBLE[self.option](self.shape)
        forward *= (self.shape.head_dim + self.head_dim_v) / (2 * self.shape.head_dim)
        return forward * (_BACKWARD_OVER_FORWARD if self.op == "backward" else 1.0)

    @property
    def dense(self) -> Shape:
        """The shape of its arrays: packed sequences are one batch entry."""
        if self.op != "varlen":
            return self.shape
        tokens = sum(sequence.seqlen_q for sequence in self.sequences)
        return replace(self.shape, batch=1, seqlen_q=tokens, seqlen_k=tokens)

    def inputs(self, device: str, seed: int) -> Inputs:
        """Standard normal q, k and v, and the option's keywords: torch tensors, or numpy arrays
        without torch. They are determined by the seed and the device.

        Raises ValueError if this device or dtype is not available.
        """
        shape = self.dense
        q_size = (shape.batch, shape.heads_q, shape.seqlen_q, shape.head_dim)
        kv_size = (shape.batch, shape.heads_kv, shape.seqlen_k, shape.head_dim)
        sizes = (q_size, kv_size, kv_size)
        try:
            import torch
        except ImportError:
            q, k, v = _numpy_inputs(sizes, self.dtype, device, seed)
        else:
            generator = torch.Generator(device).manual_seed(seed)
            q, k, v = (
                torch.randn(size, generator=generator, device=device).to(getattr(torch, self.dtype))
                for size in sizes
            )
        if self.op == "latent":
            v = k[..., : self.head_dim_v]
        return Inputs(self, q, k, v, OPTIONS[self.option](self, device))


def _numpy_inputs(sizes: Any, dtype: str, device: str, seed: int) -> Any:
    if device != "cpu":
        raise ValueError("a GPU is reached through torch, which is not installed")
    kind: Any = dtype
    if dtype == "bfloat16":
        try:
            import ml_dtypes  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise ValueError("bfloat16 needs torch or ml_dtypes; neither is installed") from None
        kind = ml_dtypes.bfloat16
    rng = np.random.default_rng(seed)
    return tuple(round_to(rng.standard_normal(size), dtype).astype(kind) for size in sizes)


class Paged(NamedTuple):
    """A cache in pages, (P, page, Hkv, D), whose order in memory is random."""

    k: Any
    v: Any
    block_table: Any


@dataclass(frozen=True)
class Inputs:
    """q, k and v of a problem, (B, H, S, D) arrays on one device, and the option's keywords.

    Packed sequences are one batch entry: (1, H, T, D).
    """

    problem: Problem
    q: Any
    k: Any
    v: Any
    keywords: Keywords = _NOTHING

    @property
    def shape(self) -> Shape:
        return self.problem.shape

    @cached_property
    def bshd(self) -> tuple[Any, Any, Any]:
        """q, k and v as contiguous (B, S, H, D) tensors."""
        q, k, v = (x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v))
        return q, k, v

    @cached_property
    def fp8_scales(self) -> tuple[Any, Any]:
        """k_scale and v_scale of an e4m3 cache, (Hkv,) float32 each."""
        largest = (x.abs().amax(dim=(0, 2, 3)).float() for x in (self.k, self.v))
        k_scale, v_scale = (x / _LARGEST_E4M3 for x in largest)
        return k_scale, v_scale

    @cached_property
    def in_fp8(self) -> Inputs:
        """The inputs with k and v as stored in an e4m3 cache, without their scales."""
        import torch

        k, v = (
            (x.float() / scale[:, None, None]).to(torch.float8_e4m3fn)
            for x, scale in zip((self.k, self.v), self.fp8_scales, strict=True)
        )
        return replace(self, k=k, v=v)

    @cached_property
    def rounded_to_fp8(self) -> Inputs:
        """The inputs with k and v as read from an e4m3 cache, in float32."""
        stored = self.in_fp8
        k, v = (
            x.float() * scale[:, None, None]
            for x, scale in zip((stored.k, stored.v), self.fp8_scales, strict=True)
        )
        return replace(self, k=k, v=v)

    @cached_property
    def tokens(self) -> Any:
        """The pages of `paged` as latent tokens in 8 bits, "ds_mla"."""
        import torch

        from ... import append_kv

        rows = self.paged.k.flatten(0, 1)
        pages, page = self.paged.k.shape[:2]
        cache = torch.zeros(pages, page, 1, TOKEN_BYTES, dtype=torch.uint8, device=rows.device)
        slots = torch.arange(len(rows), device=rows.device)
        append_kv(rows, None, cache, None, slots, kv_format=TOKENS)
        return cache

    @cached_property
    def rounded_to_tokens(self) -> Inputs:
        """The inputs with k and v as such tokens hold them, in float32."""
        import torch

        from ..._call.token_format import unpacked

        numbers = unpacked(self.tokens.cpu().numpy(), TOKENS, self.problem.dtype)
        pages = torch.from_numpy(numbers).to(self.q.device)
        k = pages[self.paged.block_table.long()].flatten(1, 2)[:, : self.shape.seqlen_k]
        k = k.transpose(1, 2)
        return replace(self, k=k, v=k[..., : self.problem.head_dim_v])

    @cached_property
    def seqlens_k(self) -> Any:
        """Number of keys of each sequence, (B,) int32."""
        import torch

        shape, device = self.shape, self.q.device
        return torch.full((shape.batch,), shape.seqlen_k, dtype=torch.int32, device=device)

    @cached_property
    def cu_seqlens(self) -> Any:
        """Offsets of the queries of each sequence, (B + 1,) int32."""
        import torch

        lengths = [sequence.seqlen_q for sequence in self.problem.sequences]
        if self.problem.op != "varlen":
            lengths *= self.shape.batch
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        return torch.from_numpy(ends).to(self.q.device)

    @cached_property
    def paged(self) -> Paged:
        """k and v as a paged cache."""
        import torch

        _, k, v = self.bshd
        shape, page = self.shape, self.problem.page
        assert page is not None  # of op "paged" or "latent"
        columns = -(-shape.seqlen_k // page)
        generator = torch.Generator(k.device).manual_seed(1)
        order = torch.randperm(shape.batch * columns, generator=generator, device=k.device)

        def stored(x: Any) -> Any:
            spare = columns * page - shape.seqlen_k
            rows = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare))
            pages = rows.reshape(shape.batch * columns, page, *x.shape[2:])
            return torch.empty_like(pages).index_copy_(0, order, pages)

        if self.problem.op == "latent":
            k = stored(k)
            v = k[..., : self.problem.head_dim_v]
        elif k.dtype == torch.float8_e4m3fn:  # few operations know it
            k, v = (stored(x.view(torch.uint8)).view(x.dtype) for x in (k, v))
        else:
            k, v = stored(k), stored(v)
        return Paged(k, v, order.view(shape.batch, columns).int())


def parse_dtype(name: str) -> str:
    """A dtype by its name or its short one. Raises ValueError."""
    found = SHORT_DTYPES.get(name, name)
    if found not in SHORT_DTYPES.values():
        raise ValueError(f"--dtype must be of {', '.join(SHORT_DTYPES)}, got {name!r}")
    return found


def parse_shape(text: str) -> Shape:
    """Reads "b,hq,hkv,sq,sk,d". Raises ValueError with what is wrong with it."""
    fields = text.split(",")
    names = SHAPE_FORM.split(",")
    if len(fields) != len(names):
        raise ValueError(f"a shape is {SHAPE_FORM}, {len(names)} numbers, got {text!r}")
    sizes: list[int] = []
    for name, field in zip(names, fields):
        if not field.strip().isdecimal() or int(field) < 1:
            raise ValueError(f"{name} of the shape {text!r} must be 1 or more, got {field!r}")
        sizes.append(int(field))
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim = sizes
    shape = Shape(batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim)
    if shape.heads_q % shape.heads_kv:
        raise ValueError(
            f"hkv of the shape {text!r} must divide hq, got {shape.heads_kv} and {shape.heads_q}"
        )
    return shape
