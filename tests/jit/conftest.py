"""Stubs in place of NVRTC, and a cache for each test."""

import pytest
from cutlass_attn import _C, jit
from stubs import StubCompiler


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of its own for every test, and nothing known of compilers and rows."""
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path / "cache"))
    remembered = jit._compiler, jit._load_cached, jit._rows, jit._warn_once
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()
    _C.set_compiler("")


@pytest.fixture
def stub(monkeypatch):
    made = StubCompiler()
    monkeypatch.setattr(jit, "_compiler", lambda: made)
    monkeypatch.setattr(jit, "units", lambda: {"fast/f16/d64/64x64x4": "one", "slow/f16": "two"})
    monkeypatch.setattr(jit, "digest", lambda: "headers")
    return made


@pytest.fixture
def no_nvrtc(monkeypatch):
    def fail():
        raise jit.CompilerNotFound("no NVRTC")

    monkeypatch.setattr(jit, "_compiler", fail)
