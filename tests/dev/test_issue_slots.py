"""Machine code of a main loop: the usual way around it is found, or an error says why not."""

import re
from collections import Counter

import pytest

from dev.sass import issue_slots
from dev.sass.disassemble import parse_graphs
from dev.sass.loops import (
    Block,
    Instruction,
    SassError,
    find_loop,
    hot_path,
    reach,
    read_blocks,
)
from dev.sass.serving_tiles import latent_tile_of
from dev.sass.tiles import Tile, backward_tile_of

# A loop from `head` on: one copy of its body with a rare branch, one that tests masks, then maybe a
# copy of the next tile, in two versions. Of each block its name and where control goes from there.
LOOP = """
kernel -> end head
    0000 MOV R1, c[0x0][0x28]
    0010 @!P3 BRA `(end)
head -> masked usual
    0020 @P0 BRA `(masked)
usual -> rare join
    0030 LDSM.16.M88.4 R4, [R2]
    0040 HMMA.16816.F32 R8, R4, R6, R8
    0050 MUFU.EX2 R8, R8
    0060 F2FP.F16.F32.PACK_AB R8, R9, R8
    0070 @P1 BRA P2, `(rare)
join -> sum
    0080 BRA `(sum)
rare -> sum
    0090 MUFU.EX2 R8, R9
    00a0 BRA `(sum)
masked -> sum
    00b0 LDSM.16.M88.4 R4, [R2]
    00c0 HMMA.16816.F32 R8, R4, R6, R8
    00d0 ISETP.GE.AND P4, PT, R2, R3, PT
    00e0 ISETP.LT.AND P4, PT, R2, R5, P4
    00f0 FSEL R8, R8, -INF , P4
    0100 MUFU.EX2 R8, R8
    0110 F2FP.F16.F32.PACK_AB R8, R9, R8
sum -> apart next
    0120 BRA.DIV ~URZ, `(apart)
next -> back copies
    0130 @P5 BRA `(back)
copies -> whole ragged
    0140 @!P6 BRA `(whole)
ragged -> back
    0150 ISETP.LT.AND P6, PT, R2, R3, PT
    0160 LDGSTS.E.BYPASS.LTC128B.128 [R10], [R12.64], P6
    0170 BRA `(back)
whole -> back
    0180 LDGSTS.E.BYPASS.LTC128B.128 [R10], [R12.64]
back -> head end
    0190 @P0 BRA `(head)
end ->
    01a0 EXIT
apart -> again
    01c0 CALL.REL.NOINC `($__internal_0_$__cuda_sm70_votesync_any)
again -> next
    01d0 BRA `(next)
"""
TILE = {"HMMA": 1, "MUFU": 1, "LDGSTS": 1}


def edited(*edits: tuple[str, str]) -> str:
    """LOOP with some of its text replaced."""
    text = LOOP
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def blocks_of(text: str) -> dict[str, Block]:
    """Read from what nvdisasm prints of a function with these blocks."""
    lines = ["digraph f {", 'subgraph "cluster_kernel" {']
    for part in re.split(r"\n(?=\S)", text.strip()):
        head, *code = part.splitlines()
        name, _, successors = head.partition(" ->")
        label = "".join(
            f"{at}:   {operation} ;\\l".replace(" ", "\\ ")
            for at, operation in (line.split(maxsplit=1) for line in code)
        )
        lines += ["node [shape=Mrecord];", f'"{name}"', f'[label="{{<entry>.{name}:\\l{label}}}"]']
        lines += [f'"{name}":exit0:e -> "{to}":entry:n [style=solid];' for to in successors.split()]
    ((name, graph),) = parse_graphs("\n".join([*lines, "}", "}", ""]))
    assert name == "kernel"
    blocks = read_blocks(graph)
    # nvdisasm leaves out what control cannot get to.
    alive = {name, *reach(name, {at: set(block.successors) for at, block in blocks.items()})}
    return {at: block for at, block in blocks.items() if at in alive}


def test_the_usual_way_is_the_shortest_that_does_a_tiles_work():
    path = hot_path(blocks_of(LOOP), TILE)
    # Not the mask's test, not the second exponential nor what threads that are not together do,
    # the copy, and it in its shorter version.
    usual = [0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x120, 0x130, 0x140, 0x180, 0x190]
    assert [i.address for i in path] == usual
    assert Counter(i.kind for i in path) == {
        **dict.fromkeys(("HMMA", "MUFU", "LDSM", "LDGSTS", "pack"), 1),
        "control": 7,
    }


