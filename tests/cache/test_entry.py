"""The manifest, and verified reads of an entry."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen.cache.entry import (
    CUBIN,
    MANIFEST,
    CacheEntry,
    Manifest,
    OtherSchemaError,
)
from mlagen.cache.files import DamageError
from mlagen.cache.layout import Layout
from mlagen.cache.publish import publish
from tests.cache import builds

KEY = builds.make_key()
BUILD = builds.make_build()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a published entry."""
    return publish(Layout(tmp_path), Manifest.of(KEY, BUILD, created_by="jit"), BUILD.files)


def read(folder: Path) -> CacheEntry:
    """Read the entry of ``KEY``."""
    return builds.read_at(folder, key=KEY.digest, toolchain=KEY.toolchain)


def test_manifest_has_key_files_and_provenance() -> None:
    """A manifest names key, key fields, files, facts and the process that made the entry."""
    manifest = Manifest.of(KEY, BUILD, created_by="prewarm")

    assert (manifest.key, manifest.toolchain) == (KEY.digest, builds.TOOLCHAIN)
    assert manifest.key_fields == KEY.key_fields
    assert {name: facts.size for name, facts in manifest.files.items()} == {
        name: len(content) for name, content in BUILD.files.items()
    }
    assert manifest.facts == BUILD.facts
    assert manifest.created_by == "prewarm"
    assert manifest.created["pid"] == os.getpid()
    assert manifest.created["mlagen"] == mlagen.__version__
    assert manifest.created["time"].endswith("+00:00")


def test_manifest_survives_the_round_trip() -> None:
    """A later reader gets values equal to those of the builder, including tuples in the facts."""
    facts = {**BUILD.facts, "resources": (*BUILD.facts["resources"],), "compile_ms": 0.1}
    build = replace(BUILD, facts=facts)
    manifest = Manifest.of(KEY, build, created_by="jit")
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_manifest_text_is_reproducible() -> None:
    """The keys of a manifest are sorted, so that two of them can be compared line by line."""
    manifest = Manifest.of(KEY, BUILD, created_by="jit")
    other = replace(manifest, files=dict(reversed([*manifest.files.items()])))
    assert other.to_json() == manifest.to_json()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"schema": 1}',
        b'{"schema": 1, "seal": ""}',
        b"[" * 100_000,
        b'{"schema": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_garbage_is_not_a_manifest(text: bytes) -> None:
    """Any content that is not a manifest raises DamageError."""
    with pytest.raises(DamageError, match=r"^manifest\.json: expected .*, got "):
        Manifest.from_json(text)


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "a number for a value": {"key_fields": [["family", 1]]},
    "a list for a label": {"key_fields": [[["family"], "attend"]]},
    "a label twice": {"key_fields": [["family", "attend"], ["family", "combine"]]},
    "a list of facts": {"facts": []},
    "no origin": {"created": None},
    "a negative size": {"files": {"kernel.cubin": {"size": -1, "sha256": ""}}},
    "a size without end": {"files": {"kernel.cubin": {"size": 10**400, "sha256": ""}}},
    "a size in words": {"files": {"kernel.cubin": {"size": "small", "sha256": ""}}},
}


