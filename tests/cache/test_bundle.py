"""Bundles: what is written, what is rejected before anything is published, and what is imported."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import tarfile
import time
from pathlib import Path

import pytest

from mlagen.cache import bundle as bundle_module
from mlagen.cache.bundle import (
    BundleError,
    export_bundle,
    import_bundle,
    open_bundle,
    require_target,
    verify_bundle,
    write_bundle,
)
from mlagen.cache.store import KernelStore, verify
from mlagen.errors import CacheError
from tests.cache.builds import CUBIN, entry_path, failing, make_build, make_file, make_store, tree
from tests.cache.bundle_attacks import ATTACKS, Attack, flipped_cubin
from tests.cache.bundle_cases import (
    FAMILIES,
    Member,
    bundle_bytes,
    bundle_of,
    filled_store,
    import_,
    key_for,
    members_of,
)
from tests.fixture_types import Patch


@pytest.fixture
def there(tmp_path: Path) -> KernelStore:
    """Return a store of two kernels."""
    return filled_store(tmp_path / "there")


@pytest.fixture
def bundle(there: KernelStore) -> bytes:
    """Return a bundle of two kernels."""
    return bundle_bytes(there)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return an empty store."""
    return make_store(tmp_path / "here")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a target in an empty folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out/kernels.tar.gz"


def in_here(folder: Path) -> Path:
    """Return the first entry of the store that imports."""
    return entry_path(folder / "here", key_for(FAMILIES[0]))


def test_the_same_entries_make_the_same_bytes(
    there: KernelStore, bundle: bytes, target: Path, monkeypatch: Patch
) -> None:
    """The bytes depend neither on the order of entries nor on file name or time."""
    entries = list(there.entries())
    monkeypatch.setattr(time, "time", lambda: 1e9)
    target.write_bytes(b"the old one")
    export_bundle(entries[::-1], target)
    assert target.read_bytes() == bundle
    assert tree(target.parent) == [target.name]


def test_the_summary_describes_the_file(there: KernelStore, target: Path) -> None:
    """The summary has digest and sizes of the file, and the targets of its kernels."""
    seen: list[tuple[int, int]] = []
    entries = list(there.entries())
    written = export_bundle(entries, target, on_progress=lambda *done: seen.append(done))
    content = target.read_bytes()
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.size_bytes == len(content)
    assert written.content_bytes == sum(len(member.content) for member in members_of(content))
    assert (written.archs, written.toolchains) == (["sm_90a"], ["nvrtc-13.5.37"])
    assert len(seen) == len(FAMILIES)
    assert seen[-1] == (written.content_bytes, written.content_bytes)


def test_other_programs_can_read_it(there: KernelStore, bundle: bytes, tmp_path: Path) -> None:
    """It is a standard tar of plain files, without an owner; unpacked, it is a cache folder."""
    infos = [member.info for member in members_of(bundle)]
    assert {(info.type, info.mode, info.uid, info.mtime) for info in infos} == {
        (tarfile.REGTYPE, 0o644, 0, 0)
    }
    for info, content in members_of(bundle):
        assert content == (there.root / info.name).read_bytes()
        path = tmp_path / "here/cache" / info.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert all(make_store(tmp_path / "here").find(key_for(name)) for name in FAMILIES)


