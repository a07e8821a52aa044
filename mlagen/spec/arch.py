"""GPU architectures as compilation targets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlagen.errors import ArgumentError
from mlagen.spec.cards import card_number

_TEXT = re.compile(r"sm_(\d{2,3})([af]?)")

# Shared-memory limit of one CTA, in KiB. CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability".
_SHARED_KIB = {
    **dict.fromkeys((86, 89, 120, 121), 99),
    **dict.fromkeys((80, 87), 163),
    **dict.fromkeys((90, 100, 103, 110), 227),
}


@dataclass(frozen=True, order=True)
class Arch:
    """A compilation target with its feature suffix, such as ``sm_90a``; not a device."""

    number: int
    suffix: str = ""

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    @property
    def shared_bytes(self) -> int:
        """Shared-memory limit of one CTA."""
        return _SHARED_KIB[self.number] * 1024

    def fits(self, shared_bytes: int, ctas: int) -> bool:
        """Whether ``ctas`` CTAs with ``shared_bytes`` of shared memory each fit on an SM."""
        # The driver reserves 1 KiB per CTA, and an SM has 1 KiB more than the limit of a CTA.
        return (shared_bytes + 1024) * ctas <= self.shared_bytes + 1024

    @property
    def has_cvt_e4m3(self) -> bool:
        """Whether ``cvt`` converts e4m3."""
        return self.number >= 89

    @property
    def has_wgmma(self) -> bool:
        """Whether ``wgmma`` exists: on sm_90 only."""
        return self.number == 90

    @property
    def has_griddepcontrol(self) -> bool:
        """Whether programmatic dependent launch exists."""
        return self.number >= 90


ARCHS = (
    Arch(80),
    Arch(86),
    Arch(87),
    Arch(89),
    Arch(90, "a"),
    Arch(100, "f"),
    Arch(103, "f"),
    Arch(110, "f"),
    Arch(120, "f"),
    Arch(121, "f"),
)


def parse_arch(text: str) -> Arch:
    """Return the target named ``text``, or that of a card; the suffix is optional.

    Raises
    ------
    ArgumentError
        If it is neither one of :data:`ARCHS` nor a card of :data:`mlagen.spec.cards.CARDS`.
    """
    match = _TEXT.fullmatch(text)
    number, suffix = (int(match[1]), match[2]) if match else (card_number(text), "")
    for arch in ARCHS:
        if arch.number == number and suffix in ("", arch.suffix):
            return arch
    known = ", ".join(map(str, ARCHS))
    raise ArgumentError(f"arch: expected one of {known}, or a card such as H100, got {text!r}")


def arch_of_capability(major: int, minor: int) -> Arch:
    """Return the target for a device's compute capability.

    Raises
    ------
    ArgumentError
        If no target matches that device.
    """
    for arch in ARCHS:
        if arch.number == major * 10 + minor:
            return arch
    known = ", ".join(f"{arch.number // 10}.{arch.number % 10}" for arch in ARCHS)
    raise ArgumentError(f"device: expected compute capability {known}, got {major}.{minor}")
