"""examples/09_context_parallel.py as torchrun starts it; it compares with one device by itself."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.run")
PATH = Path(__file__).parents[2] / "examples" / "09_context_parallel.py"


def test_schemes_give_the_loss_of_one_device():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*command, PATH], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["gather", "ring", "ulysses"]
