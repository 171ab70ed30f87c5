"""`attention` on a GPU with a score_mod that no other option expresses: NVRTC compiles it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from . import _C, jit
from ._call import torch_library
from ._call.call import OF_FORWARD, Call
from ._mods import cpp
from ._mods.derivative import derivative
from ._mods.gradients import first_order
from ._mods.graph import Graph

_BEFORE = f"""\
using cutlass::half_t;
using cutlass::bfloat16_t;
CA_HOST_DEVICE float tanhf(float x) {{ return fast_tanh(x); }}
{cpp.PRELUDE}"""
_VARIABLES = ("b", "h", "q", "k")


@dataclass(frozen=True)
class ScoreMod:
    """A compiled function and its operands, for `_C`. Keeps the captured tensors alive."""

    name: str
    operands: bytes
    captures: tuple[torch.Tensor, ...]
    sums: dict[int, torch.Tensor]  # {index of a captured tensor: its gradient, in float32}

    @property
    def argument(self) -> tuple[str, bytes]:
        return self.name, self.operands


def made(
    graph: Graph,
    wanted: Collection[int] = (),
    of: Graph | None = None,
    sums_on: torch.device | None = None,
) -> ScoreMod:
    """Registers the graph's function and its derivative with `jit`, under a name.

    Numbers and tensors are operands, not part of the name: functions that differ only in numbers,
    or in tensors of equal dtypes and ranks, share one name and one kernel.

    Args:
        graph: the function.
        wanted: indices of the captured tensors to which a backward kernel adds gradients.
        of: the function without its masks, if tensors are wanted; derivatives are of this one,
            because kernels need none where a key is masked.
        sums_on: device of the gradients; None: that of the call.
    """
    found = derivative(graph if of is None else of, wanted)
    if not found.loads:
        found = derivative(graph)
    source = cpp.source(graph, {"score": graph.result, "grad": found.score}, of=found)
    sums = {
        i: torch.zeros(graph.captures[i].shape, dtype=torch.float32, device=sums_on or graph.device)
        for i in source.sums
    }
    captures = tuple(_on(graph.device, x) for x in source.captures)
    source = dataclasses.replace(source, captures=captures)
    operands = cpp.packed(source, tuple(sums.values()))
    return ScoreMod(jit.score_mod(_BEFORE + source.text), operands, captures, sums)


def _on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    if x.device == device:
        return x.detach()
    if x.numel() > 1:
        raise ValueError(
            f"a captured tensor of shape {tuple(x.shape)} is on {x.device}; query is on {device}"
        )
    return x.detach().to(device)


def masked(graph: Graph, call: Call) -> tuple[Graph, dict[str, Any]]:
    """The graph with the bool mask and the chunk as terms of it, and the remaining options.

    Few kernels accept a score_mod together with a mask or a chunk.
    """
    graph = dataclasses.replace(graph, captures=list(graph.captures))
    options = dict(call.options)
    mask, chunk = options.pop("mask", None), options.pop("attention_chunk", None)
    variables = [graph.variable(x) for x in _VARIABLES]
    conditions = []
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        index = [x for x, size in zip(variables, mask.shape) if size != 1]
        conditions.append(graph.load(mask.reshape([n for n in mask.shape if n != 1]), index))
    if chunk is not None:
        facts = call.facts()
        _, _, q, k = variables
        size = graph.number(int(chunk))
        q = graph.apply("add", q, graph.number(facts.seqlen_k - facts.seqlen_q))
        chunks = (graph.apply("floordiv", x, size) for x in (q, k))
        conditions.append(graph.apply("eq", *chunks))
    for condition in conditions:
        hidden = graph.number(-float("inf"))
        graph.root = graph.apply("where", condition, graph.result, hidden)
    return graph, options


def forward_mod(call: Call, graph: Graph, device: Any = None) -> tuple[ScoreMod, dict[str, Any]]:
    """The function and options for the forward kernel. Hopper's kernel accepts mask and chunk as
    options, and skips masked tiles."""
    if call.options.get("mask") is None and call.options.get("attention_chunk") is None:
        return made(graph), call.options
    whole = made(graph)
    found = call.explained(device, score_mod=whole.argument)
    if found.chosen is not None:
        return whole, call.options
    graph, options = masked(graph, call)
    return made(graph), options


def explained(call: Call, graph: Graph, device: Any, grad: bool) -> tuple[_C.Explanation, str]:
    """The result of `_C.explain`, and the name of the compiled function."""
    if grad:
        wanted = [i for i, x in enumerate(graph.captures) if x.requires_grad]
        if wanted:
            _check_order(call, graph.captures[wanted[0]])
        whole, options = masked(graph, call)
        mod = made(whole, wanted, graph, torch.device("meta"))
        call = Call(call.q, call.k, call.v, options)
        return call.explained_gradients(device, score_mod=mod.argument), mod.name
    mod, options = forward_mod(call, graph, device)
    call = Call(call.q, call.k, call.v, options)
    return call.explained(device, score_mod=mod.argument), mod.name


def attention(call: Call, graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp; differentiable in q, k, v, sinks and captured tensors, once.

    Raises:
        ValueError: no kernel takes the call, or a captured tensor requires a gradient and the call
            has to be deterministic.
        CompileError, CompilerNotFound: see `jit.cubin`.
    """
    if torch.is_grad_enabled():
        for x in graph.captures:
            if x.requires_grad:
                _check_order(call, x)
    sinks = call.options.get("sinks")
    return _Compiled.apply(call, graph, call.q, call.k, call.v, sinks, *graph.captures)  # type: ignore


