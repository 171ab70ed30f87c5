#!/usr/bin/env python3
"""Plants the bugs of mutants.toml in the kernels, one at a time; the tests must see each of them.

    run_mutants.py --unit sm80 --compile-commands BUILD/compile_commands.json
                   --cases BUILD/.../libsimt_cases.a --engine BUILD/.../libsimt_plain_host.a
                   --engine-for-races BUILD/.../libsimt_races_host.a --work DIR
                   [--jobs N] [--only TEXT]

A bug is an edit of one header of kernels/. Edited headers go into a folder that comes before
kernels/ on the include path, and only the unit's own source (SOURCES) is compiled anew, by the
build's own command; the rest of the program is shared. Bugs in statements and expressions share a
program that holds them all, and a variable of the environment says which one is there: compiling
takes most of the time.

The program has to fail with every bug: by a wrong number, an error of the engine or, under
ThreadSanitizer, a data race. Without a bug it has to pass. It runs without the sanitizer first,
which is four to ten times faster and notices most bugs; the other bugs run under the sanitizer. A
bug whose text is not exactly once in its header, or that does not compile, is an error as well.
Exit status 1 for any of this.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
RUN_LIMIT_S = 300
RACES, LINES = "-fsanitize=thread", "-g1"  # lines, for the places of a data race
# For programs without the sanitizer: g++ 12 takes a third less time than with -O1, and they run
# about as fast. With the sanitizer they would take a third more time.
QUICK = "-Og"
# What the program of a unit is made of, and what it is called with.
SOURCES = {
    unit: f"kernels_{unit}.cpp" for unit in ("sm80", "terms", "int8", "serving", "scalar", "wmma")
}
SOURCES |= {unit: f"test_{unit}.cpp" for unit in ("limit", "latent")}
SOURCES |= {unit: f"few_{unit}.cpp" for unit in ("backward", "sm90")}
# Without a bug: none, which runs all tests.
ARGUMENTS = {"backward": ("few",), "sm90": ("few", "few_wide", "few_sequences")}
# What a unit includes first.
PLANTED_BUG = """\
#include <cstdlib>
inline int const planted_bug = std::atoi(std::getenv("PLANTED_BUG"));
"""
# How a bug becomes one that is chosen at run time.
SWITCHES = {
    "statement": "if (planted_bug == {number}) {{\n{replace}\n}} else {{\n{find}\n}}\n",
    "expression": "(planted_bug == {number} ? ({replace}) : ({find}))",
}


class MutantError(Exception):
    """A mutant that says nothing about the tests, and why."""


@dataclass(frozen=True)
class Mutant:
    """One edit of one header; number 0 is no edit."""

    number: int
    name: str
    kind: str = "text"
    file: str = ""
    after: str = ""  # where to begin to look
    find: str = ""
    replace: str = ""
    test: str = ""  # of the unit's program, that sees it; else the unit's
    cause: str = ""  # post_mortem.py measures those that have one

    def span(self, text: str) -> tuple[int, int]:
        """Where the edit goes: to the first `find` behind `after`, if there is such. Raises
        MutantError if its text, or what comes before, is not there exactly once.
        """
        sought = self.after or self.find
        if (count := text.count(sought)) != 1:
            raise MutantError(
                f"{self.name}: {sought!r} is {count} times in {self.file}; it must be once"
            )
        begin = text.find(self.find, text.index(sought) + len(self.after))
        if begin < 0:
            raise MutantError(f"{self.name}: no {self.find!r} in {self.file} behind {sought!r}")
        return begin, begin + len(self.find)

    def edit(self, find: str) -> str:
        """What comes in place of the text, which is by now `find`."""
        if self.kind == "text":
            return self.replace
        return SWITCHES[self.kind].format(number=self.number, replace=self.replace, find=find)


Edit = tuple[int, int, Mutant]  # begin, end


def edited(text: str, begin: int, end: int, edits: list[Edit]) -> str:
    """text[begin:end] with edits, of which one may be inside another, or where it is."""
    result = ""
    left = sorted(edits, key=lambda edit: (edit[0], -edit[1]))
    while left:
        first, last, mutant = left[0]
        inside = [edit for edit in left[1:] if edit[1] <= last]
        left = [edit for edit in left[1:] if edit[1] > last]
        result += text[begin:first] + mutant.edit(edited(text, first, last, inside))
        begin = last
    return result + text[begin:end]


@dataclass
class Program:
    """Mutants that are compiled together: no edit overlaps half of another."""

    name: str
    mutants: list[Mutant] = field(default_factory=list)

    def takes(self, mutant: Mutant, texts: dict[str, str]) -> bool:
        begin, end = mutant.span(texts[mutant.file])
        spans = [m.span(texts[m.file]) for m in self.mutants if m.file == mutant.file]
        return all(
            end <= first
            or last <= begin
            or (begin <= first and last <= end)
            or (first <= begin and end <= last)
            for first, last in spans
        )

    def headers(self, texts: dict[str, str]) -> dict[str, str]:
        """The edited headers, {path under kernels/: text}."""
        edits: dict[str, list[Edit]] = {}
        for m in self.mutants:
            if m.file:
                edits.setdefault(m.file, []).append((*m.span(texts[m.file]), m))
        return {file: edited(texts[file], 0, len(texts[file]), of) for file, of in edits.items()}


def load(unit: str, only: str) -> list[Mutant]:
    """The mutants of a unit, the kernels as they are first. Raises MutantError."""
    table = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))
    mutants = [Mutant(0, "no bug")]
    for number, entry in enumerate(table[unit], start=1):
        mutant = Mutant(number, **entry)
        if mutant.kind not in ("text", *SWITCHES):
            raise MutantError(f"{mutant.name}: kind is {mutant.kind!r}")
        if only in mutant.name:
            mutants.append(mutant)
    return mutants


def pack(mutants: list[Mutant]) -> tuple[list[Program], dict[str, str]]:
    """As few programs as it takes, and the headers they edit. Raises MutantError."""
    texts = {m.file: (KERNELS / m.file).read_text(encoding="utf-8") for m in mutants if m.file}
    switched: list[Program] = [Program("switched_0")]
    alone: list[Program] = []
    for mutant in mutants:
        if not mutant.file:
            switched[0].mutants.append(mutant)
            continue
        mutant.span(texts[mutant.file])
        if mutant.kind == "text":
            alone.append(Program(re.sub(r"\W+", "_", mutant.name), [mutant]))
            continue
        home = next((p for p in switched if p.takes(mutant, texts)), None)
        if home is None:
            home = Program(f"switched_{len(switched)}")
            switched.append(home)
        home.mutants.append(mutant)
    return switched + alone, texts


def run_compiler(command: list[str]) -> None:
    """Runs a compiler. Raises MutantError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        raise MutantError("\n".join([shlex.join(command), *errors[:5]]))


