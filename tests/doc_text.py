"""Parser of the project's pages: prose by line, fenced blocks, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "examples").glob("*.md")),
        ROOT / "templates" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
_BULLET = re.compile(r"^\s*(?:[-*]|\d+\.) ")

# Where one sentence ends and the next begins. An abbreviation ends none.
_SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.?!])[*_)]*\s+(?=[A-Z0-9`*\[(\"])")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and its first line on the page."""

    language: str
    text: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [
        Block(match["language"], match["text"], text.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(text)
    ]


def pages_with(language: str) -> list[str]:
    """Return the pages with a block of ``language``."""
    texts = {page: path.read_text(encoding="utf-8") for page, path in PAGES.items()}
    return [page for page in PAGES if language in {b.language for b in blocks_of(texts[page])}]


def without_blocks(text: str) -> str:
    """Return a page with its fenced blocks emptied; line numbers do not change."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def links_of(text: str) -> list[str]:
    """Return the link targets of a page within the project."""
    targets = [match["target"] for match in _LINK.finditer(without_blocks(text))]
    return [target for target in targets if not target.startswith("https://")]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = [match["text"].lower() for match in _HEADING.finditer(without_blocks(text))]
    return {re.sub(r"[^\w\s-]", "", heading).strip().replace(" ", "-") for heading in headings}


def sentences(prose: str) -> list[str]:
    """Return the sentences of a text, across line breaks."""
    return _SENTENCE_END.sub("\n", " ".join(prose.split())).split("\n")


def badly_broken_lines(text: str) -> list[str]:
    """Return the lines of prose with two sentences or an incomplete one."""
    bad = []
    lines = [*without_blocks(text).splitlines(), ""]
    for number, (line, following) in enumerate(pairwise(lines), start=1):
        if line.startswith(("|", "#", "[", ":::")) or not line.strip():
            continue
        goes_on = following.strip() and not (following.startswith("|") or _BULLET.match(following))
        is_complete = line.rstrip("*_)").endswith((".", ":", "?", "!"))
        if len(sentences(_BULLET.sub("", line))) > 1 or (goes_on and not is_complete):
            bad.append(f"{number}: {line}")
    return bad


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table; its header is the keys of the rows."""
    yield f"| {' | '.join(rows[0])} |"
    yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(map(str, row.values()))} |"
    yield ""
