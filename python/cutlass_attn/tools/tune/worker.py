"""A step of an evaluation in a process of its own: what a bad candidate breaks, ends with it.

A job is a JSON object on stdin, {"job": "compile", ...}; the last line of stdout is the answer.
$CUTLASS_ATTN_TUNING names a file with the candidate's tile, so that it is a variant here.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


def compile_(job: dict[str, Any]) -> dict[str, Any]:
    """Registers, stack, spills and warnings; with "model", the issue slots with that score too."""
    from ... import jit

    try:
        code, log = jit.compile_anew(job["key"], job["arch"])
    except jit.CompileError as error:
        return {"error": first_error(str(error))}
    answer: dict[str, Any] = parse_log(log)
    if job.get("model"):
        answer["model"] = _model(job["key"], job["model"], job["arch"], code)
    return answer


def first_error(text: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), (lines or ["no reason given"])[-1])


def parse_log(log: str) -> dict[str, Any]:
    """What ptxas -v says of the kernels of a unit: the most of each, and all warnings."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    found = {
        "registers": max(registers, default=0),
        "warnings": sorted({x.strip() for x in log.splitlines() if "warning" in x.lower()}),
    }
    for name, pattern in (
        ("stack", r"(\d+) bytes stack frame"),
        ("spill_stores", r"(\d+) bytes spill stores"),
        ("spill_loads", r"(\d+) bytes spill loads"),
    ):
        found[name] = max((int(n) for n in re.findall(pattern, log)), default=0)
    return found


def _model(key: str, score: str, arch: str, code: bytes) -> dict[str, Any]:
    from ..._build.variant_key import key_of, parse
    from ..sass import disassemble as sass
    from ..sass.issue_slots import model_of
    from ..sass.loops import SassError
    from ..sass.tiles import tile_of

    tile, parts = tile_of(key, score), parse(key)
    assert tile and parts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        graphs = {sass.identify(name): graph for name, graph in sass.control_flow(path, arch)}
    try:
        (entry,) = (
            x for x in graphs if x and x[1] == score and key_of(x[0], [parts.kernel]) == key
        )
        return model_of(graphs[entry], tile)
    except SassError as error:
        return {"error": str(error)}


def check(job: dict[str, Any]) -> dict[str, Any]:
    """Is it right on so many random inputs, with and without a causal mask?"""
    # Two tiles of the largest there are and a ragged end, in fewer queries than keys.
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 333, "seqlen_k": 401}
    shapes = [{**sizes, "head_dim": job["head_dim"], "causal": mask} for mask in (False, True)]
    return _measured(job, [job["key"]], shapes, inputs=job["inputs"], whole=True)[1]


def time(job: dict[str, Any]) -> dict[str, Any]:
    """Speed over the incumbent, in interleaved rounds: for each shape, and their mean."""
    from ..experiment.stats import geometric_mean

    keys = [job["incumbent"], job["key"]]
    timing = {"timing": job["timing"], "rounds": job["rounds"]}
    report, failure = _measured(job, keys, job["shapes"], **timing)
    if failure:
        return failure
    ratios = {}
    for row in report.rows:
        if row.requested != report.baseline:
            assert row.speedup
            ratios[str(row.shape)] = row.speedup["value"]
    return {"speedup": geometric_mean(ratios.values()), "by_shape": ratios}


def _measured(
    job: dict[str, Any], keys: list[str], shapes: list[dict[str, Any]], **how: Any
) -> tuple[Any, dict[str, Any]]:
    """The report of these variants, and {"error": ...} if one of them is not right."""
    from ..experiment.impls import ours
    from ..experiment.problems import Problem, Shape
    from ..experiment.report import Report
    from ..experiment.runner import Plan, run

    problems = [Problem(Shape(**shape), job["dtype"]) for shape in shapes]
    impls = ours(keys)
    plan = Plan(problems, impls, job["device"], **{"rounds": 0, **how})
    report = Report("tune", impls[0].name, {}, {})
    run(plan, report, lambda *_: None)
    for row in report.rows:
        if row.status != "ok":
            return report, {"error": f"{row.impl}: {row.problem}: {row.reason or row.status}"}
    return report, {"error": report.aborted} if report.aborted else {}


def gates(job: dict[str, Any]) -> dict[str, Any]:
    """The gates that fail in the first shape, and all figures, by Nsight Compute.

    "unavailable" is why it can measure no tile at all.
    """
    from ..._variants import variants
    from ..experiment.problems import Shape
    from ..gates.ncu import NcuUnavailable
    from ..profile.measure import measured_rows

    chosen = [variant for variant in variants() if variant.key == job["key"]]
    shapes = [Shape(**shape) for shape in job["shapes"][:1]]
    try:
        (row,) = measured_rows(chosen, shapes, job["device"], job.get("ncu"), lambda *_: None)
    except NcuUnavailable as error:
        return {"unavailable": str(error)}
    if row.reason:
        return {"error": row.reason}
    figures = {gate.gate.name: gate.measured for gate in row.gates}
    failed = [str(gate) for gate in row.gates if gate.verdict == "FAIL"]
    return {"figures": figures, "failed": failed}


JOBS = {"compile": compile_, "check": check, "time": time, "gates": gates}


def main() -> int:
    job = json.load(sys.stdin)
    try:
        answer = JOBS[job["job"]](job)
    except (RuntimeError, ValueError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
