"""The default store of the settings, and the layers of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlagen.cache.store import kernel_store, packaged_layers
from mlagen.settings import current_settings
from tests.cache import builds
from tests.cache.builds import make_build, make_key, make_store
from tests.fixture_types import Log, Patch

KEY = make_key()


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Clear the cached package layers before and after each test."""
    packaged_layers.cache_clear()
    yield
    packaged_layers.cache_clear()


def install(site: Path, name: str) -> Path:
    """Install a package that ships one kernel, like pip does; return its kernel folder."""
    make_store(site / "made").find_or_build(KEY, make_build)
    (site / "made/cache").rename(site / name)
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[mlagen.kernels]\n{name} = {name}\n")
    files = [str(path.relative_to(site)) for path in (site / name).rglob("*") if path.is_file()]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/RECORD"]))
    return site / name


def test_the_store_is_the_one_of_the_settings(
    monkeypatch: Patch, tmp_path: Path, cache_dir: Path
) -> None:
    """Root, layers, size limit and trust come from the environment; the store is cached."""
    make_store(tmp_path / "elsewhere").find_or_build(KEY, make_build)
    layer = tmp_path / "elsewhere/cache"
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(layer))
    current_settings.cache_clear()

    store = kernel_store()
    found = store.look_up(KEY)

    assert (store.root, found.layer) == (cache_dir, layer)
    assert found.entry is not None
    assert kernel_store() is store
    assert not cache_dir.exists()


def test_a_missing_layer_is_reported_once(monkeypatch: Patch, tmp_path: Path, caplog: Log) -> None:
    """A misspelt layer is reported once instead of compiling silently."""
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(tmp_path / "kernals"))
    current_settings.cache_clear()
    for _ in range(2):
        assert kernel_store().find(KEY) is None
    (message,) = caplog.messages
    expected = "MLAGEN_CACHE_RO: expected a folder, got none, ignoring it"
    assert message == f"{expected}: {tmp_path / 'kernals'}"


def test_installed_packages_are_the_last_layer(monkeypatch: Patch, tmp_path: Path) -> None:
    """A kernel of a package is found without importing the package, writable or not."""
    folder = install(tmp_path / "site", "some_kernels")
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    folder.chmod(0o777)  # pip installs with the mode of the umask, like the code beside it
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    found = kernel_store().look_up(KEY)
    assert (found.layer, packaged_layers()) == (folder, (folder,))
    assert found.entry is not None
    assert found.entry.cubin == builds.CUBIN
    assert "some_kernels" not in sys.modules


def test_packages_are_searched_only_on_a_miss(monkeypatch: Patch, tmp_path: Path) -> None:
    """A hit in the cache does not search installed distributions."""
    install(tmp_path / "site", "some_kernels")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    kernel_store().find_or_build(make_key("own"), make_build)
    packaged_layers.cache_clear()
    kernel_store().find(make_key("own"))
    assert packaged_layers.cache_info().misses == 0


@pytest.mark.parametrize("file", ["entry_points.txt", "RECORD"])
def test_broken_metadata_is_reported_once(
    file: str, monkeypatch: Patch, tmp_path: Path, caplog: Log
) -> None:
    """Broken metadata of a package is reported once, and does not prevent compilation."""
    install(tmp_path / "site", "some_kernels")
    (tmp_path / "site/some_kernels-1.dist-info" / file).write_bytes(
        b"[mlagen.kernels]\nsome_kernels\n" if file == "entry_points.txt" else b"\xff,,\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    found = [kernel_store().look_up(KEY).reason for _ in range(2)]
    assert found == ["absent", "absent"]
    assert caplog.text.count("mlagen.kernels: expected readable metadata of all packages") == 1


def test_a_package_without_kernels_is_no_layer(monkeypatch: Patch, tmp_path: Path) -> None:
    """An entry point whose distribution lists no such files is ignored."""
    folder = install(tmp_path / "site", "some_kernels")
    (folder.parent / "some_kernels-1.dist-info/RECORD").write_text("other/v2/ab,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert packaged_layers() == ()
