"""Attacks on bundles: each edits a valid bundle, and has the expected rejection."""

from __future__ import annotations

import copy
import gzip
import struct
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

from mlagen.cache.bundle import INDEX, INDEX_MAX_BYTES
from mlagen.cache.entry import MANIFEST_MAX_BYTES, FileDigest
from tests.cache import bundle_cases as cases
from tests.cache.builds import make_build
from tests.cache.bundle_cases import Member, bundle_of

Attack = Callable[[list[Member]], bytes]
MIB = 1 << 20


def edited(change: Callable[[list[Member]], Sequence[Member]]) -> Attack:
    """Return an attack that changes the members."""
    return lambda members: bundle_of(change(members))


def second(change: Callable[[Member], Member]) -> Attack:
    """Return an attack that changes the second member, which is the first file."""
    return edited(lambda members: [members[0], change(members[1]), *members[2:]])


def of_kind(kind: bytes) -> Attack:
    """Return an attack that changes the kind of the second member."""
    return second(lambda member: cases.of_kind(member, kind, "/etc/passwd"))


def first(content: bytes) -> Attack:
    """Return an attack that replaces the table of contents."""
    return edited(lambda members: [cases.with_content(members[0], content), *members[1:]])


def replaced(members: list[Member], name: str, change: Callable[[bytes], bytes]) -> list[Member]:
    """Return the members with another content of the first file of that name."""
    at = cases.place_of(members, name)
    content = change(members[at].content)
    assert content != members[at].content
    return [*members[:at], cases.with_content(members[at], content), *members[at + 1 :]]


def index(change: Callable[[dict[str, Any]], object]) -> Attack:
    """Return an attack that changes the table of contents."""

    def attack(members: list[Member]) -> bytes:
        table = cases.index_in(members)
        change(table)
        return bundle_of(cases.with_index(members, table))

    return attack


def entry(**changes: Any) -> Attack:
    """Return an attack that changes the first entry of the table of contents."""
    return index(lambda table: table["entries"][0].update(changes))


def cubin(**changes: Any) -> Attack:
    """Return an attack that changes the cubin of the first entry in the table of contents."""
    return index(lambda table: table["entries"][0]["files"]["kernel.cubin"].update(changes))


def manifest(**changes: Any) -> Attack:
    """Return an attack that changes the first manifest and the table of contents alike."""
    return edited(lambda members: cases.with_manifest(members, **changes))


def file_name(name: str) -> Attack:
    """Return an attack that adds a manifest under that file name, and lists it."""

    def attack(members: list[Member]) -> bytes:
        table = cases.index_in(members)
        files = table["entries"][0]["files"]
        files[name] = files.pop("build.log")
        folder = members[1].info.name.rpartition("/")[0]
        place = sorted(files).index(name)
        table["entries"][0]["files"] = dict(sorted(files.items()))
        rest = members[2:]
        rest.insert(place, cases.renamed(members[1], f"{folder}/{name}"))
        return bundle_of(cases.with_index([members[0], *rest], table))

    return attack


def flipped_cubin(members: list[Member]) -> bytes:
    """Flip a bit of a kernel."""
    flip = lambda content: content[:-1] + bytes([content[-1] ^ 1])  # noqa: E731
    return bundle_of(replaced(members, "kernel.cubin", flip))


def without_seal(members: list[Member]) -> list[Member]:
    """Include a manifest that was edited after it was sealed."""
    edit = (b'"created_by": "jit"', b'"created_by": "you"')
    return cases.reindexed(replaced(members, "manifest.json", lambda text: text.replace(*edit)))


def no_cubin(members: list[Member]) -> list[Member]:
    """Replace the cubin by other content in an otherwise valid entry."""
    changed = replaced(members, "kernel.cubin", lambda _: b"#!/bin/sh\n")
    files = {
        member.info.name.rpartition("/")[2]: FileDigest.of(member.content)
        for member in changed[1 : cases.place_of(members, "manifest.json")]
    }
    return cases.with_manifest(changed, files=files)


def swapped(name: str, *, listed: bool = False) -> Attack:
    """Return an attack that swaps a file of two entries, and lists the swap."""
    relist: Callable[[list[Member]], Sequence[Member]] = cases.reindexed if listed else list
    return edited(lambda members: relist(cases.swapped(members, name)))


