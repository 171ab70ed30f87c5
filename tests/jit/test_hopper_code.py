"""Machine code of kernels for Hopper, as NVRTC makes it, without a GPU: of wgmma, for sm_90a.

ptxas serializes the wgmma of a kernel that it has too few registers for, which says nothing but a
message, C75xx, and a wait behind each; and ignores setmaxnreg where it needs more."""

import cutlass_attn
import pytest
from cutlass_attn import jit

from dev.sass import disassemble as sass

ARCH = "sm_90a"


def forward(head_dim, n, has_half, has_next_q):
    """HGMMA and waits: the first tile of keys, with two buffers of Q the one beside the tile of
    rows before, and the loop's step, masked or not, and of half a tile of keys; the last P V."""
    steps = has_next_q + 2 + has_half
    products = (1 + steps) * head_dim // 16 + (steps + 1) * n // 16 - has_half * n // 32
    return {"HGMMA": products, "WARPGROUP.DEPBAR": 1 + 2 * steps + 1, "USETMAXREG": 2}


def backward(head_dim, n, roles, m=64):
    """S, dP, dV and dK of a step's queries and a warpgroup's keys; dQ of all keys, 64 queries and
    64 columns a time."""
    slices = head_dim // 64 * m // 64
    products = 2 * head_dim // 16 + 2 * m // 16 + slices * n // 16
    return {"HGMMA": products, "WARPGROUP.DEPBAR": 3 + slices, "USETMAXREG": roles}


