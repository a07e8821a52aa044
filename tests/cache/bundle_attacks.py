"""Attacks on bundles: each edits a valid bundle, and has the expected rejection."""

from __future__ import annotations

import copy
import gzip
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from mlagen.cache.file import CUBIN, ENTRY_MAX_BYTES, FileDigest
from tests.cache import bundle_cases as cases
from tests.cache.builds import Parts, make_build
from tests.cache.bundle_cases import Member, bundle_of

Attack = Callable[[list[Member]], bytes]
MIB = 1 << 20


def edited(change: Callable[[list[Member]], Sequence[Member]]) -> Attack:
    """Return an attack that changes the members."""
    return lambda members: bundle_of(change(members))


def first(change: Callable[[Member], Member]) -> Attack:
    """Return an attack that changes the first member."""
    return edited(lambda members: [change(members[0]), *members[1:]])


def of_kind(kind: bytes) -> Attack:
    """Return an attack that changes the kind of the first member."""
    return first(lambda member: cases.of_kind(member, kind, "/etc/passwd"))


def named(name: str) -> Attack:
    """Return an attack that renames the first member; ``{name}`` is its own name."""
    return first(lambda member: cases.renamed(member, name.format(name=member.info.name)))


def manifest(**changes: Any) -> Attack:
    """Return an attack that changes the first manifest, under a valid digest."""
    return first(lambda member: cases.with_manifest(member, **changes))


def parts(change: Callable[[Parts], bytes]) -> Attack:
    """Return an attack that changes the parts of the first entry."""
    return first(lambda member: cases.with_parts(member, change))


def flipped_cubin(members: list[Member]) -> bytes:
    """Flip a bit of a kernel."""
    own = Parts.of(members[0].content)
    place = members[0].content.index(own.cubin) + len(own.cubin) - 1
    content = bytearray(members[0].content)
    content[place] ^= 1
    return bundle_of([cases.with_content(members[0], bytes(content)), *members[1:]])


def no_elf(own: Parts) -> bytes:
    """Replace the cubin by other content in an otherwise valid entry."""
    script = b"#!/bin/sh\n"
    files = {CUBIN: FileDigest.of(script), "kernel.cu": FileDigest.of(b"")}
    packed = zlib.compress(b"")
    return own._replace(cubin=script, packed=packed).sealed(files=files, packed_bytes=len(packed))


def swapped(members: list[Member]) -> list[Member]:
    """Exchange the contents of two entries."""
    one, other = members
    return [
        cases.with_content(one, other.content),
        cases.with_content(other, one.content),
    ]


def extended(kind: bytes) -> Attack:
    """Return an attack that adds an extension header, which other programs obey."""

    def attack(members: list[Member]) -> bytes:
        info = copy.copy(members[0].info)
        info.type, info.size = kind, 512
        return gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + bytes(512 + 1024))

    return attack


def sized(field: bytes) -> Attack:
    """Return an attack that writes another size into the header, as the GNU format encodes it."""

    def attack(members: list[Member]) -> bytes:
        block = bytearray(members[0].info.tobuf(tarfile.USTAR_FORMAT))
        block[124:136] = field
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return gzip.compress(bytes(block) + bytes(1024))

    return attack


def cut(change: Callable[[bytes], bytes]) -> Attack:
    """Return an attack that changes the bytes of the file."""
    return lambda members: change(bundle_of(members))


def end_early(bundle: bytes) -> bytes:
    """End the tar in its last entry."""
    return gzip.compress(gzip.decompress(bundle)[: 512 + 700])


