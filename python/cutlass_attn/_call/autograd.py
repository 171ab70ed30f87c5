"""Gradients of `attention` and `attention_varlen`.

A call is recorded in one of three ways. All save equal tensors and run one backward pass:

- `_Eager`: calls of plain tensors, without torch's dispatcher, which would cost host time;
- the operators with `register_autograd`: under torch.compile, torch.export and dispatch modes, for
  subclasses of Tensor, and for second derivatives, which raise an error;
- `_Transformed`: under torch.func, whose transforms do not accept operators with register_autograd
  (up to torch 2.13). They need a Function with setup_context, which makes torch look at signatures
  in every call; `_Eager` does without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import torch_library, vmap
from .call import OF_FORWARD
from .schema import Schema

LEAST = (2, 5)  # the first torch with CustomOpDef.register_vmap
if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST:
    raise ImportError(f"torch is {torch.__version__}; cutlass_attn needs torch 2.5 or later")

_INPUTS = ("q", "k", "v", "bias", "sinks")  # the arguments that have gradients
_OF_BACKWARD = {
    "grad_out": "Tensor?",
    "grad_softmax_lse": "Tensor?",
    "out": "Tensor",
    "softmax_lse": "Tensor",
    "wanted": "bool[]",  # of the inputs
}

Gradients = Sequence[torch.Tensor | None]  # of the inputs


class Differentiable:
    """A function with a backward pass: its two operators, and the ways to run it.

    Args:
        schema: schema of the forward operator; the backward operator's has more arguments in front.
        forward: the forward operator.
        backward: name of the backward operator, which is made here. It returns a gradient for each
            input; those that are not wanted have no elements.
        run_forward: the function of `_C` for the forward pass.
        run_backward: the function of `_C` for the backward pass.
    """

    def __init__(
        self,
        schema: Schema,
        forward: Any,
        backward: str,
        run_forward: Callable[..., Any],
        run_backward: Callable[..., Any],
    ):
        self.name = schema.function
        self.schema = schema
        self.forward = forward
        self.run_forward = run_forward
        self.run_backward = run_backward
        names = tuple(schema.defaults)
        arrays = (name for name, kind in schema.types.items() if kind.startswith("Tensor"))
        self.kept_apart = OF_FORWARD | frozenset(arrays)  # options that `_keep` looks at
        self._places = {i: names.index(x) for i, x in enumerate(_INPUTS) if x in names}
        forward.register_autograd(self.differentiate, setup_context=self.save)
        forward.register_vmap(vmap.rule(names, forward))
        self._define_backward(backward, names)

    def _define_backward(self, name: str, names: tuple[str, ...]) -> None:
        before = ", ".join(f"{kind} {parameter}" for parameter, kind in _OF_BACKWARD.items())
        results = ", ".join(["Tensor"] * len(_INPUTS))
        schema = f"({before}, {self.schema.parameters}) -> ({results})"

        def operator(*args: Any) -> tuple[torch.Tensor, ...]:
            *operands, options = self.schema.call_of(args[len(_OF_BACKWARD) :])
            call = (*args[: len(_OF_BACKWARD)], *operands, _without_forward(options), True)
            grads = self.gradients(*call) or ()
            return tuple(_nothing(args[2]) if x is None else x for x in grads)

        def fake(*args: Any) -> tuple[torch.Tensor, ...]:
            given = self.schema.by_name(args[len(_OF_BACKWARD) :])
            inputs: list[Any] = [given.get(name) for name in _INPUTS]
            return tuple(
                _nothing(args[2])
                if not is_wanted
                else torch_library.empty_like_contiguous(x)
                if name == "bias"
                else torch.empty_like(x)
                for name, x, is_wanted in zip(_INPUTS, inputs, args[4])
            )

        self.backward = torch.library.custom_op(
            f"cutlass_attn::{name}", operator, mutates_args=(), schema=schema
        )
        self.backward.register_fake(fake)
        self.backward.register_autograd(self.refuse)
        self.backward.register_vmap(vmap.rule((*_OF_BACKWARD, *names), self.backward))

    # --- A call ---------------------------------------------------------------------------------

    def eager(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> Any:
        """Runs a call of plain tensors that `record` cannot record: under autocast, with `out` and
        a gradient, or one that must raise an error."""
        q, k, v = self._cast(q, k, v, options)
        out = options.pop("out", None) if self._needs_gradient(q, k, v, options) else None
        result = self.run_forward(q, k, v, options, is_cast=True)
        if out is None:
            return result
        if isinstance(result, tuple):
            return torch_library.copied(result[0], out), *result[1:]
        return torch_library.copied(result, out)

    def record(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: dict[str, Any],
        results: tuple[torch.Tensor, torch.Tensor],
    ) -> Any:
        """Records a call for which `_C` has computed output and LSE; returns the call's result."""
        call = (self, options, results)  # a single argument: torch inspects each one
        bias, sinks = options.get("bias"), options.get("sinks")
        if bias is None and sinks is None:
            return _apply(call, q, k, v)
        return _apply(call, q, k, v, bias, sinks)

    def recorded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> Any:
        """Runs a call through the operator."""
        q, k, v = self._cast(q, k, v, options)
        needs_gradient = self._needs_gradient(q, k, v, options)
        out = options.pop("out", None)
        return_lse = options.get("return_lse", False)
        options["return_lse"] = return_lse or needs_gradient or torch_library.is_transformed()
        args = self.schema.arguments(q=q, k=k, v=v, **options)
        result, lse, max_logit = (
            _Transformed.apply(self, *args)
            if torch_library.is_transformed()
            else self.forward(*args)
        )
        result = torch_library.copied(result, out)
        more = (lse,) if return_lse else ()
        more += (max_logit,) if options.get("return_max_logit") else ()
        return (result, *more) if more else result

    def _cast(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as torch.autocast casts them for SDPA; replaces the bias in `options`."""
        q, k, v, bias = torch_library.autocast(q, k, v, options.get("bias"))
        if bias is not None:
            options["bias"] = bias
        return q, k, v

    def _needs_gradient(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> bool:
        given = {"q": q, "k": k, "v": v, **options}
        needs_gradient = torch_library.needs_gradient(self.name, given, _INPUTS)
        if needs_gradient and (mode := options.get("quantize")) is not None:
            raise NotImplementedError(
                f"{self.name} has no gradient with quantize={mode!r}, and an input requires one; "
                "detach it, or call under torch.no_grad()"
            )
        return needs_gradient

    # --- Its backward pass ----------------------------------------------------------------------

    def gradients(
        self,
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        wanted: Sequence[bool],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: dict[str, Any],
        dispatched: bool | None = None,
    ) -> Gradients | None:
        """The wanted gradients; q, k, v and the options are those of the forward call.

        None if the call must go through torch's dispatcher, unless `dispatched` says that it does.
        """
        if torch_library.is_deterministic():
            options = {**options, "deterministic": True}
        # Passed by name: a dict costs 20,000 of the 460,000 instructions of forward and backward.
        grads: Gradients | None = self.run_backward(
            q,
            k,
            v,
            options,
            grad_out=grad_out,
            out=out,
            softmax_lse=lse,
            grad_softmax_lse=grad_lse,
            wanted=wanted,
            dispatched=dispatched,
        )
        return grads

    # --- The operators' derivatives -------------------------------------------------------------

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Saves the arguments and results of the forward operator."""
        out, lse, max_logit = output
        ctx.mark_non_differentiable(max_logit)
        if out.numel() > 0 and lse.numel() == 0:
            raise ValueError(f"{self.name}: a gradient of the operator needs return_lse=True")
        q, k, v, options = self.schema.call_of(inputs)
        _keep(ctx, self, q, k, v, out, lse, options)

    def differentiate(
        self,
        ctx: Any,
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        _: Any,  # of the largest logits, which have no derivative
        first: int = 0,
    ) -> tuple[Any, ...]:
        """Gradients of all arguments; argument 0 is the context's input number `first`."""
        wanted = [False] * len(_INPUTS)
        for i, place in self._places.items():
            wanted[i] = ctx.needs_input_grad[first + place]
        function, out, lse, *call = _kept(ctx)
        grads = _by_operator(function, grad_out, grad_lse, out, lse, wanted, *call)
        result: list[Any] = [None] * len(self.schema.defaults)
        for i, place in self._places.items():
            result[place] = grads[i]
        return tuple(result)

    def refuse(self, ctx: Any, *grads: Any) -> Any:
        """The derivative of the backward operator, which does not exist: raises."""
        raise NotImplementedError(
            f"{self.name} has no second derivative: its backward pass cannot be differentiated"
        )


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Differentiable, dict[str, Any], tuple[torch.Tensor, torch.Tensor]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,  # differentiable inputs of the options, listed for torch
    ) -> Any:
        function, options, (out, lse) = call
        _keep(ctx, function, q, k, v, out, lse, options)
        return (out, lse) if options.get("return_lse") else out

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any = None) -> Any:
        function, out, lse, q, k, v, options = _kept(ctx)
        wanted, grads = ctx.needs_input_grad[1:], None
        if not torch_library.is_compiling():
            grads = function.gradients(grad_out, grad_lse, out, lse, wanted, q, k, v, options)
        if grads is None:  # the backward operator, whose derivative raises the error
            grads = _by_operator(function, grad_out, grad_lse, out, lse, wanted, q, k, v, options)
        return None, *grads