def compile_command(unit: str, compile_commands: Path) -> tuple[list[str], Path]:
    """How the build compiles a unit: compiler and flags without inputs and outputs; the source."""
    entries = json.loads(compile_commands.read_text(encoding="utf-8"))
    name = SOURCES[unit]
    found = [
        entry for entry in entries if Path(entry["file"]).name == name and RACES in entry["command"]
    ]
    if len(found) != 1:
        raise MutantError(f"{compile_commands} compiles {name} {len(found)} times; must be once")
    words = iter(shlex.split(found[0]["command"]))
    command = []
    for word in words:
        if word in ("-o", "-c", "-MF", "-MT"):
            next(words)
        elif word != "-MD" and Path(word).name != "ccache":
            command.append(word)
    return command, Path(found[0]["file"])


def places(report: str) -> list[str]:
    """The innermost line of the kernels in each of the two stacks of a data race report."""
    stacks = report.split("\n\n")[:2]
    found = [
        re.search(r"(?:sm80|sm90|wmma|scalar|serving|cpu|tile|core)/\w+\.hpp:\d+", stack)
        for stack in stacks
    ]
    return [match[0] for match in found if match]


class Workshop:
    """Builds and runs programs in a folder of its own."""

    sanitizer: tuple[str, ...] = ()
    options: tuple[str, ...] = (QUICK,)

    def __init__(
        self,
        command: list[str],
        source: Path,
        harness: list[Path],
        work: Path,
        arguments: tuple[str, ...] = (),
    ) -> None:
        others = [word for word in command if word not in (RACES, LINES)]
        self.command = [*others, *self.options]
        self.arguments = arguments  # of a program with a bug
        self.source = source
        self.harness = harness  # what is linked with the source
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self.header = work / "planted_bug.hpp"
        self.header.write_text(PLANTED_BUG, encoding="utf-8")

    def build(self, program: Program, texts: dict[str, str]) -> Path:
        """Compiles a program. Raises MutantError."""
        folder = self.work / program.name
        shutil.rmtree(folder, ignore_errors=True)  # headers of other mutants, from another run
        folder.mkdir()
        for path, text in program.headers(texts).items():
            edited = folder / path
            edited.parent.mkdir(parents=True, exist_ok=True)
            edited.write_text(text, encoding="utf-8")
        compiler, *flags = self.command
        unit, binary = folder / "unit.o", folder / "program"
        first = ["-include", str(self.header), "-I", str(folder)]
        run_compiler([compiler, *first, *flags, "-c", str(self.source), "-o", str(unit)])
        linked = [str(unit), *map(str, self.harness), "-o", str(binary)]
        run_compiler([compiler, *self.sanitizer, "-pthread", *linked])
        return binary

    def test(self, binary: Path, mutant: Mutant) -> str:
        """What the tests say of a mutant, empty if nothing. Raises MutantError."""
        planted = {
            "PLANTED_BUG": str(mutant.number),
            "TEST_FIRST": f"{mutant.name} {mutant.file}",
            "STOP_AT_FAILURE": "1",
            "TSAN_OPTIONS": "halt_on_error=1",
        }
        arguments = self.arguments if mutant.number else ()
        if mutant.test:
            arguments = (mutant.test,)
        try:
            done = subprocess.run(
                [binary, *arguments],
                capture_output=True,
                text=True,
                env=os.environ | planted,
                timeout=RUN_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise MutantError(f"no verdict after {RUN_LIMIT_S} s") from None
        if done.returncode == 0:
            return ""
        if done.stdout.startswith("there is no test "):
            raise MutantError(done.stdout.strip())
        if summary := re.search(r"SUMMARY: ThreadSanitizer: (data race|\S+)", done.stderr):
            return f"{summary[1]}: {' and '.join(places(done.stderr))}"
        lines = done.stdout.splitlines() or [f"exit status {done.returncode}"]
        return lines[0]


class RacesWorkshop(Workshop):
    """Programs under ThreadSanitizer."""

    sanitizer = (RACES, LINES)
    options = sanitizer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit", required=True, choices=SOURCES)
    parser.add_argument("--compile-commands", type=Path, required=True)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--engine-for-races", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    options = parser.parse_args(arguments)

    start = time.monotonic()
    try:
        programs, texts = pack(load(options.unit, options.only))
        command, source = compile_command(options.unit, options.compile_commands)
        given = ARGUMENTS.get(options.unit, ())
        plain, races = (
            of(command, source, [options.cases, engine], options.work / name, given)
            for of, engine, name in (
                (Workshop, options.engine, "plain"),
                (RacesWorkshop, options.engine_for_races, "races"),
            )
        )
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1

    failures = 0

    def report(good: bool, line: str) -> None:
        nonlocal failures
        failures += not good
        print("ok  " if good else "FAIL", line, flush=True)

    def verdict(workshop: Workshop, binary: Path, mutant: Mutant) -> tuple[bool, str]:
        """Whether the tests did what they should with a mutant, and a line about it."""
        begin = time.monotonic()
        try:
            said = workshop.test(binary, mutant)
        except MutantError as error:
            return False, f"{mutant.name}: {error}"
        seconds = time.monotonic() - begin
        good = bool(said) == bool(mutant.number)
        return good, f"{mutant.name}: {said or 'the tests pass'} ({seconds:.1f} s)"

    def run_all(workshop: Workshop, programs: list[Program]) -> Iterator[tuple[Mutant, bool, str]]:
        """Mutants, whether the tests did what they should, and lines about them."""
        # Compiling first, then a task for each run: most mutants are in one program.
        builds = {pool.submit(workshop.build, program, texts): program for program in programs}
        runs = {}
        for build in as_completed(builds):
            try:
                binary = build.result()
            except MutantError as error:
                report(False, f"{builds[build].name}: {error}")
                continue
            for mutant in builds[build].mutants:
                runs[pool.submit(verdict, workshop, binary, mutant)] = mutant
        for run in as_completed(runs):
            yield runs[run], *run.result()

    with ThreadPoolExecutor(options.jobs) as pool:
        noticed = set()
        for mutant, good, line in run_all(plain, programs):
            if mutant.number == 0 or good:
                report(good, line)
            if mutant.number and good:
                noticed.add(mutant)
        left = [
            Program(program.name, [m for m in program.mutants if m not in noticed])
            for program in programs
        ]
        for _, good, line in run_all(races, [program for program in left if program.mutants]):
            report(good, f"under ThreadSanitizer, {line}")
    print(f"{len(programs)} programs, {failures} failures, {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
