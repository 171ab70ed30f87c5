"""An entry of torch's registry of flash attention implementations (torch 2.10 and later)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention

import cutlass_attn

from .. import _C

NAME = "cutlass_attn"

# Names of the arguments that the kernels below accept, by operator. torch does not document the
# registry's operators, and a wrong guess about an argument would give wrong results silently: an
# operator with other arguments is refused when the implementation is activated.
_KNOWN = {
    "_scaled_dot_product_flash_attention": (
        "query key value dropout_p is_causal return_debug_mask scale"
    ),
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask "
        "scale window_size_left window_size_right seqused_k alibi_slopes block_table num_splits"
    ),
    "_flash_attention_forward_no_dropout_inplace": (
        "out query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "return_debug_mask "
        "scale window_size_left window_size_right seqused_k alibi_slopes block_table num_splits"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal philox_seed philox_offset scale"
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal rng_state unused scale window_size_left window_size_right"
    ),
}
_RETURNS = {
    "_scaled_dot_product_flash_attention_backward": 3,
    "_flash_attention_backward": 3,
    "_scaled_dot_product_flash_attention": 9,
    "_flash_attention_forward": 5,
    "_flash_attention_forward_no_dropout_inplace": 1,
}
# The arguments of every version of the operators; later versions have more.
_ALWAYS = {"query", "key", "value", "dropout_p", "is_causal", "scale"}
_HAVE_BACKWARD = {
    (x.device, getattr(torch, x.dtype)) for x in cutlass_attn.variants("backward") if x.automatic
}


def register_flash_impl() -> None:
    """Offers the name "cutlass_attn" to torch's registry of flash attention implementations.

        cutlass_attn.compat.sdpa.register_flash_impl()
        torch.nn.attention.activate_flash_attention_impl("cutlass_attn")

    Activating it replaces torch's flash kernels for CUDA tensors: SDPA calls for which torch
    chooses flash attention (no mask, D up to 256, float16 or bfloat16) and
    `torch.nn.attention.varlen.varlen_attn` then run here, with their backward passes, and so do
    the steps of torch's `context_parallel`. `restore_flash_attention_impl` undoes it. Calls with
    dropout stay with torch's own kernels, forward and backward.

    Raises:
        RuntimeError: torch is older than 2.10; when activated: an operator of this torch has
            arguments or results that are unknown here.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise RuntimeError(
            f"register_flash_impl needs the registry of torch 2.10 or later, this is torch "
            f"{torch.__version__}; cutlass_attn.compat.sdpa.route() works with any"
        )
    register(NAME, register_fn=_activate)


class _Handle:
    """The object that torch keeps while the implementation is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def remove(self) -> None:
        self._library._destroy()


def _activate(device: str = "CUDA") -> _Handle:
    """Puts the kernels into torch's dispatcher; torch calls it. Raises RuntimeError."""
    operators = known_operators()
    for operator in operators.values():
        check_schema(operator._schema)
    kernels = _Kernels({name: _original(name, device) for name in operators})
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("_scaled_dot_product_flash_attention", kernels.dense),
        ("_flash_attention_forward", kernels.forward),
        ("_flash_attention_forward_no_dropout_inplace", kernels.forward_into),
        ("_scaled_dot_product_flash_attention_backward", kernels.dense_backward),
        ("_flash_attention_backward", kernels.backward),
    ):
        if name in operators:
            library.impl(name, kernel, device, with_keyset=True)
    return _Handle(library)


def known_operators() -> dict[str, Any]:
    """The operators of this torch that have kernels here; the last one is new in torch 2.12."""
    return {
        name: getattr(torch.ops.aten, name).default
        for name in _KNOWN
        if hasattr(torch.ops.aten, name)
    }


def check_schema(schema: torch.FunctionSchema) -> None:
    """Raises RuntimeError if the operator has unknown arguments or another number of results."""
    operator = schema.name.removeprefix("aten::")
    known = _KNOWN[operator].split()
    names = [argument.name for argument in schema.arguments]
    # In the order of `known`, as torch passes most of them by position.
    fits = names == [name for name in known if name in names] and set(names) >= _ALWAYS
    if not fits or len(schema.returns) != _RETURNS[operator]:
        raise RuntimeError(
            f'torch {torch.__version__} has an operator that the implementation "{NAME}" does not '
            f"support: {schema}; supported: the arguments {', '.join(known)} and "
            f"{_RETURNS[operator]} results. cutlass_attn.compat.sdpa.route() does not need it"
        )


def _original(name: str, device: str) -> Any:
    """torch's own kernel; None where this build of torch has none for the device."""
    try:
        return torch.library.get_kernel(f"aten::{name}", device)
    except (RuntimeError, AttributeError):  # AttributeError: before torch 2.10
        return None


