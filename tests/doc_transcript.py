"""Transcripts of the pages: what each command shows, compared with what it prints, or renewed.

A page names the NVRTC of its outputs. With the same one, numbers are compared too; with another
one, those that depend on the compiler are not. Keys are equal wherever the options of the compilers
are; otherwise one key of the page stands for one real key, on the whole page.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from tests.doc_text import FENCE

# What differs between two runs.
_UNSTABLE = (
    (r" *\b\d+ (?:s|min|h|d) ago$", " AGE"),
    (r"(?<=^.{8})(?=.{7}  )[ \d.]+ (?:us|ms|s)\b", "   TIME"),  # the column of `prewarm`
    (r"\b\d+(?:\.\d+)? (?:us|ms|s|min|h)\b", "TIME"),
    (r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE"),
)

# What differs between compilers, in lines whose spaces are single.
_OF_COMPILER = (
    (r"\d+(?= registers)|\d+(?= bytes )", "COUNT"),
    (r"\d+ \d+(?= SIZE)|(?: \d+){5}$", "COUNTS"),  # columns of `cache ls` and of `resources`
    (r"nvrtc-[\d.]+", "nvrtc-VERSION"),
    (r"libnvrtc\.so\.\d+", "libnvrtc.so.MAJOR"),
    (r"cuda-bindings \d+", "cuda-bindings MAJOR"),
    (r"nvidia-cuda-nvrtc(?:-cu12)?", "nvidia-cuda-nvrtc"),
)

# Sizes of what has times and dates in it may differ by some bytes, and be rounded the other way.
_SIZE_CHANGE = {"B": 8, "KiB": 1.01, "MiB": 0.11}

_SIZE = re.compile(r"\b(\d+(?:\.\d+)?) (B|KiB|MiB)(?!\w)")
_KEY = re.compile(r"\b(?:[0-9a-f]{64}|(?=[a-f]*\d)[0-9a-f]{8})\b")
_FOLDER_OF_KEY = re.compile(r"(?<=/e/)[0-9a-f]{2}(?=/([0-9a-f]{2}))")

_PROMPT = re.compile(r"(\w*)\$ (.+)")
_MARK = re.compile(r"^<!-- Outputs by (nvrtc-[\d.]+)\. -->$", re.MULTILINE)

Run = Callable[[str, str], list[str]]


class Step(NamedTuple):
    """A command of a page: the machine of its prompt, and the shown output."""

    machine: str
    command: str
    shown: list[str]


def steps_of(text: str) -> list[Step]:
    """Return the commands of a console block; a prompt is ``$``, or ``name$`` for a machine."""
    steps: list[Step] = []
    for line in text.splitlines():
        if prompt := _PROMPT.fullmatch(line):
            steps.append(Step(prompt[1], prompt[2], []))
        else:
            steps[-1].shown.append(line)
    return steps


def toolchain_of(page: str) -> str:
    """Return the NVRTC of a page's outputs."""
    mark = _MARK.search(page)
    assert mark is not None, "expected a line: <!-- Outputs by nvrtc-VERSION. -->"
    return mark[1]


@dataclass
class Transcript:
    """The outputs of a page, on its way from the first command to the last."""

    is_same_compiler: bool
    has_equal_keys: bool
    differences: list[str] = field(default_factory=list)
    _real: dict[str, str] = field(default_factory=dict)  # by the page's keys

    def replay(self, page: str, run: Run) -> str:
        """Run the commands of a page, note the differences, and return the renewed page."""

        def renewed(block: re.Match[str]) -> str:
            if block["language"] != "console":
                return block[0]
            lines = [line for step in steps_of(block["text"]) for line in self._step(step, run)]
            return "\n".join(("```console", *lines, "```"))

        return FENCE.sub(renewed, page)

    def _step(self, step: Step, run: Run) -> list[str]:
        """Run a command; return it with the shown output if that is right, or else renewed."""
        command = _KEY.sub(lambda key: self._real.get(key[0], key[0]), step.command)
        printed = run(step.machine, command)
        self._learn(step.shown, printed)
        prompt = f"{step.machine}$ {command}"
        lines = list(zip(_in_order(step.shown), _in_order(printed), strict=False))
        if len(step.shown) == len(printed) and all(self._are_equal(*pair) for pair in lines):
            return [prompt, *step.shown]
        self.differences.append("\n".join((prompt, *printed, "--- is shown as", *step.shown)))
        return [prompt, *self._renewed(step.shown, printed)]

    def _renewed(self, shown: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
        """Yield the printed lines, or the shown ones that are right: fewer lines of a page move."""
        left = list(shown)
        for line in printed:
            kept = next((other for other in left if self._are_equal(other, line)), None)
            if kept is not None:
                left.remove(kept)
            yield line if kept is None else kept

    def _learn(self, shown: Sequence[str], printed: Sequence[str]) -> None:
        """Pair the keys of lines that are alike, in order."""
        alike: dict[str, list[str]] = defaultdict(list)
        for line in shown:
            alike[_masked(line)].append(line)
        for line in printed:
            if same := alike[_masked(line)]:
                for key, real in zip(_KEY.findall(same.pop(0)), _KEY.findall(line), strict=True):
                    self._real.setdefault(key[:8], real[:8])
                    self._real.setdefault(key, real)

    def _are_equal(self, shown: str, printed: str) -> bool:
        if not self._have_equal_keys(shown, printed):
            return False
        if not self.is_same_compiler:
            return _masked(shown) == _masked(printed)
        texts = [_without(_UNSTABLE, _KEY.sub("KEY", line)) for line in (shown, printed)]
        return len({_SIZE.sub("SIZE", text) for text in texts}) == 1 and all(
            unit == other and abs(float(size) - float(real)) <= _SIZE_CHANGE[unit]
            for (size, unit), (real, other) in zip(*map(_SIZE.findall, texts), strict=True)
        )

    def _have_equal_keys(self, shown: str, printed: str) -> bool:
        keys, real = _KEY.findall(shown), _KEY.findall(printed)
        is_digest = "sha256 " in shown  # of a bundle, whose entries have dates
        if self.has_equal_keys and not is_digest:
            return keys == real and _FOLDER_OF_KEY.findall(shown) == _FOLDER_OF_KEY.findall(printed)
        pairs = [*zip(keys, real, strict=False)]
        pairs += [(key[:8], other[:8]) for key, other in pairs]
        is_one_to_one = len(set(self._real.values())) == len(self._real)
        return is_one_to_one and all(self._real.get(key) == other for key, other in pairs)


def _in_order(lines: Iterable[str]) -> list[str]:
    """Return lines in order, but those of kernels that compile in parallel sorted."""
    ordered: list[str] = []
    for is_built, group in groupby(lines, lambda line: line.startswith("built ")):
        found = list(group)
        ordered += sorted(found, key=_masked) if is_built else found
    return ordered


def renewed_mark(page: str, toolchain: str) -> str:
    """Return a page whose outputs are by this NVRTC."""
    return _MARK.sub(f"<!-- Outputs by {toolchain}. -->", page)


def of_any_cuda(line: str) -> str:
    """Return a line without what depends on the compiler."""
    return _without(_OF_COMPILER, line)


def _masked(line: str) -> str:
    """Return a line without what depends on the run or the compiler."""
    line = _KEY.sub("KEY", _FOLDER_OF_KEY.sub("KE", line))
    return of_any_cuda(" ".join(_SIZE.sub("SIZE", _without(_UNSTABLE, line)).split()))


def _without(patterns: Iterable[tuple[str, str]], line: str) -> str:
    for pattern, name in patterns:
        line = re.sub(pattern, name, line)
    return line
