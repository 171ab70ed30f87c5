"""The program that Nsight Compute watches: it launches one kernel while its profiler is on.

python dev/profile/launch.py KERNEL DTYPE B,HQ,HKV,SQ,SK,D CAUSAL DEVICE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from cutlass_attn._attention import attention
from cutlass_attn._variants import accumulate_of, quantize_of
from cutlass_attn.tools.experiment.problems import Problem, parse_shape


def main(kernel: str, dtype: str, shape: str, causal: str, device: str) -> None:
    torch.cuda.set_device(torch.device(device).index or 0)
    inputs = Problem(parse_shape(shape), dtype).inputs(device, seed=0)
    q, k, v = inputs.q, inputs.k, inputs.v
    out = torch.empty_like(q)

    def run() -> None:
        kind: dict[str, Any] = {
            "accumulate": accumulate_of(kernel),
            "quantize": quantize_of(kernel),
        }
        attention(q, k, v, causal=causal == "causal", kernel=kernel, out=out, **kind)

    run()  # loads, and compiles where it has to
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
