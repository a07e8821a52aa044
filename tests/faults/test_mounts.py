"""Real file systems that are full or read-only, if this machine allows mounts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.store import KernelStore
from tests.cache import builds
from tests.cache.builds import CountedBuild, cut, entry_path, make_build, make_key, tree
from tests.faults.steps import KEY, ask, parts, store_in, warnings_in, whole_entries
from tests.fixture_types import Log

pytestmark = pytest.mark.timeout(60)

OTHER = make_key("another kernel")

# From linux/sched.h and linux/mount.h.
_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_READ_ONLY, _AGAIN = 1, 32


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 on success."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def leave_the_mounts() -> None:
    """Give this process a mount namespace, and the right to change it."""
    user, group = os.getuid(), os.getgid()
    call("unshare", _NEW_USERS | _NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def mount(folder: Path, options: str, flags: int = 0) -> None:
    """Mount an empty file system, or remount one with other options."""
    call("mount", b"none", os.fsencode(folder), b"tmpfs", flags, options.encode())


def in_mount_namespace_status(work: Callable[[], object]) -> int:
    """Run ``work`` in a child with its own mount namespace, and return its exit status."""

    def work_apart() -> None:
        leave_the_mounts()
        work()

    return builds.in_child(work_apart)


def in_mount_namespace(work: Callable[[], object]) -> None:
    """Do the same; the work must succeed."""
    assert in_mount_namespace_status(work) == 0


@pytest.fixture(autouse=True, scope="module")
def _can_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip if processes may not mount."""
    folder = tmp_path_factory.mktemp("mount")

    def attempt() -> None:
        try:
            leave_the_mounts()
            mount(folder, "size=64k")
        except OSError:
            os._exit(77)

    if builds.in_child(attempt) == 77:
        pytest.skip("this machine does not let a process mount")


LIMITS = [f"size={pages * 4}k" for pages in range(1, 10)]
LIMITS += [f"size=1m,nr_inodes={count}" for count in range(1, 20)]
LARGE = builds.CUBIN * 100  # 100 KiB


@pytest.mark.parametrize("cubin", [builds.CUBIN, LARGE], ids=["small", "large"])
def test_a_disk_that_is_full_costs_no_kernel(cubin: bytes, tmp_path: Path, caplog: Log) -> None:
    """Whichever file or folder does not fit first, and when the disk has space again."""
    limits = [*LIMITS, *(f"size={size}k" for size in (64, 128, 256, 512))]

    def work() -> None:
        published = []
        for number, limit in enumerate(limits):
            folder = tmp_path / str(number)
            (folder / "cache").mkdir(parents=True)
            mount(folder / "cache", f"{limit},mode=700")
            caplog.clear()
            store = store_in(folder)

            entries = [store.find_or_build(key, lambda: make_build(cubin)) for key in (KEY, OTHER)]
            warnings = warnings_in(caplog)
            mount(folder / "cache", "size=2m,nr_inodes=100", _AGAIN)
            later = ask(folder, build=lambda: make_build(cubin))

            in_memory = [entry.path for entry in entries].count(None)
            assert [entry.cubin for entry in entries] == [cubin] * 2
            assert len(warnings) == min(in_memory, 1)
            assert all(os.strerror(28) in warning for warning in warnings)
            assert later.path == entry_path(folder, KEY)
            assert whole_entries(folder) == len(
                {entry.path for entry in [*entries, later]} - {None}
            )
            assert parts(folder) == []
            published.append(entries[0].path is not None)
        assert set(published) == {False, True}

    in_mount_namespace(work)


