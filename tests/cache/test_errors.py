"""The store when the operating system returns errors: kernels from memory, and one warning."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache import quarantine
from mlagen.cache.store import KernelStore
from mlagen.errors import CacheError
from tests.cache.builds import Log, Patch, failing, make_build, make_key, make_store

KEY = make_key()


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store whose folder does not exist yet."""
    return make_store(tmp_path)


def warnings_in(caplog: Log) -> list[str]:
    """Return the logged warnings."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_processes_that_cannot_publish_do_not_wait_for_each_other(
    store: KernelStore, tmp_path: Path
) -> None:
    """If no entry can be published, the lock would only serialise the builds."""
    (tmp_path / "cache").touch()
    store.find_or_build(KEY, make_build)
    assert not (tmp_path / "locks").exists()


def test_sweep_that_fails_does_not_undo_publishing(
    store: KernelStore, monkeypatch: Patch, caplog: Log
) -> None:
    """An unreadable staging folder does not undo the publication."""
    monkeypatch.setattr(quarantine, "sweep", failing(errno.EACCES))
    entry = store.find_or_build(KEY, make_build)
    assert entry.path is not None
    assert warnings_in(caplog) == []
    with pytest.raises(CacheError, match="got Permission denied"):
        store.sweep()


@pytest.mark.parametrize("verb", ["remove", "quarantine", "clear"])
def test_an_entry_that_cannot_be_moved_is_a_cache_error(
    verb: str, store: KernelStore, monkeypatch: Patch
) -> None:
    """The error names the path, and the entry stays."""
    store.find_or_build(KEY, make_build)
    (stored,) = store.entries()
    verbs: dict[str, Callable[[], object]] = {
        "remove": lambda: store.remove(stored),
        "quarantine": lambda: store.quarantine(stored, "a reason"),
        "clear": store.clear,
    }

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing(errno.EROFS))
        with pytest.raises(CacheError, match="got Read-only file system: ") as caught:
            verbs[verb]()

    assert caught.value.path in {stored.path, *stored.path.parents}
    assert store.find(KEY) is not None
