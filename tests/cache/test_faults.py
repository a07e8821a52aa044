"""Damaged entries are quarantined and rebuilt, without blocking or crashing a call."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.store import KernelStore
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_folder, make_build, make_key, make_store, tree

KEY = make_key()
OTHER = make_key("another kernel")


def _flip_one_byte(entry: Path) -> None:
    content = bytearray((entry / "kernel.cubin").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (entry / "kernel.cubin").write_bytes(content)


def _become_link(name: str) -> Callable[[Path], None]:
    def move_and_link(entry: Path) -> None:
        # The content is valid, but not what was published: a link may change any time.
        (entry / name).rename(entry.parents[2] / name)
        (entry / name).symlink_to(entry.parents[2] / name)

    return move_and_link


def _become_fifo(name: str) -> Callable[[Path], None]:
    def replace(entry: Path) -> None:
        (entry / name).unlink()
        os.mkfifo(entry / name)

    return replace


def _become_folder(name: str) -> Callable[[Path], None]:
    def replace(entry: Path) -> None:
        (entry / name).unlink()
        (entry / name / "inside").mkdir(parents=True)

    return replace


def _take_from_the_other(name: str) -> Callable[[Path], None]:
    def copy(entry: Path) -> None:
        other = entry.parents[2] / OTHER.digest[:2] / OTHER.digest / OTHER.toolchain
        shutil.copyfile(other / name, entry / name)

    return copy


def _claim(field: str, value: object) -> Callable[[Path], None]:
    def edit(entry: Path) -> None:
        body = json.loads((entry / "manifest.json").read_text())
        (entry / "manifest.json").write_text(json.dumps({**body, field: value}))

    return edit


def _become_empty(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


def _become_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_bytes(b"no folder")


def _become_dangling_link(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to("nowhere")


FAULTS: dict[str, Callable[[Path], object]] = {
    "one byte of the cubin flipped": _flip_one_byte,
    "cubin empty": lambda entry: (entry / "kernel.cubin").write_bytes(b""),
    "cubin truncated": lambda entry: os.truncate(entry / "kernel.cubin", 63),
    "cubin longer": lambda entry: (entry / "kernel.cubin").write_bytes(builds.CUBIN + b"\0"),
    "cubin of another entry": _take_from_the_other("kernel.cubin"),
    "cubin missing": lambda entry: (entry / "kernel.cubin").unlink(),
    "cubin a link": _become_link("kernel.cubin"),
    "cubin a FIFO": _become_fifo("kernel.cubin"),
    "cubin a folder": _become_folder("kernel.cubin"),
    "manifest empty": lambda entry: (entry / "manifest.json").write_bytes(b""),
    "manifest garbage": lambda entry: (entry / "manifest.json").write_bytes(b"\0\xffgarbage"),
    "manifest truncated": lambda entry: os.truncate(entry / "manifest.json", 100),
    "manifest huge": lambda entry: os.truncate(entry / "manifest.json", 1 << 40),
    "manifest of another entry": _take_from_the_other("manifest.json"),
    "manifest of another toolchain": _claim("toolchain", "nvrtc-12.8.1"),
    "manifest with other facts": _claim("facts", {"kernel": {"symbol": "other"}}),
    "manifest of a later schema": _claim("schema", 2),
    "manifest missing": lambda entry: (entry / "manifest.json").unlink(),
    "manifest a link": _become_link("manifest.json"),
    "manifest a FIFO": _become_fifo("manifest.json"),
    "manifest a folder": _become_folder("manifest.json"),
    "entry empty": _become_empty,
    "entry a file": _become_file,
    "entry a dangling link": _become_dangling_link,
}


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store with two kernels."""
    store = make_store(tmp_path)
    store.find_or_build(KEY, make_build)
    store.find_or_build(OTHER, lambda: make_build(builds.CUBIN[:4] + b"other"))
    return store


@pytest.mark.timeout(10)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_damage_is_quarantined_and_rebuilt(
    fault: Callable[[Path], object],
    store: KernelStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A miss, one warning, one quarantined entry with its reason, one build, then hits again."""
    fault(entry_folder(tmp_path, KEY))
    build = CountedBuild()

    found = store.find(KEY)
    entries = [store.find_or_build(KEY, build) for _ in range(2)]

    assert found is None
    assert build.calls == 1
    assert entries[0] == entries[1] == make_store(tmp_path).find(KEY)
    assert entries[0].cubin == builds.CUBIN
    (cell,) = (tmp_path / "cache/v1/quarantine").iterdir()
    assert os.path.lexists(cell / "entry")
    reason = json.loads((cell / "reason.json").read_text())["reason"]
    assert ": expected " in reason
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage() == f"cache: damaged entry moved to {cell}: {reason}"
    assert store.find(OTHER) is not None


@pytest.mark.timeout(10)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_damage_does_not_disturb_the_commands(
    fault: Callable[[Path], object], store: KernelStore, tmp_path: Path
) -> None:
    """A damaged entry is listed, fails verification, is not changed by that, and can be removed."""
    fault(entry_folder(tmp_path, KEY))
    before = tree(tmp_path)

    (stored,) = store.select(KEY.digest)
    problem = store.verify(stored)
    after = tree(tmp_path)
    store.remove(stored)

    assert problem is not None
    assert after == before
    assert not os.path.lexists(entry_folder(tmp_path, KEY))
    assert [stored.key for stored in store.entries()] == [OTHER.digest]


def test_damage_that_cannot_be_moved_costs_a_build_only(
    store: KernelStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a read-only folder a damaged entry is reported, stays, and is not loaded."""
    _flip_one_byte(entry_folder(tmp_path, KEY))

    def reject(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", reject)
        entry = store.find_or_build(KEY, make_build)

    assert entry.cubin == builds.CUBIN
    assert entry.path is None
    assert "stays at" in caplog.messages[0]
    assert "Read-only file system" in caplog.messages[0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("repetition", range(5), ids="run {}".format)
def test_damage_found_by_many_is_built_once(
    repetition: int, store: KernelStore, tmp_path: Path
) -> None:
    """A process that finds damage late does not remove the rebuilt entry."""
    _flip_one_byte(entry_folder(tmp_path, KEY))
    build = CountedBuild(seconds=0.05 + 0.01 * repetition)

    # Separate stores, so that the threads behave like processes.
    entries = builds.together([lambda: make_store(tmp_path).find_or_build(KEY, build)] * 8)

    assert build.calls == 1
    assert {entry.cubin for entry in entries} == {builds.CUBIN}
    assert store.find(KEY) is not None
