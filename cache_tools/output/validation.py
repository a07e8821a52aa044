"""Documents from elsewhere against the schema that they should have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlagen.values import reject, shown

from .schemas import Schema

_SCALARS: dict[str, tuple[str, tuple[type, ...]]] = {
    "text": ("a text", (str,)),
    "integer": ("an integer", (int,)),
    "number": ("a finite number", (int, float)),
    "boolean": ("a boolean", (bool,)),
}


def require_type(value: Any, kind: str, schema: Schema, where: str) -> None:
    """Require that a value has a type of the schema, and that its numbers are finite.

    Raises
    ------
    ArgumentError
        If it has another; the message begins with ``where`` and the path inside the value.
    """
    name, is_nullable, _ = kind.partition(" or null")
    if value is None and is_nullable:
        return
    outer, _, inner = name.partition(" of ")
    if inner:
        if not isinstance(value, list if outer == "list" else dict):
            reject(where, f"a {outer}", shown(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            require_type(item, inner, schema, f"{where}[{key}]")
    elif name in schema:
        _require_part(value, name, schema, where)
    elif not _is_scalar(value, name):
        reject(where, f"{_SCALARS[name][0]}{is_nullable}", shown(value))


def _require_part(value: Any, part: str, schema: Schema, where: str) -> None:
    if not isinstance(value, Mapping) or value.keys() != schema[part].keys():
        reject(where, f"the fields of {part}", shown(value))
    for name, field in schema[part].items():
        require_type(value[name], field.type, schema, f"{where}.{name}")


def _is_scalar(value: object, name: str) -> bool:
    if not isinstance(value, _SCALARS[name][1]) or isinstance(value, bool) != (name == "boolean"):
        return False
    try:
        return name != "number" or math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an int that no float can hold
        return False
