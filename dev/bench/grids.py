"""The named grids of problems of `python -m dev.bench --grid`."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_attn._build.facts import ACCUMULATE
from cutlass_attn.tools.experiment.problems import OPTIONS, Problem, Shape

from . import options  # noqa: F401  # adds to OPTIONS


@dataclass(frozen=True)
class Grid:
    """Problems that are measured in one way."""

    name: str
    shapes: tuple[Shape, ...]
    timing: str = "events"  # on a GPU: "events" (cold L2) or "graph" (warm)
    host_time: bool = False  # also the host time of a call
    options: tuple[str, ...] = ("none",)
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    kernels: tuple[str, ...] = ()  # kernels of this library, in addition to "auto"
    impls: tuple[str, ...] = ()  # only these
    baseline: str = "torch:flash"
    op: str = "forward"  # of OPS
    pages: tuple[int | None, ...] = (None,)  # keys per page, for op "paged" or "latent"

    @property
    def problems(self) -> list[Problem]:
        return [
            Problem(shape, dtype, option, self.op, page)
            for dtype in self.dtypes
            for shape in self.shapes
            for page in self.pages
            for option in self.options
        ]


def _square(batch: int, heads: int, seqlen: int, head_dim: int) -> tuple[Shape, Shape]:
    sizes = (batch, heads, heads, seqlen, seqlen, head_dim)
    return Shape(*sizes), Shape(*sizes, causal=True)


# Bool masks, over shapes without another mask.
_MASKS = ("none", "padding", "documents", "mask")
_FORWARD_OPTIONS = tuple(name for name in OPTIONS if name != "bias_grad")
_TERMS = ("none", "softcap", "alibi", "bias", "bias_grad", "dropout")
_UNMASKED = (Shape(4, 32, 32, 4096, 4096, 64), Shape(4, 16, 16, 4096, 4096, 128))
# fp16 accumulation: kernels that have it. This many tokens fill a GPU equally at every length.
_IN_FP16 = tuple(f"sm80/{name}" for name in ACCUMULATE if name != "fp32")
_TOKENS = 16384

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
        Grid(
            "decode",
            (
                *(
                    Shape(batch, 32, 8, 1, keys, 128)
                    for batch, keys in ((16, 8192), (1, 32768), (64, 2048), (8, 1024), (1, 1024))
                ),
                Shape(32, 32, 8, 1, 4096, 64),
            ),
            op="decode",
        ),
        # The cost of pages, relative to the call on a contiguous cache.
        Grid(
            "paged",
            tuple(
                Shape(batch, 32, 8, 1, keys, 128)
                for batch, keys in ((16, 8192), (1, 32768), (64, 2048))
            ),
            baseline="cutlass_attn:contiguous",
            op="paged",
            pages=(16, 1, 256),
        ),
        # Latent attention: queries of all heads, of a rank of 8, and of 4 tokens: docs/latent.md.
        Grid(
            "latent",
            (
                Shape(128, 128, 1, 1, 4096, 576),
                Shape(16, 128, 1, 1, 8192, 576),
                *(
                    Shape(batch, 16, 1, 1, keys, 576)
                    for batch, keys in ((128, 4096), (16, 8192), (1, 32768))
                ),
                Shape(16, 16, 1, 4, 8192, 576, causal=True),
            ),
            kernels=("sm80/latent", "sm80/latent_64", "sm90/latent"),
            baseline="cutlass_attn:auto",
            op="latent",
            pages=(64,),
        ),
        # Head dims beyond 256: docs/serving.md.
        Grid(
            "wide",
            tuple(
                Shape(batch, heads, heads // 8, 1, 8192, 512)
                for batch in (8, 64)
                for heads in (8, 16)
            ),
            baseline="cutlass_attn:contiguous",
            op="paged",
            pages=(64,),
        ),
        # The cost of packing, relative to one dense call per sequence.
        Grid(
            "varlen",
            tuple(
                Shape(16, heads, heads_kv, 8192, 8192, head_dim, causal=True)
                for head_dim, heads, heads_kv in ((128, 16, 16), (128, 16, 4), (64, 32, 32))
            ),
            baseline="cutlass_attn:dense",
            op="varlen",
        ),
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
        # At most as many tiles of 64 rows as SMs; blocks share their keys: docs/notes/hopper.md.
        Grid(
            "few",
            (
                *(
                    shape
                    for head_dim in (64, 128)
                    for seqlen in (512, 1024)
                    for shape in _square(1, 4, seqlen, head_dim)
                ),
                *(shape for head_dim in (64, 128) for shape in _square(2, 8, 512, head_dim)),
                Shape(1, 4, 4, 100, 8192, 128),
                Shape(1, 32, 32, 64, 64, 128),
                Shape(1, 32, 8, 16, 8192, 128),
            ),
        ),
        # A few tiles of 64 rows per SM, where the tile matters most: docs/notes/hopper.md.
        Grid(
            "medium",
            tuple(
                shape
                for head_dim in (64, 128, 256)
                for seqlen, head_counts in ((512, (24, 64)), (1024, (12, 32)), (2048, (6, 16)))
                for heads in head_counts
                for shape in _square(1, heads, seqlen, head_dim)
            ),
        ),
        # What options cost, in fp16: docs/attention.md.
        Grid(
            "options",
            (
                Shape(4, 32, 32, 4096, 4096, 64),
                Shape(4, 16, 16, 4096, 4096, 128),
                Shape(2, 8, 8, 2048, 2048, 256),
            ),
            options=_FORWARD_OPTIONS,
            dtypes=("float16",),
            kernels=("sm80/general",),
            baseline="cutlass_attn:auto",
        ),
        # Bool masks, and the share that each leaves visible: docs/attention.md.
        Grid(
            "masks",
            _UNMASKED,
            options=_MASKS,
            dtypes=("bfloat16",),
            impls=("cutlass_attn", "torch"),
            baseline="torch:cudnn",
        ),
        Grid(
            "masks-backward",
            _UNMASKED,
            options=_MASKS,
            dtypes=("bfloat16",),
            impls=("cutlass_attn", "torch"),
            baseline="torch:cudnn",
            op="backward",
        ),
        # Backward passes with what models add to a logit: docs/training.md.
        Grid(
            "backward-terms",
            tuple(
                shape
                for head_dim, heads in ((64, 32), (128, 16))
                for shape in _square(4, heads, 4096, head_dim)
            ),
            impls=("cutlass_attn", "torch"),
            options=_TERMS,
            dtypes=("bfloat16",),
            baseline="torch:cudnn",
            op="backward",
        ),
        # Error and time of fp16 accumulation by head dim and length: docs/accumulation.md.
        Grid(
            "accumulation",
            tuple(
                Shape(max(1, _TOKENS // seqlen), 16, 16, seqlen, seqlen, head_dim)
                for head_dim in (64, 128, 256)
                for seqlen in (128, 512, 2048, 8192)
            ),
            dtypes=("float16",),
            kernels=_IN_FP16,
            impls=("cutlass_attn",),
            baseline="cutlass_attn:auto",
        ),
        # Whole backward passes: docs/training.md.
        Grid(
            "backward",
            tuple(
                shape
                for head_dim, heads in ((64, 32), (128, 16), (256, 8))
                for batch, seqlen in ((16, 1024), (4, 4096), (1, 16384))
                for shape in _square(batch, heads, seqlen, head_dim)
            ),
            impls=("cutlass_attn", "torch"),
            op="backward",
        ),
        Grid(
            "backward-dropout",
            tuple(
                shape
                for head_dim, heads in ((64, 32), (128, 16))
                for shape in _square(4, heads, 4096, head_dim)
            ),
            impls=("cutlass_attn", "torch"),
            options=("none", "dropout"),
            op="backward",
        ),
        # On a CPU these grids are small, and for fp16 accumulation have only errors of emulated
        # kernels.
        Grid(
            "decode-cpu",
            (Shape(3, 4, 2, 1, 300, 64), Shape(1, 4, 2, 1, 600, 64)),
            op="decode",
        ),
        Grid(
            "paged-cpu",
            (Shape(3, 4, 2, 1, 300, 64),),
            baseline="cutlass_attn:contiguous",
            op="paged",
            pages=(16, 1, 256),
        ),
        Grid(
            "latent-cpu",
            (Shape(2, 5, 1, 1, 100, 576), Shape(1, 40, 1, 2, 70, 576, causal=True)),
            baseline="cutlass_attn:auto",
            op="latent",
            pages=(16,),
        ),
        Grid(
            "varlen-cpu",
            (Shape(4, 4, 4, 200, 200, 64, causal=True), Shape(4, 4, 2, 200, 200, 64, causal=True)),
            baseline="cutlass_attn:dense",
            op="varlen",
        ),
        Grid(
            "backward-cpu",
            _square(1, 2, 192, 64),
            impls=("cutlass_attn", "torch"),
            op="backward",
        ),
        Grid(
            "backward-terms-cpu",
            (Shape(2, 2, 2, 192, 192, 64),),
            impls=("cutlass_attn", "torch"),
            options=_TERMS,
            dtypes=("float16",),
            baseline="cutlass_attn:auto",
            op="backward",
        ),
        Grid(
            "masks-cpu",
            (Shape(2, 2, 2, 192, 192, 64),),
            options=_MASKS,
            dtypes=("float16",),
            baseline="cutlass_attn:auto",
        ),
        Grid(
            "masks-backward-cpu",
            (Shape(2, 2, 2, 192, 192, 64),),
            options=_MASKS,
            dtypes=("float16",),
            baseline="cutlass_attn:auto",
            op="backward",
        ),
        Grid(
            "options-cpu",
            (Shape(1, 2, 2, 64, 64, 64),),
            options=_FORWARD_OPTIONS,
            dtypes=("float16",),
            baseline="cutlass_attn:auto",
        ),
        Grid(
            "accumulation-cpu",
            tuple(Shape(1, 1, 1, seqlen, seqlen, 64) for seqlen in (128, 512)),
            dtypes=("float16",),
            kernels=("sm80-simt", *(f"{name}-simt" for name in _IN_FP16)),
            impls=("cutlass_attn",),
            baseline="cutlass_attn:auto",
        ),
    )
}


def grid_for(name: str | None, device: str) -> Grid:
    """The grid of this name for a device; default "forward", on a CPU "small"."""
    if device == "cpu":
        return GRIDS.get(f"{name}-cpu") or GRIDS[name or "small"]
    return GRIDS[name or "forward"]