def test_a_damaged_entry_stops_the_export(there: KernelStore, target: Path, tmp_path: Path) -> None:
    """The error names the entry, whatever is damaged of it, and the old bundle stays."""
    target.write_bytes(b"the old one")
    path = entry_path(tmp_path / "there", key_for(FAMILIES[0]))
    content = path.read_bytes()
    for place in (0, 60, len(content) // 2, len(content) - 6):
        path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
        with pytest.raises(BundleError, match=r"^bundle: expected a valid entry, got a") as caught:
            export_bundle(list(there.entries()), target)
        assert caught.value.path == path
    assert target.read_bytes() == b"the old one"
    assert tree(target.parent) == [target.name]


@pytest.mark.parametrize("is_new", [True, False], ids=["dangling", "of an old bundle"])
def test_a_link_stays(is_new: bool, there: KernelStore, target: Path, bundle: bytes) -> None:
    """The bundle is written to where a link leads, and the link remains one."""
    link = target.with_name("latest")
    link.symlink_to(target.name)
    if not is_new:
        target.write_bytes(b"the old one")
    export_bundle(list(there.entries()), link)
    assert os.fspath(link.readlink()) == target.name
    assert target.read_bytes() == bundle
    assert tree(target.parent) == [target.name, "latest"]


NO_FILES = ["latest", "fifo", ".", "..", "/"]


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_not_replaced(name: str, there: KernelStore, target: Path) -> None:
    """A folder, or a link that leads to no regular file, is rejected in one line, and stays."""
    folder = target.parent
    os.mkfifo(folder / "pipe")
    (folder / "fifo").symlink_to("pipe")
    (folder / "latest").symlink_to("latest")
    before = tree(folder)
    for write in (require_target, lambda path: export_bundle(list(there.entries()), path)):
        with pytest.raises(BundleError, match=r"^bundle: expected a .*file, got .*: "):
            write(folder / name)
    assert tree(folder) == before


@pytest.mark.parametrize("umask", [0o022, 0o077], ids="{:03o}".format)
@pytest.mark.parametrize("name", ["k" * 255, "\N{GREEK SMALL LETTER KAPPA}" * 127])
def test_a_bundle_has_any_name_and_the_mode_of_the_umask(
    name: str, umask: int, there: KernelStore, target: Path
) -> None:
    """Unlike the private files of the cache; the temporary file has a short name of its own."""
    before = os.umask(umask)
    try:
        require_target(target.with_name(name))
        export_bundle(list(there.entries()), target.with_name(name))
    finally:
        os.umask(before)
    assert tree(target.parent) == [name]
    assert target.with_name(name).stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_folder_that_cannot_be_written_is_rejected_before_the_work(
    target: Path, monkeypatch: Patch
) -> None:
    """The error names the target and leaves nothing; a missing folder is not made."""
    with pytest.raises(BundleError, match="expected a file in a folder that exists, got"):
        require_target(target.parent / "nowhere/kernels.tar.gz")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BundleError, match=f"writable file, got Permission denied: {target}$"):
        require_target(target)
    assert tree(target.parent) == []


def test_more_entries_than_can_be_imported_are_rejected(
    there: KernelStore, bundle: bytes, target: Path, monkeypatch: Patch
) -> None:
    """On export, and on import."""
    monkeypatch.setattr(bundle_module, "MAX_ENTRIES", 1)
    with pytest.raises(BundleError, match="at most 1 kernels, got 2"):
        export_bundle(list(there.entries()), target)
    with pytest.raises(BundleError, match="at most 1 kernels, got more"):
        verify_bundle(io.BytesIO(bundle), "it")
    assert tree(target.parent) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_nothing(
    code: int, there: KernelStore, target: Path, monkeypatch: Patch
) -> None:
    """A partial bundle never has the final name, and is deleted."""
    monkeypatch.setattr(os, "fsync", failing(code))
    with pytest.raises(BundleError, match=f"expected a writable file, got {os.strerror(code)}"):
        export_bundle(list(there.entries()), target)
    assert tree(target.parent) == []


