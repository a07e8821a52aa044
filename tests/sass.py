"""SASS analysis of sm90 kernels: scoreboards and register moves.

A variable-latency instruction increments one of six scoreboards and decrements it on completion;
other instructions wait for the scoreboards that they name. Bits 41 to 61 of an instruction's second
word hold the stall count, the scoreboards of its result and of its operands, and those that it
waits for. The encoding is undocumented; Jia et al. describe it ("Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking", 2018), and sm_90 still uses it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cache_tools.tools.disassembly import find_nvdisasm
from mlagen.errors import ToolchainError
from tests.built_once import built_once

_NONE = 7  # no scoreboard
_FIRST_WORD = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"\s+/\* (0x[0-9a-f]{16}) \*/")
_LABEL = re.compile(r"(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_UNCONDITIONAL_BRANCH = re.compile(r"(BRA|BRA\.U) `")
_READS_SHARED = re.compile(r"\bLDSM?\b")
_ENDS = re.compile(r"(EXIT|RET\b.*)$")
_MMA = re.compile(r"[HQ]GMMA\.")
_MOVE = re.compile(r"R2UR UR(\d+)")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_MAX_MMA_DISTANCE = 40  # max instructions between the MMAs of one group


_Reads = frozenset[tuple[int, int | None]]


def nvdisasm_is_missing() -> bool:
    """Return whether nvdisasm is missing."""
    try:
        find_nvdisasm()
    except ToolchainError:
        return True
    return False


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One SASS instruction and its possible successors."""

    text: str
    scoreboard: int | None  # the scoreboard of its result
    waits_for: frozenset[int]  # scoreboards that it waits for
    successors: tuple[int, ...]  # indices of successors


def overtaken(cubin: bytes) -> list[tuple[str, str]]:
    """Return arrivals at an mbarrier, each with an ldmatrix that may still be in flight."""
    instructions = _instructions(cubin)
    # Per instruction, the ldmatrix in flight before it: its index, and the scoreboard of its end.
    in_flight: list[_Reads | None] = [None] * len(instructions)
    in_flight[0] = frozenset()
    found = set()
    pending = [0]
    while pending:
        index = pending.pop()
        current = instructions[index]
        reads = {read for read in in_flight[index] or () if read[1] not in current.waits_for}
        if "SYNCS.ARRIVE" in current.text:
            found |= {(current.text, instructions[read].text) for read, _ in reads}
        if "LDSM" in current.text:
            reads.add((index, None))
        if _READS_SHARED.search(current.text) and current.scoreboard is not None:
            # Such reads complete in order, so a read without a scoreboard ends before this one.
            reads = {
                (read, current.scoreboard if board is None else board) for read, board in reads
            }
        for successor in current.successors:
            known = in_flight[successor]
            if known is None or not reads <= known:
                in_flight[successor] = (known or frozenset()) | reads
                pending.append(successor)
    return sorted(found)


def moves_between_mmas(cubin: bytes) -> int:
    """Return the number of moves of descriptors, to uniform registers, between MMAs."""
    texts = [instruction.text for instruction in _instructions(cubin)]
    mmas = [index for index, text in enumerate(texts) if _MMA.match(text)]
    assert mmas, "expected a kernel with wgmma"
    return sum(
        (move := _MOVE.search(text)) is not None
        and int(move[1]) in _descriptor_registers(texts[last])
        for first, last in pairwise(mmas)
        if last - first <= _MAX_MMA_DISTANCE
        for text in texts[first:last]
    )


def stores_before_semaphores(cubin: bytes) -> int:
    """Return the number of global stores between the last MMA and the first semaphore."""
    texts = [instruction.text for instruction in _instructions(cubin)]
    last_mma = max(index for index, text in enumerate(texts) if _MMA.match(text))
    behind = texts[last_mma:]
    semaphores = [index for index, text in enumerate(behind) if "REDG" in text]
    assert semaphores, "expected the code of splits behind the MMAs"
    return sum("STG.E" in text for text in behind[: semaphores[0]])


def _descriptor_registers(mma: str) -> set[int]:
    """Return the numbers of the uniform registers that an MMA reads descriptors from."""
    return {int(first) + i for first in _DESCRIPTOR.findall(mma) for i in range(4)}


def _disassembly(cubin: bytes) -> str:
    """Return the SASS of a kernel, which several tests read."""

    def build(file: Path) -> None:
        kernel = file.with_suffix(".cubin")
        kernel.write_bytes(cubin)
        options = ("--print-code", "--print-instruction-encoding", "--no-dataflow")
        with file.open("w", encoding="utf-8") as output:
            subprocess.run([find_nvdisasm(), *options, kernel], stdout=output, check=True)

    made_of = (cubin, str(find_nvdisasm()))
    return built_once("kernel.sass", build, made_of=made_of).read_text(encoding="utf-8")


def _instructions(cubin: bytes) -> list[Instruction]:
    lines = _disassembly(cubin).splitlines()
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
            scoreboard=None if (scoreboard := word >> 46 & 7) == _NONE else scoreboard,
            waits_for=frozenset(board for board in range(6) if word >> 52 >> board & 1),
            successors=tuple(_successors(index, text, labels, len(texts))),
        )
        for index, (text, word) in enumerate(zip(texts, words, strict=True))
    ]


def _successors(index: int, text: str, labels: dict[str, int], count: int) -> set[int]:
    """Return the indices of the possible successors of instruction ``index``."""
    targets = {labels[name] for name in _TARGET.findall(text) if not text.startswith("BSSY")}
    if _ENDS.match(text):
        return set()
    if _UNCONDITIONAL_BRANCH.match(text):
        return targets
    return targets | ({index + 1} if index + 1 < count else set())
