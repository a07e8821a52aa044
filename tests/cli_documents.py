"""The JSON documents of the commands, as the tables of docs/reference/cli.md describe them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/cli.md"
SECTION = re.compile(r"^#+ `mlagen ?(?P<command>[^`]*)`$", re.MULTILINE)
_ROW = re.compile(r"^\| (?P<name>.+?) \| (?P<type>.+?) \| .+ \|$")
_REFERENCE = re.compile(r"^(?P<parts>`.*`): see \[`mlagen (?P<command>[^`]*)`\]", re.MULTILINE)

# The type of each field, by part of a document; the first part is the document.
Schema: TypeAlias = dict[str, dict[str, str]]

_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def sections_of(page: str) -> dict[str, str]:
    """Return the text below the heading of each command."""
    found = list(SECTION.finditer(page))
    ends = [match.start() for match in found[1:]] + [len(page)]
    return {
        match["command"]: page[match.end() : end] for match, end in zip(found, ends, strict=True)
    }


def read_documents() -> dict[str, Schema]:
    """Return the schema of each command that the page has tables for."""
    documents: dict[str, Schema] = {}
    for command, text in sections_of(PAGE.read_text(encoding="utf-8")).items():
        schema: Schema = {}
        for row in filter(None, map(_ROW.match, text.splitlines())):
            name = row["name"].removeprefix("in ")
            if row["type"] == "type":
                part = schema[name] = {}
            elif row["type"].strip("-"):
                part[name.strip("`")] = row["type"]
        for reference in _REFERENCE.finditer(text):
            known = documents[reference["command"]]
            schema |= {part: known[part] for part in reference["parts"].split(", ")}
        if schema:
            documents[command] = schema
    return documents


DOCUMENTS = read_documents()


def require_document(value: Any, schema: Schema, part: str = "the document") -> None:
    """Fail unless an object has exactly the names and types of a part of the schema, in order."""
    assert isinstance(value, dict), part
    assert list(value) == list(schema[part]), part
    for name, kind in schema[part].items():
        _require_type(value[name], kind, schema, f"{part}: {name}")


def _require_type(value: Any, kind: str, schema: Schema, where: str) -> None:
    required, is_nullable, _ = kind.partition(" or null")
    if value is None and is_nullable:
        return
    whole, _, element = required.partition(" of ")
    if element:
        assert isinstance(value, list if whole == "list" else dict), where
        for item in value.values() if isinstance(value, dict) else value:
            _require_type(item, element, schema, where)
    elif required.startswith("`"):
        require_document(value, schema, required)
    else:
        assert isinstance(value, _TYPES[required]), f"{where}: expected {kind}, got {value!r}"
        assert isinstance(value, bool) == (required == "boolean"), where
