"""`cutlass-attn explain`."""

import json
import sys

import cutlass_attn
import torch
from click.testing import CliRunner
from cutlass_attn.tools import cli

SHAPE = ["--shape", "2x8x512x64", "--kv-heads", "2", "--dtype", "bf16", "--causal"]


def run(*arguments):
    command = cli.cutlass_attn.commands["explain"]
    return CliRunner().invoke(command, list(arguments), standalone_mode=False)


def expected(**options):
    q = torch.empty(2, 8, 512, 64, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(2, 2, 512, 64, dtype=torch.bfloat16, device="meta")
    return cutlass_attn.explain(q, kv, kv, causal=True, **options)


def test_it_prints_what_explain_does():
    result = run(*SHAPE, "--device", "RTX 4090")
    assert result.output == f"{expected(device='RTX 4090')}\n"
    assert result.output.startswith("bfloat16, q (2, 8, 512, 64), k (2, 2, 512, 64)")
    assert "on RTX 4090 (sm_89, 128 SMs)" in result.output
    assert result.return_value == (0 if cutlass_attn.build_info().cuda else 1)


def test_its_options():
    result = run(*SHAPE, "--device", "cpu", "--grad", "--table")
    assert result.output == f"{expected(device='cpu', grad=True).table()}\n"
    assert result.return_value == 0
    result = run("--shape", "1x2x16x64", "--keys", "300", "--kernel", "cpu", "--device", "cpu")
    assert "k (1, 2, 300, 64)" in result.output and "-> cpu/f16" in result.output


def test_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    call = ["explain", "--shape", "2x8x512x64", "--causal", "--device"]
    assert cli.main([*call, "cpu"]) == 0
    assert "-> cpu/f16" in capsys.readouterr().out
    assert cli.main([*call, "RTX 4090"]) == (0 if cutlass_attn.build_info().cuda else 1)
    assert "on RTX 4090 (sm_89, 128 SMs)" in capsys.readouterr().out
    assert cli.main([*call, "cpu", "--dtype", "bf16"]) == 2
    assert "--dtype bf16 needs torch" in capsys.readouterr().err


def test_json():
    result = run(*SHAPE, "--device", "cpu", "--json", "-")
    found = json.loads(result.output)
    assert found["command"] == "explain" and found["ok"] and found["device"] == "cpu"
    chosen = [row["variant"] for row in found["rows"] if row["chosen"]]
    assert chosen == ["cpu/bf16"] and len(found["rows"]) == len(cutlass_attn.variants())


def test_a_call_that_no_kernel_takes_is_status_1():
    result = run(*SHAPE, "--device", "sm_75")
    assert result.return_value == 1 and "no kernel takes this call" in result.output


def test_errors(capsys):
    for arguments, text in (
        (["--shape", "2x8x512", "--device", "cpu"], "--shape must be BxHxSxD"),
        (["--shape", "2x8x0x64", "--device", "cpu"], "got '2x8x0x64'"),
        ([*SHAPE, "--device", "RTX 4091"], "did you mean 'RTX 4090'"),
        ([*SHAPE, "--device", "cpu", "--kv-heads", "3"], "heads"),
        (["--device", "cpu"], "--shape"),
    ):
        assert cli.main(["explain", *arguments]) == 2, arguments
        assert text in capsys.readouterr().err
    assert cli.main(["explain", "--shape", "1000000x1000000x100000x64"]) == 2
    assert "--shape and --keys give an array of (1000000, " in capsys.readouterr().err
    assert cli.main(["explain", "--shape", "1x1x1x64", "--kernel", "sm81"]) == 2
    assert 'explain: kernel is "sm81", allowed: "auto", ' in capsys.readouterr().err
