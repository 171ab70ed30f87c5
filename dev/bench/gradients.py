"""Backward passes: running them, and judging their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from cutlass_attn import _C
from cutlass_attn._attention import attention
from cutlass_attn.testing import Accuracy
from cutlass_attn.tools.experiment.problems import Inputs

# The error of a gradient may be this many times that of an unfused backward pass in its dtype.
_ALLOWED = 2.0

Gradients = tuple[Any, Any, Any]  # of q, k and v


@dataclass(frozen=True)
class BackwardPass:
    """The backward pass of a finished call: gradients of q, k, v and what the option learns."""

    out: Any
    operands: tuple[Any, ...]
    grad_out: Any

    @classmethod
    def of(
        cls,
        attention: Callable[..., Any],
        inputs: Inputs,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> BackwardPass:
        """The backward pass of `attention(q, k, v)`, which is called in the context."""
        operands = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        with context():
            out = attention(*operands)
        return cls(out, (*operands, *inputs.keywords.learned), _grad_of(out))

    def __call__(self) -> Gradients:
        """Returns the gradients of q, k and v."""
        import torch

        gradients = torch.autograd.grad(self.out, self.operands, self.grad_out, retain_graph=True)
        return gradients[:3]  # type: ignore[return-value]


class KernelPass:
    """A backward pass by a kernel or variant of this library, given by name, of a call with these
    keywords. Raises ValueError if it does not accept the call."""

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        import torch

        self._operands = inputs.q, inputs.k, inputs.v
        self._options = options
        out, lse = attention(*self._operands, **options, return_lse=True)
        self._given = {"grad_out": _grad_of(out), "out": out, "softmax_lse": lse}
        self._gradients: Gradients = tuple(map(torch.empty_like, self._operands))  # type: ignore

    def __call__(self, kernel: str) -> Gradients:
        names = ("grad_q", "grad_k", "grad_v")
        gradients = dict(zip(names, self._gradients, strict=True))
        _C.backward(*self._operands, self._options, **self._given, **gradients, kernel=kernel)
        return self._gradients


def _grad_of(out: Any) -> Any:
    """A random gradient of a result, equal in every run."""
    import torch

    generator = torch.Generator(out.device).manual_seed(2)
    noise = torch.randn(out.shape, generator=generator, device=out.device)
    return noise.to(out.dtype)


class GradientYardstick:
    """Gradients in fp64, and the error of an unfused backward pass in the problem's dtype.

    Only the first KV head of the first batch entry is compared. For problems without an option.
    """

    def __init__(self, inputs: Inputs) -> None:
        import torch

        group = inputs.shape.heads_q // inputs.shape.heads_kv
        operands = (inputs.q[:1, :group], inputs.k[:1, :1], inputs.v[:1, :1])
        grad_out = BackwardPass.of(lambda q, k, v: torch.empty_like(q), inputs).grad_out[:1, :group]
        self._group = group
        self._exact = _unfused(operands, grad_out, inputs.shape.causal, torch.float64)
        unfused = _unfused(operands, grad_out, inputs.shape.causal, inputs.q.dtype)
        self._allowed = max(
            _relative(given, exact) for given, exact in zip(unfused, self._exact, strict=True)
        )

    def judge(self, gradients: Gradients) -> Accuracy:
        """The worst of the three gradients. Errors are relative to a gradient's RMS."""
        heads = (self._group, 1, 1)
        parts = [x[:1, :n] for x, n in zip(gradients, heads, strict=True)]
        errors = [_relative(given, exact) for given, exact in zip(parts, self._exact, strict=True)]
        largest = max(
            float((given.double() - exact).abs().max() / _size(exact))
            for given, exact in zip(parts, self._exact, strict=True)
        )
        rms, allowed = max(errors), _ALLOWED * self._allowed
        reason = ""
        if not rms <= allowed:
            reason = f"RMS error {rms:.3g} of a gradient, allowed {allowed:.3g}"
        elif not all(bool(x.isfinite().all()) for x in gradients):
            reason = "a gradient is not finite everywhere"
        mean = sum(errors) / len(errors)
        return Accuracy(largest, mean, rms, float("inf"), allowed, self._allowed, reason)


def _size(x: Any) -> float:
    return float(x.double().square().mean().sqrt())


def _relative(given: Any, exact: Any) -> float:
    return _size(given.double() - exact) / _size(exact)


def _unfused(operands: Gradients, grad_out: Any, causal: bool, dtype: Any) -> Gradients:
    """Gradients by autograd of the definition of attention, with matrices rounded to `dtype`."""
    import torch

    q, k, v = (x.detach().to(dtype).requires_grad_() for x in operands)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(ones.triu(1 + k.shape[2] - q.shape[2]), float("-inf"))
    out = torch.softmax(scores, -1) @ v
    return torch.autograd.grad(out, (q, k, v), grad_out.to(dtype))  # type: ignore[return-value]
