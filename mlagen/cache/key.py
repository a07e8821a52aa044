"""The key of a kernel: labelled key_fields and their digest; it knows no template, no compiler."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

# Counts changes of meaning: of an ingredient, of the digest, or of the manifest stored under it.
SCHEMA = 1


@dataclass(frozen=True)
class CacheKey:
    """What a kernel is made of, and by which compiler.

    Attributes
    ----------
    key_fields : tuple[tuple[str, str], ...]
        Labels and values, in order; everything that can change the machine code, except the
        compiler itself.
    toolchain : str
        The compiler, ``nvrtc-13.5.37``, or ``nvrtc-13`` for any of that major version. It names a
        folder below the digest and is not part of it, so that one kernel can be kept as several
        compilers made it.
    digest : str
        SHA-256 of the schema and the key_fields, as 64 hex digits.
    """

    key_fields: tuple[tuple[str, str], ...]
    toolchain: str
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        labels = [label for label, _ in self.key_fields]
        assert len(set(labels)) == len(labels), f"a label occurs twice in {labels}"
        assert all(type(value) is str for _, value in self.key_fields), self.key_fields
        # JSON separates label from value and one pair from the next, whatever characters they hold.
        canonical = json.dumps([SCHEMA, self.key_fields], ensure_ascii=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode("ascii")).hexdigest()
        # Now and not when asked: `cached_property` has a lock that a fork may find taken.
        object.__setattr__(self, "digest", digest)

    @property
    def is_exact(self) -> bool:
        """Whether one compiler is wanted, and not any of a major version."""
        return "." in self.toolchain

    def accepts(self, toolchain: str) -> bool:
        """Whether what that compiler made will do."""
        return toolchain == self.toolchain or (
            not self.is_exact and toolchain.startswith(f"{self.toolchain}.")
        )

    def differences(self, other: CacheKey) -> list[tuple[str, str | None, str | None]]:
        """Return what explains that two keys differ: label, own value, the other's value.

        ``None`` stands for a label that one of them lacks; the toolchain comes last.
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
