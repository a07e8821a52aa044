"""Read errors: no kernel is lost, and no valid entry is deleted for ever."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_path
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch

CALLS = ("open", "read", "fstat", "stat", "lstat", "scandir", "listdir")
CODES = [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR]


def reject(patch: Patch, folder: Path, strike: Callable[[], None]) -> None:
    """Call a function before every read access below a folder."""

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def look(subject: Any, *args: Any, **kwargs: Any) -> Any:
            is_open = isinstance(subject, int) or kwargs.get("dir_fd") is not None
            if is_open or str(subject).startswith(str(folder)):
                strike()
            return call(subject, *args, **kwargs)

        return look

    for name in CALLS:
        patch.setattr(os, name, around(getattr(os, name)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_an_error_at_any_read_costs_a_build_at_most(
    code: int, lasting: bool, tmp_path: Path, caplog: Log
) -> None:
    """The kernel is returned, a warning names the reason, and the next process finds it."""
    is_damage = code == errno.EIO  # a failing disk; the entry counts as damaged
    calls = []
    for number in itertools.count(1):
        folder, looks = tmp_path / str(number), itertools.count(1)
        struck = []
        ask(folder)

        def strike() -> None:
            look = next(looks)  # noqa: B023 - all of it is over before the next round
            if look == number or (lasting and look > number):  # noqa: B023
                struck.append(look)  # noqa: B023
                raise OSError(code, os.strerror(code))

        caplog.clear()
        build = CountedBuild()
        with pytest.MonkeyPatch.context() as patch:
            reject(patch, folder, strike)
            entries = [store_in(folder).find_or_build(KEY, build)]
        if not struck:
            break
        warnings = warnings_in(caplog)
        entries.append(ask(folder))

        assert [entry.cubin for entry in entries] == [builds.CUBIN] * 2
        assert len(warnings) <= (2 if is_damage and lasting else 1)
        if code == errno.ESTALE:  # a removed entry is a miss
            assert len(warnings) == (entries[0].path is None)
        else:
            assert warnings or not build.calls
        assert entries[1].path == entry_path(folder, KEY)
        assert whole_entries(folder) == 1
        calls.append(build.calls)

    # A transient error is gone at the second read, or under the lock.
    assert set(calls) == ({0, 1} if lasting else {0})
    assert len(calls) > 7
