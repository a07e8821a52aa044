"""GPU architectures as compilation targets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlagen.errors import ArgumentError

_TEXT = re.compile(r"sm_(\d{2,3})([af]?)")
_VENDOR = re.compile(r"^(nvidia)?(geforce)?")

# Cards by compute capability, from developer.nvidia.com/cuda-gpus.
_CARDS = {
    80: "A100 A800 A30",
    86: "A10 A10G A16 A2 A40 RTX-A4000 RTX-A5000 RTX-A6000 RTX-3060 RTX-3070 RTX-3080 RTX-3090",
    87: "Orin Jetson-AGX-Orin",
    89: "L4 L20 L40 L40S RTX-4060 RTX-4070 RTX-4080 RTX-4090 RTX-6000-Ada",
    90: "H20 H100 H200 H800 GH200",
    100: "B100 B200 GB200",
    103: "B300 GB300",
    110: "Thor Jetson-AGX-Thor",
    120: "RTX-5060 RTX-5070 RTX-5080 RTX-5090 RTX-PRO-6000",
    121: "GB10 DGX-Spark",
}
CARDS = {card: number for number, cards in _CARDS.items() for card in cards.split()}

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

    Raises ArgumentError if it is neither one of :data:`ARCHS` nor a card of :data:`CARDS`.
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

    Raises ArgumentError if no target matches that device.
    """
    for arch in ARCHS:
        if arch.number == major * 10 + minor:
            return arch
    known = ", ".join(f"{arch.number // 10}.{arch.number % 10}" for arch in ARCHS)
    raise ArgumentError(f"device: expected compute capability {known}, got {major}.{minor}")


def card_number(name: str) -> int | None:
    """Return the capability of a card, 90 for ``H100``, or None if the name is unknown.

    Case, spaces, hyphens and the vendor prefix are ignored: ``NVIDIA GeForce RTX 4090`` is
    ``rtx4090``.
    """
    return _BY_NORMALIZED_NAME.get(_VENDOR.sub("", _normalized(name)))


def _normalized(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_BY_NORMALIZED_NAME = {_normalized(card): number for card, number in CARDS.items()}
