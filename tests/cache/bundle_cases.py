"""Small bundles for tests, and helpers that modify them."""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mlagen.cache.bundle import INDEX
from mlagen.cache.bundle_reading import import_bundle, verify_bundle
from mlagen.cache.bundle_writing import write_bundle
from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from tests.cache.builds import CUBIN, TOOLCHAIN, make_build, make_store

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


def index_in(members: Sequence[Member]) -> dict[str, Any]:
    """Return the table of contents."""
    assert members[0].info.name == INDEX
    index: dict[str, Any] = json.loads(members[0].content)
    return index


def with_index(members: Sequence[Member], index: object) -> list[Member]:
    """Return the members under another table of contents."""
    return [with_content(members[0], json.dumps(index).encode()), *members[1:]]


def reindexed(members: Sequence[Member]) -> list[Member]:
    """Return the members with a table of contents that matches them."""
    index = index_in(members)
    contents = {member.info.name: member.content for member in members}
    for row in index["entries"]:
        for name, facts in row["files"].items():
            content = contents[f"e/{row['key']}/{row['toolchain']}/{name}"]
            facts |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sizes = [facts["size"] for row in index["entries"] for facts in row["files"].values()]
    return with_index(members, {**index, "total_bytes": sum(sizes)})


def place_of(members: Sequence[Member], name: str, nth: int = 0) -> int:
    """Return the index of the ``nth`` member whose file has that name."""
    places = [at for at, member in enumerate(members) if member.info.name.endswith(f"/{name}")]
    return places[nth]


def swapped(members: Sequence[Member], name: str) -> list[Member]:
    """Return the members with one file swapped between the two entries."""
    here, there = place_of(members, name, 0), place_of(members, name, 1)
    changed = list(members)
    changed[here] = with_content(members[here], members[there].content)
    changed[there] = with_content(members[there], members[here].content)
    return changed


def with_manifest(members: Sequence[Member], **changes: Any) -> list[Member]:
    """Return the members with a changed first manifest, resealed and listed with its new digest."""
    at = place_of(members, "manifest.json")
    manifest = replace(Manifest.from_json(members[at].content), **changes)
    changed = [*members[:at], with_content(members[at], manifest.to_json()), *members[at + 1 :]]
    return reindexed(changed)


def _read(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    assert file is not None, info
    return file.read()