@pytest.mark.parametrize("changes", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_manifest_has_its_types_even_where_no_seal_is_checked(changes: dict[str, Any]) -> None:
    """A listing without a seal check can rely on the types."""
    body = json.loads(Manifest.of(KEY, BUILD, created_by="jit").to_json()) | changes
    with pytest.raises(DamageError, match=r"^manifest\.json: expected a manifest, got "):
        Manifest.from_json(json.dumps(body).encode(), checks_seal=False)


def altered(facts: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    """Return facts in which one value, of the kernel or of its resources, is another."""
    made = copy.deepcopy({**facts})
    (kernel,) = made["resources"]
    place = next((each for each in (kernel, made["kernel"]) if name in each), made)
    place[name] = value
    return made


UNUSABLE: list[tuple[str, object]] = [
    ("kernel", {}),
    ("kernel", None),
    ("spec", []),
    ("spec", {"arch": 90}),
    ("spec", {"time": float("nan")}),
    ("dynamic_shared_bytes", "0"),
    ("resources", []),
    ("resources", None),
    ("resources", [{}]),
    ("resources", "text"),
    ("symbol", None),
    *((name, value) for name in ("registers", "stack_bytes") for value in (-1, True, 0.5, 1 << 40)),
    *((name, float("nan")) for name in ("registers", "compile_ms", "a note")),
    *((name, float("inf")) for name in ("spill_load_bytes", "compile_ms", "a note")),
    ("compile_ms", "long"),
    ("compile_ms", 10**400),
]
NO_ORIGIN: list[tuple[str, object]] = [
    *((name, 1) for name in ("time", "host", "python", "mlagen", "because")),
    *(("pid", value) for value in ("1", None, float("nan"))),
]


@pytest.mark.parametrize("checks_seal", [True, False], ids=["to be served", "to be listed"])
@pytest.mark.parametrize(("name", "value"), [*UNUSABLE, *NO_ORIGIN], ids=str)
def test_a_sealed_manifest_with_unusable_facts_is_damage(
    name: str, value: object, checks_seal: bool
) -> None:
    """A seal says who wrote it last, not that calls and commands can use it."""
    manifest = Manifest.of(KEY, BUILD, created_by="jit")
    if (name, value) in NO_ORIGIN:
        sealed = replace(manifest, created={**manifest.created, name: value}).to_json()
    else:
        sealed = replace(manifest, facts=altered(manifest.facts, name, value)).to_json()
    with pytest.raises(DamageError, match=r"^manifest\.json: expected a manifest, got .*$"):
        Manifest.from_json(sealed, checks_seal=checks_seal)


@pytest.mark.parametrize("name", ["facts", "created", "created_by", "family"])
def test_a_sealed_manifest_that_lacks_a_part_is_damage(name: str) -> None:
    """Every reader may rely on all parts."""
    body = json.loads(Manifest.of(KEY, BUILD, created_by="jit").to_json())
    del body["seal"]
    if name == "family":
        body["key_fields"] = body["key_fields"][1:]
    else:
        del body[name]
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    with pytest.raises(DamageError, match=r"^manifest\.json: expected a manifest, got "):
        Manifest.from_json(json.dumps({**body, "seal": seal}).encode())


@pytest.mark.parametrize("checks_seal", [True, False], ids=["to be served", "to be listed"])
def test_manifest_of_another_schema_is_named_as_such(checks_seal: bool) -> None:
    """A valid seal distinguishes an entry of a later version from a damaged one."""
    later = replace(Manifest.of(KEY, BUILD, created_by="jit"), schema=2).to_json()
    flipped = later.replace(b'"schema": 2', b'"schema": 3')
    with pytest.raises(OtherSchemaError, match=r"^manifest\.json: expected schema 1, got 2$"):
        Manifest.from_json(later, checks_seal=checks_seal)
    with pytest.raises(DamageError, match="expected the content of its seal, got other content"):
        Manifest.from_json(flipped, checks_seal=checks_seal)


def test_every_flipped_bit_of_a_cubin_is_found(folder: Path) -> None:
    """Each of 200 single bit flips of a cubin is damage."""
    dice = random.Random(5)  # noqa: S311 - the same bits in every run
    for _ in range(200):
        content = bytearray(builds.CUBIN)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (folder / CUBIN).write_bytes(content)
        with pytest.raises(DamageError, match="expected sha256 "):
            read(folder)


def test_no_flipped_bit_of_a_manifest_changes_what_is_read(folder: Path) -> None:
    """A bit flip in a manifest is found, or changes white space only."""
    original, found = read(folder), 0
    text = (folder / MANIFEST).read_bytes()
    for place in range(0, len(text), 3):
        flipped = bytearray(text)
        flipped[place] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(flipped)

        try:
            assert read(folder) == original
        except DamageError:
            found += 1

    assert found > len(text) // 6


def test_cubin_that_is_not_elf_is_found(tmp_path: Path) -> None:
    """Bytes with the right digest that are not ELF are damage too."""
    build = builds.make_build(b"text")
    folder = publish(Layout(tmp_path), Manifest.of(KEY, build, created_by="jit"), build.files)
    with pytest.raises(DamageError, match=r"^kernel\.cubin: expected an ELF file, got b'text'$"):
        read(folder)


def test_manifest_without_a_cubin_is_found(tmp_path: Path) -> None:
    """An entry whose manifest lists no cubin is damage."""
    build = replace(BUILD, files={"kernel.cu": b"// source"})
    folder = publish(Layout(tmp_path), Manifest.of(KEY, build, created_by="jit"), build.files)
    with pytest.raises(DamageError, match=r"expected a file kernel\.cubin, got kernel\.cu$"):
        read(folder)


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07", "\x7f", "\x9b2J", "h\xf6st"])
def test_a_manifest_that_would_control_a_terminal_is_damage(text: str) -> None:
    """Control characters are rejected, because commands print manifests."""
    manifest = Manifest.of(KEY, BUILD, created_by="jit")
    sealed = replace(manifest, created={**manifest.created, "host": text}).to_json()
    raw = sealed.replace(b"h\\u00f6st", "h\xf6st".encode())
    with pytest.raises(DamageError, match="control a terminal"):
        Manifest.from_json(raw)
