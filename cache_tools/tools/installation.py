"""What this installation looks up: the digests of its kernel sources, and its compiler."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mlagen.cache.key import CacheKey
from mlagen.errors import ToolchainError

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry


def required_toolchain() -> str | None:
    """Return the toolchain of the keys of this installation, or None if it is unknown."""
    from mlagen.compiler.toolchain import wanted_toolchain
    from mlagen.settings import current_settings

    try:
        return wanted_toolchain(current_settings().toolchain)
    except ToolchainError:
        return None


def required_line_info() -> str | None:
    """Return the folder of the line info that keys of this installation name, if any."""
    from mlagen.codegen.sources import template_root
    from mlagen.settings import current_settings

    return str(template_root()) if current_settings().line_info else None


def matches_sources(stored: StoredEntry, digests: Collection[str]) -> bool:
    """Whether an entry was rendered from sources with one of ``digests``; False if damaged."""
    from mlagen.codegen.sources import CODEGEN

    if stored.manifest is None:
        return False
    fields = dict(stored.manifest.key_fields)
    return fields.get("templates") in digests and fields.get("codegen") == CODEGEN


def matches_toolchain(stored: StoredEntry, toolchain: str | None) -> bool:
    """Whether a lookup for ``toolchain`` accepts the compiler of an entry."""
    return toolchain is not None and CacheKey((), toolchain).accepts(stored.toolchain)
