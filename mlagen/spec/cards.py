"""Compute capabilities of NVIDIA cards by name, from developer.nvidia.com/cuda-gpus."""

from __future__ import annotations

import re

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

_VENDOR = re.compile(r"^(nvidia)?(geforce)?")


def card_number(name: str) -> int | None:
    """Return the capability of a card, 90 for ``H100``, or None if the name is unknown.

    Case, spaces, hyphens and the vendor prefix are ignored: ``NVIDIA GeForce RTX 4090`` is
    ``rtx4090``.
    """
    return _BY_NORMALIZED_NAME.get(_VENDOR.sub("", _normalized(name)))


def _normalized(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_BY_NORMALIZED_NAME = {_normalized(card): number for card, number in CARDS.items()}
