"""A small transformer learns to write like this repository's documents, character by character.

It is trained twice from one seed, through `cutlass_attn.attention` and through PyTorch's
scaled_dot_product_attention: the two losses go down together. training.png shows both. At the end
the model writes a few lines.

Run it with `python examples/03_train.py`. It needs torch and rich, and matplotlib for the picture.
On two idle cores it takes a minute or two, in float32; on a GPU the model is larger, under
torch.autocast with bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cutlass_attn
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (B, S, H, D)


def cutlass_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cutlass_attn.attention(q, k, v, causal=True, layout="bshd")


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTION: dict[str, Attend] = {"cutlass_attn": cutlass_attention, "torch": torch_attention}


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_dim: int
    context: int  # characters that the model sees
    batch: int
    steps: int
    rate: float  # of learning, the highest


SIZES = {
    "cpu": Size(3, 4, 32, 128, 12, 400, 2e-3),
    "cuda": Size(8, 12, 64, 1024, 16, 600, 1e-3),
}
WARMUP = 5  # steps that are not timed


class Block(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.shape = (3, size.heads, size.head_dim)
        self.attend = attend
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, self.shape).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    def __init__(self, size: Size, characters: int, attend: Attend) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(size.context, width)
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) to logits of the next character, (B, S, characters)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.characters(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def read_text() -> str:
    """The repository's own documents."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernels/*.md")]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(paths))


@dataclass
class Run:
    """What a training gave."""

    model: Model
    losses: list[float]
    tokens_per_second: float


def train(
    attend: Attend, size: Size, text: Tensor, characters: int, step_done: Callable[[], object]
) -> Run:
    """`text` are numbers of characters, on the device that trains."""
    device = text.device.type
    torch.manual_seed(0)
    model = Model(size, characters, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.rate, size.steps)
    generator = torch.Generator().manual_seed(1)  # of the same batches for all
    within = torch.arange(size.context + 1, device=device)
    losses, begin = [], 0.0
    for step in range(size.steps):
        if step == min(WARMUP, size.steps - 1):
            begin = now(device)
        starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
        batch = text[starts.to(device) + within]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        step_done()
    steps = size.steps - min(WARMUP, size.steps - 1)
    rate = steps * size.batch * size.context / (now(device) - begin)
    return Run(model, torch.stack(losses).tolist(), rate)


def now(device: str) -> float:
    """When all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def write(model: Model, size: Size, start: Tensor, count: int) -> Tensor:
    """`count` characters that the model has to say after `start`, (1, S)."""
    torch.manual_seed(2)
    tokens = start
    for _ in range(count):
        logits = model(tokens[:, -size.context :])[:, -1].float()
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(-1), 1)], dim=1)
    return tokens


def draw(runs: dict[str, Run], path: Path) -> bool:
    """Both curves, and what lies between them; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for (name, run), style in zip(runs.items(), ("-", "--")):
        upper.plot(run.losses, style, label=name)
    upper.set_ylabel("loss, nats a character")
    upper.legend()
    ours, theirs = (run.losses for run in runs.values())
    lower.plot([a - b for a, b in zip(ours, theirs)], color="0.4")
    lower.set(xlabel="step", ylabel="difference")
    figure.savefig(path, dpi=120)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for training.png")
    given = parser.parse_args(arguments)
    size = SIZES[torch.device(given.device).type]
    if given.steps is not None:
        size = Size(**{**vars(size), "steps": given.steps})
    console = Console(highlight=False)

    text = read_text()
    alphabet = sorted(set(text))
    numbers = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([numbers[character] for character in text], device=given.device)
    console.print(f"{len(text):,} characters, {len(alphabet)} different ones, on {given.device}")

    runs: dict[str, Run] = {}
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        for name, attend in ATTENTION.items():
            task = bar.add_task(name, total=size.steps)
            step_done = lambda task=task: bar.advance(task)  # noqa: E731
            runs[name] = train(attend, size, encoded, len(alphabet), step_done)

    table = Table("step", *(f"loss, {name}" for name in runs), "difference")
    ours, theirs = (run.losses for run in runs.values())
    for step in sorted({*range(0, size.steps, max(1, size.steps // 8)), size.steps - 1}):
        a, b = ours[step], theirs[step]
        table.add_row(str(step), f"{a:.4f}", f"{b:.4f}", f"{a - b:+.1e}")
    console.print(table)
    for name, run in runs.items():
        console.print(f"{name:<12} {run.tokens_per_second:,.0f} characters/s")
    apart = max(abs(a - b) for a, b in zip(ours, theirs))
    console.print(f"the curves are at most {apart:.1e} apart")

    start = torch.tensor([[numbers["\n"], numbers["#"]]], device=given.device)
    written = write(runs["cutlass_attn"].model, size, start, 200)[0].tolist()
    console.print("".join(alphabet[i] for i in written), style="italic", markup=False)
    picture = given.out / "training.png"
    drawn = draw(runs, picture)
    console.print(f"both curves: {picture}" if drawn else "no picture: pip install matplotlib")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
