"""The include graph of the templates: names resolved, each file once, in dependency order.

A name is looked for in the folder of the kernel, then in the folders above it, up to the root of
the templates, so that a shared file gets the ``config.cuh`` of the family it is compiled for.
``x.cuh`` may be ``x.cuh.j2``.
Imports no Jinja: the key of a kernel needs the include graph, and a warm process never renders.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mlagen.errors import CompileError

_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*include\b(.*)")
_ONCE = "#pragma once"  # for editors; here each file comes once anyway
MAIN = "kernel.cu"  # the name of the file with the kernel function
_OPERAND = re.compile(r'[ \t]*"([^"]+)"[ \t]*')


class Text(NamedTuple):
    """Lines, and the ``template:line`` that each of them came from."""

    lines: list[str]
    origins: list[str]


class IncludeError(CompileError):
    """An ``#include`` that cannot be resolved; the message begins with its file and line."""

    def __init__(self, origin: str, problem: str) -> None:
        super().__init__(f"{origin}: {problem}", log=f"{origin}: {problem}", source="")


def included_name(line: str, origin: str) -> str | None:
    """Return the name that an ``#include`` line names, or None for any other line.

    Raises IncludeError if it is not a name in quotes.
    """
    directive = _DIRECTIVE.fullmatch(line)
    if directive is None:
        return None
    operand = _OPERAND.fullmatch(directive[1])
    if operand is None:
        raise IncludeError(origin, f'#include: expected "FILE", got {directive[1].strip()}')
    return operand[1]


class Resolver:
    """Finds the files that the files of one kernel include."""

    def __init__(self, root: Path, folder: str) -> None:
        self._root = root
        self._folder = folder
        self._found: dict[str, list[str]] = {}

    def resolve(self, name: str, origin: str) -> str:
        """Return the template that ``name`` stands for, relative to the root.

        Raises IncludeError if there is no such file, or more than one.
        """
        if name not in self._found:
            self._found[name] = self._candidates(name)
        found = self._found[name]
        if not found:
            places = f"{self._folder}/ and the folders above"
            raise IncludeError(origin, f'#include "{name}": expected a file in {places}, got none')
        if len(found) > 1:
            raise IncludeError(origin, f'#include "{name}": ambiguous: {", ".join(found)}')
        return found[0]

    def _candidates(self, name: str) -> list[str]:
        if name.startswith("/") or ".." in name.split("/"):
            return []
        folder = Path(self._folder)
        places = ((place / name).as_posix() for place in (folder, *folder.parents))
        files = (f"{place}{suffix}" for place in places for suffix in ("", ".j2"))
        return [file for file in files if (self._root / file).is_file()]


def transitive_includes(root: Path, folder: str) -> frozenset[str]:
    """Return every template that some spec's kernel is made of, of those with a ``folder``.

    Jinja's choices are not looked at: an ``#include`` counts on whatever branch it stands. Raises
    IncludeError if an ``#include`` cannot be resolved.
    """
    resolver = Resolver(root, folder)
    kernel = resolver.resolve(MAIN, folder)
    found, unread = {kernel}, [kernel]
    while unread:
        file = unread.pop()
        text = (root / file).read_text(encoding="utf-8")
        for number, line in enumerate(text.split("\n"), start=1):
            if (name := included_name(line, f"{file}:{number}")) is not None:
                included = resolver.resolve(name, f"{file}:{number}")
                if included not in found:
                    found.add(included)
                    unread.append(included)
    return frozenset(found)


def flatten(
    root: Path, folder: str, read: Callable[[str], Text], kernel: str | None = None
) -> Text:
    """Return a kernel as one text that includes nothing: each file once, after those it includes.

    The names of its files are looked for in ``folder`` first; its own file is :data:`MAIN` as found
    from there by default. ``read`` returns a template as rendered for the spec. Raises IncludeError
    if an ``#include`` cannot be resolved, or files include each other.
    """
    resolver = Resolver(root, folder)
    whole = Text([], [])
    finished: set[str] = set()
    unfinished: list[str] = []

    def visit(file: str) -> None:
        unfinished.append(file)
        text = read(file)
        body = Text([], [])
        for line, origin in zip(*text, strict=True):
            if line == _ONCE:
                continue
            name = included_name(line, origin)
            if name is None:
                _append(body, line, origin)
                continue
            included = resolver.resolve(name, origin)
            if included in unfinished:
                cycle = [*unfinished[unfinished.index(included) :], included]
                raise IncludeError(origin, f'#include "{name}": cycle: {" -> ".join(cycle)}')
            if included not in finished:
                visit(included)
        unfinished.pop()
        finished.add(file)
        if _has_code(body):
            if whole.lines:
                _append(whole, "", whole.origins[-1])
            for line, origin in zip(*body, strict=True):
                _append(whole, line, origin)

    visit(kernel or resolver.resolve(MAIN, folder))
    _trim(whole)
    return whole


def _append(text: Text, line: str, origin: str) -> None:
    """Append a line, but no blank line at the beginning or after another: of directives."""
    if line.strip() or (text.lines and text.lines[-1].strip()):
        text.lines.append(line)
        text.origins.append(origin)


def _trim(text: Text) -> None:
    while text.lines and not text.lines[-1].strip():
        text.lines.pop()
        text.origins.pop()


def _has_code(text: Text) -> bool:
    """Whether there is more than comments: a file that only selects includes emits nothing."""
    return any(line.strip() and not line.lstrip().startswith("//") for line in text.lines)
