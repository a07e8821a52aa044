"""Entries as commands name them: the beginning of one key."""

from __future__ import annotations

import pytest

from cache_tools.entries import document_of, entries_of
from mlagen.cache.opening import kernel_store
from mlagen.errors import ArgumentError
from mlagen.prewarming import PrewarmReport


@pytest.mark.parametrize("digits", [6, 8, 64])
def test_the_beginning_of_a_key_is_enough(digits: int, cached: PrewarmReport) -> None:
    """Six digits or more name an entry, in upper case too."""
    key = cached.units[0].key

    (found,) = entries_of(kernel_store(), key[:digits].upper())

    assert found.key == key


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (
            "000000",
            "key: expected the beginning of a cached key (mlagen cache ls), got 000000",
        ),
        ("abc", "key: expected 6 to 64 lower-case hex digits, got 'abc'"),
        ("kernel", "key: expected 6 to 64 lower-case hex digits, got 'kernel'"),
    ],
    ids=["nothing begins so", "too short", "no digits"],
)
def test_what_names_no_entry_is_refused(prefix: str, message: str) -> None:
    """The message says what a key is."""
    with pytest.raises(ArgumentError) as raised:
        entries_of(kernel_store(), prefix)

    assert str(raised.value) == message


def test_several_keys_are_told(cached: PrewarmReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of two keys is refused, with the digits that tell them apart."""
    store = kernel_store()
    everything = list(store.entries())
    monkeypatch.setattr(store, "select", lambda _prefix: everything)

    with pytest.raises(ArgumentError) as raised:
        entries_of(store, "abcdef")

    keys = ", ".join(sorted(unit.key[:10] for unit in cached.units))
    assert str(raised.value) == f"key: expected more digits than abcdef, got several keys: {keys}"


def test_the_document_of_a_damaged_entry_says_the_problem(cached: PrewarmReport) -> None:
    """An entry without a manifest is described by where it lies and what is wrong."""
    (stored,) = entries_of(kernel_store(), cached.units[0].key)
    (stored.path / "manifest.json").write_text("{")
    (stored,) = entries_of(kernel_store(), cached.units[0].key)

    document = document_of(stored)

    assert document["problem"].startswith("manifest.json: expected a manifest, got ")
    assert [name for name, value in document.items() if value is not None] == [
        *("key", "toolchain", "path", "layer", "is_read_only", "size_bytes", "used", "problem")
    ]
