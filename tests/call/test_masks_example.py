"""examples/07_masks.py: masks as PyTorch's, and the tiles that it counts."""

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the examples use torch")
PATH = Path(__file__).parents[2] / "examples" / "07_masks.py"


@pytest.fixture
def example():
    return runpy.run_path(str(PATH))


def test_every_mask_agrees_with_torch(example, capsys, tmp_path):
    assert example["main"](["--device", "cpu", "--length", "256", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "results as PyTorch's" in text
    for mask in example["MASKS"].values():
        assert mask.title in text
    pytest.importorskip("matplotlib", reason="it draws the picture")
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


def test_another_mask_is_noticed(example, capsys, tmp_path):
    causal = example["MASKS"]["causal"]
    example["MASKS"]["causal"] = type(causal)("causal", lambda n, d: {}, causal.visible)
    assert example["main"](["--device", "cpu", "--length", "256", "--out", str(tmp_path)]) == 1
    assert "RESULTS DIFFER" in capsys.readouterr().out


def test_tiles(example):
    mask = torch.ones(2, 1, 128, 192, dtype=torch.bool)
    mask[0, :, :64, 64:128] = False
    mask[1, :, 64, 191] = False
    expected = [[[2, 0, 2], [2, 2, 2]], [[2, 2, 2], [2, 2, 1]]]
    assert example["classes"](mask).tolist() == expected
    tiles = example["count"](mask)
    assert (tiles.empty, tiles.partial) == (pytest.approx(1 / 12), pytest.approx(1 / 12))
    assert tiles.visible == pytest.approx(1 - (64 * 64 + 1) / mask.numel())


def test_length_must_be_whole_tiles(example, capsys):
    with pytest.raises(SystemExit):
        example["main"](["--length", "100"])
    assert "--length must be a multiple of 64, got 100" in capsys.readouterr().err