def test_a_loop_in_the_loop_counts_as_often_as_it_turns():
    convert = "next -> convert\n    0124 MOV R1, R2\nconvert -> convert after\n"
    convert += "    0128 F2FP.BF16.F32.PACK_AB R8, R9, R8\n    012c @P2 BRA `(convert)\n"
    text = edited(("next -> back copies\n", convert + "after -> back copies\n"))
    once, thrice = (Counter(hot_path(blocks_of(text), TILE, turns)) for turns in (1, 3))
    assert {i.address: n for i, n in (thrice - once).items()} == {0x128: 2, 0x12C: 2}


def test_a_loop_may_be_left_by_a_call():
    """As NVRTC's code does: the jump back comes after a CALL that is taken at the end."""
    left = edited(
        (
            "back -> head end\n    0190 @P0 BRA `(head)",
            "back -> end on\n    0190 @P0 CALL.REL.NOINC `(end)\non -> head\n    0198 BRA `(head)",
        )
    )
    assert len(hot_path(blocks_of(left), TILE)) == len(hot_path(blocks_of(LOOP), TILE)) + 1


def test_a_way_back_within_the_loop_is_none_of_the_usual_way():
    """As from a slow path to what it does once more."""
    inner = blocks_of(edited(("whole -> back", "whole -> back sum")))
    assert hot_path(inner, TILE) == hot_path(blocks_of(LOOP), TILE)


# The first block and the last of a kernel, as nvdisasm draws them.
DRAWN = r"""
digraph f {
subgraph "cluster_kernel" {
node [fontname="Courier",fontsize=10,shape=Mrecord];
"kernel"
[label="{<entry>\t.global\t\tkernel\l\t.type\t\tkernel,@function\lkernel:\l.text.kernel:\l0000:\ \ \ MOV\ R1,\ c\[0x0\]\[0x28\]\ ;\l0010:\ \ \ @!UPT\ UIADD3\ URZ,\ URZ,\ URZ,\ URZ\ ;\l|<exit0>0020:\ \ \ @P6\ BRA\ P1,\ `(.L_x_1)\ ;\l}"]
"kernel":exit0:e -> ".L_x_1":entry:n [style=solid];
"kernel":exit0:s -> "BB1":entry:n [style=solid];
node [fontname="Courier",fontsize=10,shape=Mrecord];
"BB1"
[label="{<entry>0030:\ \ \ LDS.128\ R4,\ \[R5.X16+0x3800\]\ ;\l}"]
"BB1":entry:s -> ".L_x_1":entry:n [style=solid];
node [fontname="Courier",fontsize=10,shape=Mrecord];
".L_x_1"
[label="{<entry>.L_x_1:\l|<exit0>f380:\ \ \ EXIT\ ;\l}"]
}
}
"""  # noqa: E501


def test_blocks_are_those_that_nvdisasm_draws():
    ((name, graph),) = parse_graphs(DRAWN)
    assert name == "kernel"
    assert read_blocks(graph) == {
        "kernel": Block(
            (
                Instruction(0x0, "", "MOV"),
                Instruction(0x10, "@!UPT", "UIADD3"),
                Instruction(0x20, "@P6", "BRA"),
            ),
            (".L_x_1", "BB1"),
        ),
        "BB1": Block((Instruction(0x30, "", "LDS.128"),), (".L_x_1",)),
        ".L_x_1": Block((Instruction(0xF380, "", "EXIT"),), ()),
    }


def test_the_loop_is_all_that_leads_back_to_its_head():
    blocks = blocks_of(LOOP)
    assert find_loop(blocks) == ("head", frozenset(blocks) - {"kernel", "end"})


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        pytest.param("kernel ->", TILE, "no instruction", id="empty"),
        pytest.param(edited(("back -> head end", "back -> end")), TILE, "0 loops", id="no loop"),
        pytest.param(
            edited(("end ->\n", "end -> end\n    0198 HMMA.16816.F32 R1\n")),
            TILE,
            "2 loops",
            id="two loops",
        ),
        pytest.param(edited(("-> end head", "-> masked head")), TILE, "at 2 places", id="heads"),
        pytest.param(LOOP, {**TILE, "HMMA": 2}, "no way around", id="other products"),
        pytest.param(
            edited(("head -> masked usual", "head -> sum usual"), ("MUFU.EX2 R8, R9", "NOP")),
            {**TILE, "MUFU": 2},
            r"no way around .*'MUFU': 1, 'LDGSTS': 1",
            id="other exponentials",
        ),
        pytest.param(
            edited(("    0180", "    0174 MOV R1, R2\n    0178 MOV R1, R2\n    0180")),
            TILE,
            "equally short",
            id="ambiguous",
        ),
        pytest.param(
            edited(("head -> masked usual", "head -> masked")),
            TILE,
            "1 FSEL: it tests masks",
            id="only masked",
        ),
        pytest.param(edited(("@P1 BRA P2", "BRX R2 -0x10")), TILE, "BRX may go", id="indirect"),
    ],
)
def test_what_is_not_clear_is_an_error(text, wanted, message):
    with pytest.raises(SassError, match=message):
        hot_path(blocks_of(text), wanted)


