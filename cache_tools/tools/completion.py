"""Shell completion of values: quick, and silent if the values cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import TypeAlias

import click
from click.shell_completion import CompletionItem

Completer: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

# No shell shows a longer list, and a large cache takes long to read.
_MAX_KEYS = 200


def completer(values: Callable[[], Iterable[str]]) -> Completer:
    """Return a completer of the last of comma-separated values; ``values`` is called on demand."""

    def complete(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
        before, comma, last = typed.rpartition(",")
        found: list[str] = []
        with suppress(Exception):  # a traceback would end up in the prompt
            found = [value for value in values() if value.lower().startswith(last.lower())]
        return [CompletionItem(f"{before}{comma}{value}") for value in found]

    return complete


def complete_spec(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete a family, and behind its opening bracket a whole spec, which has to be quoted."""
    found: list[str] = []
    with suppress(Exception):
        from .kernel_specs import spec_texts

        found = [text for text in spec_texts(typed) if text.startswith(typed)]
    return [CompletionItem(text) for text in found]


def complete_key(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the key of a cached kernel, with the kernel as help."""
    found: dict[str, CompletionItem] = {}
    with suppress(Exception):
        from mlagen.cache.store import kernel_store

        from ..output.report import SHORT_KEY, kernel_text

        digits = max(SHORT_KEY, len(typed) + 1)
        for stored in islice(kernel_store().entries(layers=True, prefix=typed.lower()), _MAX_KEYS):
            fields = dict(stored.manifest.key_fields) if stored.manifest else {}
            spec = {name.removeprefix("spec."): value for name, value in fields.items()}
            key = stored.key[:digits]
            found[key] = CompletionItem(key, help=kernel_text(fields.get("family", ""), spec))
    return list(found.values())


def complete_spec_or_key(
    ctx: click.Context, param: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Complete a spec or a key."""
    return [*complete_spec(ctx, param, typed), *complete_key(ctx, param, typed)]


def arch_names() -> list[str]:
    """Return the targets, and the GPU names that map to them."""
    from mlagen.spec.arch import ARCHS, CARDS

    return [*map(str, ARCHS), *CARDS]


def family_names() -> list[str]:
    """Return the kernel families."""
    from mlagen.spec.families import FAMILIES

    return list(FAMILIES)


def model_names() -> list[str]:
    """Return the names of the known models."""
    from mlagen.models.names import known_names

    return list(known_names())
