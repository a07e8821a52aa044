"""Publication: atomic, the first entry stays, and a failing step leaves no trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlagen.cache.entry import Manifest
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


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    """An empty folder from a power failure is replaced."""
    Layout(tmp_path).entry(KEY.digest, KEY.toolchain).mkdir(parents=True)
    folder = publish_cubin(tmp_path)
    assert builds.read_at(folder, key=KEY.digest, toolchain=KEY.toolchain).cubin == builds.CUBIN


def test_a_read_only_folder_is_rejected_before_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only folder is an OSError that names it."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(PermissionError, match="staging"):
        require_writable(Layout(tmp_path))