def test_clocks_of_a_product_follow_from_what_the_parts_are_sold_as():
    clocks = {p.name: (p.hmma_clocks, p.hmma_clocks_fp16) for p in issue_slots.PARTS}
    assert clocks == {"L4": (16, 16), "RTX 4090": (32, 16), "RTX 5090": (32, 16)}


def test_sums_in_fp16_count_by_their_own_clocks():
    text = edited(("0040 HMMA.16816.F32 ", "0040 HMMA.16816.F16 "))
    usual, in_fp16 = (
        issue_slots.model(hot_path(blocks_of(x), TILE))["parts"] for x in (LOOP, text)
    )
    assert [part["RTX 4090"]["tensor"] for part in (usual, in_fp16)] == [32, 16]
    assert usual["L4"] == in_fp16["L4"]
    # Shared memory bounds both: as many products a second.
    assert usual["RTX 4090"]["tflops"] == in_fp16["RTX 4090"]["tflops"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param((64, 64, 128, 64, 4, 1), (128, 0, 0, 64, 8), id="two m16 blocks a warp"),
        pytest.param((192, 128, 64, 64, 4, 1), (160, 0, 0, 32, 20), id="a head dim for V"),
        pytest.param((512, 512, 32, 32, 2, 4), (64, 0, 0, 4, 16), id="warps that share rows"),
        pytest.param(
            (64, 64, 128, 64, 4, 1, False, True), (64, 32, 0, 64, 7), id="q and k in int8"
        ),
        pytest.param(
            (64, 64, 128, 64, 4, 1, False, True, True), (0, 64, 0, 68, 5), id="all in int8"
        ),
        pytest.param(
            (64, 64, 128, 64, 4, 1, False, True, False, True), (0, 32, 32, 68, 5), id="P V in e4m3"
        ),
    ],
)
def test_a_tiles_work_follows_from_its_shape(sizes, expected):
    tile = Tile(*sizes, score="identity")
    assert tuple(issue_slots.per_tile(tile).values()) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        pytest.param("d64/64x128x4", [(320, 9, 32, 64)], id="both chains in a warp"),
        pytest.param("d128/32x128x8", [(160, 5, 16, 32), (160, 5, 16, 0)], id="two roles"),
        pytest.param("d256/32x64x8", [(160, 9, 32, 16), (160, 9, 32, 0)], id="few keys"),
    ],
)
def test_a_backward_steps_work_follows_from_its_shape(key, expected):
    tile = backward_tile_of(f"sm80/backward/f16/{key}")
    names = ("HMMA", "LDGSTS", "RED", "MUFU")
    assert [tuple(way[name] for name in names) for way in tile.step()] == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("latent/bf16/d576v512/16x32x1c4", (68, 16, 18, None, 1)),
        ("latent_64/bf16/d512/64x16x4c2", (64, 8, 4, None, 1)),
        ("latent_ds_mla/bf16/d576v512/16x32x1c4", (68, 16, 10, 72, 2)),
        ("latent_64_ds_mla/bf16/d576v512/64x16x4c2", (68, 8, 3, 12, 4)),
        ("latent_ds_mla_v4/bf16/d512/16x32x1c4", (64, 16, 8, 72, 2)),
    ],
)
def test_a_latent_tiles_work_follows_from_its_shape(key, expected):
    tile = latent_tile_of(f"sm80/{key}")
    (way,) = tile.step()
    kinds = ("HMMA", "MUFU", "LDGSTS", "pack")
    assert (*map(way.get, kinds), tile.turns) == expected
    assert latent_tile_of(f"sm90/{key}") is None


def test_backward_tiles_with_a_loop_in_the_loop_have_no_model():
    for key in ("sm80/backward/f16/d128/64x128x8", "sm80/backward_general/f16/d64/32x128x4"):
        assert backward_tile_of(key) is None
    assert backward_tile_of("sm80/f16/d64/64x64x4") is None


def test_clocks_of_the_units():
    row = issue_slots.model(hot_path(blocks_of(LOOP), TILE))
    # Shared memory: an LDSM and an LDGSTS of 512 bytes each, for each of four schedulers.
    assert row["clocks"] == {"issue": 12, "MUFU": 8, "ALU": 2, "shared": 4 * (4 + 4)}
    on_l4 = row["parts"]["L4"]
    assert (on_l4["tensor"], on_l4["bound"], on_l4["utilisation"]) == (16, "shared", 0.5)
    assert on_l4["without_overlap"] == round(16 / (16 + 10 + 8), 3)
