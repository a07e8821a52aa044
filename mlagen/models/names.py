"""Models that are known by name: aliases, Hub ids, and the keys of their configurations."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from mlagen.models.model_types import Value, table_rows, values_of

# Suffixes of fine-tuned or quantized variants, which have the same attention.
_SUFFIX = re.compile(
    r"-(instruct|it|base|chat|thinking|fp8|bf16|nvfp4|int4|awq|gptq|hf|original|\d{4})$"
)
_MAX_SUGGESTIONS = 5


class KnownModel(NamedTuple):
    """A model that is known by name."""

    name: str
    owner: str  # on the Hub
    aliases: tuple[str, ...]  # models with the same attention
    config: dict[str, Value]


@cache
def known_models() -> dict[str, KnownModel]:
    """Return the known models by their name."""
    rows = table_rows("known_models.tsv")
    return {
        name: KnownModel(name, owner, tuple(aliases.split()), values_of(config))
        for name, owner, aliases, config in rows
    }


@cache
def known_names() -> tuple[str, ...]:
    """Return the names and aliases of the known models."""
    return tuple(
        sorted(n for known in known_models().values() for n in (known.name, *known.aliases))
    )


def known_model(name: str) -> KnownModel | None:
    """Return the model of a name, an alias or a Hub id, or None.

    The match ignores case and suffixes such as ``-Instruct``, ``-FP8`` and ``-0528``.
    """
    owner, slash, model = name.lower().rpartition("/")
    while True:
        for known in known_models().values():
            if model in (known.name, *known.aliases) and (not slash or owner == known.owner):
                return known
        shorter = _SUFFIX.sub("", model)
        if shorter == model:
            return None
        model = shorter


def similar_names(name: str) -> list[str]:
    """Return known names that begin like a name, or else are spelled like it."""
    model = name.lower().rpartition("/")[2]
    names = [known for known in known_names() if model and known.startswith(model)]
    return (names or get_close_matches(model, known_names(), cutoff=0.75))[:_MAX_SUGGESTIONS]
