"""What a type checker says of programs that use the library."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
from typing import get_args

import cutlass_attn
import numpy as np
import pytest
from cutlass_attn import _types

pytest.importorskip("mypy")

PYTHON = pathlib.Path(__file__).resolve().parents[2] / "python"


PROGRAM = """
import torch
import cutlass_attn as ca

x = torch.zeros(1)
reveal_type(ca.attention(x, x, x, causal=True))
reveal_type(ca.attention(x, x, x, return_lse=True))
reveal_type(ca.attention_varlen(x, x, x, [0, 4], seqused_k=[4]))
reveal_type(ca.attention_decode(x, x, x, 3, layout="bhsd", return_lse=True))
ca.attention(x, x, x, layout="bsdh")
ca.attention(x, x, x, quantize="int4")
ca.attention(x, x, x, accumulate="fp8")
ca.attention(x, x, x, is_causal=True)
ca.attention_varlen(x, x, x, x, layout="bhsd")
ca.attention_decode(x, x, x, x, num_splits="2")
ca.prequantize(x, x, quantize="fp16")
ca.merge_states(x, x, x, x, layout="NHD")
ca.warmup; ca.compat; ca.testing
ca.nonexistent
"""


def check(tmp_path, text):
    """What mypy prints, by line of the program."""
    program = tmp_path / "program.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports",
         "--config-file=", f"--cache-dir={tmp_path}", str(program)],
        env={**os.environ, "MYPYPATH": str(PYTHON)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    found = [line.split(":", 2) for line in done.stdout.splitlines() if "program.py:" in line]
    return {text.splitlines()[int(at) - 1]: said for _file, at, said in reversed(found)}


def test_what_is_said_of_a_program(tmp_path):
    said = check(tmp_path, PROGRAM)
    revealed = {line: text for line, text in said.items() if line.startswith("reveal_type")}
    assert len(revealed) == 4
    for line, text in revealed.items():
        is_pair = "return_lse" in line
        assert "Tensor" in text and ("tuple[" in text) == is_pair, (line, text)
    lines = PROGRAM.splitlines()
    wrong = lines[lines.index('ca.attention(x, x, x, layout="bsdh")') :]
    wrong.remove("ca.warmup; ca.compat; ca.testing")
    assert [line for line, text in said.items() if "error" in text] == wrong[::-1]


@pytest.mark.parametrize("function", ["attention", "attention_varlen", "attention_decode"])
def test_types_have_the_keywords_of_signatures(function):
    """And no others; those of literals are what the library allows."""
    options = {
        "attention": _types.AttentionOptions,
        "attention_varlen": _types.VarlenOptions,
        "attention_decode": _types.DecodeOptions,
    }[function]
    parameters = inspect.signature(getattr(cutlass_attn, function)).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert options.__optional_keys__ == names - {"return_lse", "return_max_logit"}


def test_literals_are_what_is_allowed():
    x = np.zeros((1, 1, 1, 8), np.float16)
    for name, allowed in (
        ("accumulate", _types.Accumulator),
        ("quantize", _types.Quantized),
        ("layout", _types.Layout),
    ):
        with pytest.raises(ValueError, match=f"{name} must be") as refused:
            cutlass_attn.attention(x, x, x, **{name: "nil"})
        words = set(re.findall(r'"(\w+)"', str(refused.value)))
        assert words == set(get_args(allowed))
