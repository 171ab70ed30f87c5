"""Converts operands of `context_attention` to the layout of the schemes, and results back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._call import torch_library
from ._plan import ContextPlan


class Call:
    """q, k and v as local tensors (B, rows, heads, head_dim), cast by torch.autocast.

    If they are wrong, `error` has the exception, to be raised on all ranks, and q, k and v are as
    given.
    """

    def __init__(self, plan: ContextPlan, layout: str, q: Any, k: Any, v: Any, sinks: Any) -> None:
        self.plan = plan
        self.layout = layout
        self.is_packed = plan.cu_seqlens is not None
        self.q, self.k, self.v, self.sinks = q, k, v, sinks
        self._mesh: Any = None
        self._placements: tuple[Placement, ...] = ()
        self.error: Exception | None = None
        try:
            self._read()
        except Exception as error:
            self.error = error

    @property
    def _dim(self) -> int:
        """The dimension of rows in the caller's layout."""
        return 0 if self.is_packed else 2 if self.layout == "bhsd" else 1

    def _read(self) -> None:
        if self.layout not in ("bhsd", "bshd"):
            raise ValueError(f'layout must be "bhsd" or "bshd", got {self.layout!r}')
        given = {"q": self.q, "k": self.k, "v": self.v}
        for name, x in given.items():
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
            if isinstance(x, DTensor) != isinstance(self.q, DTensor):
                raise TypeError("q, k and v must all be DTensors, or none of them")
        if isinstance(self.q, DTensor):
            given = {name: self._local(name, x) for name, x in given.items()}
        if isinstance(self.sinks, DTensor):
            self.sinks = self._local_sinks(self.sinks)
        ndim = 3 if self.is_packed else 4
        dims = "(rows, heads, head_dim)" if self.is_packed else "four dimensions"
        for name, x in given.items():
            if x.dim() != ndim:
                raise ValueError(
                    f"{name} must have {dims}, as the plan has "
                    f"{'' if self.is_packed else 'no '}cu_seqlens, got shape {tuple(x.shape)}"
                )
            if x.shape[self._dim] != self.plan.local_rows:
                raise ValueError(
                    f"{name} must have {self.plan.local_rows} rows on each rank, "
                    f"plan.local_rows, got {x.shape[self._dim]}: shape {tuple(x.shape)} with "
                    f"layout={self.layout!r}"
                )
        q, k, v = torch_library.autocast(*given.values())
        self.q, self.k, self.v = (self._inside(x) for x in (q, k, v))

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return x[None]
        return x.transpose(1, 2) if self.layout == "bhsd" else x

    def results(self, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        """The results in the caller's layout."""
        if self.is_packed:
            out, lse = out[0], None if lse is None else lse[0]
        elif self.layout == "bhsd":
            out = out.transpose(1, 2)
        if self._mesh is not None:
            out = DTensor.from_local(out, self._mesh, self._placements, run_check=False)
            if lse is not None:
                of_lse = [self._of_lse(x) for x in self._placements]
                lse = DTensor.from_local(lse, self._mesh, of_lse, run_check=False)
        return out if lse is None else (out, lse)

    # --- DTensor --------------------------------------------------------------------------------

    def _local(self, name: str, x: DTensor) -> torch.Tensor:
        """The local rows of a DTensor. Raises ValueError unless it is sharded as the plan is."""
        if self._mesh is None:
            self._mesh, self._placements = x.device_mesh, x.placements
        if x.device_mesh != self._mesh or x.placements != self._placements:
            raise ValueError(
                f"{name} must have the mesh and placements of q, {self._placements}, got "
                f"{x.placements}"
            )
        due = Shard(self._dim)
        dims = [i for i, placement in enumerate(x.placements) if placement == due]
        shared = [dist.get_process_group_ranks(self._mesh.get_group(i)) for i in dims]
        wanted = [
            dist.get_process_group_ranks(group)
            for group in (self.plan.outer, self.plan.inner)
            if group is not None
        ]
        if shared != wanted:
            raise ValueError(
                f"{name} must be placed as {due} over the ranks of the plan, {wanted}, and over no "
                f"others, got {x.placements} on a mesh of {tuple(self._mesh.mesh.shape)}"
            )
        return x.to_local()

    def _local_sinks(self, sinks: DTensor) -> torch.Tensor:
        """The local sinks of a DTensor; each rank's gradient is its share. Raises ValueError."""
        if any(not isinstance(x, Replicate) for x in sinks.placements):
            raise ValueError(f"sinks must be replicated, got {sinks.placements}")
        return sinks.to_local(grad_placements=[Partial() for _ in sinks.placements])

    def _of_lse(self, placement: Placement) -> Placement:
        """The placement of the log-sum-exp, which has heads before rows and no head dim."""
        if not isinstance(placement, Shard):
            return placement
        if self.is_packed:
            return Shard((1, 0)[placement.dim])
        return Shard(((0, 1, 2) if self.layout == "bhsd" else (0, 2, 1))[placement.dim])
