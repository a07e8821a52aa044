"""The store when the operating system returns errors: kernels from memory, and one warning."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache import layers as layers_module
from mlagen.cache import quarantine
from mlagen.cache.folder import Folder
from mlagen.cache.layout import Layout
from mlagen.cache.store import KernelStore
from mlagen.errors import CacheError
from tests.cache import builds
from tests.cache.builds import CUBIN, CountedBuild, entry_folder, make_build, make_key, make_store

KEY = make_key()


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store whose folder does not exist yet."""
    return make_store(tmp_path)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged warnings."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


BLOCKED = {
    "the cache folder is a file": "cache",
    "the layout folder is a file": "cache/v1",
    "the folder of entries is a file": "cache/v1/e",
    "the staging folder is a file": "cache/v1/staging",
}


@pytest.mark.parametrize("blocked", BLOCKED.values(), ids=BLOCKED)
def test_folder_that_cannot_be_written_costs_one_warning(
    blocked: str, store: KernelStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels are built once per process and stored in memory; nothing is raised."""
    (tmp_path / blocked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / blocked).touch()
    build, other = CountedBuild(), CountedBuild()

    entries = [store.find_or_build(KEY, build) for _ in range(3)]
    store.find_or_build(make_key("another"), other)

    assert (build.calls, other.calls) == (1, 1)
    assert {entry.path for entry in entries} == {None}
    assert store.find(KEY) is entries[0]
    assert entries[0].cubin == builds.CUBIN
    assert len(warnings_in(caplog)) == 1
    assert warnings_in(caplog)[0].startswith("cache: expected a usable folder, got ")
    assert str(tmp_path / "cache") in warnings_in(caplog)[0]


def test_processes_that_cannot_publish_do_not_wait_for_each_other(
    store: KernelStore, tmp_path: Path
) -> None:
    """If no entry can be published, the lock would only serialise the builds."""
    (tmp_path / "cache").touch()

    store.find_or_build(KEY, make_build)

    assert not (tmp_path / "locks").exists()


def test_a_full_disk_stores_kernels_in_memory(
    store: KernelStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel is stored in memory, with one warning; later kernels that fit are published."""

    def reject(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", reject)
        entries = [store.find_or_build(make_key(name), make_build) for name in ("one", "two")]
    published = store.find_or_build(make_key("three"), make_build)

    assert [entry.path for entry in entries] == [None, None]
    assert published.path == entry_folder(tmp_path, make_key("three"))
    assert len(warnings_in(caplog)) == 1
    assert "No space left on device" in warnings_in(caplog)[0]


@pytest.mark.parametrize("code", [13, 24], ids=["EACCES", "EMFILE"])
def test_entry_that_cannot_be_read_is_not_called_damaged(
    code: int,
    store: KernelStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is built again for this process, with one warning, and stays for other processes."""
    store.find_or_build(KEY, make_build)

    def reject(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(layers_module, "read_entry", reject)
        found = [store.find(KEY), store.find(KEY)]

    assert found == [None, None]
    assert len(warnings_in(caplog)) == 1
    assert store.find(KEY) is not None


def test_entry_that_another_machine_removed_is_absent(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stale NFS handle is an ordinary miss: the kernel is built, and nothing is logged."""
    store.find_or_build(KEY, make_build)

    def stale(*_: object, **__: object) -> None:
        raise OSError(116, os.strerror(116))

    with monkeypatch.context() as patch:
        patch.setattr(layers_module, "read_entry", stale)
        found = store.look_up(KEY)
        built = store.find_or_build(KEY, make_build)

    assert (found.entry, found.reason) == (None, "absent")
    assert built.cubin == CUBIN
    assert warnings_in(caplog) == []


def test_sweep_that_fails_does_not_undo_publishing(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreadable staging folder does not undo the publication."""

    def reject(_: Layout) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(quarantine, "sweep", reject)

    entry = store.find_or_build(KEY, make_build)

    assert entry.path is not None
    assert warnings_in(caplog) == []
    with pytest.raises(CacheError, match="got Permission denied"):
        store.sweep()


@pytest.mark.parametrize("verb", ["remove", "quarantine", "clear"])
def test_an_entry_that_cannot_be_moved_is_a_cache_error(
    verb: str, store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the path, and the entry stays."""
    store.find_or_build(KEY, make_build)
    (stored,) = store.entries()
    verbs: dict[str, Callable[[], object]] = {
        "remove": lambda: store.remove(stored),
        "quarantine": lambda: store.quarantine(stored, "a reason"),
        "clear": store.clear,
    }

    def reject(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", reject)
        with pytest.raises(CacheError, match="got Read-only file system: ") as caught:
            verbs[verb]()

    assert caught.value.path in {stored.path, *stored.path.parents}
    assert store.find(KEY) is not None
