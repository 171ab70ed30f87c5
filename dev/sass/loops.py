"""The instructions of a loop's usual iteration, from a function's control flow.

nvdisasm finds the basic blocks and their successors. This module searches the loop with products,
and in it the shortest cycle through its head with the numbers of instructions, by kind, that the
caller expects of an iteration. Code without such a cycle is an error; nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

FP32 = {"FADD", "FFMA", "FMUL", "HADD2"}  # equal numbers of lanes; HADD2.F32 converts fp16 to fp32
CONTROL = {"BAR", "BRA", "BSSY", "BSYNC", "DEPBAR", "LDGDEPBAR", "NOP", "VOTE", "WARPSYNC"}
MEMORY = {"LDGSTS", "LDS", "LDSM", "STS"}
KINDS = (
    *("HMMA", "IMMA", "QMMA", "MUFU", "FP32", "pack"),
    *("LDSM", "LDGSTS", "LDS", "STS", "RED", "control", "other"),
)

PRODUCTS = ("HMMA", "IMMA", "QMMA")  # of 16-bit numbers, int8, e4m3

JUMPS_ANYWHERE = {"BRX", "BRXU", "JMP", "JMX", "JMXU"}

# A node of the graph with its label, an instruction in a label, and an edge.
_NODE = re.compile(r'^"(.+)"\n\[label="(.*)"\]', re.MULTILINE)
_INSTRUCTION = re.compile(r"([0-9a-f]{4,}): +(?:(@!?U?P\w+) +)?([A-Z][\w.]*)")
_EDGE = re.compile(r'^"(.+)":\w+:\w+ -> "(.+)":\w+:\w+', re.MULTILINE)


class SassError(ValueError):
    """The code is not as expected; the message says what was found."""


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # "@P0", or "" for none
    name: str  # with its suffixes

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def kind(self) -> str:
        if self.base in FP32:
            return "FP32"
        if self.base in CONTROL or self.guard == "@!PT":  # never executed, but issued
            return "control"
        if self.base in ("F2FP", "F2F"):
            return "pack"
        return self.base if self.base in KINDS else "other"


@dataclass(frozen=True)
class Block:
    """Instructions that are executed one after the other, and the possible next blocks."""

    code: tuple[Instruction, ...]
    successors: tuple[str, ...]

    def count(self, kind: str) -> int:
        return sum(instruction.kind == kind for instruction in self.code)


def read_blocks(graph: str) -> dict[str, Block]:
    """Basic blocks of a function by their names, from its graph as nvdisasm -bbcfg -poff draws it.

    Unreachable code is not in it. A CALL leads to the next instruction, and the function
    called is none of the blocks.
    """
    edges = _EDGE.findall(graph)
    blocks = {
        name: Block(
            tuple(
                Instruction(int(address, 16), guard, operation)
                for address, guard, operation in _INSTRUCTION.findall(label.replace("\\ ", " "))
            ),
            tuple(after for before, after in edges if before == name),
        )
        for name, label in _NODE.findall(graph)
    }
    code = [instruction for block in blocks.values() for instruction in block.code]
    if not code:
        raise SassError("no instruction")
    if unknown := {i.name for i in code if i.base in JUMPS_ANYWHERE}:
        raise SassError(f"{', '.join(sorted(unknown))} may go anywhere")
    return blocks


def reach(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Blocks that can be reached from `start` in one step or more."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = edges[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def find_loop(blocks: dict[str, Block]) -> tuple[str, frozenset[str]]:
    """Head and blocks of the only loop with products."""
    after = {at: set(block.successors) for at, block in blocks.items()}
    before = {at: {other for other in blocks if at in after[other]} for at in blocks}
    products = [at for at, x in blocks.items() if any(map(x.count, PRODUCTS))]
    loops = {frozenset(reach(at, after) & reach(at, before)) for at in products} - {frozenset()}
    if len(loops) != 1:
        raise SassError(f"{len(loops)} loops have products, not one")
    (body,) = loops
    heads = [at for at in body if before[at] - body]
    if len(heads) != 1:
        raise SassError(f"the loop is entered at {len(heads)} places, not at one")
    return heads[0], body


def _in_order(blocks: dict[str, Block], head: str, body: frozenset[str]) -> list[str]:
    """The loop's blocks, each before its successors.

    Back edges of inner loops are excepted: they lead to blocks that come earlier.
    """
    done: list[str] = []
    under_way: set[str] = set()

    def visit(at: str) -> None:
        under_way.add(at)
        for successor in blocks[at].successors:
            if successor == head or successor not in body:
                continue
            if successor not in under_way and successor not in done:
                visit(successor)
        under_way.remove(at)
        done.append(at)

    visit(head)
    return done[::-1]


def hot_path(blocks: dict[str, Block], wanted: dict[str, int], turns: int = 1) -> list[Instruction]:
    """The shortest cycle through the loop with exactly these numbers of instructions by kind, of
    loops in it one turn. Their instructions are in the result `turns` times."""
    head, body = find_loop(blocks)
    # Shortest paths to a block, and back to the head, by the numbers of each kind so far.
    Ways = dict[tuple[int, ...], list[tuple[str, ...]]]
    ways: dict[str, Ways] = {at: {} for at in body}
    ways[head][(0,) * len(wanted)] = [()]
    around: Ways = {}

    def length(way: tuple[str, ...]) -> int:
        return sum(len(blocks[at].code) for at in way)

    for at in _in_order(blocks, head, body):
        for counts, paths in ways[at].items():
            sums = tuple(n + blocks[at].count(kind) for n, kind in zip(counts, wanted))
            if any(n > limit for n, limit in zip(sums, wanted.values())):
                continue
            for successor in blocks[at].successors:
                if successor not in body or successor == at:
                    continue
                known = around if successor == head else ways[successor]
                found = known.get(sums, []) + [(*path, at) for path in paths]
                known[sums] = [way for way in found if length(way) == min(map(length, found))]
    if not (paths := around.get(tuple(wanted.values()), [])):
        others = "; ".join(str(dict(zip(wanted, counts))) for counts in around) or "none"
        raise SassError(f"no way around the loop has {wanted}; those with no more of any: {others}")
    within = {at: set(blocks[at].successors) & body - {head} for at in body}
    times = {at: turns if at != head and at in reach(at, within) else 1 for at in body}
    usual, *equal = [[i for at in path for i in blocks[at].code * times[at]] for path in paths]
    if any(Counter(i.name for i in way) != Counter(i.name for i in usual) for way in equal):
        raise SassError(f"{len(paths)} ways around the loop are equally short, but differ")
    if masks := sum(i.base == "FSEL" for i in usual):
        raise SassError(f"the shortest way around the loop has {masks} FSEL: it tests masks")
    return usual
