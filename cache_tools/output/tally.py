"""Statistics of the cached kernels: count, size, groups, and which are usable here."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..tools.entries import iso_time
from ..tools.installation import matches_sources, matches_toolchain

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry

# Criteria by which entries are grouped.
GROUPS = ("layer", "family", "arch", "toolchain", "mlagen")


@dataclass
class Tally:
    """Running totals over the entries."""

    templates: frozenset[str]  # digests of the kernel sources that are installed
    toolchain: str | None
    line_info: str | None = None  # folder of the templates, of MLAGEN_LINEINFO
    entries: int = 0  # of the cache folder alone, as size_bytes
    size_bytes: int = 0
    usable: int = 0
    unusable: int = 0
    damaged: int = 0
    ends: dict[str, tuple[str, str]] = field(default_factory=dict)  # time and key
    groups: dict[str, dict[str, tuple[int, int]]] = field(
        default_factory=lambda: {by: defaultdict(lambda: (0, 0)) for by in GROUPS}
    )

    def add(self, stored: StoredEntry) -> None:
        """Add an entry to the totals."""
        key_fields = dict(stored.manifest.key_fields) if stored.manifest else {}
        fits = (
            matches_sources(stored, self.templates)
            and matches_toolchain(stored, self.toolchain)
            and key_fields.get("line_info") == self.line_info
        )
        self.usable += fits
        self.unusable += not fits
        self.damaged += stored.manifest is None
        if not stored.is_read_only:
            self.entries += 1
            self.size_bytes += stored.size_bytes
        named = {"layer": str(stored.layer), "toolchain": stored.toolchain}
        if stored.manifest is not None:
            created = stored.manifest.created
            named["family"] = key_fields.get("family", "")
            named["arch"] = key_fields.get("spec.arch", "")
            named["mlagen"] = str(created.get("mlagen", ""))
            if not stored.is_read_only:
                self._date(str(created.get("time", "")), stored)
        for by, name in named.items():
            count, size = self.groups[by][name]
            self.groups[by][name] = (count + 1, size + stored.size_bytes)

    def _date(self, time: str, stored: StoredEntry) -> None:
        created = (time, stored.key)
        used = (iso_time(stored.used) or "", stored.key)
        self.ends["oldest"] = min(self.ends.get("oldest", created), created)
        self.ends["newest"] = max(self.ends.get("newest", created), created)
        self.ends["longest_unused"] = min(self.ends.get("longest_unused", used), used)
