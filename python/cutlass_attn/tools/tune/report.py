"""The report of a run: what was tried, where it was rejected, and the best so far against time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .proposers import Tried
from .state import State


def best_so_far(tried: list[Tried]) -> list[tuple[float, float]]:
    """(seconds, score) whenever a tile was the best until then."""
    curve: list[tuple[float, float]] = []
    for entry in tried:
        if entry.score is not None and (not curve or entry.score > curve[-1][1]):
            curve.append((entry.seconds, entry.score))
    return curve


def markdown(state: State, title: str, notes: list[str], steps: list[str]) -> str:
    """The report as a text; `steps` are those of the evaluation, in their order."""
    tried, best = state.tried, state.best
    lines = [f"# {title}", ""]
    lines += [f"- {note}" for note in notes]
    if best is not None:
        lines.append(f"- best: {best.candidate}, {best.score:.3f} times the speed of the first")
    lines += ["", "## Rejected at", "", "| step | tiles |", "| --- | ---: |"]
    rejected = Counter(entry.stage for entry in tried if entry.score is None)
    lines += [f"| {step} | {rejected[step]} |" for step in steps if rejected[step]]
    lines.append(f"| none | {sum(entry.score is not None for entry in tried)} |")
    lines += ["", "## Tried", "", "| tile | score | seconds | step | reason |"]
    lines.append("| --- | ---: | ---: | --- | --- |")
    for entry in tried:
        score = "-" if entry.score is None else f"{entry.score:.3f}"
        reason = entry.reason or (entry.figures or {}).get("fails", "")  # of the first: it runs
        reason = reason.replace("|", "/").replace("\n", " ")
        lines.append(
            f"| {entry.candidate} | {score} | {entry.seconds:.0f} | {entry.stage} | {reason} |"
        )
    return "\n".join(lines) + "\n"


def plot(state: State, title: str, path: Path) -> bool:
    """Draws best-so-far over time and every score beside it; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    scored = [entry for entry in state.tried if entry.score is not None]
    rejected = [entry.seconds for entry in state.tried if entry.score is None]
    heights = [entry.score or 0.0 for entry in scored]
    axes.plot([entry.seconds for entry in scored], heights, "o", ms=4, label="a tile")
    curve = best_so_far(state.tried)
    if curve:
        times, scores = [*(t for t, _ in curve), state.seconds], [s for _, s in curve]
        axes.step(times, [*scores, scores[-1]], where="post", label="best so far")
    axes.plot(
        rejected, [0.02] * len(rejected), "x", ms=4, label="rejected",
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set(title=title, xlabel="seconds", ylabel="speed over the first incumbent")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return True


def write(state: State, title: str, notes: list[str], steps: list[str]) -> list[Path]:
    """Writes report.md and, with matplotlib, report.svg beside the state; returns their paths."""
    folder = state.path.parent
    text = folder / "report.md"
    picture = folder / "report.svg"
    content = markdown(state, title, notes, steps)
    paths = [text]
    if plot(state, title, picture):
        content += f"\n![best so far]({picture.name})\n"
        paths.append(picture)
    text.write_text(content, encoding="utf-8")
    return paths
