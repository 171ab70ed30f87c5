"""Converts mask_mod and BlockMask to an interval and a bool mask, kept for later calls."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import transforms
from .graph import Graph, Node, evaluate, ordered
from .masks import Interval, Lengths, dense, in_rows, options, split
from .tracing import trace

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Mask:
    """A mask: a key is visible if both the interval and `dense` allow it."""

    interval: Interval
    dense: torch.Tensor | None  # bool, broadcasts to (B, Hq, Sq, Sk)
    has_interval: bool = False  # `dense` allows no more than the interval


State = tuple[Any, ...]  # of a tensor; see `_state`


@dataclass(frozen=True)
class _Kept:
    mask: Mask
    function: weakref.ref[Any]  # the mask_mod
    read: list[tuple[torch.Tensor, State]]


_MOST = 4  # sizes of calls for which one BlockMask, or mask_mod, keeps masks
_kept: weakref.WeakKeyDictionary[BlockMask, dict[Lengths, _Kept]] = weakref.WeakKeyDictionary()


_NO_MASK = 1 << 30  # BLOCK_SIZE of a BlockMask that stands for none


def check(block_mask: Any, lengths: Lengths, device: torch.device) -> None:
    """Checks a BlockMask against a call. Raises TypeError, RuntimeError, ValueError."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        hint = "; a bool tensor is the option mask" if isinstance(block_mask, torch.Tensor) else ""
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}{hint}")
    counts = block_mask.kv_num_blocks
    if counts.device != device:
        raise RuntimeError(f"block_mask is on {counts.device}; query is on {device}")
    if counts.dim() != 3:
        raise ValueError(
            f"block_mask.kv_num_blocks must have 3 dimensions, got {tuple(counts.shape)}"
        )
    for name, size, due in (
        ("batch size", counts.shape[0], lengths.b),
        ("number of heads", counts.shape[1], lengths.h),
    ):
        if size not in (1, due):
            raise ValueError(f"block_mask has {name} {size}; query has {due}, and 1 is allowed")
    if block_mask.BLOCK_SIZE == (_NO_MASK, _NO_MASK):
        return
    own, of_call = tuple(block_mask.seq_lengths), (lengths.q, lengths.k)
    if own != of_call:
        raise ValueError(
            f"block_mask is of lengths {own}; query and key have {of_call}. Create it for these "
            f"lengths, or call block_mask._adjust{of_call}; a slice of a BlockMask keeps the "
            "lengths of the whole"
        )


def read(block_mask: BlockMask, lengths: Lengths) -> Mask:
    """The mask of a BlockMask for a call of these sizes.

    It is kept for as long as the BlockMask lives, and read again if its mask_mod is another one, or
    if `_state` of its lists or of a tensor that mask_mod captured changed. A variable of mask_mod
    that is bound to another tensor goes unseen: torch's lists would be of the old one, too.
    """
    if transforms.have_wrapped(_lists(block_mask)):
        return _read(block_mask, _traced(block_mask), lengths)
    entries = _kept.setdefault(block_mask, {})
    known = entries.get(lengths)
    if known is not None and _is_current(known, block_mask):
        return known.mask
    graph = _traced(block_mask)
    if transforms.have_wrapped(graph.captures):
        return _read(block_mask, graph, lengths)
    with transforms.outside():
        mask = _read(block_mask, graph, lengths)
    read_tensors = [*_lists(block_mask), *graph.captures]
    function = _weak(block_mask.mask_mod)
    if function is not None:
        if len(entries) >= _MOST and lengths not in entries:
            entries.clear()
        entries[lengths] = _Kept(mask, function, [(x, _state(x)) for x in read_tensors])
    return mask


@dataclass(frozen=True)
class _KeptFunction:
    mask: Mask
    nodes: tuple[Any, ...]  # what the function computed
    captures: list[tuple[weakref.ref[torch.Tensor], State]]


_functions: weakref.WeakKeyDictionary[Any, dict[Any, _KeptFunction]] = weakref.WeakKeyDictionary()


