"""The table of model types: how each is read, or why it is rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple, TypeAlias

Value: TypeAlias = int | str | list[str]
_NUM_COLUMNS = 4
_WORDS = {"true": True, "false": False}


class ModelType(NamedTuple):
    """How the configurations of a model type are read."""

    sources: Mapping[str, Value]  # what a missing key stands for; a text is the key that has it
    ignored: frozenset[str]  # keys about attention that change no decode kernel
    expected: str  # the property that the type lacks, or ""


def model_type(name: object) -> ModelType | None:
    """Return the row of a ``model_type``, or None if the table has none."""
    return _model_types().get(name) if isinstance(name, str) else None


@cache
def _model_types() -> dict[str, ModelType]:
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
