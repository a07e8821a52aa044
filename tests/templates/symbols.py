"""The names that a piece of CUDA defines at namespace scope, and those that it may use of others.

A scan of tokens, not a parser: it knows the declarations that the templates have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

_SKIPPED = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|^[ \t]*#(?:\\\n|[^\n])*', re.MULTILINE)
_TOKEN = re.compile(r"::|->|[A-Za-z_]\w*|[0-9][\w.']*|\S")
_WORD = re.compile(r"[A-Za-z_]\w*")
_OPEN, _CLOSE = set("([{"), set(")]}")

# Words before a name that do not make it a declaration, as a type would.
_NOT_TYPES = {
    *("return", "else", "case", "sizeof", "struct", "class", "using", "template", "operator"),
    *("const", "constexpr", "inline", "static", "extern", "volatile", "mutable", "explicit"),
    *("__device__", "__global__", "__noinline__", "__shared__", "__grid_constant__"),
}


def tokens_of(text: str) -> list[str]:
    """Return the tokens of CUDA without comments, strings and preprocessor lines."""
    return _TOKEN.findall(_SKIPPED.sub(" ", text))


def defined_names(text: str) -> set[str]:
    """Return what ``text`` defines at namespace scope."""
    names = (_declared_name(head) for head in _heads(tokens_of(text)))
    return {name for name in names if name is not None}


def used_names(text: str) -> set[str]:
    """Return the names in ``text`` that may be those of a namespace, its own among them.

    Members, and names that are declared inside of functions and structs, are left out; a function
    counts where it is called, even if a variable has its name.
    """
    tokens = ["", "", *tokens_of(text), ""]
    words = [place for place in range(2, len(tokens) - 1) if _WORD.fullmatch(tokens[place])]
    variables = {
        tokens[place]
        for place in words
        if _is_declaration(tokens, place) and tokens[place + 1] not in ("(", "<")
    }
    return {
        tokens[place]
        for place in words
        if tokens[place - 1] not in (".", "->", "::")
        and not _is_declaration(tokens, place)
        and (
            tokens[place] not in variables
            or (tokens[place][0].islower() and tokens[place + 1] in ("(", "<"))
        )
    } | defined_names(text)


def _is_declaration(tokens: list[str], place: int) -> bool:
    """Whether a type stands before the name: a word, or one with ``&``, ``*`` or ``>``."""
    before, type_name = tokens[place - 1], tokens[place - 2]
    if before == ">":
        start = place - 2
        while _WORD.fullmatch(tokens[start]) or tokens[start].isdigit() or tokens[start] in ",*":
            start -= 1
        return tokens[start] == "<"
    if before in ("&", "*"):
        is_type = type_name[:1].isupper() or type_name in {"float", "int", "char", "u16", "u32"}
        return is_type and tokens[place + 1] in set(",)=;:[{(")
    return _WORD.fullmatch(before) is not None and before not in _NOT_TYPES


def _heads(tokens: list[str]) -> Iterator[list[str]]:
    """Yield the tokens of each declaration at namespace scope, without what braces hold."""
    head: list[str] = []
    depth = 0
    for sign, following in pairwise([*tokens, ""]):
        if depth == 0 and sign not in ("}", ";"):
            head.append(sign)
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if depth == 0 and (sign == ";" or (sign == "}" and following != ";")):
            yield head
            head = []


def _declared_name(head: list[str]) -> str | None:
    """Return the name that a declaration gives."""
    while head[:1] == ["template"]:
        head = head[_matching(head, 1) + 1 :]
    if not head or head[0] == "static_assert":
        return None
    attributes = {"alignas", "__launch_bounds__"}
    head = [
        token
        for before, token in pairwise(["", *head])
        if token not in attributes | {"class"} and before not in attributes
    ]
    if head[0] in ("using", "struct", "enum"):
        return next(token for token in head[1:] if _WORD.fullmatch(token))
    end = min((head.index(sign) for sign in ("(", "=") if sign in head), default=len(head))
    if head[end - 1] == ">":
        depth = 0
        while (depth := depth + (head[end - 1] == ">") - (head[end - 1] == "<")) > 0:
            end -= 1
        end -= 1
    return head[end - 1]


def _matching(head: list[str], start: int) -> int:
    """Return the place of the ``>`` that closes the ``<`` at ``start``."""
    depth = 0
    for place in range(start, len(head)):
        depth += (head[place] == "<") - (head[place] == ">")
        if depth == 0:
            return place
    raise ValueError(f"expected a closing >: {' '.join(head)}")