def read_function(mask_mod: Callable[..., Any], lengths: Lengths, device: torch.device) -> Mask:
    """The mask of a mask_mod for a call of these sizes.

    The function is traced in every call. Its mask is kept for as long as the function lives, and
    used again where the trace is the same: numbers, and captured tensors that are the same objects
    in the same `_state`. torch counts no writes to tensors of inference mode, so a mask that reads
    one is not kept.
    """
    graph = trace(mask_mod, "mask_mod", device)
    if transforms.have_wrapped(graph.captures):
        transforms.refuse_mapped("mask_mod", graph.captures)
        return _computed(graph, lengths, device)
    nodes, key = _identity(graph), (lengths, str(device))
    try:
        entries = _functions.setdefault(mask_mod, {})
    except TypeError:  # no weak reference to it, or no hash
        entries = {}
    known = entries.get(key)
    if known is not None and known.nodes == nodes and _same(known.captures, graph.captures):
        return known.mask
    with transforms.outside():
        mask = _computed(graph, lengths, device)
    if not any(x.is_inference() for x in graph.captures):
        if len(entries) >= _MOST and key not in entries:
            entries.clear()
        captures = [(weakref.ref(x), _state(x)) for x in graph.captures]
        entries[key] = _KeptFunction(mask, nodes, captures)
    return mask


def _computed(graph: Graph, lengths: Lengths, device: torch.device) -> Mask:
    with torch.no_grad(), torch.inference_mode(False):
        interval, rest = split(graph, graph.result)
        return Mask(interval, None if rest is None else dense(graph, rest, lengths, device))


def _same(
    known: list[tuple[weakref.ref[torch.Tensor], State]], captures: list[torch.Tensor]
) -> bool:
    """Whether the captured tensors are the known objects, in the known state."""
    return len(known) == len(captures) and all(
        kept() is x and state == _state(x) for (kept, state), x in zip(known, captures)
    )


def _identity(graph: Graph) -> tuple[Any, ...]:
    """A key that is equal for graphs that compute equal results from equal captures."""
    order = ordered(graph.result)
    place = {node: i for i, node in enumerate(order)}
    return tuple((x.op, x.kind, repr(x.value), *(place[y] for y in x.args)) for x in order)


def _is_current(known: _Kept, block_mask: BlockMask) -> bool:
    function, lists = known.function(), _lists(block_mask)
    return (
        function is not None
        and (function is block_mask.mask_mod or function == block_mask.mask_mod)
        and all(x is y for x, (y, _) in zip(lists, known.read))
        and all(_state(x) == state for x, state in known.read)
    )


def _weak(function: Callable[..., Any]) -> weakref.ref[Any] | None:
    """A weak reference: the function may refer to the BlockMask, and would keep it alive."""
    try:
        return (weakref.WeakMethod if inspect.ismethod(function) else weakref.ref)(function)
    except TypeError:
        return None


def _state(x: torch.Tensor) -> State:
    """The state of a tensor: it changes when torch counts a write (not in inference mode), and when
    `x.data` becomes another tensor."""
    try:
        data = x.data_ptr()
    except RuntimeError:  # a tensor of torch.func, which has no memory of its own
        data = None
    return None if x.is_inference() else x._version, data, x.shape, x.stride()


def _lists(block_mask: BlockMask) -> list[torch.Tensor]:
    lists = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    return [x for x in lists if x is not None]


def _traced(block_mask: BlockMask) -> Graph:
    graph = trace(block_mask.mask_mod, "mask_mod", block_mask.kv_num_blocks.device)
    transforms.refuse_mapped("block_mask", [*_lists(block_mask), *graph.captures])
    return graph


# Outside of inference mode, so that a call with gradients can keep the mask for backward.
@torch.inference_mode(False)
@torch.no_grad()
def _read(block_mask: BlockMask, graph: Graph, lengths: Lengths) -> Mask:
    interval, rest = split(graph, graph.result)
    lists = _Lists(block_mask, lengths)
    if rest is None and interval.chunk is None:
        follows = lists.follow_interval(interval)
    else:
        follows = lists.follow(graph, graph.result)
    if not follows:  # lists that say more than mask_mod does
        return Mask(Interval(), lists.dense(graph, graph.result))
    if options(interval, lengths) is None:  # an interval that no kernel has
        return Mask(interval, dense(graph, graph.result, lengths, lists.device), True)
    if rest is None:
        return Mask(interval, None)
    return Mask(interval, dense(graph, rest, lengths, lists.device))


