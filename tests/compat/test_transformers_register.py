"""compat.transformers: names, keywords and versions that register() takes; the flash route."""

import importlib.util
import json
import os
import sys

import pytest
from test_transformers import Layer, operands

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402, importorskip gives a module that is replaced on import
from cutlass_attn.compat import transformers as compat  # noqa: E402
from cutlass_attn.jit import cache  # noqa: E402


def test_keywords_that_register_ignores():
    compat.register("cutlass_attn_ignoring", ignore=["hidden_gate"])
    function = transformers.AttentionInterface()["cutlass_attn_ignoring"]
    q, k, v = operands()
    out, _ = function(Layer(), q, k, v, None, hidden_gate=1.0)
    assert torch.equal(out, compat.attention_forward(Layer(), q, k, v, None)[0])
    with pytest.raises(ValueError, match=r"passes head_mask, which .*register\(ignore=\[...\]\)"):
        function(Layer(), q, k, v, None, head_mask=1.0)


def test_other_versions(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.0")
    with pytest.raises(RuntimeError, match=r"6\.0\.0 is installed; register\(any_version=True"):
        compat.register()
    with pytest.warns(UserWarning, match="supports transformers from 5.0 to before 6.0"):
        compat.register(any_version=True)


def test_names():
    for word in ("flash_cutlass", "my_sdpa", "eager2"):
        with pytest.raises(ValueError, match="must not contain"):
            compat.register(word)
    compat.register("ours")
    assert "ours" in transformers.AttentionInterface().valid_keys()


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0", "unknown"])
def test_versions(monkeypatch, version):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(RuntimeError, match=rf"from 5\.\d+ to before .*; {version} is installed"):
        compat.register()


def test_local_kernel(tmp_path, monkeypatch):
    """The folder is what the package kernels loads, and its functions are what models call."""
    from transformers import modeling_flash_attention_utils as flash

    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path))
    folder = compat.local_kernel_dir()
    assert compat.local_kernel_dir() == folder
    assert folder.is_relative_to(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["torch-cpu", "torch-cuda"]
    assert len(list((folder / "torch-cpu").iterdir())) == 2
    metadata = json.loads((folder / "torch-cuda" / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda"}
    path = folder / "torch-cpu" / "__init__.py"
    spec = importlib.util.spec_from_file_location("local_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # transformers leaves out, silently, what a function has no argument for.
    for function in (module.flash_attn_func, module.flash_attn_varlen_func):
        supported = flash._lazy_define_process_function(function).keywords["supports_mapping"]
        assert all(supported[x] for x in ("s_aux", "softcap", "window_size", "dropout_p"))


@pytest.mark.parametrize("umask", [0, 0o002])
def test_the_folder_is_one_that_the_cache_takes(tmp_path, monkeypatch, umask):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(cache, "_is_private_group", lambda gid: False)
    before = os.umask(umask)
    try:
        compat.local_kernel_dir()
    finally:
        os.umask(before)
    assert cache.check_folder() == tmp_path / "new"


def test_kernels_loads_the_folder(tmp_path, monkeypatch):
    """By its own loader, without the hub."""
    load = pytest.importorskip("kernels.load")  # this checkout has a folder kernels
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path))
    module = load.get_local_kernel(compat.local_kernel_dir(), backend="cpu")
    q = torch.randn(1, 5, 2, 32).half()
    assert module.flash_attn_func(q, q, q, causal=True).shape == q.shape
    assert set(module.__all__) == {
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    }