@dataclass
class _Kernels:
    """The replacements of torch's kernels for one type of device."""

    originals: dict[str, Any]

    def dense(
        self,
        keys: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """aten::_scaled_dot_product_flash_attention: operands are (B, H, S, D)."""
        if why := _why_not((query, key, value), dropout_p, return_debug_mask):
            args = (query, key, value, dropout_p, is_causal, return_debug_mask)
            name = "_scaled_dot_product_flash_attention"
            return self._leave(name, why, keys, *args, scale=scale)
        out, lse = cutlass_attn.attention(
            query,
            key,
            value,
            causal=is_causal,  # torch sets it only if there are as many keys as queries
            softmax_scale=scale,
            out=torch.empty_like(query),
            return_lse=True,
        )
        state, unused, debug = _aux(query)
        return out, lse, None, None, query.shape[2], key.shape[2], state, unused, debug

    def forward(
        self,
        keys: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        """aten::_flash_attention_forward: (B, S, H, D), or with cum_seq_q packed (T, H, D)."""
        if why := _why_not((query, key, value), dropout_p, return_debug_mask):
            args = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
            flags = (dropout_p, is_causal, return_debug_mask)
            return self._leave("_flash_attention_forward", why, keys, *args, *flags, **options)
        out, lse = _run(query, key, value, cum_seq_q, cum_seq_k, is_causal, options)
        return out, lse, *_aux(query)

    def forward_into(
        self,
        keys: Any,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        **options: Any,
    ) -> torch.Tensor:
        """aten::_flash_attention_forward_no_dropout_inplace: the result goes into `out`."""
        if why := _why_not((query, key, value), dropout_p, return_debug_mask):
            args = (out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
            flags = (dropout_p, is_causal, return_debug_mask)
            name = "_flash_attention_forward_no_dropout_inplace"
            return self._leave(name, why, keys, *args, *flags, **options)
        _, lse = _run(query, key, value, cum_seq_q, cum_seq_k, is_causal, options, out=out)
        return lse

    def dense_backward(
        self,
        keys: Any,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        """aten::_scaled_dot_product_flash_attention_backward: operands are (B, H, S, D). In
        context_parallel `out` and `logsumexp` are those of all ranks' keys."""
        if why := _why_no_backward(query, dropout_p):
            args = (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
            rest = (dropout_p, is_causal, philox_seed, philox_offset)
            name = "_scaled_dot_product_flash_attention_backward"
            return self._leave(name, why, keys, *args, *rest, scale=scale)
        options = {"causal": is_causal, "softmax_scale": scale}
        given = (grad_out, query, key, value, out, logsumexp)
        return _run_backward(_C.backward, given, options)

    def backward(
        self,
        keys: Any,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: torch.Tensor,
        unused: torch.Tensor,
        **given: Any,
    ) -> Any:
        """aten::_flash_attention_backward: (B, S, H, D), or with cum_seq_q packed (T, H, D)."""
        if why := _why_no_backward(query, dropout_p):
            args = (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
            rest = (dropout_p, is_causal, rng_state, unused)
            return self._leave("_flash_attention_backward", why, keys, *args, *rest, **given)
        options = {
            "causal": is_causal,
            "softmax_scale": given.get("scale"),
            "window": (given.get("window_size_left"), given.get("window_size_right")),
        }
        operands = (grad_out, query, key, value, out, logsumexp)
        if cum_seq_q is None:
            return _run_backward(_C.backward, operands, options | {"layout": "bshd"})
        options |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
        return _run_backward(_C.backward_varlen, operands, options)

    def _leave(self, name: str, why: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
        original = self.originals[name]
        if original is None:
            raise NotImplementedError(
                f'the flash attention implementation "{NAME}" does not take {why}, and this torch '
                f"has no kernel of its own for aten::{name}"
            )
        return original.call_boxed(keys, *args, **kwargs)


def _why_not(tensors: tuple[torch.Tensor, ...], dropout_p: float, debug: bool) -> str | None:
    """Why torch's own kernel has to do it."""
    if dropout_p != 0:
        return "dropout"  # torch's backward pass has to draw the same numbers
    if debug:
        return "return_debug_mask"
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if needs_gradient and not _has_backward(tensors[0]):
        return "an input that requires a gradient"
    return None


def _has_backward(query: torch.Tensor) -> bool:
    return (query.device.type, query.dtype) in _HAVE_BACKWARD


def _why_no_backward(query: torch.Tensor, dropout_p: float) -> str | None:
    """Why torch's own kernel has to do it."""
    if dropout_p != 0:
        return "dropout"
    return None if _has_backward(query) else f"a gradient of {query.dtype}"


def _run_backward(
    function: Any, given: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value."""
    grad_out, query, key, value, out, lse = given
    grads: tuple[torch.Tensor, ...] = function(
        query,
        key,
        value,
        options | {"deterministic": torch.are_deterministic_algorithms_enabled()},
        grad_out=grad_out,
        out=out,
        softmax_lse=lse.contiguous(),
        grad_softmax_lse=None,
        wanted=[True] * 3,
        dispatched=True,
    )
    return grads


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    is_causal: bool,
    given: dict[str, Any],
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; `given` are the operator's keywords. num_splits is ignored."""
    sides = (given.get("window_size_left"), given.get("window_size_right"))
    options: dict[str, Any] = {
        "causal": is_causal,
        "window": sides,
        "softmax_scale": given.get("scale"),
        "alibi_slopes": given.get("alibi_slopes"),
        "return_lse": True,
        "out": out,
    }
    paging = {name: given.get(name) for name in ("seqused_k", "block_table")}
    if cum_seq_q is not None:
        varlen: Any = cutlass_attn.attention_varlen
        return varlen(query, key, value, cum_seq_q, cum_seq_k, **paging, **options)
    if any(x is not None for x in paging.values()):
        raise NotImplementedError("seqused_k and block_table need packed queries with cum_seq_q")
    return cutlass_attn.attention(query, key, value, layout="bshd", **options)


def _aux(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The unused results: a state of dropout's generator, an empty tensor, an empty debug mask."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, state.new_zeros(()), query.new_empty(0)
