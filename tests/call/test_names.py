"""Names of the package: what `import cutlass_attn` gives, and what it leaves alone."""

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