KINDS = {
    "a symbolic link": tarfile.SYMTYPE,
    "a hard link": tarfile.LNKTYPE,
    "a device": tarfile.CHRTYPE,
    "a FIFO": tarfile.FIFOTYPE,
    "a folder": tarfile.DIRTYPE,
}
MORE = "expected the end of a tar after the last member, got another"
FILE, WRONG = "expected a regular file, got ", "manifest: expected one of an entry, got "
NAME, GZIP = "expected that of", "expected a whole gzip file, got"
TOO_LARGE = f"expected at most {ENTRY_MAX_BYTES} bytes, got"
FACTS = make_build().facts
ATTACKS: dict[str, tuple[Attack, str]] = {
    # members of the tar
    **{name: (of_kind(kind), f"{FILE}{name}") for name, kind in KINDS.items()},
    "a name that climbs": (named("../../evil"), f"evil: manifest: {NAME} evil, got that of"),
    "a name that climbs to its own": (named("../{name}"), "expected the member v2/.*, got '../v2"),
    "an absolute name": (named("/{name}"), "expected the member v2/.*, got '/v2/"),
    "another folder": (named("v2/zz/{name}"), "expected the member v2/.*, got 'v2/zz/"),
    "a long name of GNU": (extended(tarfile.GNUTYPE_LONGNAME), f"{FILE}type"),
    "attributes of PAX": (extended(tarfile.XHDTYPE), f"{FILE}type"),
    "a sparse file": (extended(tarfile.GNUTYPE_SPARSE), f"{FILE}type"),
    "an entry twice": (
        edited(lambda members: [*members, members[0]]),
        "expected each entry once, got a duplicate",
    ),
    "an extra member": (
        edited(lambda members: [*members, cases.with_content(members[1], b"extra")]),
        "expected the file of an entry, got one that begins b'extra'",
    ),
    "a size below zero": (sized(b"\xff" * 12), f"{TOO_LARGE} -1"),
    "a size beyond reason": (sized(b"77777777777\0"), f"{TOO_LARGE} 8589934591"),
    "a member that is too large": (
        first(lambda member: cases.with_content(member, bytes(ENTRY_MAX_BYTES + 1))),
        f"{TOO_LARGE} {ENTRY_MAX_BYTES + 1}",
    ),
    # contents
    "a flipped bit": (flipped_cubin, "kernel.cubin: expected sha256 .*, got"),
    "swapped entries": (edited(swapped), f"manifest: {NAME}"),
    "a key that climbs": (manifest(key="../" * 20), "expected key_fields of .*, got of"),
    "a compiler that climbs": (manifest(toolchain="../../evil"), f"manifest: {NAME}"),
    "another compiler": (manifest(toolchain="nvrtc-12.8.1"), f"manifest: {NAME}"),
    "key_fields of another key": (
        manifest(key_fields=(("family", "mla_sm80"), ("spec.arch", "sm_80"))),
        "manifest: expected key_fields of [0-9a-f]{64}, got of [0-9a-f]{64}",
    ),
    "facts of no kernel": (manifest(facts={"kernel": {}, "compile_ms": 1.5}), WRONG),
    "a number that JSON lacks": (manifest(facts={**FACTS, "compile_ms": float("nan")}), WRONG),
    "a kernel that is not ELF": (parts(no_elf), r"kernel.cubin: expected an ELF .* b'#!/b'"),
    "a bomb": (
        parts(
            lambda own: own._replace(packed=(bomb := zlib.compress(bytes(60 * MIB)))).sealed(
                packed_bytes=len(bomb)
            )
        ),
        "expected 10 bytes in compressed files, got others",
    ),
    # the file
    "an empty file": (lambda _: b"", MORE),
    "no gzip": (lambda _: b"kernels", f"{GZIP} Not a gzipped file"),
    "no tar": (lambda _: gzip.compress(b"kernels" * 100), "expected a member, got no tar"),
    "a tar without its end": (cut(lambda b: gzip.compress(gzip.decompress(b)[:-10240])), MORE),
    "a tar that ends early": (cut(end_early), "manifest: expected the content of its digest"),
    "a gzip that ends early": (cut(lambda b: b[:-20]), GZIP),
    "a gzip without its checksum": (cut(lambda b: b[:-8]), f"{GZIP} Compressed file ended"),
    "a wrong checksum": (
        cut(lambda bundle: bundle[:-8] + struct.pack("<II", 1, 1)),
        f"{GZIP} (CRC check failed|Incorrect length)",
    ),
    "garbage behind": (cut(lambda b: b + b"garbage"), f"{GZIP} Not a gzipped file"),
    "another gzip behind": (cut(lambda bundle: bundle + gzip.compress(b"more")), MORE),
    "endless zeros behind": (cut(lambda b: b + gzip.compress(bytes(50 * MIB))), MORE),
}
