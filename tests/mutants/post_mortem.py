#!/usr/bin/env python3
"""Plants the suspected causes of a wrong result in the wmma kernel and measures what each one does.

    post_mortem.py --compile-commands BUILD/compile_commands.json --work DIR [--only TEXT]
                   [--json FILE]

The bugs are those of mutants.toml that name a cause. For each, tests/cpp/simt/measure_wmma.cpp runs
the kernel on the CPU at the reference shape (B = 2, H = 8, S = 512, D = 64, fp16, standard normal
Q, K, V) and compares with fp64; it also says which of four small checks see the bug. Unlike in the
tests, shared memory starts as zeros and a copy's destination keeps what it had until the copy
lands: an error is then a number, as on a GPU, not NaN. docs/notes/wmma-post-mortem.md is about the
table that this prints. Exit status 1 if the kernel is not right without a bug, or a bug is not
planted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import run_mutants
from run_mutants import KERNELS, Mutant, MutantError, Program, Workshop, run_compiler

SIMT = KERNELS.parent / "tests" / "cpp" / "simt"
CHECKS = ("identity", "first_tile", "one_warp", "known_values")
RUNS = ("forward", "random", "causal")


class Measuring(Workshop):
    """Programs that measure: optimised."""

    def __init__(self, compile_commands: Path, work: Path) -> None:
        command, _ = run_mutants.compile_command("wmma", compile_commands)
        dropped = (run_mutants.RACES, "-O1", "-g1", "-fno-optimize-sibling-calls")
        command = [word for word in command if word not in dropped]
        work.mkdir(parents=True, exist_ok=True)
        objects = []
        for source in ("simt/host.cpp", "runtime/kernel.cpp"):
            objects.append(str(work / f"{Path(source).stem}.o"))
            definition = "-DCUTLASS_ATTN_CUDA=0"
            run_compiler([*command, definition, "-c", str(KERNELS / source), "-o", objects[-1]])
        engine = work / "engine.o"
        run_compiler([command[0], "-r", "-nostdlib", *objects, "-o", str(engine)])
        super().__init__(command, SIMT / "measure_wmma.cpp", [engine], work)

    def measure(self, binary: Path, number: int, *arguments: str) -> dict[str, Any]:
        """What the program prints with a bug. Raises MutantError."""
        done = subprocess.run(
            [binary, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"PLANTED_BUG": str(number)},
        )
        if done.returncode != 0:
            raise MutantError(f"exit status {done.returncode}: {done.stderr.strip()}")
        return {**json.loads(done.stdout), "messages": sorted(set(done.stderr.splitlines()))}


def suspects(only: str) -> list[Mutant]:
    """No bug first, then those with a cause."""
    first, *found = [*run_mutants.load("wmma", ""), *run_mutants.load("post_mortem", "")[1:]]
    found = [m for m in found if m.cause and (only in m.name or only == m.cause)]
    return [first, *(replace(m, number=i) for i, m in enumerate(found, start=1))]


def error(run: dict[str, Any]) -> str:
    """Largest and mean error, rows that are wrong, and numbers that are none."""
    if not run["ran"]:
        return "stopped"
    text = f"{run['max']:.4f}, {run['mean']:.1e}, {run['rows']}"
    return text + (f", {run['not_finite']} not finite" if run["not_finite"] else "")


def line(name: str, result: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [name, *(error(result[run]) for run in RUNS)]
    cells.append(", ".join(check for check in CHECKS if not result[check]) or "none")
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile-commands", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="", help="bugs with this in their name, or cause")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    options = parser.parse_args(arguments)

    results: dict[str, dict[str, Any]] = {}
    failures = 0
    print("max error, mean error, wrong rows of 8192\n")
    print(f"| bug | {' | '.join(RUNS)} | seen by |")
    print("|" + " --- |" * (len(RUNS) + 2), flush=True)

    def report(program: Program, binary: Path) -> None:
        for mutant in program.mutants:
            runs = [(mutant.name, ())]
            if not mutant.file:
                runs.append((f"{mutant.name}, fragments of 8 x 32", ("wide",)))
            for name, extra in runs:
                result = workshop.measure(binary, mutant.number, *extra)
                results[name] = {"cause": mutant.cause, **result}
                print(line(name, result), flush=True)

    try:
        programs, texts = run_mutants.pack(suspects(options.only))
        workshop = Measuring(options.compile_commands, options.work)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1
    for program in programs:
        try:
            report(program, workshop.build(program, texts))
        except MutantError as error:
            failures += 1
            print(f"{program.name}: {error}", file=sys.stderr, flush=True)
    right = results.get("no bug")
    if not (right and all(right[check] for check in CHECKS) and right["forward"]["max"] < 1e-3):
        failures += 1
        print("without a bug the kernel is not right", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