def extended(kind: bytes) -> Attack:
    """Return an attack that adds an extension header, which other programs obey."""

    def attack(members: list[Member]) -> bytes:
        info = copy.copy(members[1].info)
        info.type, info.size = kind, 512
        raw = b"".join(
            member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
            for member, content in [members[0], (info, bytes(512))]
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


def twice(members: list[Member]) -> list[Member]:
    """List and include one entry twice."""
    table = cases.index_in(members)
    table["entries"].append(table["entries"][0])
    table["total_bytes"] *= 2
    return [*cases.with_index(members, table), *members[1:]]


def cut(change: Callable[[bytes], bytes]) -> Attack:
    """Return an attack that changes the bytes of the file."""
    return lambda members: change(bundle_of(members))


KINDS = {
    "a symbolic link": tarfile.SYMTYPE,
    "a hard link": tarfile.LNKTYPE,
    "a device": tarfile.CHRTYPE,
    "a FIFO": tarfile.FIFOTYPE,
    "a folder": tarfile.DIRTYPE,
}
TABLE, MORE = (
    "expected a table of contents, got",
    "expected the end after the last member, got more",
)
FACTS, FILE = "expected a size and a sha256, got", "expected a regular file, got "
WRONG = "manifest.json: expected a manifest, got "
OTHER_KEY = (("family", "mla_sm80"), ("spec.arch", "sm_80"))
ATTACKS: dict[str, tuple[Attack, str]] = {
    # members of the tar
    **{name: (of_kind(kind), f"build.log: {FILE}{name}") for name, kind in KINDS.items()},
    "a name that climbs": (
        second(lambda member: cases.renamed(member, "../../evil")),
        r"expected the member e/\w+/nvrtc-13.5.37/build.log, got '../../evil'",
    ),
    "an absolute name": (
        second(lambda member: cases.renamed(member, "/etc/passwd")),
        "expected the member e/.*, got '/etc/passwd'",
    ),
    "a long name of GNU": (extended(tarfile.GNUTYPE_LONGNAME), f"{FILE}type"),
    "attributes of PAX": (extended(tarfile.XHDTYPE), f"{FILE}type"),
    "a sparse file": (extended(tarfile.GNUTYPE_SPARSE), f"{FILE}type"),
    "a member twice": (
        edited(lambda members: [*members[:2], *members[1:]]),
        "expected the member e/.*/kernel.cu, got 'e/.*/build.log'",
    ),
    "an extra member": (
        edited(lambda members: [*members, cases.renamed(members[1], "e/extra")]),
        MORE,
    ),
    "a missing member": (
        edited(lambda members: members[:-1]),
        "expected the member e/.*/manifest.json, got the end",
    ),
    "members in another order": (
        edited(lambda members: [members[0], members[2], members[1], *members[3:]]),
        "expected the member e/.*/build.log, got 'e/.*/kernel.cu'",
    ),
    "a member larger than announced": (
        second(lambda member: cases.with_content(member, bytes(50 * MIB))),
        "build.log: expected at most 0 bytes, got 52428800",
    ),
    "a member smaller than announced": (
        edited(lambda members: replaced(members, "kernel.cu", lambda _: b"")),
        "kernel.cu: expected 10 bytes, got 0",
    ),
    "a size below zero": (negative_size, f"{INDEX}: expected at most {32 * MIB} bytes, got -"),
    # the table of contents
    "no table of contents": (edited(lambda m: m[1:]), f"expected the member {INDEX}, got 'e/"),
    "no members": (edited(lambda _: []), f"expected the member {INDEX}, got the end"),
    "a table of contents too large": (
        first(bytes(INDEX_MAX_BYTES + 1)),
        f"{INDEX}: expected at most {INDEX_MAX_BYTES} bytes, got {INDEX_MAX_BYTES + 1}",
    ),
    "a table of contents of noise": (first(b"\xff\xfe{"), f"{INDEX}: {TABLE}"),
    "a table of contents without end": (first(b"[" * 100_000), f"{INDEX}: {TABLE}"),
    "a list for a table of contents": (first(b"[1]"), f"{INDEX}: {TABLE}"),
    "an unknown schema": (index(lambda table: table.update(schema=2)), "expected schema 1, got 2"),
    "another total": (
        index(lambda t: t.update(total_bytes=1)),
        "expected .* bytes in total, got 1",
    ),
    "an announced key that climbs": (entry(key="../" * 20), "key: expected 64 lower-case hex"),
    "an announced compiler that climbs": (entry(toolchain=".."), "toolchain: expected a name"),
    "an announced folder": (entry(toolchain="a/b"), "toolchain: expected a name, got 'a/b'"),
    "an announced file that climbs": (file_name("../../x"), "file: expected a plain name"),
    "an announced absolute file": (file_name("/x"), "file: expected a plain name, got '/x'"),
    "an announced hidden file": (file_name(".x"), "file: expected a plain name, got '.x'"),
    "an entry without files": (entry(files={}), "expected a manifest.json, got"),
    "an entry without a kernel": (
        index(lambda table: table["entries"][0]["files"].pop("kernel.cubin")),
        "expected a kernel.cubin, got",
    ),
    "another target": (entry(arch="sm_80"), "expected '.*' for 'sm_80', got"),
    "another family": (entry(family="x"), "expected 'x' for 'sm_90a', got"),
    "a size of true": (cubin(size=True), f"kernel.cubin: {FACTS}"),
    "a size that is not a number": (cubin(size="9"), "expected a (table of contents|size)"),
    "an announced size below zero": (cubin(size=-1), FACTS),
    "an announced size beyond reason": (cubin(size=1 << 40), f"at most {64 * MIB} bytes, got 1099"),
    "a manifest that no store would read": (
        manifest(created={"host": "x" * MANIFEST_MAX_BYTES}),
        f"manifest.json: expected at most {MANIFEST_MAX_BYTES} bytes, got 1049",
    ),
    "a digest that is not a string": (cubin(sha256=5), FACTS),
    "an entry twice": (edited(twice), f"{INDEX}: expected each entry once, got a duplicate"),
    # contents
    "a flipped bit": (flipped_cubin, "kernel.cubin: expected sha256 .*, got"),
    "another digest": (cubin(sha256="0" * 64), f"kernel.cubin: expected sha256 {'0' * 64}, got"),
    "swapped kernels": (
        swapped("kernel.cubin"),
        "kernel.cubin: expected [0-9]+ bytes, got|expected at most [0-9]+ bytes, got",
    ),
    "swapped kernels, announced so": (
        swapped("kernel.cubin", listed=True),
        "manifest.json: expected the files of bundle.json, got others",
    ),
    "the manifest of another key": (
        swapped("manifest.json", listed=True),
        "manifest.json: expected [0-9a-f]{64} by nvrtc-13.5.37, got [0-9a-f]{64} by",
    ),
    "a manifest of another compiler": (
        manifest(toolchain="nvrtc-12.8.1"),
        "manifest.json: expected .* by nvrtc-13.5.37, got .* by nvrtc-12.8.1",
    ),
    "key_fields of another key": (
        manifest(key_fields=OTHER_KEY),
        "manifest.json: expected key_fields of [0-9a-f]{64}, got of [0-9a-f]{64}",
    ),
    "key fields that are not strings": (manifest(key_fields=(("family", 1),)), WRONG),
    "facts that are a list": (manifest(facts=[]), WRONG),
    "facts without resources": (manifest(facts={"kernel": {}, "compile_ms": 1.5}), WRONG),
    "facts with a number that JSON lacks": (
        manifest(facts={**make_build().facts, "compile_ms": float("nan")}),
        WRONG,
    ),
    "a manifest of another schema": (manifest(schema=0), "expected schema 1, got 0"),
    "a manifest edited after it was sealed": (
        edited(without_seal),
        "expected the content of its seal",
    ),
    "a kernel that is not ELF": (edited(no_cubin), r"kernel.cubin: expected an ELF .* b'#!/b'"),
    # the file
    "an empty file": (lambda _: b"", f"expected the member {INDEX}, got the end"),
    "no gzip": (lambda _: b"kernels", "expected a whole gzip file, got Not a gzipped file"),
    "no tar": (lambda _: gzip.compress(b"kernels" * 100), "expected the member .*, got no tar"),
    "a tar that ends early": (
        cut(lambda bundle: gzip.compress(gzip.decompress(bundle)[:700])),
        "expected [0-9]+ bytes more, got the end",
    ),
    "a gzip that ends early": (cut(lambda b: b[:-20]), "expected a whole gzip file, got"),
    "a gzip without its checksum": (cut(lambda b: b[:-8]), "got Compressed file ended"),
    "a wrong checksum": (
        cut(lambda bundle: bundle[:-8] + struct.pack("<II", 1, 1)),
        "expected a whole gzip file, got (CRC check failed|Incorrect length)",
    ),
    "garbage behind": (cut(lambda b: b + b"garbage"), "gzip file, got Not a gzipped file"),
    "another gzip behind": (cut(lambda bundle: bundle + gzip.compress(b"more")), MORE),
    "endless zeros behind": (cut(lambda b: b + gzip.compress(bytes(50 * MIB))), MORE),
}
