"""Validation of JSON documents against their schemas."""

from __future__ import annotations

from typing import Any

from cache_tools.output.schemas import DOCUMENT, SCHEMAS, Schema
from cache_tools.output.transfer_schemas import TRANSFER_SCHEMAS
from cache_tools.replay.outcome import REPLAY

SCHEMA_OF: dict[str, Schema] = {**SCHEMAS, **TRANSFER_SCHEMAS, "replay": REPLAY}

_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def require_document(document: Any, schema: Schema) -> None:
    """Fail unless the document has exactly the names and types of the schema, in order."""
    _require_part(document, DOCUMENT, schema, "document")


def _require_part(value: Any, part: str, schema: Schema, where: str) -> None:
    assert isinstance(value, dict), where
    assert list(value) == list(schema[part]), where
    for name, field in schema[part].items():
        _require_type(value[name], field.type, schema, f"{where}.{name}")


def _require_type(value: Any, kind: str, schema: Schema, where: str) -> None:
    if kind.endswith(" or null"):
        if value is not None:
            _require_type(value, kind.removesuffix(" or null"), schema, where)
    elif kind.startswith("list of "):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            _require_type(item, kind.removeprefix("list of "), schema, f"{where}[{number}]")
    elif kind.startswith("map of "):
        assert isinstance(value, dict), where
        for name, item in value.items():
            _require_type(item, kind.removeprefix("map of "), schema, f"{where}[{name}]")
    elif kind.startswith("`"):
        _require_part(value, kind, schema, where)
    else:
        allowed = tuple(each for name in kind.split(" or ") for each in _TYPES[name])
        assert isinstance(value, allowed), f"{where}: expected {kind}, got {value!r}"
        assert isinstance(value, bool) == (kind == "boolean"), where
