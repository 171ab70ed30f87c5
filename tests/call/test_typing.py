"""What a type checker says of programs that use the library."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mypy")

PYTHON = pathlib.Path(__file__).resolve().parents[2] / "python"


def test_names_of_the_package(tmp_path):
    program = tmp_path / "program.py"
    names = ("warmup", "compat", "testing", "nonexistent")
    program.write_text("".join(f"import cutlass_attn\ncutlass_attn.{name}\n" for name in names))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports",
         "--config-file=", f"--cache-dir={tmp_path}", str(program)],
        env={**os.environ, "MYPYPATH": str(PYTHON)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert "nonexistent" in errors[0]
