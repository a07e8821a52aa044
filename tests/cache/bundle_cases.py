"""Small bundles for tests, and helpers that modify them."""

from __future__ import annotations

import copy
import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlagen.cache.bundle import import_bundle, verify_bundle, write_bundle
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from tests.cache.builds import CUBIN, TOOLCHAIN, Parts, make_build, make_store

FAMILIES = ("mla_sm80", "combine")


class Member(NamedTuple):
    """A member of a tar."""

    info: tarfile.TarInfo
    content: bytes


def key_for(family: str, *, toolchain: str = TOOLCHAIN) -> CacheKey:
    """Return the key of a small kernel."""
    return CacheKey((("family", family), ("spec.arch", "sm_90a")), toolchain)


def filled_store(folder: Path, *families: str) -> KernelStore:
    """Return a store in ``folder/cache`` that holds a kernel of each family."""
    store = make_store(folder)
    for family in families or FAMILIES:
        store.find_or_build(key_for(family), lambda: make_build(CUBIN + family.encode()))  # noqa: B023 - called at once
    return store


def bundle_bytes(store: KernelStore) -> bytes:
    """Return a bundle of all entries of a store."""
    file = io.BytesIO()
    write_bundle(list(store.entries()), file)
    return file.getvalue()


def import_(bundle: bytes, store: KernelStore, *, dry_run: bool = False) -> list[str]:
    """Verify and import a bundle."""
    return import_bundle(verify_bundle(io.BytesIO(bundle), "it"), store, dry_run=dry_run)


def members_of(bundle: bytes) -> list[Member]:
    """Return the members of a bundle."""
    with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
        return [Member(info, _read(tar, info)) for info in tar]


def bundle_of(members: Sequence[Member], *, format: int = tarfile.USTAR_FORMAT) -> bytes:  # noqa: A002 - the name in tarfile
    """Return a bundle of these members, valid or not."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return gzip.compress(file.getvalue(), mtime=0)


def renamed(member: Member, name: str) -> Member:
    """Return a member under another name."""
    info = copy.copy(member.info)
    info.name = name
    return Member(info, member.content)


def of_kind(member: Member, kind: bytes, target: str = "") -> Member:
    """Return a member of another kind, under the same name."""
    info = copy.copy(member.info)
    info.type, info.linkname, info.size = kind, target, 0
    return Member(info, b"")


def with_content(member: Member, content: bytes) -> Member:
    """Return a member with other content, and the matching size in its header."""
    info = copy.copy(member.info)
    info.size = len(content)
    return Member(info, content)


def with_parts(member: Member, change: Callable[[Parts], bytes]) -> Member:
    """Return a member with a changed entry."""
    return with_content(member, change(Parts.of(member.content)))


def with_manifest(member: Member, **changes: Any) -> Member:
    """Return a member with a changed manifest, under a valid digest."""
    return with_parts(member, lambda parts: parts.sealed(**changes))


def _read(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    assert file is not None, info
    return file.read()
