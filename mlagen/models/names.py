"""Models by name: aliases, Hub ids, their configurations here, and those in the local Hub cache."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mlagen.errors import ArgumentError
from mlagen.models.fields import Value, table_rows, values_of

# Suffixes of fine-tuned or quantized variants, which have the same attention.
_SUFFIX = re.compile(
    r"-(instruct|it|base|chat|thinking|fp8|bf16|nvfp4|int4|awq|gptq|hf|original|\d{4})$"
)
_MAX_SUGGESTIONS = 5
_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


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


def is_hub_id(name: str) -> bool:
    """Whether a name is a syntactically valid Hub id, such as ``deepseek-ai/DeepSeek-V3``."""
    return _ID.fullmatch(name) is not None


def cached_config(name: str) -> Path | None:
    """Return the ``config.json`` of a Hub id in the local cache, or None if it is missing.

    Raises ArgumentError if huggingface_hub is not installed.
    """
    if not is_hub_id(name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ArgumentError(
            "MLAGEN_HF: expected huggingface_hub to be installed, got none; "
            "run: pip install huggingface-hub, or give the path of a config.json"
        ) from error
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a valid id
        return None
    return Path(found) if isinstance(found, str) else None
