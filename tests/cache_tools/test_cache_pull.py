"""`mlagen cache pull`: kernels from a bundle at a URL."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import fsspec
import pytest

from mlagen.settings import current_settings
from tests.cache.builds import tree
from tests.cache.bundle_cases import FAMILIES, bundle_bytes, filled_store, key_for

from .conftest import Run
from .web import served


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bypass proxies for servers of this machine."""
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a bundle of two kernels, alone in a folder."""
    path = tmp_path / "served" / "kernels.tar.gz"
    path.parent.mkdir()
    path.write_bytes(bundle_bytes(filled_store(tmp_path / "there")))
    return path


def keys_in(cache_dir: Path) -> set[str]:
    """Return the keys of a cache."""
    return {path.parent.parent.name for path in cache_dir.glob("v1/e/*/*/*/manifest.json")}


KEYS = {key_for(family).digest for family in FAMILIES}


def test_a_bundle_is_pulled_from_a_web_server(run: Run, bundle: Path, cache_dir: Path) -> None:
    """The bundle is downloaded, verified and published."""
    with served(bundle.parent) as server:
        result = run("cache", "pull", f"{server}/kernels.tar.gz")

    url = f"{server}/kernels.tar.gz"
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1] == (
        f"sha256 {hashlib.sha256(bundle.read_bytes()).hexdigest()}"
    )
    assert result.stderr == f"downloading {url}\nverifying {url}\npublishing\n"
    assert keys_in(cache_dir) == KEYS


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_bundle_is_pulled_by_fsspec(
    protocol: str, run: Run, bundle: Path, cache_dir: Path
) -> None:
    """The bundle is read from any file system of fsspec."""
    url = f"{protocol}://{bundle}"
    with fsspec.open(url, "wb") as file:
        file.write(bundle_bytes(filled_store(bundle.parent.parent / "there")))

    result = run("cache", "pull", url, "--json")

    document = json.loads(result.stdout)
    assert document["bundle"] == url
    assert document["totals"] == {"added": 2, "kept": 0, "replaced": 0}
    assert keys_in(cache_dir) == KEYS


def test_a_pushed_bundle_is_pulled(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle moves from one cache to another by a URL, pinned by its digest."""
    url = f"memory://{tmp_path}/kernels.tar.gz"
    filled_store(tmp_path)
    sha256 = json.loads(run("cache", "push", url, "--json").stdout)["sha256"]
    monkeypatch.setenv("MLAGEN_CACHE_DIR", str(tmp_path / "other"))
    current_settings.cache_clear()

    result = run("cache", "pull", url, "--expect-sha256", sha256)

    assert result.exit_code == 0
    assert tree(tmp_path / "other/v1/e") == tree(tmp_path / "cache/v1/e")


def test_another_bundle_than_the_pinned_one_is_rejected(
    run: Run, bundle: Path, cache_dir: Path
) -> None:
    """Write access to the server is not enough to run code here."""
    result = run("cache", "pull", f"file://{bundle}", "--expect-sha256", "0" * 64)

    assert (result.exit_code, result.stdout) == (1, "")
    assert f"bundle: expected sha256 {'0' * 64}, got " in result.stderr
    assert not cache_dir.exists()


def test_a_dry_run_publishes_nothing(run: Run, bundle: Path, cache_dir: Path) -> None:
    """A dry run downloads and verifies."""
    result = run("cache", "pull", f"file://{bundle}", "--dry-run")

    assert result.exit_code == 0
    assert result.stdout.startswith("would import 2 kernels")
    assert not cache_dir.exists()


def test_a_download_that_breaks_publishes_nothing(run: Run, bundle: Path, cache_dir: Path) -> None:
    """A broken download fails with 1 and one line."""
    with served(bundle.parent, cuts_short=True) as server:
        result = run("cache", "pull", f"{server}/kernels.tar.gz")

    assert (result.exit_code, result.stdout) == (1, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("mlagen: url: expected ")
    assert last.endswith(f"{server}/kernels.tar.gz")
    assert not cache_dir.exists()


def test_nothing_at_the_url_fails_with_1(run: Run, bundle: Path, cache_dir: Path) -> None:
    """The message has the server's answer."""
    with served(bundle.parent) as server:
        result = run("cache", "pull", f"{server}/missing.tar.gz")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == (
        f"mlagen: url: HTTP Error 404: File not found: {server}/missing.tar.gz"
    )
    assert not cache_dir.exists()


def test_more_than_the_largest_size_is_not_downloaded(
    run: Run, bundle: Path, cache_dir: Path
) -> None:
    """The download stops at the size limit."""
    result = run("cache", "pull", f"file://{bundle}", "--max-size", "100")

    assert result.exit_code == 1
    assert "url: expected at most 100 bytes, got more: file://" in result.stderr
    assert not cache_dir.exists()


def test_nothing_is_left_in_the_temporary_folder(
    run: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is empty after success and after failure."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    codes = [
        run("cache", "pull", f"file://{bundle}").exit_code,
        run("cache", "pull", f"file://{bundle}", "--max-size", "100").exit_code,
    ]

    assert codes == [0, 1]
    assert tree(folder) == []
