"""Machine code of kernels on mma.sync that are compiled for a call with a bias, a mask or chunks,
as NVRTC makes it, without a GPU."""

import re

import pytest
from cutlass_attn import jit

from dev.sass import disassemble as sass
from dev.sass.issue_slots import model_of
from dev.sass.serving_tiles import latent_tile_of

NAMES = [
    "sm80/mask/f16/d64/128x64x4+mask",
    "sm80/mask/bf16/d128/128x64x4+mask",
    "sm80/bias/f16/d64/128x64x4+bias",
    "sm80/bias/bf16/d128/64x64x4+softcap_alibi_bias_chunk",
    "sm80/bias_mask/f16/d64/64x64x4+bias_mask",
    "sm80/bias_mask/f16/d256/64x64x4+softcap_alibi_bias_mask",
    "sm80/any_bias/f16/d64/64x64x4+bias",
    "sm80/any_bias_mask/bf16/d128/64x64x4+softcap_alibi_bias_mask",
    "sm80/bias_mask/f16/d512/32x32x2c4+bias_mask",
    "sm80/f16/d128/128x64x4+chunk",
    "sm80/max_logit/f16/d256/64x64x4+maxlogit",
    "sm80/max_logit/bf16/d64/128x64x4+maxlogit",
]
# Guards of a shuffle, a vote or a barrier where ptxas takes the warp for diverged.
GUARD = re.compile(r"\b(?:BRA\.DIV|BRA\.CONV|WARPSYNC)\b")


@pytest.mark.parametrize(
    ("name", "arch"), [(name, ("sm_80", "sm_89")[i % 2]) for i, name in enumerate(NAMES)]
)
def test_nothing_is_in_local_memory_and_no_warp_diverges(name, arch, tmp_path):
    if reason := jit.available():
        pytest.skip(reason)
    key, _, score = name.partition("+")
    if key not in jit.units():
        pytest.skip(f"this build has {key}")
    assert name in jit.entries(key)
    path = tmp_path / "code.cubin"
    path.write_bytes(jit._compiler().compile(jit._source(name), arch))
    (used,) = [of for (_, found), of in sass.read_resources(path, arch).items() if found == score]
    assert used["STACK"] == used["LOCAL"] == 0
    listings = sass.parse_listings(sass.dump("-sass", path, arch))
    (code,) = [text for function, text in listings if function.endswith(f"__{score}")]
    assert not GUARD.search(code)


@pytest.mark.parametrize(
    "key",
    ["sm80/latent_64_ds_mla/bf16/d576v512/64x16x4c2", "sm80/latent_ds_mla_v4/bf16/d512/16x32x1c4"],
)
def test_latent_tokens_do_a_tiles_work(key, tmp_path):
    """The gates of dev/check_gates.py, which reads the library alone."""
    if reason := jit.available():
        pytest.skip(reason)
    if key not in jit.units():
        pytest.skip(f"this build has {key}")
    path, arch = tmp_path / "code.cubin", "sm_89"
    path.write_bytes(jit._compiler().compile(jit._source(f"{key}+identity"), arch))
    (used,) = [x for (_, of), x in sass.read_resources(path, arch).items() if of == "identity"]
    assert used["STACK"] == used["LOCAL"] == 0
    (graph,) = [x for name, x in sass.control_flow(path, arch) if name.endswith("__identity")]
    tile, found = latent_tile_of(key), sass.count(graph)
    assert {name: found[name] for name in tile.counts()} == tile.counts()
    assert 0 < model_of(graph, tile)["clocks"]["issue"] < 600 * tile.n // 16
