"""Bundle import: new entries are added, existing ones stay, damaged ones are replaced."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from mlagen.cache.bundle import BundleError
from mlagen.cache.bundle_reading import import_bundle, open_bundle, verify_bundle
from mlagen.cache.store import KernelStore
from mlagen.errors import CacheError
from tests.cache.builds import CUBIN, entry_folder, make_build, make_store, tree
from tests.cache.bundle_cases import FAMILIES, bundle_bytes, filled_store, import_, key_for
from tests.fixture_types import Patch


@pytest.fixture
def bundle(tmp_path: Path) -> bytes:
    """Return a bundle of two kernels."""
    return bundle_bytes(filled_store(tmp_path / "there"))


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return an empty store."""
    return make_store(tmp_path / "here")


def test_exported_entries_are_found_after_import(
    bundle: bytes, store: KernelStore, tmp_path: Path
) -> None:
    """Every file and the provenance of every entry survive the import."""
    outcomes = import_(bundle, store)
    assert outcomes == ["added", "added"]
    for family in FAMILIES:
        key = key_for(family)
        here, there = (entry_folder(tmp_path / name, key) for name in ("here", "there"))
        assert tree(here) == tree(there)
        assert all((here / name).read_bytes() == (there / name).read_bytes() for name in tree(here))
        entry = store.find(key)
        assert entry is not None
        assert entry.cubin == CUBIN + family.encode()


def test_an_imported_store_exports_the_same_bundle(bundle: bytes, store: KernelStore) -> None:
    """Export, import and export give the same bytes."""
    import_(bundle, store)
    assert bundle_bytes(store) == bundle


def test_existing_entries_stay(bundle: bytes, store: KernelStore) -> None:
    """An existing entry of the same key is not written again."""
    mine = store.find_or_build(key_for("mla_sm80"), lambda: make_build(CUBIN + b"mine"))
    outcomes = import_(bundle, store)
    found = store.find(key_for("mla_sm80"))
    assert sorted(outcomes) == ["added", "kept"]
    assert found is not None
    assert found.cubin == mine.cubin
    assert import_(bundle, store) == ["kept", "kept"]


def test_entries_of_other_toolchains_do_not_block(bundle: bytes, store: KernelStore) -> None:
    """Entries of other toolchains do not block an import."""
    other = key_for("mla_sm80", toolchain="nvrtc-12.8.1")
    store.find_or_build(other, lambda: make_build(toolchain=other.toolchain))
    outcomes = import_(bundle, store)
    assert outcomes == ["added", "added"]
    assert len(list(store.entries())) == 3


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "manifest.json"])
def test_damaged_entries_are_replaced(
    name: str, bundle: bytes, store: KernelStore, tmp_path: Path
) -> None:
    """A damaged entry moves to the quarantine, and the imported one replaces it."""
    import_(bundle, store)
    (entry_folder(tmp_path / "here", key_for("mla_sm80")) / name).write_bytes(b"")
    outcomes = import_(bundle, store)
    assert sorted(outcomes) == ["kept", "replaced"]
    assert [store.verify(stored) for stored in store.entries()] == [None, None]
    assert len(list((tmp_path / "here/cache/v1/quarantine").iterdir())) == 1


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_entry_that_cannot_be_read_is_not_replaced(
    dry_run: bool, bundle: bytes, store: KernelStore, tmp_path: Path, monkeypatch: Patch
) -> None:
    """It may be valid: the import ends with one line that names it."""
    import_(bundle, store)
    before = tree(tmp_path)
    open_ = os.open

    def reject(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == "kernel.cubin":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", reject)
    expected = "^cache: expected a readable entry, got Permission denied: .*/kernel.cubin$"
    with pytest.raises(CacheError, match=expected):
        import_(bundle, store, dry_run=dry_run)
    assert tree(tmp_path) == before


def test_a_dry_run_reports_the_outcome(bundle: bytes, store: KernelStore, tmp_path: Path) -> None:
    """It reports added, kept and replaced, and changes nothing, not even damaged entries."""
    assert import_(bundle, store, dry_run=True) == ["added", "added"]
    assert not (tmp_path / "here").exists()
    import_(bundle, store)
    (entry_folder(tmp_path / "here", key_for("mla_sm80")) / "kernel.cu").unlink()
    before = tree(tmp_path)
    assert sorted(import_(bundle, store, dry_run=True)) == ["kept", "replaced"]
    assert tree(tmp_path) == before


def test_an_empty_bundle_is_valid(tmp_path: Path, store: KernelStore) -> None:
    """A bundle without entries is valid and adds nothing."""
    assert import_(bundle_bytes(make_store(tmp_path / "empty")), store) == []


def test_the_expected_digest_may_be_upper_case(bundle: bytes) -> None:
    """Hex digits are case-insensitive."""
    sha256 = verify_bundle(io.BytesIO(bundle), "it").sha256
    again = verify_bundle(io.BytesIO(bundle), "it", expect_sha256=sha256.upper())
    assert again.sha256 == sha256


def test_progress_ends_at_the_total(bundle: bytes, store: KernelStore) -> None:
    """Verification and import report progress after each entry."""
    seen: list[tuple[int, int]] = []
    verified = verify_bundle(io.BytesIO(bundle), "it", on_progress=lambda *done: seen.append(done))
    import_bundle(verified, store, on_progress=lambda *done: seen.append(done))
    total = verified.content_bytes
    assert [done for done, _ in seen] == [seen[0][0], total, seen[0][0], total]
    assert {all_of_it for _, all_of_it in seen} == {total}


def test_an_unwritable_store_is_a_cache_error(bundle: bytes, tmp_path: Path) -> None:
    """The error is a cache error, not a bundle error."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/cache").write_text("a file")
    store = make_store(tmp_path / "here")
    with pytest.raises(CacheError, match=r"^cache: expected a writable folder, got ") as caught:
        import_(bundle, store)
    assert not isinstance(caught.value, BundleError)


@pytest.mark.parametrize("kind", ["folder", "fifo", "nothing"])
def test_only_a_file_is_opened(kind: str, tmp_path: Path) -> None:
    """Anything else is rejected at once; a FIFO does not block."""
    path = tmp_path / "kernels.tar.gz"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with (
        pytest.raises(BundleError, match=f"^bundle: expected a file, got .*: {path}$"),
        open_bundle(path),
    ):
        pytest.fail("opened")


def test_an_unreadable_file_is_reported(bundle: bytes) -> None:
    """A read error reaches the user in one line."""

    class Broken(io.BytesIO):
        def read(self, _size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(BundleError, match="expected a readable file, got Input/output error: it"):
        verify_bundle(Broken(bundle), "it")
