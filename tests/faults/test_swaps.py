"""Folders that are swapped or removed between any two accesses."""

from __future__ import annotations

import ctypes
import io
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mlagen.cache.bundle import BundleError, write_bundle
from mlagen.cache.store import KernelStore, verify
from mlagen.errors import CacheError
from tests.cache import builds
from tests.cache.builds import entry_path, make_build, make_key, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in
from tests.faults.strangers import folder_of, give_away
from tests.fixture_types import Log, Patch

CALLS = ("open", "read", "fstat", "stat", "listdir", "mkdir", "link", "unlink", "utime", "close")
PLANTED = b"\x7fELF planted"
KEYS = [make_key(f"family {number}") for number in range(2)]


@contextmanager
def at_step(number: int, act: Callable[[], object]) -> Iterator[list[int]]:
    """Call ``act`` before one of the disk accesses; yield whether it was called."""
    done: list[int] = []
    steps = itertools.count(1)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if not done and next(steps) == number:
                done.append(number)
                act()
            return call(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, around(getattr(os, name)))
        yield done


def exchange(one: Path, other: Path) -> None:
    """Swap two names atomically."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, bytes(one), here, bytes(other), flag) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def plant(folder: Path, patch: Patch) -> Path:
    """Create a cache with a kernel of another user, sealed and with valid digests."""
    ask(folder, build=lambda: make_build(PLANTED))
    planted = folder / "cache"
    if os.geteuid() == 0:
        for path in (planted, *planted.rglob("*")):
            give_away(path, patch)
    else:
        planted.chmod(0o777)
    return planted


def test_planted_bytes_are_not_served_whenever_the_cache_is_swapped(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The checked folder is the one that is read: the kernel of the user, or none."""
    ask(tmp_path)
    planted = plant(tmp_path / "planted", monkeypatch)
    cubins = []
    for number in itertools.count(1):
        store = store_in(tmp_path)
        with at_step(number, lambda: exchange(tmp_path / "cache", planted)) as done:
            found = store.look_up(KEY)
        if not done:
            break
        exchange(tmp_path / "cache", planted)
        cubins.append(found.entry.cubin if found.entry else None)

    assert len(cubins) > 8
    assert set(cubins) == {None, builds.CUBIN}


@pytest.mark.parametrize("place", ["cache/v2", "shard"])
def test_a_link_swapped_in_is_not_read_through(place: str, tmp_path: Path) -> None:
    """A link is rejected for trusted users too, at any moment of the swap."""
    served = []
    for number in itertools.count(1):
        folder, planted = tmp_path / str(number), tmp_path / str(number) / "planted"
        ask(folder)
        ask(planted, build=lambda: make_build(PLANTED))
        target, link = folder_of(folder, place), folder / "link"
        link.symlink_to(folder_of(planted, place))
        with at_step(number, lambda: exchange(target, link)) as done:  # noqa: B023 - at once
            found = store_in(folder, is_shared=True).look_up(KEY)
        if not done:
            break
        served.append(found.entry.cubin if found.entry else None)

    assert PLANTED not in served
    assert builds.CUBIN in served


CLEANING: dict[str, Callable[[KernelStore], object]] = {
    "collect": KernelStore.collect,
    "clear": KernelStore.clear,
    "remove": lambda store: store.remove(next(iter(store.entries()))),
    "remove damage": lambda store: [
        store.remove(one, if_unchanged=True) for one in store.entries()
    ],
    "remove old layouts": KernelStore.remove_old_layouts,
    "a call": lambda store: store.find_or_build(KEYS[1], make_build),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["cache/v2", "cache/v1", "cache/v1/e", "shard"])
