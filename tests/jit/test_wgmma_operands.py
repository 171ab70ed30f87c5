"""Where wgmma finds its operands: the engine's model is a GPU's, bit for bit.

Every form and number of columns that `arch/wgmma.hpp` has, at every offset of 16 columns in a
swizzled row, with leading and stride byte offsets of several sizes. Numbers are small integers,
whose sums are exact in any order."""

import ctypes
import importlib.util
import itertools
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from cutlass_attn import jit

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
FORMS = ("ss", "rs", "ts")  # wgmma_operands.hpp
COLUMNS = (32, 64, 96, 128, 192, 256)
DTYPES = {"bf16": "cutlass::bfloat16_t", "f16": "cutlass::half_t"}
IMAGE_BYTES = 96 * 1024
CALLS = 48
INSTANCES = list(itertools.product(DTYPES, COLUMNS, range(len(FORMS))))


class Params(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_void_p),
        ("image_bytes", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("calls", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


def by_rows(rows):
    """(offset, leading, stride) of operands of 16 columns, columns contiguous."""
    for base, k, stride in itertools.product((0, 3072), range(4), (1024, 2048)):
        if base + rows // 8 * stride <= IMAGE_BYTES:
            yield base + 32 * k, 16, stride


def by_columns(columns):
    """Of operands of 16 rows and so many columns, columns contiguous, 64 of them to a chunk."""
    for base, leading, stride in itertools.product((0, 5120), (4096, 16384), (1024, 2048)):
        if base + (columns + 63) // 64 * leading + 2 * stride > IMAGE_BYTES:
            continue
        yield base, leading, stride
        if columns == 32:
            yield base + 64, leading, stride


def calls_of(columns, form):
    """(CALLS, 6) int32: places of A and B."""
    of_a = {"ss": list(by_rows(64)), "rs": [(0, 16, 1024)], "ts": list(by_columns(64))}
    of_b = by_rows(columns) if form == "ss" else by_columns(columns)
    pairs = list(itertools.product(of_a[form], of_b))
    random.Random(columns).shuffle(pairs)
    return np.array([[*a, *b] for a, b in pairs[:CALLS]], dtype=np.int32)


def source():
    """A translation unit with an entry for each instance."""
    entries = "".join(
        f'extern "C" __global__ void __launch_bounds__(128) {dtype}_{n}_{form}(Params params) '
        "{ extern __shared__ __align__(1024) char smem[]; "
        f"run<{element}, {n}, {form}, cutlass_attn::arch::Sm90>(params, smem); }}\n"
        for (dtype, element), n, form in itertools.product(
            DTYPES.items(), COLUMNS, range(len(FORMS))
        )
    )
    header = (HERE / "wgmma_operands.hpp").read_text(encoding="utf-8").replace("#pragma once", "")
    return f"{header}\nusing namespace wgmma_operands;\n{entries}"


# -fcf-protection is on by default in the compilers of some distributions, and changes how fibers of
# the engine switch.
@pytest.fixture(scope="module", params=["none", "full"] if platform.machine() == "x86_64" else [""])
def engine(request, tmp_path_factory):
    """run_on_engine() of wgmma_operands.cpp."""
    compiler = shutil.which("c++")
    spec = importlib.util.find_spec("cutlass_library")
    if compiler is None or spec is None:
        pytest.skip("needs a C++ compiler and the wheel nvidia-cutlass")
    cutlass = Path(spec.submodule_search_locations[0]) / "source" / "include"
    tool = [sys.executable, str(KERNELS.parent / "backend" / "toolkit.py"), "headers"]
    found = subprocess.run(tool, check=False, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(found.stderr)
    cuda = found.stdout.strip().split(";")
    path = tmp_path_factory.mktemp("engine") / "engine.so"
    sources = [HERE / "wgmma_operands.cpp", KERNELS / "simt" / "host.cpp"]
    includes = [f"-I{folder}" for folder in (KERNELS, cutlass, *cuda)]
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-pthread", "-fno-strict-aliasing"]
    flags += [f"-fcf-protection={request.param}"] if request.param else []
    subprocess.run([compiler, *flags, *includes, *sources, "-o", path], check=True)
    return ctypes.CDLL(str(path)).run_on_engine


def image_of(dtype):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-8, 9, (IMAGE_BYTES // 2,), generator=generator)
    return numbers.to(torch.bfloat16 if dtype == "bf16" else torch.float16)


def run_engine(engine, dtype, columns, form):
    calls = calls_of(columns, FORMS[form])
    image, out = image_of(dtype), np.empty((len(calls), 128, columns // 2), dtype=np.float32)
    params = Params(image.data_ptr(), IMAGE_BYTES, len(calls), calls.ctypes.data, out.ctypes.data)
    why = ctypes.create_string_buffer(300)
    failed = engine(dtype == "bf16", columns, form, ctypes.byref(params), why, len(why))
    assert not failed, why.value.decode()
    return out


class Module:
    """Machine code on the present device, by the driver's own calls."""

    def __init__(self, code):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self.module), code)

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        assert status == 0, f"{name}: CUDA error {status}"

    def launch(self, name, params):
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        max_dynamic_smem = 8
        self.call("cuFuncSetAttribute", function, max_dynamic_smem, IMAGE_BYTES)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        sizes = (1, 1, 1, 128, 1, 1, IMAGE_BYTES)
        self.call("cuLaunchKernel", function, *sizes, None, arguments, None)


@pytest.fixture(scope="module")
def module():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is of compute capability 9.0 alone")
    if reason := jit.available():
        pytest.skip(reason)
    torch.cuda.current_stream().synchronize()  # makes a context
    return Module(jit._compiler().compile(source(), "sm_90a"))


@cases.needs_gpu
@pytest.mark.parametrize(("dtype", "columns", "form"), INSTANCES)
def test_operands(engine, module, dtype, columns, form):
    expected = run_engine(engine, dtype, columns, form)
    calls = torch.from_numpy(calls_of(columns, FORMS[form])).cuda()
    image, out = image_of(dtype).cuda(), torch.empty(expected.shape, device="cuda")
    torch.cuda.synchronize()
    addresses = calls.data_ptr(), out.data_ptr()
    params = Params(image.data_ptr(), IMAGE_BYTES, len(calls), *addresses)
    module.launch(f"{dtype}_{columns}_{form}", params)
    torch.cuda.synchronize()
    assert np.array_equal(out.cpu().numpy(), expected)


def test_places_differ(engine):
    """The engine by a formula, and that a wrong place would be seen."""
    image = image_of("f16").float().numpy().reshape(-1, 8, 8, 8)  # 8 rows of 8 times 16 bytes
    plain = np.stack([[rows[r, np.arange(8) ^ r] for r in range(8)] for rows in image])
    rows = plain.reshape(-1, 64)  # not swizzled
    out = run_engine(engine, "f16", 64, 0)
    calls = calls_of(64, "ss")
    for (a, _, a_stride, b, _, b_stride), got in zip(calls, out, strict=True):

        def operand(offset, stride):
            first = [offset // 1024 * 8 + g * stride // 128 for g in range(8)]
            tile = np.concatenate([rows[row : row + 8] for row in first])
            return tile[:, offset % 128 // 2 :][:, :16]

        product = 2 * operand(a, a_stride) @ operand(b, b_stride).T
        blocks = product.reshape(4, 2, 8, 8, 4, 2)  # warp, half, row, block, pair, column
        assert np.array_equal(got.reshape(4, 8, 4, 8, 2, 2), blocks.transpose(0, 2, 4, 3, 1, 5))
    assert len({x.tobytes() for x in out}) == len(out)