# Function.apply() looks for functorch transforms, which C++ has already done: it takes as long as
# the call. The class of `ctx` also looks for a `vjp` before each backward pass: 4,000 instructions.
_apply = super(torch.autograd.Function, _Eager).apply
if hasattr(_Eager, "_backward_cls"):
    _Eager._backward_cls.apply = _Eager.backward


class _Transformed(torch.autograd.Function):
    generate_vmap_rule = True  # from the rules of the operators

    @staticmethod
    def forward(function: Differentiable, *args: Any) -> Any:
        return function.forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        function, *args = inputs
        function.save(ctx, tuple(args), output)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> Any:
        function, *_ = ctx.call
        return None, *function.differentiate(ctx, grad_out, grad_lse, None, first=1)


class _TransformedGradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(function: Differentiable, *args: Any) -> Any:
        return function.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.function = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.function.refuse(ctx)


def _keep(
    ctx: Any,
    function: Differentiable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: dict[str, Any],
) -> None:
    """Saves a call and its results for the backward pass, tensors where torch's hooks see them."""
    tensors: list[str] = []
    if function.kept_apart.isdisjoint(options):  # most calls; one with * takes twice as long
        ctx.save_for_backward(out, lse, q, k, v)
    else:
        options = _without_forward(options)
        tensors = [name for name, x in options.items() if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(out, lse, q, k, v, *[options.pop(name) for name in tensors])
    ctx.call = (function, tensors, options)
    ctx.set_materialize_grads(False)


def _without_forward(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name not in OF_FORWARD}


def _kept(ctx: Any) -> tuple[Any, ...]:
    """The function, the output, its LSE, q, k, v, options."""
    function, tensors, options = ctx.call
    out, lse, q, k, v, *saved = ctx.saved_tensors
    if saved:
        options = {**options, **dict(zip(tensors, saved))}
    return function, out, lse, q, k, v, options


def _by_operator(
    function: Differentiable,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wanted: Sequence[bool],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
) -> Gradients:
    """`gradients`, through the backward operator."""
    options = dict(options)
    torch_library.options_for_operator(q, options)
    given = function.schema.arguments(q=q, k=k, v=v, **options)
    of_all = [*wanted, *[False] * (len(_INPUTS) - len(wanted))]
    args = (grad_out, grad_lse, out, lse, of_all, *given)
    if torch_library.is_transformed():
        grads = _TransformedGradients.apply(function, *args)
    else:
        grads = function.backward(*args)
    return [x if y else None for x, y in zip(grads, wanted)]


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """A tensor without elements, for a gradient that is not wanted."""
    return like.new_empty((0,))
