"""The C++ of mods, compiled by g++ to run on a CPU."""

import ctypes
import shutil
import subprocess

import pytest
import torch
from cutlass_attn._mods import cpp

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

HEAD = "#include <cmath>\n#include <cstdint>\n#define CA_HOST_DEVICE\n"


def for_logits(name, arguments, shape, body):
    """A C++ function that runs `body` for each logit i, which is that of b, h, q, k."""
    batch, heads, seqlen_q, seqlen_k = shape
    return f"""
extern "C" void {name}({arguments}) {{
  int i = 0;
  for (int b = 0; b < {batch}; ++b)
    for (int h = 0; h < {heads}; ++h)
      for (int q = 0; q < {seqlen_q}; ++q)
        for (int k = 0; k < {seqlen_k}; ++k, ++i) {{
          {body}
        }}
}}
"""


def values(n, shape):
    """A function run{n}() that calls apply() and grad() of Mod{n}."""
    return for_logits(
        f"run{n}",
        f"float* out, float* gradient, float const* score, Mod{n} const* mod",
        shape,
        "out[i] = mod->apply(score[i], b, h, q, k); gradient[i] = mod->grad(score[i], b, h, q, k);",
    )


def library(folder, parts):
    """All of the C++, compiled by one call of g++."""
    (folder / "mods.cpp").write_text("".join([HEAD, cpp.PRELUDE, *parts]))
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, folder / "mods.so", folder / "mods.cpp"], check=True)
    return ctypes.CDLL(str(folder / "mods.so"))


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def run_values(library, n, source, score):
    """(result, gradient) by values()."""
    out, gradient = torch.empty_like(score), torch.empty_like(score)
    getattr(library, f"run{n}")(*map(pointer, (out, gradient, score)), cpp.packed(source))
    return out, gradient