def bias_grad(counts, head_dim):
    """And blocks that compute the gradient of a bias: S and dP, a wait for each, and two roles."""
    more = {"HGMMA": 2 * head_dim // 16, "WARPGROUP.DEPBAR": 2, "USETMAXREG": 2}
    return {name: count + more[name] for name, count in counts.items()}


def two_pass(head_dim, head_dim_v):
    """64 keys: S and dV of one warpgroup, dP and dK of the other; dQ of 64 queries: S, dP and dQ.
    Each of a step in the loop, and of one before or after it. Waits: of each warpgroup one before
    the loop, two in it, one after; of dQ two before, three in it, one after."""
    qk, v, second = head_dim // 16, head_dim_v // 16, 64 // 16
    products = 2 * (2 * qk + 2 * v + 3 * second)
    return {"HGMMA": products, "WARPGROUP.DEPBAR": 2 * 4 + 6, "USETMAXREG": 4}


def split_keys(head_dim, n, pass_tiles):
    """Passes of a tile of keys: Q K^T of the first and of the next, P V of one with another after
    it and of the last; where there is one, a pass of more tiles. In halves, and a wait for each
    S."""
    qk, pv = 2 * head_dim // 16, n // 16
    products, waits = 2 * (qk + pv), 1 + 2 + 2
    if pass_tiles > 1:
        products += pass_tiles * (qk + pv)
        waits += 2 * pass_tiles + 1
    return {"HGMMA": products, "WARPGROUP.DEPBAR": waits}


def quantized(head_dim):
    """The first key block, of either half of a tile, and steps of both halves: of the first tile,
    of full and of masked tiles. Q K^T of 64 keys; P V of the block before, beyond a head dim of
    128 in turns of 64 columns; the last P V."""
    first, steps, turns = 2, 1 + 2 + 2, 1 if head_dim <= 128 else head_dim // 64
    return {
        "IGMMA": (first + steps) * head_dim // 32,
        "QGMMA": (steps + 1) * turns * 64 // 32,
        "WARPGROUP.DEPBAR": first + steps * (1 + turns) + turns,
        "USETMAXREG": 2,
    }


CODE = {
    "sm90/bf16/d128/128x128x8": forward(128, 128, has_half=True, has_next_q=False),
    "sm90/bf16/d64/128x128x8": forward(64, 128, has_half=True, has_next_q=True),
    "sm90/bf16/d256/64x64x4": forward(256, 64, has_half=False, has_next_q=False),
    "sm90/int8_fp8/bf16/d64/192x128x12": quantized(64),
    "sm90/int8_fp8/bf16/d128/128x128x8": quantized(128),
    "sm90/int8_fp8/f16/d256/128x128x8": quantized(256),
    "sm90/split_keys/f16/d64/64x128x8": split_keys(64, 128, pass_tiles=2),
    "sm90/split_keys/bf16/d128/64x128x8": split_keys(128, 128, pass_tiles=1),
    "sm90/backward_wgmma_q128/bf16/d64/128x128x8": backward(64, 128, roles=3, m=128),
    "sm90/backward_wgmma/bf16/d64/64x192x12": backward(64, 192, roles=2),
    "sm90/backward_wgmma/bf16/d128/64x128x8": backward(128, 128, roles=3),
    "sm90/backward_wgmma_mask/bf16/d64/64x128x8": backward(64, 128, roles=3),
    "sm90/backward_wgmma_mask/bf16/d128/64x128x8": backward(128, 128, roles=3),
    "sm90/backward_wgmma_bias_grad/bf16/d128/64x128x8": bias_grad(backward(128, 128, roles=3), 128),
    "sm90/backward_wgmma_mask_bias_grad/bf16/d64/64x192x12": bias_grad(
        backward(64, 192, roles=2), 64
    ),
    "sm90/backward_wgmma_dropout/bf16/d64/64x192x12": backward(64, 192, roles=2),
    "sm90/backward_wgmma_dropout/bf16/d128/64x128x8": backward(128, 128, roles=3),
    "sm90/dropout/bf16/d64/128x128x8": forward(64, 128, has_half=True, has_next_q=True),
    "sm90/dropout/bf16/d128/128x128x8": forward(128, 128, has_half=True, has_next_q=False),
    "sm90/backward_two_pass/bf16/d192v128/64x64x8": two_pass(192, 128),
    "sm90/backward_two_pass/bf16/d256/64x64x8": two_pass(256, 256),
}


# Bytes of the stack: warpgroups with keys, at their last registers, spill 4 to 8.
SPILLS = {
    # Of the warp that copies, at 24 registers, which also walks the map.
    "sm90/backward_wgmma_mask/bf16/d64/64x128x8": 16,
    "sm90/backward_wgmma_mask/bf16/d128/64x128x8": 16,
    "sm90/backward_wgmma_dropout/bf16/d128/64x128x8": 8,
    "sm90/int8_fp8/bf16/d64/192x128x12": 8,  # of the warp that copies, at 32 registers
    # Of the warp that copies for blocks with the gradient, at 32 registers.
    "sm90/backward_wgmma_bias_grad/bf16/d128/64x128x8": 40,
}


def score_of(key):
    terms = {"mask": "mask", "bias_grad": "bias"}
    found = [x for word, x in reversed(terms.items()) if word in key]
    return "_".join(found) or "identity"


@pytest.fixture(scope="module", params=CODE)
def compiled(request, tmp_path_factory):
    if reason := jit.available():
        pytest.skip(reason)
    key = request.param
    op = "backward" if "backward" in key else "forward"
    assert key in [row.key for row in cutlass_attn.variants(op)]
    if key not in jit.units():
        pytest.skip(f"this build has {key}")
    source = jit._source(jit.entry_name(key, score_of(key)))
    code, log = jit._compiler().compile_with_log(source, ARCH)
    path = tmp_path_factory.mktemp("code") / "code.cubin"
    path.write_bytes(code)
    return key, path, log


def test_no_wgmma_is_serialized(compiled):
    key, path, log = compiled
    assert "C75" not in log
    found = {score: of for (_, score), of in sass.read_counts(path, ARCH).items()}
    counts = {name: found[score_of(key)][name] for name in CODE[key]}
    assert counts == CODE[key]


def test_nothing_is_in_local_memory(compiled):
    key, path, _ = compiled
    used = {score: of for (_, score), of in sass.read_resources(path, ARCH).items()}[score_of(key)]
    assert used["STACK"] <= SPILLS.get(key, 0) and used["LOCAL"] == 0


def test_grids_that_overlap_wait_for_earlier_ones(compiled):
    """The launches before and after as well, whose loads the engine does not check."""
    key, path, _ = compiled
    if "backward" not in key:
        pytest.skip("its grids do not overlap")
    listings = list(sass.parse_listings(sass.dump("-sass", path, ARCH)))
    assert len(listings) == 3
    for _, code in listings:  # griddepcontrol.wait comes before all loads from global memory
        assert "ACQBULK" in code and "LDG" not in code[: code.index("ACQBULK")]


NAMES = [
    "sm90/bf16/d64/128x128x8+alibi",
    "sm90/f16/d128/128x128x8+softcap_alibi",
    "sm90/bias/bf16/d128/128x128x8+softcap_alibi_bias_chunk",
    "sm90/mask/bf16/d128/128x128x8+softcap_alibi_mask",
    "sm90/split_keys/f16/d64/64x128x8+softcap_alibi",
    "sm90/max_logit/bf16/d128/128x128x8+softcap_maxlogit",
    "sm90/latent/bf16/d576v512/64x48x4c2+maxlogit",
]


@pytest.mark.parametrize("name", NAMES)
def test_composed_scores_do_not_serialize_and_hardly_spill(name, tmp_path):
    if reason := jit.available():
        pytest.skip(reason)
    key, _, score = name.partition("+")
    if key not in jit.units():
        pytest.skip(f"this build has {key}")
    assert name in jit.entries(key)
    code, log = jit._compiler().compile_with_log(jit._source(name), ARCH)
    assert "C75" not in log
    path = tmp_path / "code.cubin"
    path.write_bytes(code)
    (used,) = [of for (_, found), of in sass.read_resources(path, ARCH).items() if found == score]
    # Bytes. D = 128 is at its last registers; a softcap and the largest logit together spill in the
    # code that computes a tile again.
    assert used["STACK"] <= (32 if score == "softcap_maxlogit" else 16) and used["LOCAL"] == 0


def test_int8_has_registers_for_four_blocks(tmp_path):
    """Of 128 threads, with any score but that with every option. With a softcap three words wait
    in local memory."""
    if reason := jit.available():
        pytest.skip(reason)
    key = "sm80/int8/f16/d64/64x64x4"
    if key not in jit.units():
        pytest.skip(f"this build has {key}")
    code, _ = jit._compiler().compile_with_log(jit.units()[key], "sm_90")
    path = tmp_path / "code.cubin"
    path.write_bytes(code)
    for (_, score), used in sass.read_resources(path, "sm_90").items():
        assert used["STACK"] <= (16 if score == "softcap" else 0), score
        assert used["LOCAL"] == 0 and used["REG"] <= 128, score
