"""The size limit: LRU eviction, safe for readers, measured only near the limit."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from mlagen.cache import eviction
from mlagen.cache.eviction import evict, exceeds_share
from mlagen.cache.folder import Folder
from mlagen.monitoring import metrics
from tests.cache.builds import CUBIN, entry_path, failing, make_build, make_key, make_store
from tests.faults.steps import store_in
from tests.fixture_types import Patch

KEYS = [make_key(f"family {number}") for number in range(10)]
HOUR_S = 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Return the folder of a cache with ten entries, used ten hours ago, nine hours ago, ..."""
    store = make_store(tmp_path)
    for number, key in enumerate(KEYS):
        store.find_or_build(key, make_build)
        set_age(tmp_path, number, HOUR_S * (10 - number))
    return Folder(tmp_path / "cache")


def set_age(folder: Path, number: int, age_s: float) -> None:
    """Set the last use of an entry to that long ago."""
    used = time.time() - age_s
    os.utime(entry_path(folder, KEYS[number]), (used, used))


def size_of(folder: Folder) -> int:
    """Return the total size of all entries, measured file by file."""
    return sum(file.stat().st_size for file in folder.root.glob("v2/*/*"))


def remaining(folder: Path) -> list[int]:
    """Return the numbers of the existing entries."""
    return [number for number, key in enumerate(KEYS) if entry_path(folder, key).exists()]


def test_the_least_recently_used_are_evicted_first(folder: Folder, tmp_path: Path) -> None:
    """Eviction stops at nine tenths of the limit."""
    size = size_of(folder) // 10
    before = metrics()["evicted"]
    evicted = evict(folder, size * 6)
    assert [usage.path for usage in evicted] == [entry_path(tmp_path, key) for key in KEYS[:5]]
    assert remaining(tmp_path) == [5, 6, 7, 8, 9]
    assert size_of(folder) <= size * 6 * 0.9
    assert metrics()["evicted"] == before + 5


def test_nothing_is_evicted_below_the_limit(folder: Folder, tmp_path: Path) -> None:
    """Nothing is evicted up to the limit."""
    evicted = evict(folder, size_of(folder))
    assert evicted == []
    assert remaining(tmp_path) == list(range(10))


def test_recently_used_entries_stay(folder: Folder, tmp_path: Path) -> None:
    """Recently used entries stay even above the limit, because a process may be reading them."""
    for number in (0, 4):
        set_age(tmp_path, number, 60.0)
    evict(folder, 1)
    assert remaining(tmp_path) == [0, 4]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EISDIR], ids=str)
def test_an_entry_that_cannot_be_removed_is_skipped(
    code: int, folder: Folder, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The next entries are evicted instead; if none can be, it is an error."""
    stuck, unlink = entry_path(tmp_path, KEYS[0]), os.unlink

    def reject(name: str, **kwargs: int) -> None:
        if name == stuck.name:
            raise OSError(code, os.strerror(code))
        unlink(name, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", reject)
        evicted = evict(folder, size_of(folder) // 2)
    assert stuck not in {usage.path for usage in evicted}
    assert remaining(tmp_path) == [0, 7, 8, 9]

    monkeypatch.setattr(os, "unlink", failing(code))
    evict(folder, size_of(folder))  # below the limit, nothing is tried
    with pytest.raises(OSError, match=os.strerror(code)):
        evict(folder, size_of(folder) // 2)
    assert remaining(tmp_path) == [0, 7, 8, 9]


def test_what_is_no_entry_is_neither_counted_nor_removed(folder: Folder, tmp_path: Path) -> None:
    """Files of the user or of the system stay."""
    size = size_of(folder)
    for name in ("notes.txt", f".{'a' * 16}.part"):
        entry_path(tmp_path, KEYS[0]).with_name(name).write_bytes(bytes(size))
    assert evict(folder, size) == []
    assert len(evict(folder, 1)) == 10
    assert size_of(folder) == 2 * size


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("age_s", "is_renewed"),
    [(10.0, False), (HOUR_S - 60, False), (HOUR_S + 60, True), (-HOUR_S - 60, True)],
    ids=["just now", "within the hour", "more than an hour ago", "in the future"],
)
def test_a_use_is_recorded_once_an_hour(age_s: float, is_renewed: bool, tmp_path: Path) -> None:
    """A hit within the hour changes nothing on the disk; the content is never changed."""
    set_age(tmp_path, 3, age_s)
    entry = entry_path(tmp_path, KEYS[3])
    before, content = entry.stat().st_mtime_ns, entry.read_bytes()
    found = make_store(tmp_path).find(KEYS[3])
    assert found is not None
    assert (entry.stat().st_mtime_ns != before) is is_renewed
    assert not is_renewed or entry.stat().st_mtime == pytest.approx(time.time(), abs=60)
    assert entry.read_bytes() == content


@pytest.mark.usefixtures("folder")
def test_a_use_that_cannot_be_recorded_is_ignored(tmp_path: Path, monkeypatch: Patch) -> None:
    """A read-only disk is no error."""
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    assert make_store(tmp_path).find(KEYS[0]) is not None


@pytest.mark.parametrize("times", [1.9, 2.1], ids=["below", "above"])
def test_all_entries_are_measured_near_the_limit_only(
    times: float, folder: Folder, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Keys spread evenly: one folder tells whether all may have half of the limit."""
    path = entry_path(tmp_path, KEYS[0])
    with folder.shard(KEYS[0].digest) as shard:
        assert exceeds_share(shard, int(path.stat().st_size * 256 * times)) is (times < 2)
    measured: list[object] = []
    monkeypatch.setattr(eviction, "evict", lambda *args: measured.append(args))
    limit = int(256 * path.stat().st_size * times)
    path.unlink()
    store_in(tmp_path, max_bytes=limit).find_or_build(KEYS[0], make_build)
    assert len(measured) == (times < 2)


def test_a_store_enforces_its_limit(tmp_path: Path) -> None:
    """Publishing evicts the least recently used entries."""
    large = make_build(CUBIN * 20)
    store = store_in(tmp_path, max_bytes=5 * 20_000)
    for number, key in enumerate(KEYS):
        store.find_or_build(key, lambda: large)
        set_age(tmp_path, number, HOUR_S * (10 - number))
    assert 2 * 20_000 < size_of(Folder(tmp_path / "cache")) <= 5 * 20_000
    assert remaining(tmp_path) == list(range(10 - len(remaining(tmp_path)), 10))
