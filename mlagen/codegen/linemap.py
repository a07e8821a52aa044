r"""Which template line a rendered line came from.

While templates are read, an invisible mark ``\x01line:template\x02`` is put in front of every
literal line; after rendering the marks are taken out again and become a map.
"""

from __future__ import annotations

import re

from jinja2.ext import Extension

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
        if name is not None and not name.endswith(".j2"):
            return _verbatim(source, name)
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


def _verbatim(source: str, name: str) -> str:
    # Plain CUDA is not parsed: the {%0, %1} of inline assembly would read as a Jinja tag.
    lines = source.removesuffix("\n").split("\n")
    marked = (f"\x01{number}:{name}\x02{line}" for number, line in enumerate(lines, start=1))
    return "{% raw %}" + "\n".join(marked) + "\n{% endraw %}"


def split_marks(rendered: str) -> tuple[str, tuple[str, ...]]:
    """Return the text without marks, and the ``template:line`` of each of its lines.

    A line without a mark (a blank one) belongs to the place of the line before it.
    """
    lines, origins = [], []
    origin = ""
    for line in rendered.split("\n"):
        if marks := _MARK.findall(line):
            number, name = marks[-1]
            origin = f"{name}:{number}"
        lines.append(_MARK.sub("", line))
        origins.append(origin)
    return "\n".join(lines), tuple(origins)
