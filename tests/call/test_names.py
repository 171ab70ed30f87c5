"""Names of the package: what `import cutlass_attn` gives, and what it leaves alone."""

import importlib
import subprocess
import sys
from importlib.util import find_spec

import cutlass_attn
import pytest


def run(code, *flags):
    """Runs a program of its own; the test fails with what it prints."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", cutlass_attn.__all__)
def test_no_module_has_the_name_of_a_function(name):
    """`import cutlass_attn.attention as m` would give a module before, and a function after."""
    assert getattr(cutlass_attn, name) is not None
    assert find_spec(f"cutlass_attn.{name}") is None


def test_compat_and_testing_are_imported_when_named():
    pytest.importorskip("torch")
    run(
        "import sys, cutlass_attn as a; assert 'cutlass_attn.compat' not in sys.modules;"
        "a.testing.dropout_mask; a.compat.sdpa.route; a.compat.flash_attn.flash_attn_func;"
        "a.compat.transformers.register; a.compat.diffusers.register"
    )


@pytest.mark.parametrize("module", [cutlass_attn, cutlass_attn.compat])
def test_other_names_are_attribute_errors(module):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nil'"):
        module.nil  # noqa: B018


@pytest.mark.parametrize(
    ("name", "module"),
    [("flash_attn_func", "flash_attn"), ("scaled_dot_product_attention", "sdpa")],
)
def test_functions_of_other_libraries_are_in_compat(name, module):
    with pytest.raises(AttributeError, match=f"no attribute .{name}.; cutlass_attn") as raised:
        getattr(cutlass_attn, name)
    assert str(raised.value).endswith(f".compat.{module} has it")


def test_compat_has_what_is_said_to_be_there():
    pytest.importorskip("torch")
    for name, module in cutlass_attn._ELSEWHERE.items():
        assert callable(getattr(importlib.import_module(f"cutlass_attn.compat.{module}"), name))


IMPORTS = {
    "torch first": "import torch, cutlass_attn",
    "torch last": "import cutlass_attn, torch",
    "torch looked for": "import cutlass_attn, importlib.util as u; u.find_spec('torch'); "
    "import torch",
    "torch in a thread": "import cutlass_attn, importlib as i, threading as t; "
    "x = t.Thread(target=i.import_module, args=['torch']); x.start(); x.join(); import torch",
}


@pytest.mark.parametrize("order", IMPORTS)
def test_operators_need_no_call(order):
    pytest.importorskip("torch")
    names = "attention_forward attention_backward attention_varlen attention_decode append_kv"
    run(
        f"{IMPORTS[order]}\n"
        f"for name in {names.split()}: getattr(torch.ops.cutlass_attn, name).default\n"
        "import sys; assert not any(type(f).__name__ == '_AfterTorch' for f in sys.meta_path)"
    )


def test_a_torch_that_is_too_old_imports(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '1.0'\n")
    run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import cutlass_attn, torch; assert torch.__version__ == '1.0'"
    )


def test_a_call_names_the_torch_that_is_too_old():
    pytest.importorskip("torch")
    run(
        "import torch; torch.__version__ = '2.4.1+cpu'; import cutlass_attn\n"
        "x = torch.zeros(1, 1, 2, 8, requires_grad=True)\n"
        "try: cutlass_attn.attention(x, x, x)\n"
        "except ImportError as error: assert 'torch is 2.4.1+cpu; cutlass_attn needs torch 2.5' in "
        "str(error)\n"
        "else: raise AssertionError"
    )


def test_an_exported_program_loads_in_a_new_process(tmp_path):
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def forward(self, q):
            return cutlass_attn.attention(q, q, q, causal=True)

    q = torch.ones(1, 2, 5, 16)
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Model(), (q,)), file)
    # In the order of imports that leaves most to the library; above are all of them.
    run(
        f"{IMPORTS['torch last']}\nmodule = torch.export.load({str(file)!r}).module()\n"
        "assert (module(torch.ones(1, 2, 5, 16)) == 1).all()"
    )
