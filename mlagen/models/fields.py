"""Configuration fields, checked when they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlagen.errors import ArgumentError
from mlagen.models.model_types import ModelType, model_type
from mlagen.spec.dtype import DType

_DTYPES = {"bfloat16": DType.BF16, "float16": DType.FP16}
_MAX_SHOWN = 60
_OF_SERVERS = "; servers decode it with a backend of their own: leave out --attention-backend"
_MAX_COUNT = 2**31 - 1
# Tables of a configuration that are not about text layers.
_OTHER_PARTS = re.compile(
    r"(?<!attn)(?<!attention)_config$|^rope|^id2label$|^label2id$|^auto_map$"
    r"|(^|_)(vision|visual|audio|speech|image|img|video)(_|$)"
)


class Fields:
    """The fields of the text decoder in a ``config.json``.

    ``part`` is its key if it is nested: there, transformers may omit fields that equal the default
    of the class, so that a missing field is not unset. ``whole`` is the type around it, for a part
    without one. ``read`` has the labels that were read.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        part: str | None = None,
        whole: ModelType | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.part = part
        kind = config.get("model_type")
        self.type = whole if kind is None else model_type(kind)
        self.read: set[str] = set()

    def value(self, label: str) -> Any:
        """Return the value of a field, or what it stands for if it is missing, or else None."""
        self.read.add(label)
        table, _, inner = label.partition(".")
        if inner:
            inside = self.config.get(table)
            return inside.get(inner) if isinstance(inside, dict) else None
        if label in self.config:
            return self.config[label]
        source = self.type.sources.get(label) if self.type else None
        return self.value(source) if isinstance(source, str) else source

    def omits(self, label: str) -> bool:
        """Whether a nested part omits a field whose default is unknown."""
        is_absent = self.part is not None and label not in self.config
        return is_absent and self.type is None and self.config.get("model_type") is not None

    def set_items(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields that are set, including nested ones such as ``attn_config.alibi``."""
        yield from _set_items(self.config, "")

    def count(self, label: str, *, default: int | None = None, minimum: int = 1) -> int:
        """Return a number, or the default if it is missing or null."""
        value = self.value(label)
        if value is None and default is not None:
            return default
        return self.checked(label, value, minimum=minimum)

    def checked(self, label: str, value: object, *, minimum: int = 1) -> int:
        """Return the number ``value`` of ``label``, checked."""
        if type(value) is not int or value < minimum:
            raise self.rejection(label, f"{minimum} or more", value)
        if value > _MAX_COUNT:
            raise self.rejection(label, f"at most {_MAX_COUNT}", value)
        return value

    def count_of(self, labels: Sequence[str]) -> int | None:
        """Return a number that has several labels; None if none of them is set."""
        ignored = self.type.ignored if self.type else ()
        labels = [label for label in labels if label not in ignored]
        found = {label: self.count(label) for label in labels if self.config.get(label)}
        for label, count in found.items():
            first = next(iter(found))
            if count != found[first]:
                raise self.rejection(label, f"{first} {found[first]}", count)
        if found or self.value(labels[0]) is None:
            return next(iter(found.values()), None)
        return self.count(labels[0])

    def dtype(self) -> DType:
        """Return the element type of the activations; the default is bf16."""
        for label in ("dtype", "torch_dtype"):
            value = self.config.get(label)
            if value not in (None, "auto"):
                known = _DTYPES.get(str(value).removeprefix("torch."))
                if known is None:
                    raise self.rejection(label, " or ".join(_DTYPES), value)
                return known
        return DType.BF16

    def unserved(self, label: str, rule: str, value: object) -> ArgumentError:
        """Return the error for a field of attention that no kernel has."""
        return ArgumentError(f"{self.rejection(label, rule, value)}{_OF_SERVERS}")

    def rejection(self, label: str, rule: str, value: object) -> ArgumentError:
        """Return the error for a field that breaks its rule."""
        shown = "none" if value is None else repr(value)
        label = label if label.isprintable() else ascii(label)
        label, shown = (
            f"{text[:_MAX_SHOWN]}..." if len(text) > _MAX_SHOWN else text for text in (label, shown)
        )
        return ArgumentError(f"{self.name}: {label}: expected {rule}, got {shown}")


def _set_items(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if _is_unset(value):
            continue
        yield f"{path}{key}", value
        if not _OTHER_PARTS.search(key):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    yield from _set_items(inner, f"{path}{key}.")


def _is_unset(value: object) -> bool:
    """Whether a value is unset: null, false, zero, empty or a list of these."""
    return not value or (isinstance(value, list) and all(map(_is_unset, value)))