def test_a_disk_that_is_mounted_read_only_serves_hits(tmp_path: Path, caplog: Log) -> None:
    """Existing kernels are found, missing ones are built in memory, and published later."""

    def work() -> None:
        (tmp_path / "cache").mkdir()
        mount(tmp_path / "cache", "mode=700")
        ask(tmp_path)
        mount(tmp_path / "cache", "", _AGAIN | _READ_ONLY)
        before = tree(tmp_path / "cache")
        store, build = store_in(tmp_path), CountedBuild()

        entries = [store.find_or_build(key, build) for key in (KEY, OTHER, OTHER)]

        assert [entry.path for entry in entries] == [entry_path(tmp_path, KEY), None, None]
        assert {entry.cubin for entry in entries} == {builds.CUBIN}
        assert build.calls == 1
        assert len(warnings_in(caplog)) == 1
        assert tree(tmp_path / "cache") == before
        mount(tmp_path / "cache", "", _AGAIN)
        assert ask(tmp_path, OTHER).path == entry_path(tmp_path, OTHER)

    in_mount_namespace(work)


def test_an_entry_that_is_damaged_on_a_read_only_disk_is_not_served(
    tmp_path: Path, caplog: Log
) -> None:
    """It stays in place, and the kernel is built in memory."""

    def work() -> None:
        (tmp_path / "cache").mkdir()
        mount(tmp_path / "cache", "mode=700")
        ask(tmp_path)
        cut(entry_path(tmp_path, KEY))
        mount(tmp_path / "cache", "", _AGAIN | _READ_ONLY)
        store, build = store_in(tmp_path), CountedBuild()

        entries = [store.find_or_build(KEY, build) for _ in range(2)]

        assert [entry.cubin for entry in entries] == [builds.CUBIN] * 2
        assert [entry.path for entry in entries] == [None] * 2
        assert build.calls == 1
        first, second = warnings_in(caplog)
        assert first.startswith("cache: damaged entry stays at ")
        assert second.startswith("cache: expected a usable folder, got ")

    in_mount_namespace(work)


VERBS: dict[str, Callable[[KernelStore], object]] = {
    "rm": lambda store: [store.remove(stored) for stored in store.entries()],
    "clear": KernelStore.clear,
    "gc": KernelStore.collect,
    "prune": KernelStore.remove_old_layouts,
}


@pytest.mark.parametrize("verb", VERBS)
def test_entries_of_a_lower_layer_can_be_removed(verb: str, tmp_path: Path) -> None:
    """A container starts with kernels of its image: overlayfs renames none of its folders."""
    lower = tmp_path / "lower"
    ask(lower)
    (lower / "cache/v1/e/ab").mkdir(parents=True, mode=0o700)
    (lower / "cache/v1/e/ab/kernel.cubin").touch()
    os.utime(entry_path(lower, KEY), (1, 1))

    def work() -> None:
        (tmp_path / "overlay").mkdir()
        mount(tmp_path / "overlay", "mode=700")
        folders = {name: tmp_path / name for name in ("lower", "overlay/upper", "overlay/work")}
        for name in ("overlay/upper", "overlay/work", "merged"):
            (tmp_path / name).mkdir()
        lowerdir, upperdir, workdir = folders.values()
        options = f"lowerdir={lowerdir},upperdir={upperdir},workdir={workdir},userxattr"
        merged = os.fsencode(tmp_path / "merged")
        try:
            call("mount", b"overlay", merged, b"overlay", 0, options.encode())
        except OSError:
            os._exit(77)
        store = store_in(tmp_path / "merged", max_bytes=1)
        assert store.find(KEY) is not None
        assert store.find_or_build(OTHER, make_build).path == entry_path(tmp_path / "merged", OTHER)
        os.utime(entry_path(tmp_path / "merged", KEY), (1, 1))
        VERBS[verb](store)
        assert (tmp_path / "merged/cache/v1").exists() is (verb != "prune")
        assert entry_path(tmp_path / "merged", KEY).exists() is (verb == "prune")
        assert ask(tmp_path / "merged").path == entry_path(tmp_path / "merged", KEY)

    status = in_mount_namespace_status(work)
    if status == 77:
        pytest.skip("this machine does not let a process mount an overlay")
    assert status == 0
    assert entry_path(lower, KEY).exists()
