"""Options that are numbers have no gradient: a tensor that requires one is refused by name."""

import numpy as np
import pytest
from cases import torch
from cutlass_attn import attention, attention_decode, attention_varlen

Q = torch.randn(1, 4, 4, 16)
ENDS = torch.tensor([0, 4], dtype=torch.int32)
CALLS = {
    "attention": lambda **options: attention(Q, Q, Q, **options),
    "attention_varlen": lambda **options: attention_varlen(Q[0], Q[0], Q[0], ENDS, **options),
    "attention_decode": lambda **options: attention_decode(Q, Q, Q, ENDS[1:], **options),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("function", CALLS)
def test_a_number_that_requires_a_gradient_is_refused(function, name, is_compiled):
    call, learned = CALLS[function], torch.nn.Parameter(torch.tensor(0.5))
    if is_compiled:
        torch.compiler.reset()
        call = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{name} (is a tensor that )?requires a gradient"):
        call(**{name: learned})


@pytest.mark.parametrize("function", CALLS)
def test_other_tensors_of_one_element_are_numbers(function):
    expected = CALLS[function](softmax_scale=0.5)
    assert torch.equal(CALLS[function](softmax_scale=torch.tensor(0.5)), expected)
    with torch.no_grad():
        learned = torch.nn.Parameter(torch.tensor(0.5))
        assert torch.equal(CALLS[function](softmax_scale=learned), expected)


NUMBERS = [torch.tensor(0.5), np.float32(0.5), np.array(0.5)]


# Compiling takes a second: functions and numbers have both values of fullgraph, not each pair.
@pytest.mark.parametrize(
    ("function", "number", "fullgraph"),
    [(f, x, (i + j) % 2 == 0) for i, f in enumerate(CALLS) for j, x in enumerate(NUMBERS)],
    ids=str,
)
def test_compiled_calls_take_tensors_and_numbers_of_numpy(function, number, fullgraph):
    """Made in the compiled function, or outside of it, where torch cannot know the number."""
    torch.compiler.reset()
    expected = CALLS[function](softmax_scale=0.5, softcap=0.5)

    @torch.compile(backend="aot_eager", fullgraph=fullgraph)
    def call(number):
        known = CALLS[function](softmax_scale=torch.tensor(0.5), softcap=np.float32(0.5))
        return known, CALLS[function](softmax_scale=number, softcap=number)

    for result in call(number):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_gradients_with_a_tensor_as_a_number(fullgraph):
    def gradients(call, scale):
        q, k, v = (Q.clone().requires_grad_() for _ in range(3))
        return torch.autograd.grad(call(q, k, v, softmax_scale=scale).sum(), (q, k, v))

    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=fullgraph)
    for scale in (0.5, 0.25):
        found = gradients(compiled, torch.tensor(scale))
        for x, due in zip(found, gradients(attention, scale), strict=True):
            assert torch.equal(x, due)
