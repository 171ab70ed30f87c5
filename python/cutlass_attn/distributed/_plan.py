"""`ContextPlan`: the ranks that share a sequence, and the rows of each rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _schedule
from ._collectives import all_gather
from ._schedule import Band, Chunk, Joins, KernelCall, Span

SCHEMES = ("gather", "ring", "ulysses", "gather+ulysses", "ring+ulysses")


class ContextPlan:
    """How a sequence is divided among ranks, for `context_attention`.

    Args:
        group: the ranks that share the sequence: a ProcessGroup, or a DeviceMesh of one dimension.
            "gather+ulysses" and "ring+ulysses" need a DeviceMesh of two dimensions; the second one
            is for Ulysses (best: the GPUs of one host). None: all ranks.
        seqlen: tokens of the whole sequence, or of the packed batch. Not needed with cu_seqlens.
        scheme: "gather": all ranks collect all keys and values, a group of KV heads at a time.
            "ring": keys and values travel around a ring of ranks. "ulysses": after an all-to-all a
            rank has all rows of a share of the heads.
        cu_seqlens: packed sequences: the first row of each, and the end of the last one, as ints
            (a tensor is read once, here).
        placement: "zigzag": with P ranks, rank r has chunk r and chunk 2 * P - 1 - r of 2 * P, so
            that all ranks have equal work under a causal mask; "contiguous": one chunk. None:
            zigzag; for "ulysses", where work does not depend on it, contiguous.
        head_groups: "gather", "ulysses": how many groups of KV heads; the copy of one overlaps with
            the kernel of the one before. Of "gather", only two are in memory at a time. None: up
            to 4 ("ulysses": 3), fewer where kernels would be small. Rounded down to a divisor of
            the KV heads, of "ulysses" of those of a rank.
        check: when ranks compare shapes and options, which waits for the device: "first", in calls
            with shapes and options that are new to this plan; "always", in every call.

    Attributes:
        local_rows: rows of q, k and v that each rank has.
        chunk_rows: rows of a chunk, which lie together.
        padded_seqlen: rows of all ranks: seqlen, rounded up so that ranks have equally many. Rows
            after seqlen are padding: no query sees them, and they give zeros and -inf.

    Raises:
        TypeError: a length, an offset or head_groups is no int.
        ValueError: an argument is out of range, or the mesh has other dimensions.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        seqlen: int | None = None,
        *,
        scheme: str = "gather",
        cu_seqlens: Sequence[int] | torch.Tensor | None = None,
        placement: str | None = None,
        head_groups: int | None = None,
        check: str = "first",
    ) -> None:
        _require("scheme", scheme, SCHEMES)
        if placement is None:
            placement = "contiguous" if scheme == "ulysses" else "zigzag"
        _require("placement", placement, ("zigzag", "contiguous"))
        _require("check", check, ("first", "always"))
        if head_groups is not None and (head_groups := _whole("head_groups", head_groups)) < 1:
            raise ValueError(f"head_groups must be at least 1, got {head_groups}")
        self.scheme = scheme
        self.placement = placement
        self.head_groups = head_groups
        self.check = check
        self.outer, self.inner = _groups(group, scheme)
        self.outer_size, self.outer_rank = _size_and_rank(self.outer)
        self.inner_size, self.inner_rank = _size_and_rank(self.inner)
        self.seqlen, self.cu_seqlens = _lengths(seqlen, cu_seqlens)
        size = self.outer_size * self.inner_size
        chunks = self.outer_size * (2 if placement == "zigzag" else 1)
        multiple = chunks * self.inner_size  # makes chunks and each rank's rows whole numbers
        self.padded_seqlen = -(-self.seqlen // multiple) * multiple
        self.local_rows = self.padded_seqlen // size
        self.chunk_rows = self.padded_seqlen // chunks
        ends = self.cu_seqlens or (0, self.seqlen)
        self.documents = [Span(a, b) for a, b in pairwise(ends) if a < b]
        self.agreed: set[Any] = set()
        self._schedules: dict[Any, Any] = {}

    @property
    def groups(self) -> list[Any]:
        """The process groups of this rank that have more than one member."""
        return [
            group
            for group, size in ((self.inner, self.inner_size), (self.outer, self.outer_size))
            if size > 1
        ]

    @property
    def positions(self) -> torch.Tensor:
        """Positions in the sequence of this rank's rows, (local_rows,) int64 on the CPU, such as
        for rotary embeddings. Padding has positions from seqlen on."""
        return self._positions(self.outer_rank, self.inner_rank)

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of a tensor that has the whole sequence in dimension `dim`."""
        if x.shape[dim] != self.seqlen:
            raise ValueError(
                f"x must have {self.seqlen} rows, the plan's seqlen, in dimension {dim}, got shape "
                f"{tuple(x.shape)}"
            )
        at = self.positions
        rows = x.index_select(dim, at.clamp(max=self.seqlen - 1).to(x.device))
        if int(at.max()) < self.seqlen:
            return rows
        shape = [1] * x.dim()
        shape[dim] = -1
        return rows.masked_fill((at >= self.seqlen).view(shape).to(x.device), 0)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence on every rank, from each rank's rows in dimension `dim`: the inverse
        of `shard`. A collective call; it has no gradient."""
        if x.shape[dim] != self.local_rows:
            raise ValueError(
                f"x must have {self.local_rows} rows, plan.local_rows, in dimension {dim}, got "
                f"shape {tuple(x.shape)}"
            )
        x = x.detach().movedim(dim, 0)
        for group in self.groups:
            whole, work = all_gather(x, group)
            work.wait()
            x = whole.flatten(0, 1)
        at = torch.cat(
            [
                self._positions(outer, inner)
                for outer in range(self.outer_size)
                for inner in range(self.inner_size)
            ]
        )
        rows = at.argsort()[: self.seqlen].to(x.device)
        return x.index_select(0, rows).movedim(0, dim)

    def chunks(self, outer_rank: int) -> list[Chunk]:
        """Positions of the rows of one Ulysses group."""
        is_zigzag = self.placement == "zigzag"
        return _schedule.place(outer_rank, self.outer_size, self.padded_seqlen, is_zigzag)

    def calls_of_gather(
        self, band: Band, attention_chunk: int | None, joins: Joins
    ) -> list[KernelCall]:
        """The kernel calls of this rank, with the keys of all ranks in the order of positions."""
        key = ("gather", band, attention_chunk, joins)
        if key not in self._schedules:
            documents = _schedule.split_documents(self.documents, attention_chunk)
            whole = [Chunk(0, self.padded_seqlen, 0)]
            queries = self.chunks(self.outer_rank)
            self._schedules[key] = _schedule.calls(queries, whole, documents, band, joins)
        found: list[KernelCall] = self._schedules[key]
        return found

    def calls_of_ring(
        self, band: Band, attention_chunk: int | None, joins: Joins
    ) -> list[list[KernelCall]]:
        """The kernel calls of each step; in step n this rank has the keys of the rank n places
        before it. Steps after the last one with a call on any rank are left out on all ranks."""
        key = ("ring", band, attention_chunk, joins)
        if key not in self._schedules:
            documents = _schedule.split_documents(self.documents, attention_chunk)
            places = [self.chunks(rank) for rank in range(self.outer_size)]
            last, mine = 0, []
            for step in range(self.outer_size):
                for rank, queries in enumerate(places):
                    found = _schedule.calls(queries, places[rank - step], documents, band, joins)
                    if found:
                        last = step
                    if rank == self.outer_rank:
                        mine.append(found)
            self._schedules[key] = mine[: last + 1]
        steps: list[list[KernelCall]] = self._schedules[key]
        return steps

    def _positions(self, outer_rank: int, inner_rank: int) -> torch.Tensor:
        chunks = self.chunks(outer_rank)
        rows = torch.cat([torch.arange(x.start, x.stop, device="cpu") for x in chunks])
        return rows[inner_rank * self.local_rows : (inner_rank + 1) * self.local_rows]


def _require(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _groups(group: Any, scheme: str) -> tuple[Any, Any]:
    """The groups for "gather" or "ring" and for Ulysses; None if the scheme does not use one."""
    has_two = "+" in scheme
    if isinstance(group, DeviceMesh):
        dims = 2 if has_two else 1
        if group.ndim != dims:
            raise ValueError(
                f"group must be a DeviceMesh with {dims} dimension{'s' * has_two} for "
                f"scheme={scheme!r}, got {group.ndim}: shape {tuple(group.mesh.shape)}, names "
                f"{group.mesh_dim_names}; mesh['name'] is a part of it"
            )
        if has_two:
            return group.get_group(0), group.get_group(1)
        group = group.get_group()
    elif has_two:
        raise ValueError(
            f"group must be a DeviceMesh with 2 dimensions for scheme={scheme!r}, got "
            f"{type(group).__name__}"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group must be a ProcessGroup that this rank is a member of, or a DeviceMesh, got "
            f"{group!r}; torch.distributed must be initialized"
        )
    return (None, group) if scheme == "ulysses" else (group, None)


def _size_and_rank(group: Any) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def _whole(name: str, x: Any) -> int:
    """Raises TypeError unless x is an integer of any kind."""
    try:
        if not isinstance(x, bool):
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{name} must be of int, got {x!r}")


def _lengths(seqlen: int | None, cu_seqlens: Any) -> tuple[int, tuple[int, ...] | None]:
    seqlen = None if seqlen is None else _whole("seqlen", seqlen)
    if cu_seqlens is None:
        if seqlen is None or seqlen < 1:
            raise ValueError(f"seqlen must be at least 1, or cu_seqlens be given, got {seqlen}")
        return seqlen, None
    if getattr(cu_seqlens, "ndim", 1) != 1 or not hasattr(cu_seqlens, "__len__"):
        raise TypeError(f"cu_seqlens must be a list of int or (B + 1,), got {cu_seqlens!r}")
    offsets = tuple(_whole("cu_seqlens", x) for x in cu_seqlens)
    if len(offsets) < 2 or offsets[0] != 0 or list(offsets) != sorted(offsets) or offsets[-1] < 1:
        raise ValueError(f"cu_seqlens must begin with 0 and not fall, got {list(offsets)}")
    if seqlen is not None and seqlen < offsets[-1]:
        raise ValueError(f"cu_seqlens ends at {offsets[-1]}, beyond seqlen {seqlen}")
    return (offsets[-1] if seqlen is None else seqlen), offsets
