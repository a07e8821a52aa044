"""Unreachable layers and caches: one warning and a build, and commands end in order."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlagen.cache.store import kernel_store
from mlagen.settings import current_settings
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_path, make_key
from tests.cache_tools.test_any_cache import EVERY, run_all
from tests.faults.privileges import give_up_capabilities
from tests.faults.steps import KEY, ask, warnings_in
from tests.fixture_types import Log, Patch

CODES = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENAMETOOLONG]
LOOKS = ("open", "stat", "lstat", "scandir", "listdir", "mkdir", "access")
KEYS = {"exact": make_key(), "any of a major version": make_key(toolchain="nvrtc-13")}


def cut_off(patch: Patch, folder: Path, code: int) -> None:
    """Make every access to a folder, and below it, fail."""

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def look(subject: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(subject, int) and Path(subject).is_relative_to(folder):
                if call is access:
                    return False
                raise OSError(code, os.strerror(code), str(subject))
            return call(subject, *args, **kwargs)

        return look

    access = os.access
    for name in LOOKS:
        patch.setattr(os, name, around(getattr(os, name)))


@pytest.mark.parametrize("is_open", [False, True], ids=["from the start", "later"])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_a_layer_that_cannot_be_reached_costs_a_build_and_a_warning(
    code: int,
    key: Any,
    is_open: bool,
    tmp_path: Path,
    cache_dir: Path,
    monkeypatch: Patch,
    caplog: Log,
) -> None:
    """The kernel is built and published, and the layer is named once."""
    ask(tmp_path / "far")
    layer, build = tmp_path / "far/cache", CountedBuild()
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(layer))
    current_settings.cache_clear()
    if is_open:  # a server may fail after the store was opened
        kernel_store()
    cut_off(monkeypatch, layer, code)

    entries = [kernel_store().find_or_build(key, build) for _ in range(2)]

    assert [entry.cubin for entry in entries] == [builds.CUBIN] * 2
    assert build.calls == 1
    assert entries[0].path is not None
    assert entries[0].path.is_relative_to(cache_dir)
    if is_open:
        # A stale handle belongs to a removed entry, and is not logged.
        assert len(warnings_in(caplog)) == (code != errno.ESTALE)
    else:
        rule = f"MLAGEN_CACHE_RO: expected a folder, got {os.strerror(code)}, ignoring it"
        assert warnings_in(caplog) == [f"{rule}: {layer}"]


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_a_cache_that_cannot_be_reached_stores_kernels_in_memory(
    code: int, key: Any, cache_dir: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """There is one warning, and one build per process."""
    cut_off(monkeypatch, cache_dir, code)
    build = CountedBuild()

    entries = [kernel_store().find_or_build(key, build) for _ in range(2)]

    assert [(entry.cubin, entry.path) for entry in entries] == [(builds.CUBIN, None)] * 2
    assert build.calls == 1
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"cache: expected a usable folder, got {os.strerror(code)}")
    assert ("MLAGEN_CACHE_DIR or XDG_CACHE_HOME" in warning) == (
        code in {errno.EACCES, errno.ENAMETOOLONG}
    )


def test_a_layer_below_a_folder_without_search_permission_is_ignored(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """The permissions are those of a real disk."""
    ask(tmp_path / "far")
    (tmp_path / "far").chmod(0o600)
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(tmp_path / "far/cache"))
    current_settings.cache_clear()

    def work() -> None:
        give_up_capabilities()
        entry = kernel_store().find_or_build(KEY, CountedBuild())
        assert entry.path is not None
        assert len(warnings_in(caplog)) == 1

    try:
        assert builds.in_child(work) == 0
    finally:
        (tmp_path / "far").chmod(0o700)
    assert entry_path(tmp_path, KEY).exists()


def lock_away(tmp_path: Path) -> Path:
    """Return a path below a folder without search permission."""
    (tmp_path / "far/cache").mkdir(parents=True)
    (tmp_path / "far").chmod(0o600)
    return tmp_path / "far/cache"


def test_a_command_ignores_a_layer_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """It ends with a documented code, and `doctor` names the layer."""
    layer = lock_away(tmp_path)
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(layer))
    found = run_all([*EVERY, "doctor"])
    assert {line: code for line, (code, *_) in found.items()} == {**EVERY, "doctor": 1}
    problem = f"layer: expected a cache folder, got Permission denied: {layer}"
    assert problem in found["doctor"][1]


@pytest.mark.parametrize("name", ["MLAGEN_CACHE_DIR", "MLAGEN_LOCK_DIR"])
def test_a_command_ends_in_order_without_a_folder_that_can_be_reached(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """It ends with a documented code, and one line if it is an error."""
    folder = lock_away(tmp_path)
    monkeypatch.setenv(name, str(folder))

    found = run_all([*EVERY, "doctor"])

    code, text, _ = found.pop("doctor")
    assert code == 1
    assert f"expected a writable folder, got Permission denied: {folder}" in text
    for line, (code, _, err) in found.items():
        assert code in {EVERY[line], 4}, (line, err)
        assert err.count("\n") <= 1


def test_an_unwritable_home_names_the_remedy(tmp_path: Path, monkeypatch: Patch) -> None:
    """A container with an unknown user and HOME=/ has no cache folder until one is configured."""
    (tmp_path / "home").mkdir(mode=0o500)
    for name in ("MLAGEN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ((code, _, errors),) = run_all(["prewarm --arch sm_80 --family combine"]).values()
    assert code == 4
    assert "set MLAGEN_CACHE_DIR or XDG_CACHE_HOME to a folder that can be written" in errors
    assert errors.count("\n") == 1
