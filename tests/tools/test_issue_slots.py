"""Machine code of a main loop: the usual way around it is found, or an error says why not."""

from collections import Counter

import pytest
from cutlass_attn.tools.sass import issue_slots
from cutlass_attn.tools.sass.loops import SassError, find_loop, hot_path, read_blocks
from cutlass_attn.tools.sass.tiles import Tile

# A loop at 0x20: one copy of its body with a rare branch, one that tests masks, then maybe a copy
# of the next tile, in two versions.
LOOP = """
    /*0000*/                   MOV R1, c[0x0][0x28] ;      /* 0x00000a0000017a02 */
                                                           /* 0x000fe40000000f00 */
    /*0010*/              @!P3 BRA 0x160 ;                 /* 0x0000000000007947 */
    /*0020*/               @P0 BRA 0xa0 ;
    /*0030*/                   LDSM.16.M88.4 R4, [R2] ;
    /*0040*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
    /*0050*/                   MUFU.EX2 R8, R8 ;
    /*0058*/                   F2FP.F16.F32.PACK_AB R8, R9, R8 ;
    /*0060*/               @P1 BRA P2, 0x80 ;
    /*0070*/                   BRA 0xe0 ;
    /*0080*/                   MUFU.EX2 R8, R9 ;
    /*0090*/                   BRA 0xe0 ;
    /*00a0*/                   LDSM.16.M88.4 R4, [R2] ;
    /*00b0*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
    /*00c0*/                   ISETP.GE.AND P4, PT, R2, R3, PT ;
    /*00c4*/                   ISETP.LT.AND P4, PT, R2, R5, P4 ;
    /*00c8*/                   FSEL R8, R8, -INF , P4 ;
    /*00d0*/                   MUFU.EX2 R8, R8 ;
    /*00d8*/                   F2FP.F16.F32.PACK_AB R8, R9, R8 ;
    /*00e0*/                   BRA.DIV ~URZ, 0x180 ;
    /*00f0*/               @P5 BRA 0x150 ;
    /*0100*/              @!P6 BRA 0x140 ;
    /*0110*/                   ISETP.LT.AND P6, PT, R2, R3, PT ;
    /*0120*/                   LDGSTS.E.BYPASS.LTC128B.128 [R10], [R12.64], P6 ;
    /*0130*/                   BRA 0x150 ;
    /*0140*/                   LDGSTS.E.BYPASS.LTC128B.128 [R10], [R12.64] ;
    /*0150*/               @P0 BRA 0x20 ;
    /*0160*/                   EXIT ;
    /*0170*/                   BRA 0x170;
    /*0180*/                   CALL.REL.NOINC 0x1a0 ;
    /*0190*/                   BRA 0xf0 ;
    /*01a0*/                   RET.REL.NODEC R8 0x0 ;
"""
TILE = {"HMMA": 1, "MUFU": 1, "LDGSTS": 1}


def edited(*edits: tuple[str, str]) -> str:
    """LOOP with some of its text replaced."""
    text = LOOP
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def test_the_usual_way_is_the_shortest_that_does_a_tiles_work():
    path = hot_path(read_blocks(LOOP), TILE)
    # Not the mask's test, not the second exponential, the copy, and it in its shorter version.
    usual = [0x20, 0x30, 0x40, 0x50, 0x58, 0x60, 0x70, 0xE0, 0xF0, 0x100, 0x140, 0x150]
    assert [i.address for i in path] == usual
    assert Counter(i.kind for i in path) == {
        **dict.fromkeys(("HMMA", "MUFU", "LDSM", "LDGSTS", "pack"), 1),
        "control": 7,
    }


def test_a_loop_may_be_left_by_a_call():
    """As NVRTC's code does: the jump back comes after a CALL that is taken at the end."""
    left = edited(("@P0 BRA 0x20 ;", "@P0 CALL.REL.NOINC 0x160 ;\n/*0158*/ BRA 0x20 ;"))
    blocks = read_blocks(left)
    assert blocks[0x150].successors == (0x160, 0x158)
    assert len(hot_path(blocks, TILE)) == len(hot_path(read_blocks(LOOP), TILE)) + 1


def test_blocks_end_at_branches_and_before_their_targets():
    blocks = read_blocks(LOOP)
    assert blocks[0x20].successors == (0xA0, 0x30)
    assert blocks[0x30].successors == (0x80, 0x70)  # its condition is an operand as well
    assert blocks[0x70].successors == (0xE0,)
    assert blocks[0xE0].successors == (0xF0,)  # BRA.DIV is not taken
    assert blocks[0x160].successors == ()
    assert not {0x170, 0x180, 0x190, 0x1A0} & set(blocks)  # nobody gets there
    head, body = find_loop(blocks)
    assert head == 0x20
    assert {at for at in blocks if 0x20 <= at < 0x160} == body