def _check_order(call: Call, capture: torch.Tensor) -> None:
    """Raises a ValueError if gradients of this tensor have to have the same bits in every run."""
    if call.options.get("deterministic"):
        given, allowed = "deterministic is True", "deterministic=False"
    elif torch_library.is_deterministic():
        given = "torch.use_deterministic_algorithms is on"
        allowed = "torch.use_deterministic_algorithms(False)"
    else:
        return
    raise ValueError(
        f"{given}, and score_mod captures a tensor of shape {tuple(capture.shape)} that requires a "
        f"gradient, which kernels add up in any order; allowed: {allowed}, or the tensor detached"
    )


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, graph: Graph, q: Any, k: Any, v: Any, sinks: Any, *captures: Any
    ) -> Any:
        mod, options = forward_mod(call, graph)
        options = {**options, "return_lse": True, "out": None}
        out, lse = _C.forward(q, k, v, options, score_mod=mod.argument, dispatched=True)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *captures)
        ctx.call = call, graph
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        call, graph = ctx.call
        compute = functools.partial(_gradients, call, graph, ctx.needs_input_grad[2:])
        return None, None, *first_order(compute, grad_out, grad_lse, *ctx.saved_tensors)


def _gradients(
    call: Call,
    graph: Graph,
    wanted: tuple[bool, ...],
    grad_out: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    out: Any,
    lse: Any,
    *captures: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The wanted gradients of q, k, v, sinks and captured tensors."""
    graph = dataclasses.replace(graph, captures=list(captures))
    of_captures = [i for i, is_wanted in enumerate(wanted[4:]) if is_wanted]
    if of_captures:
        _check_order(call, captures[of_captures[0]])
    whole, options = masked(graph, call)
    mod = made(whole, of_captures, graph)
    options = {name: x for name, x in options.items() if name not in OF_FORWARD}
    options.pop("out", None)
    if sinks is not None:
        options["sinks"] = sinks
    if torch_library.is_deterministic():
        options["deterministic"] = True
    grads = _C.backward(
        q,
        k,
        v,
        options,
        grad_out=grad_out,
        out=out,
        softmax_lse=lse,
        grad_softmax_lse=grad_lse,
        # q, k, v, bias, sinks; one of them, or no kernel would run
        wanted=[wanted[0] or not any(wanted[:4]), *wanted[1:3], False, wanted[3]],
        score_mod=mod.argument,
        dispatched=True,
    )
    found = [
        (mod.sums[i].to(x) if i in mod.sums else torch.zeros_like(x)) if is_wanted else None
        for i, (x, is_wanted) in enumerate(zip(captures, wanted[4:]))
    ]
    return *grads[:3], grads[4], *found
