"""Failing disks: the kernel is returned, with one warning and no partial entry."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_folder, make_key, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in, watch, whole_entries
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
        assert not (folder / "cache/v1/quarantine").exists()
        assert ask(folder).path == entry_folder(folder, KEY)
        published.append(entries[0].path is not None)

    assert len(published) > 30
    assert set(published) == {False, True}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_an_error_at_any_step_of_a_quarantine_costs_no_kernel(code: int, tmp_path: Path) -> None:
    """A damaged entry that cannot be moved is not loaded, and the kernel is built."""
    for number in itertools.count(1):
        folder, fault = tmp_path / str(number), Fault(code, number, lasting=True)
        ask(folder)
        (entry_folder(folder, KEY) / "kernel.cubin").write_bytes(b"\x7fELF damaged")
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, before=fault)
            entry = ask(folder)
        if fault.strikes == 0:
            break

        assert entry.cubin == builds.CUBIN
        again = ask(folder)
        assert again.cubin == builds.CUBIN
        assert again.path == entry_folder(folder, KEY)
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
    assert tree(tmp_path / "cache/v1/staging") == []
    assert ask(tmp_path).path == entry_folder(tmp_path, KEY)


NOTES = {
    "empty": b"",
    "no JSON": b"{",
    "no numbers": b'{"bytes": "many", "counted": []}',
    "endless": b'{"bytes": Infinity, "counted": 0}',
    "not a number": b'{"bytes": 0, "counted": NaN}',
    "brackets without end": b"[" * 4000,
    "too long": b" " * 5000,
    "less than nothing": b'{"bytes": -1e15, "counted": 0}',
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_a_damaged_size_file_is_measured_again(note: bytes, tmp_path: Path, caplog: Log) -> None:
    """A kernel is returned for any content, and the size file is right afterwards."""
    ask(tmp_path)
    path = tmp_path / "cache/v1/size.json"
    path.write_bytes(note)
    entry = ask(tmp_path, OTHER)
    assert entry.path == entry_folder(tmp_path, OTHER)
    files = [file for file in (tmp_path / "cache/v1/e").rglob("*") if file.is_file()]
    assert json.loads(path.read_bytes())["bytes"] == sum(file.stat().st_size for file in files)
    assert warnings_in(caplog) == []
