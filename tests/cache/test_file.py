"""The file of an entry: its manifest, its parts, and every damage of them."""

from __future__ import annotations

import copy
import json
import os
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

import mlagen
from mlagen.cache.file import (
    CUBIN,
    ENTRY_MAX_BYTES,
    HEAD_BYTES,
    DamageError,
    FileDigest,
    Manifest,
    decode,
    decode_all,
    decode_manifest,
    encode,
    entry_name,
    file_of,
    parse_name,
)
from mlagen.cache.folder import VERSION
from mlagen.cache.key import SCHEMA
from tests.cache import builds
from tests.cache.builds import Parts, make_build

KEY = builds.make_key()
BUILD = make_build()
MANIFEST, FILE = encode(KEY, BUILD, created_by="jit")


def test_manifest_has_key_files_and_provenance() -> None:
    """A manifest names key, key fields, files, facts and the process that made the entry."""
    manifest, _ = encode(KEY, BUILD, created_by="prewarm", because="damaged")

    assert (manifest.key, manifest.toolchain) == (KEY.digest, builds.TOOLCHAIN)
    assert manifest.key_fields == KEY.key_fields
    assert {name: digest.size for name, digest in manifest.files.items()} == {
        name: len(content) for name, content in BUILD.files.items()
    }
    assert manifest.facts == BUILD.facts
    assert (manifest.created_by, manifest.created["because"]) == ("prewarm", "damaged")
    assert manifest.created["pid"] == os.getpid()
    assert manifest.created["mlagen"] == mlagen.__version__
    assert manifest.created["time"].endswith("+00:00")


def test_an_entry_survives_the_round_trip() -> None:
    """A later reader gets values equal to those of the builder, including tuples in the facts."""
    facts = {**BUILD.facts, "resources": (*BUILD.facts["resources"],), "compile_ms": 0.1}
    manifest, file = encode(KEY, replace(BUILD, facts=facts), created_by="jit")
    assert decode(file) == (manifest, builds.CUBIN)
    assert decode_all(file) == (manifest, BUILD.files)
    start = file[: len(file) - manifest.packed_bytes - len(builds.CUBIN)]
    assert decode_manifest(start, len(file)) == (manifest, len(start))


def test_the_cubin_comes_first_and_the_source_next() -> None:
    """Programs that read an entry without mlagen rely on the order."""
    shuffled = replace(BUILD, files=dict(reversed([*BUILD.files.items()])))
    manifest, file = encode(KEY, shuffled, created_by="jit")
    assert list(manifest.files) == [CUBIN, "build.log", "kernel.cu"]
    assert decode_all(file)[1] == BUILD.files
    start = file.index(builds.CUBIN)
    assert zlib.decompress(FILE[FILE.index(builds.CUBIN) + len(builds.CUBIN) :]) == b"// source\n"
    assert file[start:].startswith(builds.CUBIN)


@pytest.mark.parametrize("toolchain", ["", "..", "a/b", "a b", ".hidden", "x" * 64])
def test_a_toolchain_that_is_not_a_file_name_is_rejected(toolchain: str) -> None:
    """No toolchain escapes the folder of its key."""
    assert parse_name(f"{KEY.digest}.{toolchain}") is None
    with pytest.raises(AssertionError):
        entry_name(KEY.digest, toolchain)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"key": 1}', b"[" * 100_000),
        b'{"key": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_garbage_is_not_a_manifest(text: bytes) -> None:
    """Any content that is not a manifest raises DamageError, whatever its digest says."""
    with pytest.raises(DamageError, match=r"^manifest: expected .*, got "):
        decode(file_of(text, builds.CUBIN, b""))