class _Lists:
    """A BlockMask's lists as maps of blocks: mask_mod applies in `partial`, all keys of `full` are
    visible, those of all other blocks are not."""

    def __init__(self, block_mask: BlockMask, lengths: Lengths) -> None:
        self.lengths = lengths
        self.size_q, self.size_k = block_mask.BLOCK_SIZE
        self.columns = -(-lengths.k // self.size_k)
        self.device = block_mask.kv_num_blocks.device
        self.partial = self._map(block_mask.kv_num_blocks, block_mask.kv_indices)
        self.full = torch.zeros_like(self.partial)
        if block_mask.full_kv_num_blocks is not None:
            self.full = self._map(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)

    def _map(self, counts: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """(B or 1, H or 1, blocks of rows, blocks of keys); entries beyond a count are not read."""
        assert indices is not None
        position = torch.arange(indices.shape[-1], device=self.device)
        beyond = torch.full_like(indices, self.columns)
        index = torch.where(position < counts[..., None], indices, beyond).long()
        shape = (*counts.shape, self.columns + 1)
        found = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return found.scatter_(-1, index, True)[..., : self.columns]

    def follow_interval(self, interval: Interval) -> bool:
        """Whether the lists of blocks agree with a mask_mod that is an interval."""
        first_q = torch.arange(self.partial.shape[-2], device=self.device)[:, None] * self.size_q
        first_k = torch.arange(self.columns, device=self.device) * self.size_k
        last_q = (first_q + self.size_q).clamp(max=self.lengths.q) - 1
        last_k = (first_k + self.size_k).clamp(max=self.lengths.k) - 1
        lowest, highest = first_k - last_q, last_k - first_q  # of k - q in a block
        some = every = torch.ones_like(lowest, dtype=torch.bool)
        if interval.low is not None:
            some, every = some & (highest >= interval.low), every & (lowest >= interval.low)
        if interval.high is not None:
            some, every = some & (lowest <= interval.high), every & (highest <= interval.high)
        wrong = (some & ~(self.partial | self.full)) | (self.full & ~every)
        return not wrong.any()

    def follow(self, graph: Graph, root: Node) -> bool:
        """Whether the lists of blocks agree with any mask_mod."""
        wrong = torch.zeros((), dtype=torch.bool, device=self.device)
        for rows, visible in self._blocks(graph, root):
            partial, full = self._rows(rows)
            wrong |= ((visible & ~(partial | full)) | (full & ~visible)).any()
        return not wrong

    def dense(self, graph: Graph, root: Node) -> torch.Tensor:
        lengths = self.lengths
        own = lengths.shape(root.depends)
        b, h = (max(own[i], self.partial.shape[i], self.full.shape[i]) for i in (0, 1))
        shape = b, h, lengths.q, lengths.k
        result = torch.empty(shape, dtype=torch.bool, device=self.device)
        for rows, visible in self._blocks(graph, root):
            partial, full = self._rows(rows)
            result[:, :, rows] = (visible & partial) | full
        return result

    def _blocks(self, graph: Graph, root: Node) -> Any:
        b, h, _, _ = self.lengths.shape(root.depends)
        width = max(b, self.partial.shape[0]) * max(h, self.partial.shape[1]) * self.lengths.k
        for rows in in_rows(self.lengths, width, len(ordered(root)) + 4):
            yield rows, evaluate(graph, root, self.lengths.variables(self.device, rows))

    def _rows(self, rows: slice) -> list[torch.Tensor]:
        """The maps of some rows of the mask, one entry for each key."""
        q = torch.arange(rows.start, rows.stop, device=self.device) // self.size_q
        k = torch.arange(self.lengths.k, device=self.device) // self.size_k
        return [x[:, :, q[:, None], k] for x in (self.partial, self.full)]
