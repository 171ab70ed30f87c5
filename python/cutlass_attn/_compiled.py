"""`attention` on a GPU with a score_mod that no other option expresses: NVRTC compiles it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from . import _C, jit
from ._call import torch_library
from ._call.call import OF_FORWARD, Call
from ._mods import cpp
from ._mods.derivative import derivative
from ._mods.gradients import first_order
from ._mods.graph import Graph, UnsupportedModError

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

    @property
    def argument(self) -> tuple[str, bytes]:
        return self.name, self.operands


def made(graph: Graph) -> ScoreMod:
    """Registers the graph's function and its derivative with `jit`, under a name.

    Numbers and tensors are operands, not part of the name: functions that differ only in numbers,
    or in tensors of equal dtypes and ranks, share one name and one kernel.
    """
    roots = {"score": graph.result, "grad": derivative(graph).score}
    source = cpp.source(graph, roots)
    captures = tuple(_on(graph.device, x) for x in source.captures)
    source = dataclasses.replace(source, captures=captures)
    return ScoreMod(jit.score_mod(_BEFORE + source.text), cpp.packed(source), captures)


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
        graph, options = masked(graph, call)
        mod = made(graph)
        call = Call(call.q, call.k, call.v, options)
        return call.explained_gradients(device, score_mod=mod.argument), mod.name
    mod, options = forward_mod(call, graph, device)
    call = Call(call.q, call.k, call.v, options)
    return call.explained(device, score_mod=mod.argument), mod.name


def attention(call: Call, graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp; differentiable in q, k, v and sinks, once.

    Raises:
        NotImplementedError: a captured tensor requires a gradient.
        ValueError: no kernel takes the call.
        CompileError, CompilerNotFound: see `jit.cubin`.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in graph.captures):
        shapes = [tuple(x.shape) for x in graph.captures if x.requires_grad]
        raise UnsupportedModError(
            f"a captured tensor of shape {shapes[0]} requires a gradient; allowed only where the "
            "score_mod adds it to the score: detach it, or pass that term as bias="
        )
    return _Compiled.apply(call, graph, call.q, call.k, call.v, call.options.get("sinks"))  # type: ignore


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, graph: Graph, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        mod, options = forward_mod(call, graph)
        options = {**options, "return_lse": True, "out": None}
        out, lse = _C.forward(q, k, v, options, score_mod=mod.argument, dispatched=True)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
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
) -> tuple[torch.Tensor | None, ...]:
    """The wanted gradients of q, k, v and sinks."""
    graph, options = masked(graph, call)
    mod = made(graph)
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
        wanted=[*wanted[:3], False, wanted[3]],  # q, k, v, bias, sinks
        score_mod=mod.argument,
        dispatched=True,
    )
    return *grads[:3], grads[4]
