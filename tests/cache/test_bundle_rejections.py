"""Hostile and broken bundles: each is rejected before any entry is published."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from mlagen.cache.bundle import BundleError
from mlagen.cache.bundle_reading import import_bundle, verify_bundle
from mlagen.cache.store import KernelStore
from tests.cache import bundle_cases as cases
from tests.cache.builds import make_store, tree
from tests.cache.bundle_attacks import ATTACKS, Attack, flipped_cubin
from tests.cache.bundle_cases import Member, import_


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Member]:
    """Return the members of a valid bundle of two entries."""
    return cases.members_of(
        cases.bundle_bytes(cases.filled_store(tmp_path_factory.mktemp("valid")))
    )


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store with another kernel."""
    return cases.filled_store(tmp_path, "other")


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Return every path below a folder, with the content of files."""
    paths = {name: folder / name for name in tree(folder)}
    return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}


@pytest.mark.parametrize(("attack", "message"), ATTACKS.values(), ids=ATTACKS)
def test_a_bad_bundle_publishes_nothing(
    attack: Attack, message: str, members: list[Member], store: KernelStore, tmp_path: Path
) -> None:
    """It is rejected with the reason in one line, and the cache stays the same, byte for byte."""
    bundle = attack(members)
    before = content_of(tmp_path)
    with pytest.raises(BundleError, match=rf"^bundle: .*({message})") as caught:
        import_(bundle, store)
    assert str(caught.value).endswith(": it")
    assert "\n" not in str(caught.value)
    assert caught.value.path == Path("it")
    assert content_of(tmp_path) == before


def test_bundles_above_the_size_limit_are_rejected(members: list[Member]) -> None:
    """The size limit is exact, and applies to the declared sizes."""
    bundle, total = cases.bundle_of(members), cases.index_in(members)["total_bytes"]
    enough = verify_bundle(io.BytesIO(bundle), "it", max_bytes=total)
    assert enough.content_bytes == total
    with pytest.raises(BundleError, match=f"expected at most {total - 1} bytes in total, got"):
        verify_bundle(io.BytesIO(bundle), "it", max_bytes=total - 1)


def test_another_digest_than_expected_is_rejected_first() -> None:
    """A bundle with another digest than the pinned one is not even unpacked."""
    with pytest.raises(BundleError, match=f"expected sha256 {'0' * 64}, got [0-9a-f]{{64}}: it"):
        verify_bundle(io.BytesIO(b"no gzip"), "it", expect_sha256="0" * 64)


def test_every_truncation_is_rejected(
    members: list[Member], store: KernelStore, tmp_path: Path
) -> None:
    """Every truncation is rejected, and publishes nothing."""
    bundle, before = cases.bundle_of(members), content_of(tmp_path)
    for length in range(0, len(bundle), 7):
        with pytest.raises(BundleError):
            import_(bundle[:length], store)
    assert content_of(tmp_path) == before


def test_a_flipped_bit_is_rejected_or_changes_nothing(
    members: list[Member], tmp_path: Path
) -> None:
    """Of 200 single bit flips, the accepted ones change no content."""
    bundle, chance = cases.bundle_of(members), random.Random(6)  # noqa: S311 - no secret
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
            assert [member.content for member in cases.members_of(bytes(flipped))] == valid

    assert rejected > 150
    assert tree(tmp_path) == []


def test_a_file_that_changes_meanwhile_publishes_nothing_unverified(
    members: list[Member], tmp_path: Path
) -> None:
    """Entries are verified again on import, even if the file is written meanwhile."""
    store = make_store(tmp_path)
    file = io.BytesIO(cases.bundle_of(members))
    bundle = verify_bundle(file, "it")
    file.seek(0)
    file.write(flipped_cubin(members))
    file.truncate()
    with pytest.raises(BundleError, match=r"kernel.cubin: expected sha256"):
        import_bundle(bundle, store)
    assert list(store.entries()) == []
