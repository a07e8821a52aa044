"""Edits of a valid bundle: each function writes an invalid one."""

from __future__ import annotations

import copy
import gzip
import tarfile
from collections.abc import Callable
from typing import Any

from mlagen.cache.entry import FileDigest
from tests.cache import bundle_cases as cases
from tests.cache.bundle_cases import Member

Attack = Callable[[list[Member]], bytes]


def edit_index(change: Callable[[dict[str, Any]], None]) -> Attack:
    """Return an attack that changes the table of contents."""

    def attack(members: list[Member]) -> bytes:
        index = cases.index_in(members)
        change(index)
        return cases.bundle_of(cases.with_index(members, index))

    return attack


def edit_entry(**changes: Any) -> Attack:
    """Return an attack that changes the first entry of the table of contents."""
    return edit_index(lambda index: index["entries"][0].update(changes))


def edit_cubin(**changes: Any) -> Attack:
    """Return an attack that changes the cubin of the first entry in the table of contents."""
    return edit_index(lambda index: index["entries"][0]["files"]["kernel.cubin"].update(changes))


def edit_second(change: Callable[[Member], Member]) -> Attack:
    """Return an attack that changes the second member, which is the first file."""
    return lambda members: cases.bundle_of([members[0], change(members[1]), *members[2:]])


def edit_manifest(**changes: Any) -> Attack:
    """Return an attack that changes the first manifest and the table of contents alike."""
    return lambda members: cases.bundle_of(cases.with_manifest(members, **changes))


def with_file_name(name: str) -> Attack:
    """Return an attack that adds a manifest under that file name, and lists it."""

    def attack(members: list[Member]) -> bytes:
        index = cases.index_in(members)
        files = index["entries"][0]["files"]
        files[name] = files.pop("build.log")
        entry = members[1].info.name.rpartition("/")[0]
        first = cases.renamed(members[1], f"{entry}/{name}")
        place = sorted(files).index(name)
        index["entries"][0]["files"] = dict(sorted(files.items()))
        rest = [*members[2 : 2 + place], first, *members[2 + place :]]
        return cases.bundle_of(cases.with_index([members[0], *rest], index))

    return attack


def without_seal(members: list[Member]) -> bytes:
    """Include a manifest that was edited after it was sealed."""
    at = cases.place_of(members, "manifest.json")
    edited = members[at].content.replace(b'"created_by": "jit"', b'"created_by": "you"')
    assert edited != members[at].content
    changed = [*members[:at], cases.with_content(members[at], edited), *members[at + 1 :]]
    return cases.bundle_of(cases.reindexed(changed))


def flipped_cubin(members: list[Member]) -> bytes:
    """Flip a bit of a kernel."""
    at = cases.place_of(members, "kernel.cubin")
    content = bytearray(members[at].content)
    content[-1] ^= 1
    changed = [*members[:at], cases.with_content(members[at], bytes(content)), *members[at + 1 :]]
    return cases.bundle_of(changed)


def no_cubin(members: list[Member]) -> bytes:
    """Replace the cubin by other content in an otherwise valid entry."""
    at = cases.place_of(members, "kernel.cubin")
    text = cases.with_content(members[at], b"#!/bin/sh\n")
    changed = [*members[:at], text, *members[at + 1 :]]
    files = {
        member.info.name.rpartition("/")[2]: FileDigest.of(member.content)
        for member in changed[1 : cases.place_of(members, "manifest.json")]
    }
    return cases.bundle_of(cases.with_manifest(changed, files=files))


def claims(size: int) -> Callable[[Member], Member]:
    """Return a change that declares a size in the header, followed by as many zeros."""

    def change(member: Member) -> Member:
        return cases.with_content(member, bytes(size))

    return change


def first_is(name: str, content: bytes) -> Attack:
    """Return an attack that puts another member first."""

    def attack(members: list[Member]) -> bytes:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        return cases.bundle_of([Member(info, content), *members[1:]])

    return attack


def extended(kind: bytes) -> Attack:
    """Return an attack that adds an extension header, which other programs obey."""

    def attack(members: list[Member]) -> bytes:
        info = copy.copy(members[1].info)
        info.type, info.size = kind, 512
        raw = b"".join(
            member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
            for member, content in [(members[0].info, members[0].content), (info, bytes(512))]
        )
        return gzip.compress(raw + bytes(1024))

    return attack


def negative_size(members: list[Member]) -> bytes:
    """Write a negative size in the header, which the GNU format can encode."""
    block = bytearray(members[0].info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = b"\xff" * 12
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return gzip.compress(bytes(block) + bytes(1024))


def twice(members: list[Member]) -> bytes:
    """List and include one entry twice."""
    index = cases.index_in(members)
    index["entries"].append(index["entries"][0])
    index["total_bytes"] *= 2
    return cases.bundle_of([*cases.with_index(members, index), *members[1:]])
