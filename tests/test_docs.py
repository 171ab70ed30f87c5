"""Every Python block of the README and of the user pages runs as pasted, one behind the other.

A block whose first line is `# Needs a GPU` or `# Needs <package>` is only compiled without it.
"""

import importlib.util
import logging
import re
from pathlib import Path

import cutlass_attn
import pytest

torch = pytest.importorskip("torch", reason="the examples use torch")
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SESSION = re.compile(r"^    >>> .*\n(?:    .*\n)+", re.MULTILINE)


def lacks(need):
    """Is this machine without what a block needs?"""
    if need in ("a GPU", "Hopper"):
        lowest = (9, 0) if need == "Hopper" else (8, 0)
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() < lowest
    if need.startswith("torch "):
        installed, least = (
            tuple(map(int, version.split(".")[:2]))
            for version in (torch.__version__, need.removeprefix("torch "))
        )
        return installed < least
    if need == "NVRTC":
        from cutlass_attn import jit

        return bool(jit.available())
    return importlib.util.find_spec(need) is None


def pages_with(pattern):
    return [pytest.param(p, id=p.name) for p in PAGES if pattern.search(p.read_text())]


@pytest.mark.skipif(cutlass_attn.build_info().simt == "none", reason="`verify` runs a simt kernel")
@pytest.mark.parametrize("page", pages_with(BLOCK))
def test_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(
        logging.root, "handlers", [logging.NullHandler()]
    )  # as basicConfig finds it
    names = {}
    for block in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], page.name, "exec")
        needs = re.match(r"# Needs (.+)\n", block[1])
        if needs is None or not lacks(needs[1]):
            exec(code, names)


@pytest.mark.parametrize("page", pages_with(SESSION))
def test_errors_are_verbatim(page):
    names = {"cutlass_attn": cutlass_attn, "torch": torch}
    for session in SESSION.findall(page.read_text()):
        lines = [line[4:] for line in session.splitlines()]
        statements = [line[4:] for line in lines if line.startswith(">>> ")]
        *before, last = statements
        exec("\n".join(before), names)
        with pytest.raises(Exception) as caught:
            exec(last, names)
        assert lines[len(statements) :] == f"{caught.typename}: {caught.value}".splitlines()
