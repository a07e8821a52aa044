"""Architectures as compilation targets."""

from __future__ import annotations

import pytest

from mlagen.errors import ArgumentError
from mlagen.spec.arch import ARCHS, Arch, arch_of_capability, parse_arch
from mlagen.spec.cards import CARDS

KNOWN = "sm_80, sm_86, sm_87, sm_89, sm_90a, sm_100f, sm_103f, sm_110f, sm_120f, sm_121f"


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_the_text_of_a_target_names_it(arch: Arch) -> None:
    """A target is found by its text, with the suffix and without."""
    parsed = {parse_arch(str(arch)), parse_arch(f"sm_{arch.number}")}

    assert parsed == {arch}


@pytest.mark.parametrize(
    "text",
    [
        "sm_75",
        "sm_90f",
        "sm_100a",
        "sm_80a",
        "90a",
        "SM_90a",
        "sm_90a ",
        "native",
        "",
        "V100",
        "H10",
    ],
)
def test_what_is_no_target_is_rejected(text: str) -> None:
    """The message lists all targets, and what was asked for."""
    with pytest.raises(ArgumentError) as caught:
        parse_arch(text)

    assert str(caught.value) == (
        f"arch: expected one of {KNOWN}, or a card such as H100, got {text!r}"
    )


@pytest.mark.parametrize(
    ("card", "arch"),
    [
        ("A100", "sm_80"),
        ("a30", "sm_80"),
        ("A10", "sm_86"),
        ("RTX 3090", "sm_86"),
        ("L4", "sm_89"),
        ("rtx-4090", "sm_89"),
        ("NVIDIA GeForce RTX 4090", "sm_89"),
        ("H100", "sm_90a"),
        ("h200", "sm_90a"),
        ("GH200", "sm_90a"),
        ("b200", "sm_100f"),
        ("GB300", "sm_103f"),
        ("RTX 5090", "sm_120f"),
        ("DGX Spark", "sm_121f"),
    ],
)
def test_a_card_stands_for_its_target(card: str, arch: str) -> None:
    """Case, spaces, hyphens and the maker's name do not count."""
    assert str(parse_arch(card)) == arch


@pytest.mark.parametrize("card", CARDS)
def test_every_card_has_a_target(card: str) -> None:
    """A capability that no target has is not listed."""
    assert parse_arch(card).number == CARDS[card]


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_target_serves_the_device_of_its_number(arch: Arch) -> None:
    """A compute capability leads to the target of the same number."""
    found = arch_of_capability(*divmod(arch.number, 10))

    assert found == arch


def test_a_device_without_a_target_is_rejected() -> None:
    """The message lists the capabilities that have one."""
    with pytest.raises(ArgumentError) as caught:
        arch_of_capability(7, 5)

    assert str(caught.value) == (
        "device: expected compute capability 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, "
        "12.1, got 7.5"
    )


@pytest.mark.parametrize(
    ("text", "kib"),
    [("sm_80", 163), ("sm_86", 99), ("sm_90a", 227), ("sm_100f", 227), ("sm_120f", 99)],
)
def test_the_shared_memory_of_a_block(text: str, kib: int) -> None:
    """It is what the CUDA C++ Programming Guide tables for the compute capability."""
    arch = parse_arch(text)

    assert arch.shared_bytes == kib * 1024


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_target_has_a_shared_memory_size(arch: Arch) -> None:
    """Each is at least the 99 KiB that the smallest tile is cut for."""
    size = arch.shared_bytes

    assert size >= 99 * 1024


def test_dependent_launch_exists_from_sm_90_on() -> None:
    """The instruction for it, griddepcontrol, came with sm_90."""
    with_it = {str(arch) for arch in ARCHS if arch.has_griddepcontrol}

    assert with_it == {"sm_90a", "sm_100f", "sm_103f", "sm_110f", "sm_120f", "sm_121f"}
