"""Compilation targets."""

from __future__ import annotations

import pytest

from mlagen.errors import ArgumentError
from mlagen.spec.arch import ARCHS, CARDS, Arch, arch_of_capability, parse_arch

KNOWN = "sm_80, sm_86, sm_87, sm_89, sm_90a, sm_100f, sm_103f, sm_110f, sm_120f, sm_121f"
UNKNOWN = ("sm_75", "sm_90f", "sm_100a", "sm_80a", "90a", "SM_90a", "sm_90a ", "native", "")


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_an_arch_is_found_by_text_and_by_capability(arch: Arch) -> None:
    """A target parses with and without its suffix, and has at least the smallest tile's memory."""
    found = {parse_arch(str(arch)), parse_arch(f"sm_{arch.number}")}

    assert found == {arch} == {arch_of_capability(*divmod(arch.number, 10))}
    assert arch.shared_bytes >= 99 * 1024


@pytest.mark.parametrize("text", [*UNKNOWN, "V100", "H10"])
def test_an_unknown_arch_is_rejected(text: str) -> None:
    """The message lists all targets and the given text."""
    with pytest.raises(ArgumentError) as caught:
        parse_arch(text)

    assert str(caught.value) == (
        f"arch: expected one of {KNOWN}, or a card such as H100, got {text!r}"
    )


CARD_NAMES = {
    "sm_80": ("A100", "a30"),
    "sm_86": ("A10", "RTX 3090"),
    "sm_89": ("L4", "rtx-4090", "NVIDIA GeForce RTX 4090"),
    "sm_90a": ("H100", "h200", "GH200"),
    "sm_100f": ("b200",),
    "sm_103f": ("GB300",),
    "sm_120f": ("RTX 5090",),
    "sm_121f": ("DGX Spark",),
}


@pytest.mark.parametrize(
    ("card", "arch"), [(card, arch) for arch, cards in CARD_NAMES.items() for card in cards]
)
def test_a_card_name_selects_its_arch(card: str, arch: str) -> None:
    """Case, spaces, hyphens and the vendor prefix are ignored."""
    assert str(parse_arch(card)) == arch


def test_every_card_has_an_arch() -> None:
    """Every listed compute capability has a target."""
    assert {card: parse_arch(card).number for card in CARDS} == CARDS


def test_a_capability_without_an_arch_is_rejected() -> None:
    """The message lists the supported capabilities."""
    with pytest.raises(ArgumentError) as caught:
        arch_of_capability(7, 5)

    assert str(caught.value) == (
        "device: expected compute capability 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, "
        "12.1, got 7.5"
    )


@pytest.mark.parametrize(
    ("text", "kib", "has_griddepcontrol"),
    [
        ("sm_80", 163, False),
        ("sm_86", 99, False),
        ("sm_89", 99, False),
        ("sm_90a", 227, True),
        ("sm_100f", 227, True),
        ("sm_120f", 99, True),
    ],
)
def test_facts_of_an_arch(text: str, kib: int, has_griddepcontrol: bool) -> None:
    """Shared memory is that of the CUDA C++ Programming Guide; griddepcontrol begins at sm_90."""
    arch = parse_arch(text)

    assert (arch.shared_bytes, arch.has_griddepcontrol) == (kib * 1024, has_griddepcontrol)
