"""What this installation would look for: the digests of its kernel sources, and its compiler."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mlagen.cache.key import CacheKey
from mlagen.errors import ToolchainError

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry


def wanted_or_none() -> str | None:
    """Return the toolchain that keys name here, or None if there is no way to tell."""
    from mlagen.compiler.toolchain import wanted_toolchain
    from mlagen.settings import current_settings

    try:
        return wanted_toolchain(current_settings().toolchain)
    except ToolchainError:
        return None


def is_of_sources(stored: StoredEntry, digests: Collection[str]) -> bool:
    """Whether an entry was rendered from sources with one of ``digests``; a damaged one was not."""
    return stored.manifest is not None and (
        dict(stored.manifest.key_fields).get("templates") in digests
    )


def is_of_toolchain(stored: StoredEntry, toolchain: str | None) -> bool:
    """Whether what compiled an entry will do for whoever wants that toolchain."""
    return toolchain is not None and CacheKey((), toolchain).accepts(stored.toolchain)
