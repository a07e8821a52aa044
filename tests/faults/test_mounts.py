"""Real file systems that are full, if this machine allows mounts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cache import builds
from tests.cache.builds import entry_folder, make_build, make_key, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.fixture_types import Log

pytestmark = pytest.mark.timeout(60)

OTHER = make_key("another kernel")

# From linux/sched.h and linux/mount.h.
_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_AGAIN = 32


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


def in_mount_namespace(work: Callable[[], object]) -> None:
    """Run ``work`` in a child with its own mount namespace."""

    def work_apart() -> None:
        leave_the_mounts()
        work()

    assert builds.in_child(work_apart) == 0


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
            assert later.path == entry_folder(folder, KEY)
            assert whole_entries(folder) == len(
                {entry.path for entry in [*entries, later]} - {None}
            )
            assert tree(folder / "cache/v1/staging") == []
            published.append(entries[0].path is not None)
        assert set(published) == {False, True}

    in_mount_namespace(work)
