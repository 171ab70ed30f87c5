"""Facts that a release states in more than one file."""

import re
import sys
from pathlib import Path

import cutlass_attn
import pytest
from cutlass_attn import __main__ as command
from cutlass_attn.jit import compiler

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = BUILD["project"]
EXTRAS = PROJECT["optional-dependencies"]


def supported():
    """{what: (supported, tried, not tried)} of the table of docs/install.md."""
    text = (ROOT / "docs" / "install.md").read_text()
    _, _, section = text.partition("## Supported and tested versions\n")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {cells[0]: tuple(cells[1:]) for cells in rows[2:]}


def pinned(name):
    """The versions that constraints.txt has of a package."""
    text = (ROOT / "constraints.txt").read_text()
    return re.findall(rf"^{name}==([\w.]+)", text, re.MULTILINE)


def least(requirements, name):
    """The version of `name>=version`, with whatever extras, in a list of requirements."""
    (version,) = (m[1] for r in requirements if (m := re.match(rf"{name}(?:\[.*\])?>=([\d.]+)", r)))
    return version


def test_pythons():
    given, tried, untried = supported()["Python"]
    prefix = "Programming Language :: Python :: "
    pythons = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert given == f"{pythons[0]} to {pythons[-1]}"
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert BUILD["tool"]["ruff"]["target-version"] == f"py{pythons[0].replace('.', '')}"
    assert BUILD["tool"]["mypy"]["python_version"] == pythons[0]
    tried, untried = (re.findall(r"3\.\d+", text) for text in (tried, untried))
    assert sorted(tried + untried) == sorted(pythons)


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_libraries(name):
    given, tried, _ = supported()[name]
    required = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["torch"]]
    assert given.startswith(f"{least(required, name)} or later")
    for version in pinned(name):
        assert re.search(rf"\b{re.escape('.'.join(version.split('.')[:2]))}\b", tried), version


def test_the_least_torch():
    autograd = pytest.importorskip("cutlass_attn._call.autograd", reason="needs torch")
    requirement = PROJECT["optional-dependencies"]["torch"]
    assert least(requirement, "torch") == ".".join(map(str, autograd.LEAST))


def test_cuda(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "backend"))
    import toolkit

    given, _, _ = supported()["CUDA toolkit of the build"]
    fetched = re.search(r"==(\d+\.\d+)", toolkit.WHEELS)[1]
    minimum = ".".join(map(str, toolkit.MINIMUM))
    assert given == f"{minimum} or later, or none: {fetched} comes from PyPI"
    given, tried, _ = supported()["NVRTC"]
    jit = PROJECT["optional-dependencies"]["jit"]
    assert given == f"{least(jit, 'cuda-toolkit')} or later"
    assert jit[1:] == [compiler.REQUIREMENT]
    assert least(jit, "cuda-toolkit") == ".".join(map(str, compiler.LEAST))
    assert ".".join(pinned("cuda-toolkit")[0].split(".")[:2]) in tried


def test_extras_that_are_named_exist():
    """In install lines of the README, of the docs, of the examples' docstrings and of messages."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder, suffix in (("docs", "md"), ("examples", "py"), ("python/cutlass_attn", "py")):
        files += (ROOT / folder).rglob(f"*.{suffix}")
    named = {}
    for path in files:
        for extras in re.findall(r"'(?:\.|cutlass_attn)\[([\w,-]+)\]'", path.read_text()):
            named |= dict.fromkeys(extras.split(","), path.name)
    assert {"cli", "jit", "transformers"} <= set(named)
    unknown = {name: where for name, where in named.items() if name not in EXTRAS}
    assert not unknown


def test_the_command():
    assert PROJECT["optional-dependencies"]["cli"] == [*command.REQUIREMENTS]


def test_build_requirements():
    """Ranges for who installs, within which constraints.txt pins what nox builds with."""
    scikit_build = BUILD["tool"]["scikit-build"]
    assert scikit_build["cmake"]["version"] == ">=3.31"  # the first with unity builds of CUDA
    for requirement in ("scikit-build-core", "pybind11"):
        (given,) = (r for r in BUILD["build-system"]["requires"] if r.startswith(requirement))
        first, below = re.fullmatch(rf"{requirement}>=(\d+\.\d+),<(\d+)", given).groups()
        (pin,) = pinned(requirement)
        numbers = [tuple(map(int, version.split("."))) for version in (first, pin, below)]
        assert numbers[0] <= numbers[1] < numbers[2]
    lowest = least(BUILD["build-system"]["requires"], "pybind11")
    assert f"find_package(pybind11 {lowest} " in (ROOT / "CMakeLists.txt").read_text()


def test_gpus():
    archs = tomllib.loads((ROOT / "kernels" / "facts.toml").read_text())["archs"]
    lowest = min(first for first, _ in archs.values())
    assert supported()["GPU"][0] == f"compute capability {lowest / 10:.1f} or later"


def test_version():
    version = PROJECT["version"]
    assert cutlass_attn.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text()
    latest, state = re.search(r"^## (\S+) \((.*)\)$", changelog, re.MULTILINE).groups()
    assert latest == version
    released = re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)
    assert state == (released[1] if released else "unreleased")
