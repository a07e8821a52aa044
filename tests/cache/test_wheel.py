"""Wheels of kernels: installation with pip, and look-ups through the entry point."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.utils import parse_wheel_filename

from mlagen.cache.bundle import BundleError
from mlagen.cache.store import KernelStore, packaged_layers
from mlagen.cache.wheel import export_wheel, package_of
from mlagen.errors import ArgumentError
from tests.cache.builds import CUBIN, entry_path, tree
from tests.cache.bundle_cases import FAMILIES, filled_store, key_for
from tests.fixture_types import Patch

# Not by find_spec: setuptools takes that for an import of pip, and hides its distutils for good,
# which fails where Inductor compiles later.
_HAS_PIP = any(found.metadata["Name"] == "pip" for found in metadata.distributions())


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store of two kernels."""
    return filled_store(tmp_path)


@pytest.fixture
def wheel(store: KernelStore, tmp_path: Path) -> Path:
    """Return a wheel of these kernels."""
    folder = tmp_path / "dist"
    folder.mkdir()
    path, _ = export_wheel(list(store.entries()), folder, "Acme.kernels", version="1.2")
    return path


@pytest.fixture
def fresh_layers() -> Iterator[None]:
    """Clear the cached package layers before and after."""
    packaged_layers.cache_clear()
    yield
    packaged_layers.cache_clear()


def test_the_record_lists_every_file(wheel: Path) -> None:
    """RECORD has digest and size of every file but itself."""
    with ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    *rows, own = contents["acme_kernels-1.2.dist-info/RECORD"].decode().splitlines()
    expected = [
        f"{name},sha256={_digest(content)},{len(content)}" for name, content in contents.items()
    ]
    assert rows == expected[:-1]
    assert own == "acme_kernels-1.2.dist-info/RECORD,,"


def test_the_same_entries_make_the_same_bytes(
    wheel: Path, store: KernelStore, tmp_path: Path
) -> None:
    """No time is recorded."""
    folder = tmp_path / "again"
    folder.mkdir()
    again, written = export_wheel(
        list(store.entries())[::-1], folder, "Acme.kernels", version="1.2"
    )
    assert again.read_bytes() == wheel.read_bytes()
    assert written.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert written.size_bytes == wheel.stat().st_size


@pytest.mark.skipif(not _HAS_PIP, reason="needs pip to install it")
@pytest.mark.usefixtures("fresh_layers")
def test_an_installed_wheel_is_a_layer(wheel: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """After installation, kernels are found through the entry point without an import."""
    site = tmp_path / "site"
    options = ("--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check")
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    monkeypatch.syspath_prepend(site)

    layers = packaged_layers()
    found = KernelStore(
        tmp_path / "empty", lock_dir=tmp_path / "locks", lock_timeout_s=1, packaged=packaged_layers
    )

    (point,) = metadata.entry_points(group="mlagen.kernels", name="acme_kernels")
    assert (point.value, metadata.version("acme-kernels")) == ("acme_kernels", "1.2")
    assert list(layers) == [site / "acme_kernels"]
    for family in FAMILIES:
        entry = found.find(key_for(family))
        assert entry is not None
        assert entry.cubin == CUBIN + family.encode()
    assert "acme_kernels" not in sys.modules


@pytest.mark.parametrize(
    "name",
    [
        *("", "../x", "a b", "1st", "kernels-", "mlagen", "MLAgen", "json", "class", "a/b"),
        *("acme\n", "a\u017fme"),
    ],
)
def test_a_colliding_name_is_rejected(name: str) -> None:
    """A path, mlagen itself and names of the standard library are rejected."""
    with pytest.raises(ArgumentError, match=r"^wheel: expected a name of its own"):
        package_of(name)


@pytest.mark.parametrize("version", ["", "one", "1.0-x", "1/0", "1.0\n2", "../1"])
def test_an_invalid_version_is_rejected(version: str, store: KernelStore, tmp_path: Path) -> None:
    """An invalid version is rejected, as it is part of the file name."""
    with pytest.raises(ArgumentError, match=r"^wheel-version: expected one such as 1.0"):
        export_wheel(list(store.entries()), tmp_path, "acme-kernels", version=version)


@pytest.mark.parametrize(
    ("version", "normal"),
    [
        ("1!2.0", "1!2.0"),
        ("1.0-1", "1.0.post1"),
        ("v1.0", "1.0"),
        ("1.0+Acme-2", "1.0+acme.2"),
        ("1.0.RC1.dev3", "1.0rc1.dev3"),
    ],
    ids=["an epoch", "a post-release", "a v", "a local version", "capitals"],
)
def test_a_version_is_normalized(
    version: str, normal: str, store: KernelStore, tmp_path: Path
) -> None:
    """Installers compare file name, dist-info folder and metadata."""
    path, _ = export_wheel(list(store.entries()), tmp_path, "acme-kernels", version=version)
    name, parsed, _, _ = parse_wheel_filename(path.name)
    assert (name, str(parsed)) == ("acme-kernels", normal)
    with ZipFile(path) as archive:
        text = archive.read(f"acme_kernels-{normal}.dist-info/METADATA").decode()
    assert f"Version: {normal}\n" in text


def test_a_damaged_entry_stops_the_export(store: KernelStore, tmp_path: Path) -> None:
    """No wheel remains, not even a partial one."""
    entry_path(tmp_path, key_for("mla_sm80")).write_bytes(b"")
    folder = tmp_path / "dist"
    folder.mkdir()
    with pytest.raises(BundleError, match=r"expected a valid entry"):
        export_wheel(list(store.entries()), folder, "acme-kernels")
    assert tree(folder) == []


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
