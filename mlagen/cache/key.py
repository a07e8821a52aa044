"""Cache key: labeled key fields and their digest, independent of templates and compiler."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

# Increases when the meaning of a key field or of the digest changes; then the version of the layout
# changes too.
SCHEMA = 1


@dataclass(frozen=True)
class CacheKey:
    """Key fields of a kernel: all that can change its cubin, except the toolchain beside them.

    The toolchain is ``nvrtc-13.5.37``, or ``nvrtc-13`` for any of that major version. It ends the
    name of an entry and is no part of the digest, so that a kernel is cached for several compilers.
    """

    key_fields: tuple[tuple[str, str], ...]
    toolchain: str
    digest: str = field(init=False, repr=False, compare=False)  # of the key fields, in hex

    def __post_init__(self) -> None:
        labels = [label for label, _ in self.key_fields]
        assert len(set(labels)) == len(labels), f"a label occurs twice in {labels}"
        assert all(type(value) is str for _, value in self.key_fields), self.key_fields
        # JSON delimits labels and values unambiguously, whatever characters they contain.
        canonical = json.dumps([SCHEMA, self.key_fields], ensure_ascii=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode("ascii")).hexdigest()
        # Computed eagerly: `cached_property` has a lock that a fork may copy locked.
        object.__setattr__(self, "digest", digest)

    @property
    def is_exact(self) -> bool:
        """Whether the key names one compiler, rather than any of a major version."""
        return "." in self.toolchain

    def accepts(self, toolchain: str) -> bool:
        """Whether an entry of that toolchain satisfies the key."""
        return toolchain == self.toolchain or (
            not self.is_exact and toolchain.startswith(f"{self.toolchain}.")
        )

    def differences(self, other: CacheKey) -> list[tuple[str, str | None, str | None]]:
        """Return the differing key fields: label, own value, the other's value.

        A missing label is ``None``; the toolchain comes last.
        """
        mine = dict(self.key_fields, toolchain=self.toolchain)
        theirs = dict(other.key_fields, toolchain=other.toolchain)
        labels = [label for label, _ in self.key_fields]
        labels += [label for label, _ in other.key_fields if label not in mine]
        return [
            (label, mine.get(label), theirs.get(label))
            for label in [*labels, "toolchain"]
            if mine.get(label) != theirs.get(label)
        ]
