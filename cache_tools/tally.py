"""What the cached kernels come to: how many, how large, of what kinds, which are of use here."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .entries import moment_of
from .installation import is_of_sources, is_of_toolchain

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry

# By what entries are counted.
GROUPS = ("layer", "family", "arch", "toolchain", "mlagen")


@dataclass
class Tally:
    """What is counted while the entries pass by."""

    templates: frozenset[str]  # digests of the kernel sources that are installed
    toolchain: str | None
    entries: int = 0  # of the cache folder, as are the sizes
    size_bytes: int = 0
    usable: int = 0
    unusable: int = 0
    damaged: int = 0
    ends: dict[str, tuple[str, str]] = field(default_factory=dict)  # moment and key
    groups: dict[str, dict[str, tuple[int, int]]] = field(
        default_factory=lambda: {by: defaultdict(lambda: (0, 0)) for by in GROUPS}
    )

    def add(self, stored: StoredEntry) -> None:
        """Count an entry."""
        fits = is_of_sources(stored, self.templates) and is_of_toolchain(stored, self.toolchain)
        self.usable += fits
        self.unusable += not fits
        self.damaged += stored.manifest is None
        if not stored.is_read_only:
            self.entries += 1
            self.size_bytes += stored.size_bytes
        named = {"layer": str(stored.layer), "toolchain": stored.toolchain}
        if stored.manifest is not None:
            created = stored.manifest.created
            key_fields = dict(stored.manifest.key_fields)
            named["family"] = key_fields.get("family", "")
            named["arch"] = key_fields.get("spec.arch", "")
            named["mlagen"] = str(created.get("mlagen", ""))
            if not stored.is_read_only:
                self._date(str(created.get("time", "")), stored)
        for by, name in named.items():
            count, size = self.groups[by][name]
            self.groups[by][name] = (count + 1, size + stored.size_bytes)

    def _date(self, made: str, stored: StoredEntry) -> None:
        made_then = (made, stored.key)
        used_then = (moment_of(stored.used) or "", stored.key)
        self.ends["oldest"] = min(self.ends.get("oldest", made_then), made_then)
        self.ends["newest"] = max(self.ends.get("newest", made_then), made_then)
        self.ends["longest_unused"] = min(self.ends.get("longest_unused", used_then), used_then)
