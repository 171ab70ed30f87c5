"""The problems that are timed: shapes, and the grids of them that have a name."""

from __future__ import annotations

from dataclasses import dataclass

from ..._build.facts import MAX_DECODE_QUERIES

SHAPE_FORM = "b,hq,hkv,sq,sk,d"


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
    def op(self) -> str:
        return "decode" if self.seqlen_q <= MAX_DECODE_QUERIES else "forward"

    @property
    def flops(self) -> float:
        """Of the two products, over the keys that are visible: 4 B H S^2 D, causal half of it."""
        pairs = float(self.seqlen_q * self.seqlen_k)
        if self.causal:
            diagonal = min(self.seqlen_q, self.seqlen_k)
            pairs = diagonal * (self.seqlen_k - diagonal / 2)
        return 4.0 * self.batch * self.heads_q * pairs * self.head_dim

    def bytes(self, element_size: int) -> int:
        """The least that is moved: q, k and v read once, the result written once."""
        rows = 2 * self.heads_q * self.seqlen_q + 2 * self.heads_kv * self.seqlen_k
        return self.batch * rows * self.head_dim * element_size

    def __str__(self) -> str:
        heads = f"{self.heads_q}" + f":{self.heads_kv}" * (self.heads_kv != self.heads_q)
        lengths = f"{self.seqlen_q}" + f":{self.seqlen_k}" * (self.seqlen_k != self.seqlen_q)
        return f"D={self.head_dim} H={heads} {self.batch}x{lengths}{' causal' * self.causal}"


@dataclass(frozen=True)
class Grid:
    """Shapes that are measured in the same way."""

    name: str
    shapes: tuple[Shape, ...]
    timing: str = "events"  # on a GPU: "events" (cold L2) or "graph" (warm)
    host_time: bool = False  # also the time that a call takes on the host


def _square(batch: int, heads: int, seqlen: int, head_dim: int) -> tuple[Shape, Shape]:
    sizes = (batch, heads, heads, seqlen, seqlen, head_dim)
    return Shape(*sizes), Shape(*sizes, causal=True)


GRIDS = {
    grid.name: grid
    for grid in (
        Grid(
            "forward",
            tuple(
                shape
                for head_dim, heads in ((64, 32), (128, 16), (256, 8))
                for batch, seqlen in ((16, 1024), (4, 4096), (1, 16384))
                for shape in _square(batch, heads, seqlen, head_dim)
            ),
        ),
        Grid("reference", _square(2, 8, 512, 64), timing="graph", host_time=True),
        Grid("decode", (Shape(16, 32, 8, 1, 8192, 128), Shape(1, 32, 8, 1, 32768, 128))),
        # Too few tiles to fill a GPU, and short enough that events would time the launch.
        Grid(
            "small",
            tuple(
                shape
                for head_dim, heads in ((64, 8), (128, 4))
                for seqlen in (128, 256, 512, 1024)
                for shape in _square(1, heads, seqlen, head_dim)
            ),
            timing="graph",
        ),
    )
}


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
