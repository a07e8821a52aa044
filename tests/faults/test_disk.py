"""Failing disks: the kernel is returned, with one warning and no partial entry."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cache import builds
from tests.cache.builds import CountedBuild, cut, entry_path, make_build, make_key
from tests.faults.steps import KEY, ask, parts, store_in, warnings_in, watch, whole_entries
from tests.fixture_types import Log

OTHER = make_key("another kernel")


class Fault:
    """Fails one step by number, or that step and all later ones."""

    def __init__(self, code: int, number: int, *, lasting: bool) -> None:
        self.strikes = 0
        self.steps = 0
        self._code, self._number, self._lasting = code, number, lasting
        self._spares = () if code == errno.EMFILE else ("look",)

    def __call__(self, step: str) -> None:
        """Count a step, and fail it."""
        if step in self._spares:
            return
        self.steps += 1
        if self.steps == self._number or (self._lasting and self.steps > self._number > 0):
            self.strikes += 1
            raise OSError(self._code, os.strerror(self._code))


def steps_of_a_build(tmp_path: Path, code: int) -> int:
    """Return the number of failing steps in building and publishing a kernel."""
    fault = Fault(code, -1, lasting=False)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, before=fault)
        ask(tmp_path / "valid")
    return fault.steps


CODES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_an_error_at_any_step_costs_no_kernel(
    code: int, lasting: bool, tmp_path: Path, caplog: Log
) -> None:
    """An error at any step of a build costs one warning at most, without a partial entry."""
    published = []
    wanted = (KEY, OTHER) if lasting else (KEY,)
    for number in range(1, steps_of_a_build(tmp_path, code) + 1):
        folder, fault = tmp_path / str(number), Fault(code, number, lasting=lasting)
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, before=fault)
            store, build = store_in(folder), CountedBuild()
            entries = [store.find_or_build(key, build) for key in wanted]

        assert fault.strikes > 0
        assert {entry.cubin for entry in entries} == {builds.CUBIN}
        assert build.calls == len(wanted)
        warnings = warnings_in(caplog)
        in_memory = [entry.path for entry in entries].count(None)
        assert len(warnings) == 1 if in_memory else len(warnings) <= 1
        assert all(os.strerror(code) in warning for warning in warnings)
        assert whole_entries(folder) == len({entry.path for entry in entries} - {None})
        assert ask(folder).path == entry_path(folder, KEY)
        published.append(entries[0].path is not None)

    assert len(published) > 10
    assert set(published) == {False, True}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_an_error_at_any_step_beside_damage_costs_no_kernel(code: int, tmp_path: Path) -> None:
    """A damaged entry that cannot be deleted is not loaded, and the kernel is built."""
    for number in itertools.count(1):
        folder, fault = tmp_path / str(number), Fault(code, number, lasting=True)
        ask(folder)
        cut(entry_path(folder, KEY))
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, before=fault)
            entry = ask(folder)
        if fault.strikes == 0:
            break

        assert entry.cubin == builds.CUBIN
        again = ask(folder)
        assert again.cubin == builds.CUBIN
        assert again.path == entry_path(folder, KEY)
        assert whole_entries(folder) == 1


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the file size of this process to ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1, 100, 500, 1000], ids="{} bytes".format)
def test_a_limit_on_the_size_of_files_costs_no_kernel(size: int, tmp_path: Path) -> None:
    """If the system ends a write early, the kernel stays in memory."""

    def work() -> None:
        with file_size_limit(size):
            entry = ask(tmp_path)
        assert entry.cubin == builds.CUBIN
        assert entry.path is None

    assert builds.in_child(work) == 0
    assert whole_entries(tmp_path) == 0
    assert parts(tmp_path) == []
    assert ask(tmp_path).path == entry_path(tmp_path, KEY)


def test_without_file_descriptors_a_kernel_stays_in_memory(tmp_path: Path) -> None:
    """Without file descriptors a process builds, and publishes when it has some again."""
    import filelock  # noqa: F401 - what is imported later needs descriptors

    store = store_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        entry = store.find_or_build(KEY, make_build)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert entry.cubin == builds.CUBIN
    assert entry.path is None
    assert store.find(KEY) is entry
    assert ask(tmp_path).path == entry_path(tmp_path, KEY)
