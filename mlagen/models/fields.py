"""The fields of a configuration, by the table of model types, and checked when they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

from mlagen.errors import ArgumentError
from mlagen.spec.dtype import DType

Value: TypeAlias = int | str | list[str]
_NUM_COLUMNS = 4
_WORDS = {"true": True, "false": False}
_DTYPES = {"bfloat16": DType.BF16, "float16": DType.FP16}
_MAX_SHOWN = 60
ANY = "*"  # the row of the keys that any type may have
_OF_SERVERS = "; servers decode it with a backend of their own: leave out --attention-backend"
_MAX_COUNT = 2**31 - 1
# Tables of a configuration that are not about text layers.
_OTHER_PARTS = re.compile(
    r"(?<!attn)(?<!attention)_config$|^rope|^id2label$|^label2id$|^auto_map$"
    r"|(^|_)(vision|visual|audio|speech|image|img|video)(_|$)"
)


class ModelType(NamedTuple):
    """How the configurations of a model type are read: a row of the table."""

    sources: Mapping[str, Value]  # what a missing key stands for; a text is the key that has it
    ignored: frozenset[str]  # keys about attention that change no decode kernel
    expected: str  # the property that the type lacks, or ""


@cache
def model_types() -> dict[str, ModelType]:
    """Return the table of model types."""
    table: dict[str, ModelType] = {}
    for names, sources, ignored, expected in table_rows("model_types.tsv"):
        row = ModelType(values_of(sources), frozenset(ignored.split()), expected)
        table |= dict.fromkeys(names.split(), row)
    return table


def table_rows(name: str) -> Iterator[list[str]]:
    """Yield the four columns of each row of a table of this package."""
    text = (resources.files("mlagen.models") / name).read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            columns = line.split("\t")
            yield columns + [""] * (_NUM_COLUMNS - len(columns))


def values_of(text: str) -> dict[str, Value]:
    """Return the values of a column such as ``head_dim=128 layer_types=mamba|attention``."""
    pairs = (pair.split("=") for pair in text.split())
    return {key: _value(value) for key, value in pairs}


def _value(text: str) -> Value:
    if "|" in text:
        return text.split("|")
    return int(text) if text.isdecimal() else _WORDS.get(text, text)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a question that has the known names that are spelled like ``name``, or nothing."""
    found = get_close_matches(str(name)[:_MAX_SHOWN], list(known), cutoff=0.75)
    return f"; did you mean {' or '.join(found)}?" if found else ""


class Fields:
    """The fields of the text decoder in a ``config.json``.

    ``whole`` is the type around a part of it, for a part without one. ``read`` has the labels that
    were read.
    """

    def __init__(
        self, name: str, config: Mapping[str, Any], whole: ModelType | None = None
    ) -> None:
        self.name = name
        self.config = config
        kind = config.get("model_type")
        known = model_types().get(kind) if isinstance(kind, str) and kind != ANY else None
        self.type = whole if kind is None else known
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
