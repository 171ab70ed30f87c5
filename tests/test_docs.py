"""Every Python block of the README and of the user pages runs as pasted, one behind the other.

A block whose first line is `# Needs a GPU` or `# Needs <package>` is only compiled without it; one
that begins with `# In a process of its own` has one. Command lines are parsed.
"""

import importlib
import importlib.util
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cutlass_attn
import pytest

torch = pytest.importorskip("torch", reason="the examples use torch")
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SESSION = re.compile(r"^    >>> .*\n(?:    .*\n)+", re.MULTILINE)
# A line of its own, or code within a sentence.
COMMAND = re.compile(
    r"^    (?P<line>(?:cutlass-attn|python -m dev\.\w+) .*)$"
    r"|`(?P<code>(?:cutlass-attn|python -m dev\.\w+) [^`]+)`",
    re.MULTILINE,
)


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
        if block[1].startswith("# In a process of its own\n"):
            subprocess.run([sys.executable, "-c", block[1]], check=True, timeout=100)
        elif needs is None or not lacks(needs[1]):
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


def command_lines():
    for page in PAGES:
        for found in COMMAND.finditer(page.read_text()):
            line = " ".join((found["line"] or found["code"]).split())
            yield pytest.param(line, id=f"{page.name}: {line}")


@pytest.mark.parametrize("line", [*command_lines()])
def test_a_command_line_has_arguments_that_the_command_takes(line):
    pytest.importorskip("click")
    words = shlex.split(line.partition("  #")[0].partition(" # ")[0])
    if words[0] == "cutlass-attn":
        from cutlass_attn.tools.cli import cutlass_attn as command

        name = words[1]
        if not name.startswith("-"):
            assert name in command.commands
            command, words = command.commands[name], words[1:]
        arguments = words[1:]
    else:
        tool = importlib.import_module(f"{words[2]}.command")
        command, arguments = getattr(tool, words[2].removeprefix("dev.")), words[3:]
    command.make_context(line, arguments)
