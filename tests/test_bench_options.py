"""`cutlass_attn.tools.grids.options`: its rows, its file and its verdict, on the CPU."""

import json

import pytest
from cutlass_attn.tools.grids import options

torch = pytest.importorskip("torch", reason="it measures torch tensors")


def run(path, *arguments):
    return options.main(["--device", "cpu", "--json", str(path), *arguments])


def test_options_are_timed_and_compared(capsys, tmp_path):
    assert run(tmp_path / "o.json", "--shapes", "2,4,4,32,48,64") == 0
    result = json.loads((tmp_path / "o.json").read_text())
    rows = result["rows"]
    ours = [row["option"] for row in rows if row["impl"].startswith("cutlass_attn:cpu")]
    assert ours == ["none", "softcap", "ALiBi", "ALiBi, causal", "bias", "mask", "dropout"]
    assert result["method"]["timing"] == "host_clock"
    for row in rows:
        assert row["us"] > 0 and row["shape"]["seqlen_k"] == 48
        ours_or_random = row["impl"].startswith("cutlass_attn") or row["option"] == "dropout"
        assert (row["difference"] is None) == ours_or_random
    compared = {row["option"] for row in rows if row["difference"] is not None}
    assert compared == {"none", "bias", "mask"}
    assert "ALiBi" in capsys.readouterr().out


def test_another_result_is_a_failure(capsys, monkeypatch, tmp_path):
    """As if PyTorch's backend computed another function."""

    def wrong(backend, q, k, v, keywords):
        if backend != "flash":
            raise RuntimeError("No available kernel. Aborting execution.")
        return torch.zeros_like(q)

    monkeypatch.setattr(options, "_run_torch", wrong)
    assert run(tmp_path / "o.json") == 1


def test_other_errors_are_not_hidden(monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("CUDA error: illegal access; kernel errors might be reported later")

    monkeypatch.setattr(options, "_run_torch", broken)
    with pytest.raises(RuntimeError, match="illegal access"):
        run(tmp_path / "o.json")


def test_a_wrong_shape_is_an_error(capsys):
    with pytest.raises(SystemExit):
        options.main(["--shapes", "1,2,3"])
    assert "b,hq,hkv,sq,sk,d" in capsys.readouterr().err
