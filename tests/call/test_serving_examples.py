"""The serving examples of examples/ give the results of dense attention."""

import runpy
from pathlib import Path

import cutlass_attn
import pytest

torch = pytest.importorskip("torch", reason="the examples use torch")
ROOT = Path(__file__).parents[2]


def test_a_shared_prefix_changes_nothing():
    example = runpy.run_path(str(ROOT / "examples" / "05_shared_prefix.py"))
    assert example["main"]() < 1e-3


def run_04(folder, requests):
    example = runpy.run_path(str(ROOT / "examples" / "04_paged_decode.py"))
    threads = torch.get_num_threads()
    try:
        return example["main"](["--requests", str(requests), "--out", str(folder)])
    finally:
        torch.set_num_threads(threads)


def test_tokens_from_pages_are_those_of_dense_attention(capsys, tmp_path):
    assert run_04(tmp_path, 10) == 0
    text = capsys.readouterr().out
    assert "the tokens are those of dense attention" in text and "tokens/s" in text
    pytest.importorskip("matplotlib", reason="it draws the picture")
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")


def test_other_attention_gives_other_tokens(capsys, tmp_path, monkeypatch):
    decode = cutlass_attn.attention_decode

    def shortsighted(*operands, **options):
        return decode(*operands, **options, window=(40, 0))

    monkeypatch.setattr(cutlass_attn, "attention_decode", shortsighted)
    assert run_04(tmp_path, 4) == 1
    assert "are NOT those" in capsys.readouterr().out


def test_absorbed_latent_attention_is_that_of_expanded_heads():
    example = runpy.run_path(str(ROOT / "examples" / "08_latent.py"))
    assert example["main"]() < 5e-3
