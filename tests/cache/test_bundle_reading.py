"""Importing a bundle: what is new is added, what is there stays, what is damaged gives way."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from mlagen.cache.bundle import BundleError
from mlagen.cache.bundle_reading import import_bundle, opened_bundle, verify_bundle
from mlagen.cache.store import KernelStore
from mlagen.errors import CacheError
from tests.cache.builds import CUBIN, entry_folder, make_build, make_store, tree
from tests.cache.bundle_cases import FAMILIES, filled_store, key_for, packed


@pytest.fixture
def bundle(tmp_path: Path) -> bytes:
    """Return a bundle of two kernels."""
    return packed(filled_store(tmp_path / "there"))


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store that holds nothing."""
    return make_store(tmp_path / "here")


def import_(bundle: bytes, store: KernelStore, *, dry_run: bool = False) -> list[str]:
    """Verify and import a bundle."""
    return import_bundle(verify_bundle(io.BytesIO(bundle), "it"), store, dry_run=dry_run)


def test_what_was_exported_is_found(bundle: bytes, store: KernelStore, tmp_path: Path) -> None:
    """Every file arrives byte for byte, with who compiled it and when."""
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
    """Nothing is lost or added on the way round."""
    import_(bundle, store)

    assert packed(store) == bundle


def test_what_is_there_stays(bundle: bytes, store: KernelStore) -> None:
    """An entry of the same key is as good, and is not written again."""
    mine = store.find_or_build(key_for("mla_sm80"), lambda: make_build(CUBIN + b"mine"))

    outcomes = import_(bundle, store)

    found = store.find(key_for("mla_sm80"))
    assert sorted(outcomes) == ["added", "kept"]
    assert found is not None
    assert found.cubin == mine.cubin
    assert import_(bundle, store) == ["kept", "kept"]


def test_the_same_key_by_another_compiler_is_no_hindrance(
    bundle: bytes, store: KernelStore
) -> None:
    """One kernel can be there as several compilers made it."""
    other = key_for("mla_sm80", toolchain="nvrtc-12.8.1")
    store.find_or_build(other, lambda: make_build(toolchain=other.toolchain))

    outcomes = import_(bundle, store)

    assert outcomes == ["added", "added"]
    assert len(list(store.entries())) == 3


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "manifest.json"])
def test_what_is_damaged_gives_way(
    name: str, bundle: bytes, store: KernelStore, tmp_path: Path
) -> None:
    """A damaged entry goes to the quarantine, and the one of the bundle takes its place."""
    import_(bundle, store)
    (entry_folder(tmp_path / "here", key_for("mla_sm80")) / name).write_bytes(b"")

    outcomes = import_(bundle, store)

    assert sorted(outcomes) == ["kept", "replaced"]
    assert [store.verify(stored) for stored in store.entries()] == [None, None]
    assert len(list((tmp_path / "here/cache/v1/quarantine").iterdir())) == 1


def test_a_dry_run_says_what_would_be(bundle: bytes, store: KernelStore, tmp_path: Path) -> None:
    """It tells added, kept and replaced apart, and touches nothing, not even what is damaged."""
    assert import_(bundle, store, dry_run=True) == ["added", "added"]
    assert not (tmp_path / "here").exists()

    import_(bundle, store)
    (entry_folder(tmp_path / "here", key_for("mla_sm80")) / "kernel.cu").unlink()
    before = tree(tmp_path)

    assert sorted(import_(bundle, store, dry_run=True)) == ["kept", "replaced"]
    assert tree(tmp_path) == before


def test_a_bundle_of_nothing_is_sound(tmp_path: Path, store: KernelStore) -> None:
    """It adds nothing."""
    assert import_(packed(make_store(tmp_path / "empty")), store) == []


def test_the_expected_digest_may_be_spelled_in_capitals(bundle: bytes) -> None:
    """Hex digits are numbers."""
    sha256 = verify_bundle(io.BytesIO(bundle), "it").sha256

    again = verify_bundle(io.BytesIO(bundle), "it", expect_sha256=sha256.upper())

    assert again.sha256 == sha256


def test_progress_ends_at_the_total(bundle: bytes, store: KernelStore) -> None:
    """Both readings move it on with each entry."""
    seen: list[tuple[int, int]] = []

    verified = verify_bundle(io.BytesIO(bundle), "it", on_progress=lambda *done: seen.append(done))
    import_bundle(verified, store, on_progress=lambda *done: seen.append(done))

    total = verified.content_bytes
    assert [done for done, _ in seen] == [seen[0][0], total, seen[0][0], total]
    assert {all_of_it for _, all_of_it in seen} == {total}


def test_a_store_that_cannot_be_written_is_the_fault_of_the_store(
    bundle: bytes, tmp_path: Path
) -> None:
    """The error is not one of the bundle, and names the cache."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/cache").write_text("a file")
    store = make_store(tmp_path / "here")

    with pytest.raises(CacheError, match=r"^cache: expected a writable folder, got ") as caught:
        import_(bundle, store)

    assert not isinstance(caught.value, BundleError)


@pytest.mark.parametrize("kind", ["folder", "fifo", "nothing"])
def test_only_a_file_is_opened(kind: str, tmp_path: Path) -> None:
    """Anything else is rejected at once; a FIFO is not waited for."""
    path = tmp_path / "kernels.tar.gz"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)

    with (
        pytest.raises(BundleError, match=f"^bundle: expected a file, got .*: {path}$"),
        opened_bundle(path),
    ):
        pytest.fail("opened")


def test_a_file_that_cannot_be_read_is_told(bundle: bytes) -> None:
    """What the disk says reaches the user in one line."""

    class Broken(io.BytesIO):
        def read(self, _size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(BundleError, match="expected a readable file, got Input/output error: it"):
        verify_bundle(Broken(bundle), "it")
