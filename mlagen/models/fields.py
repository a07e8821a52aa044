"""The fields of a configuration, each checked when it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlagen.errors import ArgumentError
from mlagen.spec.dtype import DType

_DTYPES = {"bfloat16": DType.BF16, "float16": DType.FP16}
_MAX_SHOWN = 60
# Parts of a configuration that speak of other things than layers of text.
_ASIDE = re.compile(r"(?<!attn)(?<!attention)_config$|^rope|^id2label$|^label2id$|^auto_map$")


class Fields:
    """What a ``config.json`` says of the part that generates text.

    ``part`` names that part where it is nested: there, transformers leaves out whatever equals the
    default of its class, so that an absent field is not an unset one.
    """

    def __init__(self, name: str, config: Mapping[str, Any], part: str | None = None) -> None:
        self.name = name
        self.config = config
        self.part = part

    def value(self, label: str) -> Any:
        """Return what the configuration says; None where it says nothing."""
        return self.config.get(label)

    def said(self) -> Iterator[tuple[str, Any]]:
        """Yield what is set, with what is set in tables inside, such as ``attn_config.alibi``."""
        yield from _said(self.config, "")

    def count(self, label: str, *, default: int | None = None, least: int = 1) -> int:
        """Return a number; where it is absent or null, the default if there is one."""
        value = self.config.get(label)
        if value is None and default is not None:
            return default
        return self.checked(label, value, least=least)

    def checked(self, label: str, value: object, *, least: int = 1) -> int:
        """Return a number that ``label`` stands for."""
        if type(value) is not int or value < least:
            raise self.rejection(label, f"{least} or more", value)
        return value

    def count_of(self, labels: Sequence[str]) -> int | None:
        """Return a number that has several names; None where none of them is set."""
        found = {label: self.count(label) for label in labels if self.config.get(label)}
        for label, count in found.items():
            first = next(iter(found))
            if count != found[first]:
                raise self.rejection(label, f"{first} {found[first]}", count)
        return next(iter(found.values()), None)

    def dtype(self) -> DType:
        """Return the element type of the activations, bf16 where nothing is said."""
        for label in ("dtype", "torch_dtype"):
            value = self.config.get(label)
            if value not in (None, "auto"):
                known = _DTYPES.get(str(value).removeprefix("torch."))
                if known is None:
                    raise self.rejection(label, " or ".join(_DTYPES), value)
                return known
        return DType.BF16

    def rejection(self, label: str, rule: str, value: object) -> ArgumentError:
        """Return the error for a field whose value breaks its rule."""
        shown = "none" if value is None else repr(value)
        if len(shown) > _MAX_SHOWN:
            shown = f"{shown[:_MAX_SHOWN]}..."
        return ArgumentError(f"{self.name}: {label}: expected {rule}, got {shown}")


def _said(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if _is_unset(value):
            continue
        yield f"{path}{key}", value
        if not _ASIDE.search(key):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    yield from _said(inner, f"{path}{key}.")


def _is_unset(value: object) -> bool:
    """Whether a value asks for nothing: null, false, zero, empty or a list of these."""
    return not value or (isinstance(value, list) and all(map(_is_unset, value)))