def test_an_interrupted_export_leaves_nothing(there: KernelStore, target: Path) -> None:
    """Ctrl-C in the middle takes the half bundle with it."""

    def interrupt(_done: int, _total: int) -> None:
        assert len(tree(target.parent)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(list(there.entries()), target, on_progress=interrupt)
    assert tree(target.parent) == []


def test_exported_entries_are_found_after_import(
    bundle: bytes, store: KernelStore, tmp_path: Path
) -> None:
    """Every file survives the import, byte for byte; an export gives the same bundle."""
    assert import_(bundle, store) == ["added", "added"]
    for family in FAMILIES:
        here, there = (entry_path(tmp_path / name, key_for(family)) for name in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()
        entry = store.find(key_for(family))
        assert entry is not None
        assert entry.cubin == CUBIN + family.encode()
    assert bundle_bytes(store) == bundle


def test_existing_entries_stay(bundle: bytes, store: KernelStore) -> None:
    """An existing entry of the same key is not written again; one of another compiler is apart."""
    mine = store.find_or_build(key_for("mla_sm80"), lambda: make_build(CUBIN + b"mine"))
    other = key_for("combine", toolchain="nvrtc-12.8.1")
    store.find_or_build(other, lambda: make_build(toolchain=other.toolchain))
    assert sorted(import_(bundle, store)) == ["added", "kept"]
    found = store.find(key_for("mla_sm80"))
    assert found is not None
    assert found.cubin == mine.cubin
    assert import_(bundle, store) == ["kept", "kept"]
    assert len(list(store.entries())) == 3


@pytest.mark.parametrize("place", [0, 60, 700, -6], ids=["head", "manifest", "cubin", "source"])
def test_damaged_entries_are_replaced(
    place: int, bundle: bytes, store: KernelStore, tmp_path: Path
) -> None:
    """A dry run reports it, and changes nothing."""
    import_(bundle, store)
    content = bytearray(in_here(tmp_path).read_bytes())
    content[place] ^= 64
    in_here(tmp_path).write_bytes(content)
    assert sorted(import_(bundle, store, dry_run=True)) == ["kept", "replaced"]
    assert in_here(tmp_path).read_bytes() == content
    assert sorted(import_(bundle, store)) == ["kept", "replaced"]
    assert [verify(stored) for stored in store.entries()] == [None, None]


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_entry_that_cannot_be_read_is_not_replaced(
    dry_run: bool, bundle: bytes, store: KernelStore, tmp_path: Path, monkeypatch: Patch
) -> None:
    """It may be valid: the import ends with one line that names it."""
    import_(bundle, store)
    before = tree(tmp_path)
    open_ = os.open

    def reject(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == in_here(tmp_path).name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", reject)
    expected = f"^cache: expected a readable entry, got Permission denied: {in_here(tmp_path)}$"
    with pytest.raises(CacheError, match=expected):
        import_(bundle, store, dry_run=dry_run)
    assert tree(tmp_path) == before


def test_a_dry_run_creates_nothing(bundle: bytes, store: KernelStore, tmp_path: Path) -> None:
    """It reports what would be added; an empty bundle adds nothing."""
    assert import_(bundle, store, dry_run=True) == ["added", "added"]
    assert not (tmp_path / "here").exists()
    assert import_(bundle_bytes(make_store(tmp_path / "empty")), store) == []


def test_the_expected_digest_is_compared_first(bundle: bytes) -> None:
    """Hex digits are case-insensitive; another file is not even unpacked."""
    sha256 = verify_bundle(io.BytesIO(bundle), "it").sha256
    again = verify_bundle(io.BytesIO(bundle), "it", expect_sha256=sha256.upper())
    assert again.sha256 == sha256
    with pytest.raises(BundleError, match=f"expected sha256 {'0' * 64}, got [0-9a-f]{{64}}: it"):
        verify_bundle(io.BytesIO(b"no gzip"), "it", expect_sha256="0" * 64)


def test_progress_ends_at_the_size_of_the_file(bundle: bytes, store: KernelStore) -> None:
    """Verification and import report progress after each entry."""
    seen: list[tuple[int, int]] = []
    verified = verify_bundle(io.BytesIO(bundle), "it", on_progress=lambda *done: seen.append(done))
    import_bundle(verified, store, on_progress=lambda *done: seen.append(done))
    assert len(seen) == 2 * len(FAMILIES)
    assert seen[-1] == (len(bundle), len(bundle))


def test_an_unwritable_store_is_a_cache_error(bundle: bytes, tmp_path: Path) -> None:
    """The error is a cache error, not a bundle error."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/cache").write_text("a file")
    with pytest.raises(CacheError, match=r"^cache: expected a writable folder, got ") as caught:
        import_(bundle, make_store(tmp_path / "here"))
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


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Member]:
    """Return the members of a valid bundle of two entries."""
    return members_of(bundle_bytes(filled_store(tmp_path_factory.mktemp("valid"))))


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Return every path below a folder, with the content of files."""
    paths = {name: folder / name for name in tree(folder)}
    return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}


@pytest.mark.parametrize(("attack", "message"), ATTACKS.values(), ids=ATTACKS)
def test_a_bad_bundle_publishes_nothing(
    attack: Attack, message: str, members: list[Member], tmp_path: Path
) -> None:
    """It is rejected with the reason in one line, and the cache stays the same, byte for byte."""
    bundle, store = attack(members), filled_store(tmp_path, "other")
    before = content_of(tmp_path)
    with pytest.raises(BundleError, match=rf"^bundle: .*({message})") as caught:
        import_(bundle, store)
    assert str(caught.value).endswith(": it")
    assert "\n" not in str(caught.value)
    assert caught.value.path == Path("it")
    assert content_of(tmp_path) == before


def test_bundles_above_the_size_limit_are_rejected(members: list[Member]) -> None:
    """The size limit is exact."""
    bundle, total = bundle_of(members), sum(len(member.content) for member in members)
    enough = verify_bundle(io.BytesIO(bundle), "it", max_bytes=total)
    assert enough.content_bytes == total
    with pytest.raises(BundleError, match=f"expected at most {total - 1} bytes in total, got"):
        verify_bundle(io.BytesIO(bundle), "it", max_bytes=total - 1)


def test_every_truncation_is_rejected(members: list[Member]) -> None:
    """A bundle is verified as a whole."""
    bundle = bundle_of(members)
    for length in range(0, len(bundle), 7):
        with pytest.raises(BundleError):
            verify_bundle(io.BytesIO(bundle[:length]), "it")


def test_a_flipped_bit_is_rejected_or_changes_nothing(members: list[Member]) -> None:
    """Of 200 single bit flips, the accepted ones change no content."""
    bundle, chance = bundle_of(members), random.Random(6)  # noqa: S311 - no secret
    valid = [member.content for member in members]
    rejected = 0
    for _ in range(200):
        flipped = bytearray(bundle)
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        try:
            verify_bundle(io.BytesIO(flipped), "it")
        except BundleError:
            rejected += 1
        else:
            assert [member.content for member in members_of(bytes(flipped))] == valid

    assert rejected > 150


def _flipped(members: list[Member]) -> bytes:
    return flipped_cubin(members)


def _other_kernel(members: list[Member]) -> bytes:
    other = key_for("another")
    name = f"v2/{other.digest[:2]}/{other.digest}.{other.toolchain}"
    member = members[0]
    member.info.name, member.info.size = name, len(make_file(other))
    return bundle_of([Member(member.info, make_file(other))])


@pytest.mark.parametrize(
    ("change", "message"),
    [(_flipped, "kernel.cubin: expected sha256"), (_other_kernel, "bundle that was verified, got")],
)
def test_a_file_that_changes_meanwhile_publishes_nothing_unverified(
    change: Attack, message: str, bundle: bytes, tmp_path: Path
) -> None:
    """Entries are verified again on import, even if the file is written meanwhile."""
    store = make_store(tmp_path)
    file = io.BytesIO(bundle)
    verified = verify_bundle(file, "it")
    file.seek(0)
    file.write(change(members_of(bundle)))
    file.truncate()
    with pytest.raises(BundleError, match=message):
        import_bundle(verified, store)
    assert list(store.entries()) == []


def test_an_entry_that_is_removed_is_not_exported(there: KernelStore) -> None:
    """An entry that is removed meanwhile is left out; if all are, it is an error."""
    entries = list(there.entries())
    entries[0].path.unlink()
    file = io.BytesIO()
    assert len(write_bundle(entries, file).entries) == len(FAMILIES) - 1
    there.clear()
    with pytest.raises(BundleError, match="expected kernels, got none, all were removed"):
        write_bundle(entries, io.BytesIO())
