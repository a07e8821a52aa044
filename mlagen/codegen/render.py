r"""Spec to source: one Jinja environment, and the map from rendered lines to those of templates.

Before Jinja reads a template, an invisible mark ``\x01line:template\x02`` is put in front of every
literal line; after rendering the marks are taken out again and become a map. The compiler gets the
map as ``#line`` directives, if line info is wanted.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from jinja2 import BaseLoader, Environment, StrictUndefined, TemplateRuntimeError

from mlagen.artifacts import Source
from mlagen.codegen.includes import Text, flatten
from mlagen.codegen.sources import Fact, spec_facts, template_root
from mlagen.spec.kernel import KernelSpec

_MARK = re.compile("\x01(\\d+):([^\x02]*)\x02")


def render(spec: KernelSpec, *, line_info: bool = False) -> Source:
    """Return the CUDA source of ``spec``: one translation unit that includes nothing.

    With ``line_info``, ``#line`` directives name the lines of the templates. Raises CompileError if
    an ``#include`` of a template cannot be resolved; jinja2.UndefinedError if a template asks for a
    fact that the spec does not have.
    """
    text = flatten(template_root(), spec.folder, lambda name: rendered_file(name, spec))
    if line_info:
        text = with_line_directives(text, template_root())
    return Source(
        text="\n".join(text.lines) + "\n", origins=tuple(text.origins), line_info=line_info
    )


def rendered_file(name: str, spec: KernelSpec) -> Text:
    """Return one template as ``spec`` has it, with its ``#include`` lines."""
    if name.endswith(".j2"):
        return rendered(name, spec_facts(spec))
    lines = (template_root() / name).read_text(encoding="utf-8").split("\n")
    return Text(lines, [f"{name}:{number}" for number in range(1, len(lines) + 1)])


def rendered(name: str, facts: dict[str, Fact]) -> Text:
    """Return a template rendered with the facts, which are all that it sees."""
    spec = SimpleNamespace()
    for path, value in facts.items():
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place.__dict__.setdefault(parent, SimpleNamespace())
        setattr(place, last, value)
    return split_marks(environment().get_template(name).render(spec=spec))


class _Loader(BaseLoader):
    """Reads the template folder, with marks."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, None]:
        """Return the marked text of a template, and its path."""
        del environment
        path = template_root() / template
        return with_marks(path.read_text(encoding="utf-8"), template), str(path), None


class _OneFile(Environment):
    """Renders one file at a time: the key of a kernel would miss what Jinja takes from others."""

    def join_path(self, template: str, parent: str) -> NoReturn:
        """Reject the name of another template: every include, import and extends comes by here."""
        raise TemplateRuntimeError(
            f'{parent}: expected #include "{template}", got a Jinja tag for another file'
        )


@cache
def environment() -> Environment:
    """Return the environment; a name that the context lacks is an error at render time."""
    jinja = _OneFile(
        loader=_Loader(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is CUDA, not a page
    )
    jinja.globals.clear()
    jinja.filters["c_bool"] = lambda value: "true" if value else "false"
    return jinja


def with_marks(source: str, name: str) -> str:
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


def split_marks(marked: str) -> Text:
    """Return the lines without marks, and the ``template:line`` of each of them.

    A line without a mark (a blank one) belongs to the place of the line before it.
    """
    text = Text([], [])
    origin = ""
    for line in marked.split("\n"):
        if marks := _MARK.findall(line):
            number, name = marks[-1]
            origin = f"{name}:{number}"
        text.lines.append(_MARK.sub("", line))
        text.origins.append(origin)
    return text


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
