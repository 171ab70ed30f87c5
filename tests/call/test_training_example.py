"""examples/03_train.py trains alike with this library and with PyTorch."""

import runpy
from pathlib import Path

import cutlass_attn
import pytest

torch = pytest.importorskip("torch", reason="the examples use torch")
pytest.importorskip("rich", reason="examples/03_train.py shows its progress with it")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def example():
    return runpy.run_path(str(ROOT / "examples" / "03_train.py"))


def losses(example):
    """Of a tiny model, through each attention."""
    size = example["Size"](2, 2, 16, context=24, batch=4, steps=60, rate=1e-2)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(7, (64,), generator=generator).repeat(20)
    train = example["train"]
    return [
        torch.tensor(train(attend, size, text, 7, lambda: None).losses)
        for attend in example["ATTENTION"].values()
    ]


def test_both_curves_are_one(example):
    ours, torchs = losses(example)
    assert ours[-1] < 0.9 * ours[0]
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-4)


def test_other_attention_gives_another_curve(example, monkeypatch):
    attention = cutlass_attn.attention

    def shortsighted(*operands, **options):
        return attention(*operands, **options, window=(1, 0))

    monkeypatch.setattr(cutlass_attn, "attention", shortsighted)
    ours, torchs = losses(example)
    assert (ours - torchs).abs().max() > 2e-3


def test_wrong_gradients_give_another_curve(example, monkeypatch):
    from cutlass_attn._call.operator import ATTENTION

    backward = ATTENTION.run_backward

    def wrong(*args, **more):
        grads = backward(*args, **more)
        grads[2].zero_()
        return grads

    monkeypatch.setattr(ATTENTION, "run_backward", wrong)
    ours, torchs = losses(example)
    assert (ours - torchs).abs().max() > 2e-3


def test_the_program(example, tmp_path, capsys):
    assert example["main"](["--device", "cpu", "--steps", "3", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "the curves are at most" in text and "characters/s" in text
    pytest.importorskip("matplotlib", reason="it draws the picture")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
