"""Masks of transformers' models that are intervals of keys: padding, causal, sliding window.

`mask_function` replaces transformers.masking_utils.sdpa_mask, which makes a (B, 1, Sq, Sk) bool
mask for all layers. If the mask is one interval per batch entry, it returns a `PaddingMask`
instead, which has no memory and holds the intervals as options of `cutlass_attn.attention`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


class PaddingMask(torch.Tensor):
    """A mask as transformers hands it to layers, (B, 1, Sq, Sk) bool, without its values.

    `attention_forward` reads its options. All other code that reads it, such as a model that
    slices it, gets the values of `dense()`. If such code writes to them, they become the mask, and
    the options no longer apply.

    Attributes:
        options: of `cutlass_attn.attention`: causal or window, seqused_q, seqused_k, leftpad_k.
        make: computes the values.
        numbers: the values; None until something reads them.
    """

    options: dict[str, Any]
    make: Callable[[], torch.Tensor]
    numbers: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type,
        shape: tuple[int, ...],
        device: Any,
        options: dict[str, Any],
        make: Callable[[], torch.Tensor],
    ) -> Any:
        wrapper: Any = torch.Tensor._make_wrapper_subclass
        mask = wrapper(cls, shape, dtype=torch.bool, device=device)
        mask.options, mask.make, mask.numbers = options, make, None
        return mask

    def dense(self) -> torch.Tensor:
        if self.numbers is None:
            self.numbers = self.make()
        return self.numbers

    # Functions that torch runs without its dispatcher.
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.dense(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle and torch.save
        return self.dense().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def tolist(self) -> Any:
        return self.dense().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(
            lambda x: x.dense() if isinstance(x, PaddingMask) else x, (args, kwargs or {})
        )
        return function(*args, **kwargs)


def mask_function(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers calls this once per forward pass, with the arguments of its sdpa_mask. It waits
    for the device once, as sdpa_mask does."""
    from transformers.masking_utils import sdpa_mask

    dense = functools.partial(sdpa_mask, *args, **kwargs)
    # Newer versions pass the queries' positions as numbers under these names, older ones a tensor.
    is_known = {"batch_size", "q_length", "q_offset", "kv_length"} <= kwargs.keys()
    found = _intervals(**kwargs) if is_known else None
    if found is None:
        return dense()
    whole = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    shape = (kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"])
    return PaddingMask(shape, kwargs["attention_mask"].device, found, lambda: sdpa_mask(**whole))


def _intervals(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> dict[str, Any] | None:
    """Options that are equal to the mask.

    None if it is not one interval per entry, if sdpa_mask needs no mask for it, if other code will
    change the mask, or if values cannot be read now.
    """
    if attention_mask is None or not (allow_is_causal_skip or allow_is_bidirectional_skip):
        return None
    pattern = _pattern(mask_function)
    if pattern is None or _is_traced(attention_mask):
        return None
    visible = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if visible.shape[0] != batch_size or visible.shape[1] == 0:
        return None
    places = torch.arange(visible.shape[1], device=visible.device)
    first = places.where(visible, kv_length).amin(1)
    end = (places + 1).where(visible, 0).amax(1)
    # Query i sits on key i + shift. The interval of an entry's queries ends where that of its keys
    # does, as the last query sits on the last key; later queries are padding.
    end_q = torch.full_like(end, q_length)
    has_holes = visible.sum(1) != (end - first).clamp(min=0)
    if pattern:
        shift = q_offset - kv_offset
        if pattern.get("window", (0, 0))[1] and q_length + shift != kv_length:
            return None  # the last queries see keys after their own
        end = end.clamp(max=q_length + shift)
        end_q = (end - shift).clamp(min=0)
    first = torch.minimum(first, end)
    lacks = torch.stack([has_holes, first > 0, end_q < q_length, end < kv_length])
    holes, left, right_q, right_k = lacks.any(1).tolist()
    if holes or (right_k and pattern and not (left or right_q)):
        return None  # e.g. a static cache that is full, which sdpa_mask handles
    is_plain = "window" not in pattern and (not pattern or q_length in (1, kv_length))
    if is_plain and not (left or right_q or right_k):
        return None  # is_causal alone is the mask
    options = dict(pattern)
    for name, is_needed, numbers in (
        ("leftpad_k", left, first),
        ("seqused_q", right_q, end_q),
        ("seqused_k", right_k, end),
    ):
        if is_needed:
            options[name] = numbers.int()
    return options


def _pattern(mask_function: Any) -> dict[str, Any] | None:
    """Options for a mask function of transformers, which is a closure; None if it is unknown."""
    from transformers import masking_utils as theirs

    if mask_function is theirs.causal_mask_function:
        return {"causal": True}
    if mask_function is theirs.bidirectional_mask_function:
        return {}
    parts = _closure(mask_function, "and_masks.<locals>.and_mask").get("mask_functions", ())
    if len(parts) != 2:
        return None
    overlay, base = parts
    name = "sliding_window_overlay"
    width = _closure(overlay, f"{name}.<locals>.inner_mask").get("sliding_window")
    if base is theirs.causal_mask_function and isinstance(width, int) and width > 0:
        return {"window": (width - 1, 0)}  # transformers' width counts the query's own key
    name = "sliding_window_bidirectional_overlay"
    width = _closure(overlay, f"{name}.<locals>.inner_mask").get("sliding_window")
    if base is theirs.bidirectional_mask_function and isinstance(width, int) and width >= 0:
        return {"window": (width, width)}
    return None


def _closure(function: Any, name: str) -> dict[str, Any]:
    """The variables that a function of transformers.masking_utils with this name has captured."""
    where = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if where != ("transformers.masking_utils", name):
        return {}
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _is_traced(x: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        return True
    if x.is_meta or torch._C._is_tracing():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