def altered(facts: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    """Return facts in which one value, of the kernel or of its resources, is another."""
    made = copy.deepcopy({**facts})
    (kernel,) = made["resources"]
    place = next((each for each in (kernel, made["kernel"]) if name in each), made)
    place[name] = value
    return made


SIZE = "0" * 64
NAN, INF = float("nan"), float("inf")
FACTS: list[tuple[str, object]] = [
    ("kernel", {}),
    ("kernel", None),
    ("spec", []),
    ("spec", {"arch": 90}),
    ("spec", {"time": NAN}),
    *(("dynamic_shared_bytes", value) for value in ("0", -1)),
    ("resources", []),
    ("resources", None),
    ("resources", [{}]),
    ("resources", "text"),
    ("symbol", None),
    *((name, value) for name in ("registers", "stack_bytes") for value in (-1, True, 0.5, 1 << 40)),
    *((name, NAN) for name in ("registers", "compile_ms", "a note")),
    *((name, INF) for name in ("spill_load_bytes", "compile_ms", "a note")),
    *(("compile_ms", value) for value in ("long", True, 10**400)),
]
CREATED: list[tuple[str, object]] = [
    *((name, 1) for name in ("time", "host", "python", "mlagen", "because")),
    *(("pid", value) for value in ("1", None, NAN)),
    *(("host", text) for text in ("\x1b[2J", "\x07", "\x7f", "\x9b2J")),
]
PARTS: list[tuple[str, object]] = [
    *(("key_fields", value) for value in ([["family", 1]], [[["family"], "x"]], [])),
    ("key_fields", [["family", "attend"], ["family", "combine"]]),
    *((name, None) for name in ("facts", "created", "created_by", "files")),
    *((name, []) for name in ("facts", "created")),
    *(("packed_bytes", value) for value in (-1, "9", True, ENTRY_MAX_BYTES + 1)),
    *(("files", {name: FileDigest(1, SIZE)}) for name in ("kernel.cu", "../x", "/x", ".x")),
    *(("files", {CUBIN: FileDigest(1, SIZE), name: FileDigest(1, SIZE)}) for name in ("../x", "")),
    *(("files", {CUBIN: FileDigest(size, SIZE)}) for size in (-1, 10**400, "small", True)),  # type: ignore[arg-type]
    *(("files", {CUBIN: FileDigest(1, sha)}) for sha in ("", 5, None)),  # type: ignore[arg-type]
    ("files", {CUBIN: FileDigest(1, SIZE), "x": FileDigest(ENTRY_MAX_BYTES, SIZE)}),
    ("an unknown part", 1),
]
UNUSABLE = [
    *(("facts", altered(BUILD.facts, name, value)) for name, value in FACTS),
    *(("created", {**MANIFEST.created, name: value}) for name, value in CREATED),
    *PARTS,
]


@pytest.mark.parametrize(("name", "value"), UNUSABLE, ids=[f"{i}" for i in range(len(UNUSABLE))])
def test_a_sealed_manifest_that_cannot_be_used_is_damage(name: str, value: object) -> None:
    """A digest says who wrote it last, not that calls and commands can use it."""
    body = json.loads(MANIFEST.to_json())
    text = json.dumps({**body, name: value}, default=vars).encode()
    file = file_of(text, builds.CUBIN, Parts.of(FILE).packed)
    with pytest.raises(DamageError, match=r"^manifest: expected one of an entry, got .*$"):
        decode_manifest(file, len(file))


@pytest.mark.parametrize(
    ("key", "toolchain"),
    [
        *((key, KEY.toolchain) for key in ("../" * 20, KEY.digest[:63], 5, "0" * 64)),
        *((KEY.digest, toolchain) for toolchain in ("..", "a/b", "", 1, "nvrtc-12.8.1")),
        (f"{KEY.digest}.nvrtc-13", KEY.toolchain.removeprefix("nvrtc-13.")),
    ],
)
def test_a_manifest_of_another_name_is_damage(key: object, toolchain: object) -> None:
    """Key and toolchain are those of the name of the file, and no path."""
    manifest, _ = decode(Parts.of(FILE).sealed(key=key, toolchain=toolchain))
    with pytest.raises(DamageError, match="expected that of"):
        manifest.require(entry_name(KEY.digest, KEY.toolchain))


def test_a_manifest_with_raw_control_characters_is_damage() -> None:
    """Commands print manifests: what is not ASCII could control a terminal."""
    text = MANIFEST.to_json().replace(b'"jit"', b'"j\xc2\x9bt"')
    with pytest.raises(DamageError, match="control a terminal"):
        Manifest.from_json(text)


def test_the_manifest_belongs_to_the_version_of_the_layout() -> None:
    """Other fields, or other digests of keys, are another layout: this one would call it damage."""
    assert (VERSION, SCHEMA) == ("v2", 1)
    assert list(json.loads(MANIFEST.to_json())) == [
        *("key", "toolchain", "key_fields", "files", "packed_bytes"),
        *("facts", "created", "created_by"),
    ]


def test_every_flipped_bit_of_what_is_loaded_is_found() -> None:
    """A bit flip in the head, in the manifest or in the cubin is damage; calls read no more."""
    dice = random.Random(5)  # noqa: S311 - the same bits in every run
    loaded = len(FILE) - MANIFEST.packed_bytes
    places = {*range(HEAD_BYTES + 40), *(dice.randrange(loaded) for _ in range(400))}
    for place in places:
        flipped = bytearray(FILE)
        flipped[place] ^= 1 << dice.randrange(8)
        with pytest.raises(DamageError):
            decode(bytes(flipped))


def test_every_flipped_bit_of_the_compressed_files_is_found() -> None:
    """What verification accepts has the same content."""
    for place in range(len(FILE) - MANIFEST.packed_bytes, len(FILE)):
        flipped = bytearray(FILE)
        flipped[place] ^= 1 << place % 8
        try:
            assert decode_all(bytes(flipped)) == (MANIFEST, BUILD.files)
        except DamageError as damage:
            assert str(damage).startswith(("expected ", "kernel.cu: ", "build.log: "))  # noqa: PT017


def test_every_truncation_is_found() -> None:
    """A file that is too short or too long is damage."""
    for length in range(len(FILE)):
        with pytest.raises(DamageError):
            decode(FILE[:length])
    with pytest.raises(DamageError, match=f"expected {len(FILE)} bytes, got {len(FILE) + 1}"):
        decode(FILE + b"!")


def _packed(content: bytes) -> Callable[[Parts], bytes]:
    def pack(parts: Parts) -> bytes:
        return parts._replace(packed=content).sealed(packed_bytes=len(content))

    return pack


DAMAGES: dict[str, tuple[Callable[[Parts], bytes], str]] = {
    "other bytes": (
        lambda parts: parts._replace(cubin=b"\0" * 1028).sealed(),
        "cubin: expected sha",
    ),
    "no ELF": (lambda _: _text(), "an ELF file, got b'text'"),
    "the key of other fields": (
        lambda parts: parts.sealed(key_fields=(("family", "other"),)),
        "expected key_fields of ",
    ),
    "a bomb": (_packed(zlib.compress(bytes(100 << 20))), "expected 10 bytes in compressed files"),
    "no stream": (_packed(b"text"), "expected compressed files, got Error"),
    "an open stream": (_packed(zlib.compress(b"// source\n")[:-2]), "expected 10 bytes in"),
    "more behind": (_packed(zlib.compress(b"// source\n") + b"!"), "expected 10 bytes in"),
    "another source": (_packed(zlib.compress(b"// sourca\n")), "kernel.cu: expected sha256"),
}


def _text() -> bytes:
    parts = Parts.of(FILE)
    files = {**MANIFEST.files, CUBIN: FileDigest.of(b"text")}
    return parts._replace(cubin=b"text").sealed(files=files)


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_sealed_file_with_other_contents_is_damage(
    damage: Callable[[Parts], bytes], message: str
) -> None:
    """Verification unpacks no more than the manifest announces, and names what differs."""
    with pytest.raises(DamageError, match=message):
        decode_all(damage(Parts.of(FILE)))
