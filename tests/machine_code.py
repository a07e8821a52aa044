"""What the machine code of sm90 kernels waits for and does, instruction by instruction.

An instruction that takes long counts up one of six scoreboards, and down when it is done; others
wait until those that they name are at zero. Both stand in bits 41 to 61 of an instruction's second
word: how long to stall, which scoreboard its result counts, which its operands do, and which it
waits for. No manual says so; Jia et al. found it out ("Dissecting the NVIDIA Volta GPU Architecture
via Microbenchmarking", 2018), and Hopper still has it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cache_tools.disassembly import find_nvdisasm
from mlagen.errors import ToolchainError

_NONE = 7  # the scoreboard of an instruction that counts none
_FIRST_WORD = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"\s+/\* (0x[0-9a-f]{16}) \*/")
_LABEL = re.compile(r"(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_ALWAYS_GOES = re.compile(r"(BRA|BRA\.U) `")
_READS_SHARED = re.compile(r"\bLDSM?\b")
_ENDS = re.compile(r"(EXIT|RET\b.*)$")
_PRODUCT = re.compile(r"[HQ]GMMA\.")
_APART = 40  # instructions: what is further apart does not belong to one group of products


_Reads = frozenset[tuple[int, int | None]]


def nvdisasm_is_missing() -> bool:
    """Return whether there is nothing to read machine code with."""
    try:
        find_nvdisasm()
    except ToolchainError:
        return True
    return False


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: what it is, and where the next one may be."""

    text: str
    counted: int | None  # the scoreboard that its result counts
    awaited: frozenset[int]  # scoreboards
    following: tuple[int, ...]  # indices


def overtaken(cubin: bytes, folder: Path) -> list[tuple[str, str]]:
    """Return arrivals at a barrier, each with an ldmatrix that may still be reading then."""
    instructions = _instructions(cubin, folder)
    # Before each instruction, ldmatrix under way: its index, and the scoreboard that tells its end.
    under_way: list[_Reads | None] = [None] * len(instructions)
    under_way[0] = frozenset()
    found = set()
    left = [0]
    while left:
        index = left.pop()
        here = instructions[index]
        reads = {read for read in under_way[index] or () if read[1] not in here.awaited}
        if "SYNCS.ARRIVE" in here.text:
            found |= {(here.text, instructions[read].text) for read, _ in reads}
        if "LDSM" in here.text:
            reads.add((index, None))
        if _READS_SHARED.search(here.text) and here.counted is not None:
            # Such reads end in their order, so one that is not counted ends before this one.
            reads = {(read, here.counted if board is None else board) for read, board in reads}
        for place in here.following:
            known = under_way[place]
            if known is None or not reads <= known:
                under_way[place] = (known or frozenset()) | reads
                left.append(place)
    return sorted(found)


def moved_between_products(cubin: bytes, folder: Path) -> int:
    """Return how many words are moved to registers of the whole warp between products."""
    texts = [instruction.text for instruction in _instructions(cubin, folder)]
    products = [index for index, text in enumerate(texts) if _PRODUCT.match(text)]
    assert products, "expected a kernel with wgmma"
    return sum(
        "R2UR" in text
        for first, last in pairwise(products)
        if last - first <= _APART
        for text in texts[first:last]
    )


def _instructions(cubin: bytes, folder: Path) -> list[Instruction]:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command: list[str | Path] = [
        find_nvdisasm(),
        "--print-code",
        "--print-instruction-encoding",
        file,
    ]
    lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    texts: list[str] = []
    words: list[int] = []
    labels: dict[str, int] = {}
    for line, next_line in pairwise([*lines, ""]):
        if label := _LABEL.match(line):
            labels[label[1]] = len(texts)
        elif first := _FIRST_WORD.match(line):
            second = _SECOND_WORD.match(next_line)
            assert second, next_line
            texts.append(first[2].strip())
            words.append(int(second[1], 16))
    assert texts, "nvdisasm: no code"
    return [
        Instruction(
            text=text,
            counted=None if (counted := word >> 46 & 7) == _NONE else counted,
            awaited=frozenset(board for board in range(6) if word >> 52 >> board & 1),
            following=tuple(_following(index, text, labels, len(texts))),
        )
        for index, (text, word) in enumerate(zip(texts, words, strict=True))
    ]


def _following(index: int, text: str, labels: dict[str, int], count: int) -> set[int]:
    """Return the indices of the instructions that may come after instruction ``index``."""
    targets = {labels[name] for name in _TARGET.findall(text) if not text.startswith("BSSY")}
    if _ENDS.match(text):
        return set()
    if _ALWAYS_GOES.match(text):
        return targets
    return targets | ({index + 1} if index + 1 < count else set())
