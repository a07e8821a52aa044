"""Publication: atomic, the first entry stays, and a failing step leaves no trace."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from mlagen.cache.entry import Manifest
from mlagen.cache.folder import Folder
from mlagen.cache.layout import Layout
from mlagen.cache.publish import publish, require_writable
from tests.cache import builds

KEY = builds.make_key()


def publish_cubin(root: Path, cubin: bytes = builds.CUBIN) -> Path:
    """Publish an entry of ``KEY`` below ``root``."""
    build = builds.make_build(cubin)
    return publish(Layout(root), Manifest.of(KEY, build, created_by="jit"), build.files)


def test_publish_creates_the_entry_and_nothing_else(tmp_path: Path) -> None:
    """The entry has all its files, the cache has its tag, and staging is empty."""
    folder = publish_cubin(tmp_path)

    assert builds.tree(folder) == ["build.log", "kernel.cu", "kernel.cubin", "manifest.json"]
    assert list((tmp_path / "v1/staging").iterdir()) == []
    tag = (tmp_path / "v1/CACHEDIR.TAG").read_text(encoding="ascii")
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077], ids="{:03o}".format)
def test_published_files_are_private(umask: int, tmp_path: Path) -> None:
    """The cache is private, whatever the umask."""
    before = os.umask(umask)
    try:
        publish_cubin(tmp_path / "cache")
    finally:
        os.umask(before)

    made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


def test_the_first_publication_stays(tmp_path: Path) -> None:
    """Losing the race is no error, changes nothing, and leaves staging empty."""
    first, second = builds.CUBIN + b"first", builds.CUBIN + b"second"

    folders = [publish_cubin(tmp_path, first), publish_cubin(tmp_path, second)]

    assert folders[0] == folders[1]
    assert builds.read_at(folders[0], key=KEY.digest, toolchain=KEY.toolchain).cubin == first
    assert list((tmp_path / "v1/staging").iterdir()) == []


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    """An empty folder from a power failure is replaced."""
    Layout(tmp_path).entry(KEY.digest, KEY.toolchain).mkdir(parents=True)

    folder = publish_cubin(tmp_path)

    assert builds.read_at(folder, key=KEY.digest, toolchain=KEY.toolchain).cubin == builds.CUBIN


@pytest.mark.parametrize("step", ["make", "write", "sync", "move"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE])
def test_a_failing_step_leaves_nothing(
    step: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error reaches the caller; no entry is visible and staging is empty."""

    def reject(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Folder, step, reject)
    (tmp_path / "v1/staging").mkdir(parents=True)

    with pytest.raises(OSError, match=os.strerror(code)):
        publish_cubin(tmp_path)

    assert list(tmp_path.rglob("manifest.json")) == []
    assert list((tmp_path / "v1/staging").iterdir()) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_killed_at_any_step_leaves_no_partial_entry(tmp_path: Path) -> None:
    """After kill -9 before each file operation, there is no entry or a complete one."""

    def publish_and_die(root: Path, step: int) -> None:
        steps = iter(range(step))

        def count(event: str, _: object) -> None:
            is_step = event in {"open", "os.mkdir", "os.rename", "shutil.rmtree"}
            if is_step and next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        publish_cubin(root)

    outcomes = []
    for step in range(100):
        root = tmp_path / str(step)
        status = builds.in_child(lambda: publish_and_die(root, step))  # noqa: B023 - called at once
        whole = [path.parent for path in root.rglob("v1/e/*/*/*/manifest.json")]
        for folder in whole:
            assert builds.read_at(folder, key=KEY.digest, toolchain=KEY.toolchain)
        publish_cubin(root)
        outcomes.append((status, len(whole)))
        if status == 0:
            break

    assert outcomes[-1] == (0, 1)
    assert (-signal.SIGKILL, 0) in outcomes
    assert {status for status, _ in outcomes[:-1]} == {-signal.SIGKILL}
    assert len(outcomes) > 10


def test_require_writable_creates_the_staging_folder(tmp_path: Path) -> None:
    """A writable cache raises nothing."""
    require_writable(Layout(tmp_path / "cache"))

    assert (tmp_path / "cache/v1/staging").is_dir()


def test_require_writable_rejects_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only folder is an OSError before any write."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)

    with pytest.raises(PermissionError, match="staging"):
        require_writable(Layout(tmp_path))
