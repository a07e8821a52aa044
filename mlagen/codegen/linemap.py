r"""Which template line a rendered line came from.

When Jinja reads a template, an invisible mark ``\x01line:template\x02`` is put in front of every
literal line; after rendering the marks are taken out again and become a map. The compiler gets the
map as ``#line`` directives, if line info is wanted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jinja2.ext import Extension

from mlagen.codegen.includes import Text

_MARK = re.compile("\x01(\\d+):([^\x02]*)\x02")


class LineMarks(Extension):
    """Marks the literal lines of every template with where they stand."""

    def preprocess(
        self,
        source: str,
        name: str | None,
        filename: str | None = None,  # noqa: ARG002 - Jinja passes it by this name
    ) -> str:
        """Put a mark in front of each line that is CUDA, not a Jinja tag or inside a comment."""
        marked = []
        in_comment = False
        for number, line in enumerate(source.split("\n"), start=1):
            opens, closes = line.rfind("{#"), line.rfind("#}")
            text = line.lstrip()
            is_literal = text and not in_comment and not text.startswith(("{%", "{#"))
            marked.append(f"\x01{number}:{name}\x02{line}" if is_literal else line)
            if opens != closes:
                in_comment = opens > closes
        return "\n".join(marked)


def split_marks(rendered: str) -> Text:
    """Return the lines without marks, and the ``template:line`` of each of them.

    A line without a mark (a blank one) belongs to the place of the line before it.
    """
    text = Text([], [])
    origin = ""
    for line in rendered.split("\n"):
        if marks := _MARK.findall(line):
            number, name = marks[-1]
            origin = f"{name}:{number}"
        text.lines.append(_MARK.sub("", line))
        text.origins.append(origin)
    return text


def plain_text(content: str, name: str) -> Text:
    """Return a file without Jinja: every line came from itself."""
    lines = content.split("\n")
    return Text(lines, [f"{name}:{number}" for number in range(1, len(lines) + 1)])


def with_line_directives(text: Text, root: Path) -> Text:
    """Return the text with a ``#line`` directive where its lines stop following each other.

    The directives name files below ``root``, which is absolute: a profiler opens them.
    """
    marked = Text([], [])
    following, is_continued = "", False
    for line, origin in zip(*text, strict=True):
        # A blank line has the origin of the line before it, and no instruction has its number.
        if line.strip() and origin and origin != following and not is_continued:
            name, _, number = origin.rpartition(":")
            marked.lines.append(f'#line {number} "{_escaped(root / name)}"')
            marked.origins.append(origin)
            following = origin
        marked.lines.append(line)
        marked.origins.append(origin)
        name, _, number = following.rpartition(":")
        following = f"{name}:{int(number) + 1}" if number else ""
        is_continued = line.endswith("\\")
    return marked


def _escaped(path: Path) -> str:
    """Return a path as a string literal spells it; bytes that are no UTF-8 are replaced."""
    text = os.fsencode(path).decode(errors="replace")
    return text.replace("\\", "\\\\").replace('"', '\\"')
