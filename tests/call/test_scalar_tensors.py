"""Options that are numbers have no gradient: a tensor that requires one is refused by name."""

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