@pytest.mark.parametrize(
    ("listing", "wanted", "message"),
    [
        pytest.param("", TILE, "no instruction", id="empty"),
        pytest.param(edited(("@P0 BRA 0x20 ;", "NOP ;")), TILE, "0 loops", id="no loop"),
        pytest.param(
            edited(
                ("/*0160*/                   EXIT", "/*0160*/ HMMA R1 ;\n/*0168*/ @P0 BRA 0x160")
            ),
            TILE,
            "2 loops",
            id="two loops",
        ),
        pytest.param(edited(("@!P3 BRA 0x160", "@!P3 BRA 0xa0")), TILE, "at 2 places", id="heads"),
        pytest.param(
            edited(("LDGSTS.E.BYPASS.LTC128B.128 [R10], [R12.64] ;", "@P4 BRA 0xe0 ;")),
            TILE,
            "a loop within the loop, at 0xe0",
            id="inner loop",
        ),
        pytest.param(LOOP, {**TILE, "HMMA": 2}, "no way around", id="other products"),
        pytest.param(
            edited(("@P0 BRA 0xa0", "@P0 BRA 0xe0"), ("MUFU.EX2 R8, R9", "NOP")),
            {**TILE, "MUFU": 2},
            r"no way around .*'MUFU': 1, 'LDGSTS': 1",
            id="other exponentials",
        ),
        pytest.param(
            edited(("/*0140*/", "/*0140*/ MOV R1, R2 ; /*0144*/ MOV R1, R2 ; /*0148*/")),
            TILE,
            "equally short",
            id="ambiguous",
        ),
        pytest.param(
            edited(("@P0 BRA 0xa0", "BRA 0xa0")), TILE, "1 FSEL: it tests masks", id="only masked"
        ),
        pytest.param(edited(("BRA 0x170", "BRX R2 -0x10")), TILE, "BRX may go", id="indirect"),
    ],
)
def test_what_is_not_clear_is_an_error(listing, wanted, message):
    with pytest.raises(SassError, match=message):
        hot_path(read_blocks(listing), wanted)


def test_clocks_of_a_product_follow_from_what_the_parts_are_sold_as():
    clocks = {p.name: (p.hmma_clocks, p.hmma_clocks_fp16) for p in issue_slots.PARTS}
    assert clocks == {"L4": (16, 16), "RTX 4090": (32, 16)}


def test_sums_in_fp16_count_by_their_own_clocks():
    text = edited(("/*0040*/                   HMMA.16816.F32 ", "/*0040*/ HMMA.16816.F16 "))
    usual, in_fp16 = (
        issue_slots.model(hot_path(read_blocks(x), TILE))["parts"] for x in (LOOP, text)
    )
    assert [part["RTX 4090"]["tensor"] for part in (usual, in_fp16)] == [32, 16]
    assert usual["L4"] == in_fp16["L4"]
    # Shared memory bounds both: as many products a second.
    assert usual["RTX 4090"]["tflops"] == in_fp16["RTX 4090"]["tflops"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param((64, 64, 128, 64, 4, 1), (128, 64, 8), id="two m16 blocks a warp"),
        pytest.param((192, 128, 64, 64, 4, 1), (160, 32, 20), id="a head dim for V"),
        pytest.param((512, 512, 32, 32, 2, 4), (64, 4, 16), id="warps that share rows"),
    ],
)
def test_a_tiles_work_follows_from_its_shape(sizes, expected):
    tile = Tile(*sizes, score="identity")
    assert tuple(issue_slots.per_tile(tile).values()) == expected


def test_clocks_of_the_units():
    row = issue_slots.model(hot_path(read_blocks(LOOP), TILE))
    # Shared memory: an LDSM and an LDGSTS of 512 bytes each, for each of four schedulers.
    assert row["clocks"] == {"issue": 12, "MUFU": 8, "ALU": 2, "shared": 4 * (4 + 4)}
    on_l4 = row["parts"]["L4"]
    assert (on_l4["tensor"], on_l4["bound"], on_l4["utilisation"]) == (16, "shared", 0.5)
    assert on_l4["without_overlap"] == round(16 / (16 + 10 + 8), 3)
