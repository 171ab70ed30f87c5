"""The instructions of a loop's usual iteration, from a function's machine code.

A listing of cuobjdump becomes basic blocks, the loop with HMMA is looked for among them, and in it
the shortest way from its head back to it that has as many instructions of some kinds as the caller
knows an iteration to have. Code that is not like that is an error; nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")

FP32 = {"FADD", "FFMA", "FMUL", "HADD2"}  # as many lanes; HADD2.F32 is how fp16 becomes fp32
CONTROL = {"BAR", "BRA", "BSSY", "BSYNC", "DEPBAR", "LDGDEPBAR", "NOP", "VOTE", "WARPSYNC"}
MEMORY = {"LDGSTS", "LDS", "LDSM", "STS"}
KINDS = ("HMMA", "MUFU", "FP32", "pack", "LDSM", "LDGSTS", "LDS", "STS", "control", "other")

JUMPS = {"BRA", "CALL", "EXIT", "RET"}
JUMPS_ANYWHERE = {"BRX", "BRXU", "JMP", "JMX", "JMXU"}


class SassError(ValueError):
    """The code is not what was expected; the message says what was found."""


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # "@P0", or "" for none
    name: str  # with its suffixes
    operands: str

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

    @property
    def is_conditional(self) -> bool:
        """Of a jump: may it not be taken? `BRA P1, 0x40` and `BRA.DIV ~URZ, 0x40` have no guard."""
        return bool(self.guard or re.search(r"\bU?P\d|~", self.operands))

    @property
    def target(self) -> int | None:
        """Where a branch goes. A CALL under a condition is how NVRTC's code leaves a loop."""
        is_branch = self.base == "BRA" or (self.base == "CALL" and self.guard)
        found = re.findall(r"0x([0-9a-f]+)", self.operands) if is_branch else []
        return int(found[-1], 16) if found else None


@dataclass(frozen=True)
class Block:
    """Instructions that are executed one after the other, and where control can go from there."""

    code: tuple[Instruction, ...]
    successors: tuple[int, ...]

    def count(self, kind: str) -> int:
        return sum(instruction.kind == kind for instruction in self.code)


def reach(start: int, edges: dict[int, set[int]]) -> set[int]:
    """What can be reached from `start` in one step or more."""
    seen: set[int] = set()
    todo = [start]
    while todo:
        new = edges[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def read_blocks(listing: str) -> dict[int, Block]:
    """Basic blocks that a function can get to, by the address of their first instruction.

    BRA.DIV, for warps whose threads are not together, counts as not taken, and the way back from a
    CALL without a condition, which only such code has, is not followed.
    """
    code = [
        Instruction(int(address, 16), guard, name, operands)
        for address, guard, name, operands in INSTRUCTION.findall(listing)
    ]
    if not code:
        raise SassError("no instruction")
    if unknown := {i.name for i in code if i.base in JUMPS_ANYWHERE}:
        raise SassError(f"{', '.join(sorted(unknown))} may go anywhere")
    starts = {code[0].address, *(i.target for i in code)}
    starts.update(after.address for i, after in pairwise(code) if i.base in JUMPS)
    cuts = [index for index, i in enumerate(code) if i.address in starts]
    blocks = {}
    for begin, end in zip(cuts, [*cuts[1:], len(code)]):
        last, successors = code[end - 1], []
        if last.target is not None and last.name != "BRA.DIV":
            successors.append(last.target)
        goes_on = last.base not in JUMPS or last.is_conditional
        if goes_on and end < len(code):
            successors.append(code[end].address)
        blocks[code[begin].address] = Block(tuple(code[begin:end]), tuple(successors))
    alive = reach(code[0].address, {at: set(block.successors) for at, block in blocks.items()})
    return {at: block for at, block in blocks.items() if at in alive or at == code[0].address}


def find_loop(blocks: dict[int, Block]) -> tuple[int, frozenset[int]]:
    """Head and blocks of the one loop that has products."""
    after = {at: set(block.successors) for at, block in blocks.items()}
    before = {at: {other for other in blocks if at in after[other]} for at in blocks}
    products = [at for at, block in blocks.items() if block.count("HMMA")]
    loops = {frozenset(reach(at, after) & reach(at, before)) for at in products} - {frozenset()}
    if len(loops) != 1:
        raise SassError(f"{len(loops)} loops have HMMA, not one")
    (body,) = loops
    heads = [at for at in body if before[at] - body]
    if len(heads) != 1:
        raise SassError(f"the loop is entered at {len(heads)} places, not at one")
    return heads[0], body


def _in_order(blocks: dict[int, Block], head: int, body: frozenset[int]) -> list[int]:
    """The loop's blocks, each before those that control goes to from there."""
    done: list[int] = []
    under_way: set[int] = set()

    def visit(at: int) -> None:
        under_way.add(at)
        for successor in (body - {head}).intersection(blocks[at].successors):
            if successor in under_way:
                raise SassError(f"a loop within the loop, at {successor:#x}")
            if successor not in done:
                visit(successor)
        under_way.remove(at)
        done.append(at)

    visit(head)
    return done[::-1]


def hot_path(blocks: dict[int, Block], wanted: dict[str, int]) -> list[Instruction]:
    """The shortest way around the loop with exactly so many instructions of the kinds `wanted`."""
    head, body = find_loop(blocks)
    # The shortest ways to a block, and back to the head, by what they have of the kinds so far.
    Ways = dict[tuple[int, ...], list[tuple[int, ...]]]
    ways: dict[int, Ways] = {at: {} for at in body}
    ways[head][(0,) * len(wanted)] = [()]
    around: Ways = {}

    def length(way: tuple[int, ...]) -> int:
        return sum(len(blocks[at].code) for at in way)

    for at in _in_order(blocks, head, body):
        for counts, paths in ways[at].items():
            sums = tuple(n + blocks[at].count(kind) for n, kind in zip(counts, wanted))
            if any(n > limit for n, limit in zip(sums, wanted.values())):
                continue
            for successor in body.intersection(blocks[at].successors):
                known = around if successor == head else ways[successor]
                found = known.get(sums, []) + [(*path, at) for path in paths]
                known[sums] = [way for way in found if length(way) == min(map(length, found))]
    if not (paths := around.get(tuple(wanted.values()), [])):
        others = "; ".join(str(dict(zip(wanted, counts))) for counts in around) or "none"
        raise SassError(f"no way around the loop has {wanted}; those with no more of any: {others}")
    usual, *equal = [[i for at in path for i in blocks[at].code] for path in paths]
    if any(Counter(i.name for i in way) != Counter(i.name for i in usual) for way in equal):
        raise SassError(f"{len(paths)} ways around the loop are equally short, but differ")
    if masks := sum(i.base == "FSEL" for i in usual):
        raise SassError(f"the shortest way around the loop has {masks} FSEL: it tests masks")
    return usual
