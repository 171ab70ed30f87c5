"""NVIDIA's compute-sanitizer finds nothing in any GPU kernel."""

import dataclasses
import glob
import os
import re
import shutil
import subprocess
import sys

import case_list
import cases
import pytest

# What racecheck takes for races: of backward kernels beyond head dim 64 half of the warps hand P
# over to the others by bar.arrive and bar.sync; of those on wgmma all lanes of a warp write or read
# the statistics of a step, and one of them arrives at an mbarrier after a __syncwarp().
# mutants_backward is for those.
FALSE_RACES = re.compile(r"sm[89]0/backward.*/d(96|128|192|256)/|sm90/backward_(wgmma|two_pass)")
VARIANTS = [
    variant
    for op in ("forward", "backward")
    for variant in cases.compiled_variants(op, special=True)
    if variant.device == "cuda" and set(variant.needs) <= {"bias", "mask"}
]


def sanitizer():
    places = [
        shutil.which("compute-sanitizer"),
        *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")),
    ]
    return next(filter(None, places), None)


@cases.needs_gpu
@pytest.mark.skipif(sanitizer() is None, reason="compute-sanitizer is not installed")
@pytest.mark.skipif(not VARIANTS, reason="this build has no GPU kernels")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    """One ragged causal call with each variant, all in one process: its start takes longest."""
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "99"]
    # Without torch's caching allocator every tensor has bounds that memcheck can see.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    here = os.path.dirname(__file__)
    paths = [os.path.dirname(cases.__file__), here, os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [*command, sys.executable, __file__, tool],
        env=environment,
        capture_output=True,
        text=True,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this GPU, driver or virtual machine")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), done.stdout[-6000:]
    assert f"ran {len(variants_for(tool))} variants" in done.stdout


def variants_for(tool):
    return [v for v in VARIANTS if tool != "racecheck" or not FALSE_RACES.match(v.key)]


def run_all_variants(tool):
    import cutlass_attn
    from test_backward import solved_for

    for variant in variants_for(tool):
        shape = {"seqlen_q": 9 if variant.max_rows else 77, "seqlen_k": 131}
        case = case_list.Case("sanitizer", "", heads=2, heads_kv=1, causal=True, **shape)
        head_dim = variant.head_dim or 64
        if variant.op == "backward":
            bias = "1hqk" if "bias" in variant.needs else None
            mask = "11qk" if "mask" in variant.needs else None
            if bias or mask:  # some are read for two keys at a time
                case = dataclasses.replace(case, bias=bias, mask=mask, seqlen_k=132)
            solved_for(variant, case, head_dim).run(kernel=variant.key)
        else:
            q, k, v, out = cases.tensors(case, variant.dtype, head_dim, "cuda")
            bias = cases.torch.randn(2, 77, 136, device="cuda").to(q.dtype)[..., :131]
            cutlass_attn.attention(
                q,
                k,
                v,
                causal=True,
                out=out,
                return_lse=True,
                bias=bias if "bias" in variant.needs else None,
                mask=bias > -1 if "mask" in variant.needs else None,
                **cases.own(variant),
            )
    cases.torch.cuda.synchronize()
    print(f"ran {len(variants_for(tool))} variants")


if __name__ == "__main__":
    run_all_variants(sys.argv[1])
