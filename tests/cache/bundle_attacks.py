"""Attacks on bundles: each modifies a valid bundle, with the expected rejection."""

from __future__ import annotations

import gzip
import struct
import tarfile

from mlagen.cache.bundle import INDEX, INDEX_MAX_BYTES
from mlagen.cache.entry import MANIFEST_MAX_BYTES
from tests.cache import bundle_cases as cases
from tests.cache.bundle_edits import (
    Attack,
    claims,
    edit_cubin,
    edit_entry,
    edit_index,
    edit_manifest,
    edit_second,
    extended,
    first_is,
    flipped_cubin,
    negative_size,
    no_cubin,
    twice,
    with_file_name,
    without_seal,
)

ATTACKS: dict[str, tuple[Attack, str]] = {
    # members of the tar
    "a name that climbs": (
        edit_second(lambda member: cases.renamed(member, "../../evil")),
        r"expected the member e/\w+/nvrtc-13.5.37/build.log, got '../../evil'",
    ),
    "an absolute name": (
        edit_second(lambda member: cases.renamed(member, "/etc/passwd")),
        "expected the member e/.*, got '/etc/passwd'",
    ),
    "a symbolic link": (
        edit_second(lambda member: cases.of_kind(member, tarfile.SYMTYPE, "/etc/passwd")),
        "build.log: expected a regular file, got a symbolic link",
    ),
    "a hard link": (
        edit_second(lambda member: cases.of_kind(member, tarfile.LNKTYPE, "/etc/passwd")),
        "build.log: expected a regular file, got a hard link",
    ),
    "a device": (
        edit_second(lambda member: cases.of_kind(member, tarfile.CHRTYPE)),
        "build.log: expected a regular file, got a device",
    ),
    "a FIFO": (
        edit_second(lambda member: cases.of_kind(member, tarfile.FIFOTYPE)),
        "build.log: expected a regular file, got a FIFO",
    ),
    "a folder": (
        edit_second(lambda member: cases.of_kind(member, tarfile.DIRTYPE)),
        "build.log: expected a regular file, got a folder",
    ),
    "a long name of GNU": (extended(tarfile.GNUTYPE_LONGNAME), "expected a regular file, got type"),
    "attributes of PAX": (extended(tarfile.XHDTYPE), "expected a regular file, got type"),
    "a sparse file": (extended(tarfile.GNUTYPE_SPARSE), "expected a regular file, got type"),
    "a member twice": (
        lambda members: cases.bundle_of([*members[:2], members[1], *members[2:]]),
        "expected the member e/.*/kernel.cu, got 'e/.*/build.log'",
    ),
    "an extra member": (
        lambda members: cases.bundle_of([*members, cases.renamed(members[1], "e/extra")]),
        "expected the end after the last member, got more",
    ),
    "a missing member": (
        lambda members: cases.bundle_of(members[:-1]),
        "expected the member e/.*/manifest.json, got the end",
    ),
    "members in another order": (
        lambda members: cases.bundle_of([members[0], members[2], members[1], *members[3:]]),
        "expected the member e/.*/build.log, got 'e/.*/kernel.cu'",
    ),
    "a member larger than announced": (
        edit_second(claims(50 << 20)),
        "build.log: expected at most 0 bytes, got 52428800",
    ),
    "a member smaller than announced": (
        lambda members: cases.bundle_of(
            [*members[:2], cases.with_content(members[2], b""), *members[3:]]
        ),
        "kernel.cu: expected 10 bytes, got 0",
    ),
    "a size below zero": (negative_size, "bundle.json: expected at most 33554432 bytes, got -"),
    # the table of contents
    "no table of contents": (
        lambda members: cases.bundle_of(members[1:]),
        "expected the member bundle.json, got 'e/",
    ),
    "no members": (lambda _: cases.bundle_of([]), "expected the member bundle.json, got the end"),
    "a table of contents too large": (
        first_is(INDEX, bytes(INDEX_MAX_BYTES + 1)),
        f"bundle.json: expected at most {INDEX_MAX_BYTES} bytes, got {INDEX_MAX_BYTES + 1}",
    ),
    "a table of contents of noise": (
        first_is(INDEX, b"\xff\xfe{"),
        "bundle.json: expected a table of contents, got",
    ),
    "a table of contents without end": (
        first_is(INDEX, b"[" * 100_000),
        "bundle.json: expected a table of contents, got",
    ),
    "a list for a table of contents": (
        first_is(INDEX, b"[1]"),
        "bundle.json: expected a table of contents, got",
    ),
    "an unknown schema": (
        edit_index(lambda index: index.update(schema=2)),
        "bundle.json: expected schema 1, got 2",
    ),
    "another total": (
        edit_index(lambda index: index.update(total_bytes=1)),
        "bundle.json: expected [0-9]+ bytes in total, got 1",
    ),
    "an announced key that climbs": (edit_entry(key="../" * 20), "key: expected 64 lower-case hex"),
    "an announced compiler that climbs": (edit_entry(toolchain=".."), "toolchain: expected a name"),
    "an announced folder": (edit_entry(toolchain="a/b"), "toolchain: expected a name, got 'a/b'"),
    "an announced file that climbs": (with_file_name("../../x"), "file: expected a plain name"),
    "an announced absolute file": (with_file_name("/x"), "file: expected a plain name, got '/x'"),
    "an announced hidden file": (with_file_name(".x"), "file: expected a plain name, got '.x'"),
    "an entry without a kernel": (edit_entry(files={}), "expected a manifest.json, got"),
    "another target": (edit_entry(arch="sm_80"), "expected '.*' for 'sm_80', got"),
    "another family": (edit_entry(family="x"), "expected 'x' for 'sm_90a', got"),
    "a size of true": (edit_cubin(size=True), "kernel.cubin: expected a size and a sha256, got"),
    "a size that is not a number": (edit_cubin(size="9"), "expected a (table of contents|size)"),
    "an announced size below zero": (edit_cubin(size=-1), "expected a size and a sha256, got"),
    "an announced size beyond reason": (
        edit_cubin(size=1 << 40),
        "expected at most 67108864 bytes, got 1099",
    ),
    "a manifest that no store would read": (
        edit_manifest(created={"host": "x" * MANIFEST_MAX_BYTES}),
        f"manifest.json: expected at most {MANIFEST_MAX_BYTES} bytes, got 1049",
    ),
    "a digest that is not a string": (edit_cubin(sha256=5), "expected a size and a sha256, got"),
    "an entry twice": (twice, "bundle.json: expected each entry once, got a duplicate"),
    # contents
    "a flipped bit": (flipped_cubin, "kernel.cubin: expected sha256 .*, got"),
    "another digest": (
        edit_cubin(sha256="0" * 64),
        f"kernel.cubin: expected sha256 {'0' * 64}, got",
    ),
    "swapped kernels": (
        lambda members: cases.bundle_of(cases.swapped(members, "kernel.cubin")),
        "kernel.cubin: expected [0-9]+ bytes, got|expected at most [0-9]+ bytes, got",
    ),
    "swapped kernels, announced so": (
        lambda members: cases.bundle_of(cases.reindexed(cases.swapped(members, "kernel.cubin"))),
        "manifest.json: expected the files of bundle.json, got others",
    ),
    "the manifest of another key": (
        lambda members: cases.bundle_of(cases.reindexed(cases.swapped(members, "manifest.json"))),
        "manifest.json: expected [0-9a-f]{64} by nvrtc-13.5.37, got [0-9a-f]{64} by",
    ),
    "a manifest of another compiler": (
        edit_manifest(toolchain="nvrtc-12.8.1"),
        "manifest.json: expected .* by nvrtc-13.5.37, got .* by nvrtc-12.8.1",
    ),
    "key_fields of another key": (
        edit_manifest(key_fields=(("family", "mla_sm80"), ("spec.arch", "sm_80"))),
        "manifest.json: expected key_fields of [0-9a-f]{64}, got of [0-9a-f]{64}",
    ),
    "key fields that are not strings": (
        edit_manifest(key_fields=(("family", 1),)),
        "manifest.json: expected a manifest, got ",
    ),
    "facts that are a list": (edit_manifest(facts=[]), "manifest.json: expected a manifest, got "),
    "a manifest of another schema": (edit_manifest(schema=0), "expected schema 1, got 0"),
    "a manifest edited after it was sealed": (without_seal, "expected the content of its seal"),
    "a kernel that is not ELF": (no_cubin, r"kernel.cubin: expected an ELF file, got b'#!/b'"),
    # the file
    "an empty file": (lambda _: b"", "expected the member bundle.json, got the end"),
    "no gzip": (lambda _: b"kernels" * 100, "expected a whole gzip file, got Not a gzipped file"),
    "no tar": (lambda _: gzip.compress(b"kernels" * 100), "expected the member .*, got no tar"),
    "a tar that ends early": (
        lambda members: gzip.compress(gzip.decompress(cases.bundle_of(members))[:700]),
        "expected [0-9]+ bytes more, got the end",
    ),
    "a gzip that ends early": (
        lambda members: cases.bundle_of(members)[:-20],
        "expected a whole gzip file, got",
    ),
    "a gzip without its checksum": (
        lambda members: cases.bundle_of(members)[:-8],
        "expected a whole gzip file, got Compressed file ended",
    ),
    "a wrong checksum": (
        lambda members: cases.bundle_of(members)[:-8] + struct.pack("<II", 1, 1),
        "expected a whole gzip file, got (CRC check failed|Incorrect length)",
    ),
    "garbage behind": (
        lambda members: cases.bundle_of(members) + b"garbage",
        "expected a whole gzip file, got Not a gzipped file",
    ),
    "another gzip behind": (
        lambda members: cases.bundle_of(members) + gzip.compress(b"more"),
        "expected the end after the last member, got more",
    ),
    "endless zeros behind": (
        lambda members: cases.bundle_of(members) + gzip.compress(bytes(50 << 20)),
        "expected the end after the last member, got more",
    ),
}
