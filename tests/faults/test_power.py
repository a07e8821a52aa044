"""Power failure: unflushed data is lost, and that is detected or harmless."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_path
from tests.faults.steps import KEY, ask, warnings_in, watch, whole_entries
from tests.fixture_types import Log


class PowerFailureError(BaseException):
    """The end of the process; no handler catches it."""


def fail(path: Path) -> None:
    """Keep the name of a file, without content."""
    os.truncate(path, 0)


def blank(path: Path) -> None:
    """Keep the size of a file, without content."""
    path.write_bytes(bytes(path.stat().st_size))


LOSSES: dict[str, Callable[[Path], None]] = {
    "empty files": fail,
    "files of zeros": blank,
    "no files": Path.unlink,
}


def build_until(folder: Path, number: int) -> set[int] | None:
    """Request a kernel until the power fails at step ``number``; return the disk content.

    No step runs after the failure, not even a cleanup. None means that the work had ended.
    """
    steps, synced = itertools.count(1), set[int]()

    def strike(_: str) -> None:
        if next(steps) >= number:
            raise PowerFailureError

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, before=strike, sync=lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
        try:
            ask(folder)
        except PowerFailureError:
            return synced
    return None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_power_failure_at_any_step_leaves_no_partial_entry(
    lose: Callable[[Path], None], tmp_path: Path, caplog: Log
) -> None:
    """Only flushed data survives, and a visible entry is complete nevertheless."""
    visible, lost = [], 0
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        synced = build_until(folder, number)
        if synced is None:
            break
        for path in (folder / "cache").rglob("*"):
            status = path.stat()
            if stat.S_ISREG(status.st_mode) and status.st_ino not in synced:
                lose(path)
                lost += 1
        visible.append(whole_entries(folder))
        caplog.clear()
        build = CountedBuild()

        entry = ask(folder, build=build)

        assert entry.cubin == builds.CUBIN
        assert entry.path == entry_path(folder, KEY)
        assert visible[-1] + build.calls == 1
        assert warnings_in(caplog) == []

    assert lost > 0
    assert visible == sorted(visible)
    assert set(visible) == {0, 1}


def test_names_are_flushed_before_and_after_they_change(tmp_path: Path) -> None:
    """The file is synced before it has its name, the folder afterwards."""
    done: list[str | Path] = []

    def sync(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, before=lambda _: None, after=done.append, sync=sync)
        ask(tmp_path)

    folder = entry_path(tmp_path, KEY).parent
    linked = done.index("link")
    (part,) = [path for path in done[:linked] if isinstance(path, Path)]
    assert (part.parent, part.suffix) == (folder, ".part")
    assert folder in done[linked:]
