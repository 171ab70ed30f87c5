"""Continuous batching over a paged cache: requests join and leave, and their pages are used again.

A small transformer with random weights answers many requests. In each step those that wait join if
there are pages for them, `attention_varlen` computes their prompts, and `attention_decode` one more
token for everybody, whose key it writes into the cache first. In the end the tokens are compared
with those of dense attention, one request at a time.

Run it with `python examples/04_paged_decode.py`. It needs torch and rich, and matplotlib for a
picture of the pages; a GPU is used if there is one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cutlass_attn
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

VOCABULARY, LAYERS, HEADS, HEADS_KV, DIM = 256, 2, 4, 2, 64
WIDTH = HEADS * DIM
PAGES, PAGE = 64, 16  # of the cache, and the keys of one: far fewer than all requests need
MOST_RUNNING = 8
LONGEST = 320  # tokens of a request

# (layer, q (T, HEADS, DIM), k and v (T, HEADS_KV, DIM)) -> (T, HEADS, DIM)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def normalized(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


class Model:
    """A decoder whose attention is an argument, so that one model runs in three ways."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            x = torch.randn(rows, columns, generator=generator) / rows**0.5
            return x.to(device, dtype)

        heads = HEADS + 2 * HEADS_KV
        self.embedding = weight(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.layers = [
            # Queries that are large: else attention looks at all keys alike.
            (
                weight(WIDTH, heads * DIM) * 2,
                weight(WIDTH, WIDTH),
                weight(WIDTH, 4 * WIDTH),
                weight(4 * WIDTH, WIDTH),
            )
            for _ in range(LAYERS)
        ]
        self.head = weight(WIDTH, VOCABULARY)
        angles = torch.arange(LONGEST)[:, None] / 10000 ** (torch.arange(DIM // 2) / (DIM // 2))
        self.cos, self.sin = (x.to(device, dtype) for x in (angles.cos(), angles.sin()))

    def logits(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """(T, VOCABULARY) of (T,) tokens, of whichever requests."""
        x = self.embedding[tokens]
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            heads = (normalized(x) @ qkv).unflatten(-1, (-1, DIM))
            q, k, v = heads.split([HEADS, HEADS_KV, HEADS_KV], dim=1)
            x = x + attend(layer, q, k, v).flatten(1) @ out
            x = x + torch.nn.functional.silu(normalized(x) @ up) @ down
        return normalized(x) @ self.head

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE of (T, heads, DIM), as `attention_decode` does it with rotary_interleaved=False."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass
class Request:
    number: int
    prompt: list[int]
    wanted: int  # tokens to generate
    tokens: list[int] = field(default_factory=list)  # generated ones
    pages: list[int] = field(default_factory=list)
    stored: int = 0  # keys in the cache

    @property
    def most_pages(self) -> int:
        return -(-(len(self.prompt) + self.wanted) // PAGE)


class Engine:
    """The scheduler, and the cache: (LAYERS, PAGES, PAGE, HEADS_KV, DIM) for K and for V."""

    def __init__(self, model: Model, requests: Sequence[Request]) -> None:
        self.model = model
        self.k_cache, self.v_cache = model.head.new_zeros(
            2, LAYERS, PAGES, PAGE, HEADS_KV, DIM
        ).unbind()
        self.free = list(range(PAGES))
        self.waiting, self.running = list(requests), list[Request]()
        self.owners: list[list[int]] = []  # of every page after each step, -1 for none

    def int32(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.model.head.device)

    def step(self) -> int:
        """Admits, computes and releases; how many tokens that gave."""
        admitted = []
        promised = sum(request.most_pages for request in self.running)
        while self.waiting and len(self.running) < MOST_RUNNING:
            promised += self.waiting[0].most_pages
            if promised > PAGES:  # who is admitted can always go on to its end
                break
            admitted.append(self.waiting.pop(0))
            self.running.append(admitted[-1])
        if admitted:
            self.prefill(admitted)
        decoding = [request for request in self.running if len(request.tokens) < request.wanted]
        if decoding:
            self.decode(decoding)
        self.owners.append([-1] * PAGES)
        for request in self.running:
            for page in request.pages:
                self.owners[-1][page] = request.number
        for request in self.running:
            if len(request.tokens) == request.wanted:
                self.free += request.pages
        self.running = [request for request in self.running if len(request.tokens) < request.wanted]
        return len(admitted) + len(decoding)

    def grow(self, request: Request, keys: int) -> None:
        """Takes pages until so many keys have room."""
        while len(request.pages) * PAGE < keys:
            request.pages.append(self.free.pop())

    def table(self, requests: Sequence[Request]) -> torch.Tensor:
        columns = max(len(request.pages) for request in requests)
        return self.int32([r.pages + [-1] * (columns - len(r.pages)) for r in requests])

    def prefill(self, requests: Sequence[Request]) -> None:
        """All prompts behind each other, in one call."""
        model = self.model
        ends = [0]
        for request in requests:
            self.grow(request, len(request.prompt))
            ends.append(ends[-1] + len(request.prompt))
        positions = self.int32([j for request in requests for j in range(len(request.prompt))])
        slots = self.int32(
            [r.pages[j // PAGE] * PAGE + j % PAGE for r in requests for j in range(len(r.prompt))]
        ).long()
        cu_seqlens_q, table = self.int32(ends), self.table(requests)
        seqused_k = self.int32([len(request.prompt) for request in requests])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
            cutlass_attn.append_kv(model.rotated(k, positions), v, k_cache, v_cache, slots)
            out: torch.Tensor = cutlass_attn.attention_varlen(
                model.rotated(q, positions),
                k_cache,
                v_cache,
                cu_seqlens_q,
                seqused_k=seqused_k,
                block_table=table,
                causal=True,
            )
            return out

        tokens = self.int32([token for request in requests for token in request.prompt])
        last = cu_seqlens_q[1:] - 1
        best = model.logits(tokens, attend)[last].argmax(dim=-1).tolist()
        for request, token in zip(requests, best, strict=True):
            request.stored = len(request.prompt)
            request.tokens.append(token)

    def decode(self, requests: Sequence[Request]) -> None:
        """The last token of each joins the cache, and gives the next one."""
        model = self.model
        for request in requests:
            self.grow(request, request.stored + 1)
        table, seqlens = self.table(requests), self.int32([r.stored for r in requests])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = cutlass_attn.attention_decode(
                q[:, None],  # (requests, one query, HEADS, DIM)
                self.k_cache[layer],
                self.v_cache[layer],
                seqlens,
                block_table=table,
                k_new=k[:, None],
                v_new=v[:, None],
                rotary_cos=model.cos,
                rotary_sin=model.sin,
                rotary_interleaved=False,
            )
            return out[:, 0]

        tokens = self.int32([request.tokens[-1] for request in requests])
        best = model.logits(tokens, attend).argmax(dim=-1).tolist()
        for request, token in zip(requests, best, strict=True):
            request.stored += 1
            request.tokens.append(token)


def differing(model: Model, request: Request, tolerance: float) -> int:
    """Tokens that dense attention over this request alone would not have chosen.

    It sees what was generated before each token. So if the first token is the one that a run with
    dense attention begins with, the second is, too, and so on. A token whose logit is within the
    tolerance of the largest is as good as that one.
    """
    tokens = torch.tensor(request.prompt + request.tokens[:-1], device=model.head.device)
    positions = torch.arange(len(tokens), device=tokens.device)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = model.rotated(q, positions), model.rotated(k, positions)
        out: torch.Tensor = cutlass_attn.attention(
            q[None], k[None], v[None], causal=True, layout="bshd"
        )
        return out[0]

    logits = model.logits(tokens, attend)[len(request.prompt) - 1 :].float()
    chosen = torch.tensor(request.tokens, device=tokens.device)[:, None]
    behind = logits.max(dim=-1).values - logits.gather(1, chosen)[:, 0]
    return int((behind > tolerance).sum())


def draw(path: Path, owners: list[list[int]]) -> bool:
    """Whose every page is after each step; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    used = [sum(owner >= 0 for owner in step) for step in owners]
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    top.step(range(len(used)), used, where="mid", color="#0072B2")
    top.axhline(PAGES, color="black", linewidth=1)
    top.set_ylabel("pages in use")
    top.set_ylim(0, PAGES * 1.1)
    # A colour for each request, which the next ones have again; none for free pages.
    colors = [[owner % 20 if owner >= 0 else float("nan") for owner in step] for step in owners]
    by_page = list(zip(*colors, strict=True))
    below.imshow(by_page, aspect="auto", cmap="tab20", vmin=0, vmax=19, interpolation="nearest")
    below.set_ylabel("page; a colour is a request")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
    return True


def make_requests(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    return [
        Request(i, [number(0, VOCABULARY - 1) for _ in range(number(1, 200))], number(1, 80))
        for i in range(count)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for pages.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error(f"--requests must be 1 or more, got {options.requests}")
    if options.device == "cpu":
        torch.set_num_threads(1)  # its products are small: threads wait longer than they compute
    # In half precision two tokens may be equally good up to rounding.
    dtype, tolerance = (torch.float32, 1e-4) if options.device == "cpu" else (torch.float16, 3e-2)
    model = Model(options.device, dtype)
    requests = make_requests(options.requests)
    engine = Engine(model, requests)
    total = sum(request.wanted for request in requests)
    console = Console()

    begin = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=total)
        while engine.waiting or engine.running:
            bar.advance(task, engine.step())
    took = time.perf_counter() - begin  # each step waits for its tokens

    prompts = sum(len(request.prompt) for request in requests)
    needed = sum(request.most_pages for request in requests)
    console.print(
        f"{len(requests)} requests on {options.device}: {prompts} tokens of prompts and {total} "
        f"generated ones in {len(engine.owners)} steps and {took:.2f} s, {total / took:.0f} "
        f"tokens/s; {needed} pages needed in all, {PAGES} in the cache",
        highlight=False,
    )
    wrong = sum(differing(model, request, tolerance) for request in requests)
    same = "are those" if wrong == 0 else f"are NOT those, {wrong} differ,"
    console.print(f"the tokens {same} of dense attention for each request", highlight=False)
    picture = options.out / "pages.png"
    if draw(picture, engine.owners):
        console.print(f"{picture} shows whose each page is after each step", highlight=False)
    else:
        console.print("no picture: pip install matplotlib", highlight=False)
    return 0 if wrong == 0 and len(engine.free) == PAGES else 1


if __name__ == "__main__":
    raise SystemExit(main())