@pytest.mark.parametrize("clean", CLEANING.values(), ids=CLEANING)
def test_nothing_behind_a_link_is_deleted_whenever_it_is_swapped_in(
    clean: Callable[[KernelStore], object], place: str, tmp_path: Path
) -> None:
    """The target of a link stays, even if the link appears between check and deletion."""
    victim = tmp_path / "victim"
    shard, entry = entry_path(tmp_path, KEY).parts[-2:]
    for name in (f"{shard}/{entry}", entry, "e/one", "one", f".{'a' * 16}.part"):
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_bytes(b"precious")
    for path in victim.rglob("*"):
        os.utime(path, (0, 0))
    before = tree(victim)
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        ask(folder)
        os.utime(entry_path(folder, KEY), (1, 1))
        part = entry_path(folder, KEY).with_name(f".{'b' * 16}.part")
        part.touch()
        os.utime(part, (0, 0))
        (folder / "cache/v1/e/inside").mkdir(parents=True)
        target = folder_of(folder, place)

        def swap() -> None:
            with suppress(FileNotFoundError):
                target.rename(folder / "aside")  # noqa: B023 - called in this round
                target.symlink_to(victim)  # noqa: B023

        with at_step(number, swap) as done, suppress(CacheError, StopIteration):
            clean(store_in(folder, is_shared=True, max_bytes=1))
        if not done:
            break

        assert tree(victim) == before

    assert number > 4


LOOKING: dict[str, Callable[[KernelStore], object]] = {
    "list": lambda store: [one.problem for one in store.entries() if one.problem],
    "verify": lambda store: [one for one in store.entries() if _problem_of(one)],
    "export": lambda store: _export(store) and [],
    "look up": lambda store: [one for one in map(store.look_up, KEYS) if one.problem],
}


def _problem_of(stored: Any) -> str | None:
    with suppress(FileNotFoundError):
        return stored.problem or verify(stored)
    return None


def _export(store: KernelStore) -> bool:
    try:
        write_bundle(list(store.entries()), io.BytesIO())
    except BundleError as error:
        assert "all were removed" in str(error)  # noqa: PT017 - it may as well succeed
    return True


def _clear_and_fill(store: KernelStore) -> None:
    store.clear()
    _fill(store)


def _fill(store: KernelStore) -> None:
    for key in KEYS:
        store.find_or_build(key, make_build)


REMOVALS: dict[str, Callable[[KernelStore], object]] = {
    "cleared": KernelStore.clear,
    "one removed": lambda store: store.remove(next(iter(store.entries()))),
    "cleared and built again": _clear_and_fill,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
@pytest.mark.parametrize("look", LOOKING.values(), ids=LOOKING)
def test_an_entry_removed_at_any_moment_is_not_damaged(
    look: Callable[[KernelStore], object],
    remove: Callable[[KernelStore], object],
    tmp_path: Path,
    caplog: Log,
) -> None:
    """A reader finds it gone, or its replacement."""
    for number in itertools.count(1):
        store, other = store_in(tmp_path), store_in(tmp_path)
        _fill(store)
        with at_step(number, lambda: remove(other)) as done:  # noqa: B023 - called in this round
            bad = look(store)
        if not done:
            break

        assert bad == []

    assert number > 8
    assert warnings_in(caplog) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seconds", [1.5])
def test_nothing_false_is_reported_beside_a_process_that_removes(
    seconds: float, tmp_path: Path, caplog: Log
) -> None:
    """Many rounds of every read, while another process clears, removes and builds."""
    store, rounds = store_in(tmp_path), 0
    _fill(store)
    rival = builds.fork()
    if rival == 0:
        signal.alarm(30)
        try:
            for turn in itertools.cycle(REMOVALS.values()):
                other = store_in(tmp_path)
                _fill(other)
                with suppress(StopIteration):
                    turn(other)
        finally:
            os._exit(1)
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert [look(store) for look in LOOKING.values()] == [[]] * len(LOOKING)
            rounds += 1
    finally:
        os.kill(rival, signal.SIGKILL)
        os.waitpid(rival, 0)

    assert rounds > 5
    assert warnings_in(caplog) == []
