"""The model of latent decoding's times, against what an H200 took."""

import pytest

from dev.latent_times import Call, clocks_of, explained, predicted_us
from dev.sass.issue_slots import PARTS, Part
from dev.sass.serving_tiles import latent_tile_of

# With the 6 clocks of a product that were measured.
H200 = Part("H200", 132, 1.755, 632.0, 632.0, 1264.0, 4800.0)
TILE = latent_tile_of("sm80/latent/bf16/d576v512/16x32x1c4")
TILE_64 = latent_tile_of("sm80/latent_64/bf16/d576v512/64x16x4c2")


@pytest.mark.parametrize(
    ("batch", "keys", "splits", "seen"),
    [(128, 4096, 2, 165), (16, 8192, 16, 60), (1, 32768, 132, 34)],
)
def test_an_h200_takes_up_to_a_fifth_longer(batch, keys, splits, seen):
    """Its table is in docs/latent.md. 16 heads; an SM has two blocks, whose loop takes 1000 clocks
    a tile at most."""
    us = predicted_us(H200, TILE, 1000, Call(batch, keys, 16, splits), blocks_per_sm=2)
    assert 0.8 < us / seen < 1


def test_what_bounds_a_call():
    rtx = next(part for part in PARTS if part.name == "RTX 4090")
    few, many = (predicted_us(rtx, TILE, x, Call(128, 4096, 16, 1)) for x in (0, 1000))
    assert few == many  # memory
    # Two row tiles of a sequence read its keys once, and the loop bounds them.
    many, more = (predicted_us(rtx, TILE_64, x, Call(128, 4096, 128, 1)) for x in (5000, 6000))
    assert more / many == pytest.approx(1.2, rel=0.02)
    # The SM with the most blocks: 129 blocks take two waves of 128.
    assert predicted_us(rtx, TILE, 0, Call(129, 4096, 16, 1)) > 1.9 * few


def test_clocks_are_those_of_a_schedulers_warps():
    row = {"parts": {"L4": {"tensor": 1000, "without_overlap": 0.5}}}
    assert clocks_of(row, PARTS[0], TILE) == 2000
    assert clocks_of(row, PARTS[0], TILE_64) == 4000  # two warps


def test_the_call_is_explained():
    chosen = {heads: explained(PARTS[1], 16, 8192, heads) for heads in (16, 128)}
    assert chosen[16].chosen.kernel == "sm80/latent" and chosen[16].splits > 1
    assert chosen[128].chosen.kernel == "sm80/latent_64"
