r"""Which template line a rendered line came from.

When Jinja reads a template, an invisible mark ``\x01line:template\x02`` is put in front of every
literal line; after rendering the marks are taken out again and become a map.
"""

from __future__ import annotations

import re

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
