"""The manifest and the verified way to read an entry."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

import mlagen
from mlagen.cache.entry import CUBIN, MANIFEST, CacheEntry, Manifest, read_entry
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
    return read_entry(folder, key=KEY.digest, toolchain=KEY.toolchain)


def test_manifest_says_what_when_where_and_by_whom() -> None:
    """A manifest names key, ingredients, files, facts and the process that made the entry."""
    manifest = Manifest.of(KEY, BUILD, created_by="prewarm")

    assert (manifest.key, manifest.toolchain) == (KEY.digest, builds.TOOLCHAIN)
    assert manifest.ingredients == KEY.ingredients
    assert {name: facts.size for name, facts in manifest.files.items()} == {
        name: len(content) for name, content in BUILD.files.items()
    }
    assert manifest.facts == BUILD.facts
    assert manifest.created_by == "prewarm"
    assert manifest.created["pid"] == os.getpid()
    assert manifest.created["mlagen"] == mlagen.__version__
    assert manifest.created["time"].endswith("+00:00")


def test_manifest_survives_the_disk() -> None:
    """What a later reader sees equals what the builder has, tuples among the facts included."""
    build = replace(BUILD, facts={"resources": ({"registers": 168},), "compile_ms": 0.1})
    manifest = Manifest.of(KEY, build, created_by="jit")

    assert Manifest.from_json(manifest.to_json()) == manifest


def test_manifest_is_the_same_text_for_the_same_facts() -> None:
    """The names of a manifest are sorted, so that two of them can be compared line by line."""
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
def test_garbage_is_no_manifest(text: bytes) -> None:
    """Whatever the file holds, reading it ends in DamageError and in nothing else."""
    with pytest.raises(DamageError, match=r"^manifest\.json: expected .*, got "):
        Manifest.from_json(text)


def test_manifest_of_another_schema_is_named_as_such() -> None:
    """An entry of a later version is told apart from a damaged one."""
    body = json.loads(Manifest.of(KEY, BUILD, created_by="jit").to_json())

    with pytest.raises(DamageError, match=r"^manifest\.json: expected schema 1, got 2$"):
        Manifest.from_json(json.dumps({**body, "schema": 2}).encode())


def test_read_entry_returns_what_was_published(folder: Path) -> None:
    """The bytes and the manifest come back, with the folder they lie in."""
    entry = read(folder)

    assert entry.cubin == builds.CUBIN
    assert entry.manifest.facts == BUILD.facts
    assert entry.path == folder


@pytest.mark.parametrize(("key", "toolchain"), [("0" * 64, KEY.toolchain), (KEY.digest, "nvrtc-1")])
def test_read_entry_refuses_the_entry_of_another_key(
    key: str, toolchain: str, folder: Path
) -> None:
    """A folder that was copied to another place is not served there."""
    with pytest.raises(DamageError, match=r"expected .* by .*, got .* by "):
        read_entry(folder, key=key, toolchain=toolchain)


@pytest.mark.parametrize("kept", [0, 1, 63, len(builds.CUBIN) // 2, len(builds.CUBIN) - 1])
def test_truncated_cubin_is_found(kept: int, folder: Path) -> None:
    """A cubin that lost its end is damage, with both sizes in the message."""
    (folder / CUBIN).write_bytes(builds.CUBIN[:kept])

    with pytest.raises(DamageError, match=f"expected {len(builds.CUBIN)} bytes, got {kept}$"):
        read(folder)


def test_every_flipped_bit_of_a_cubin_is_found(folder: Path) -> None:
    """Two hundred cubins with one bit flipped each are two hundred times damage."""
    dice = random.Random(5)  # noqa: S311 - the same bits in every run
    for _ in range(200):
        content = bytearray(builds.CUBIN)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (folder / CUBIN).write_bytes(content)

        with pytest.raises(DamageError, match="expected sha256 "):
            read(folder)


def test_no_flipped_bit_of_a_manifest_changes_what_is_read(folder: Path) -> None:
    """A bit flipped anywhere in a manifest is found, or changed nothing but white space."""
    sound, found = read(folder), 0
    text = (folder / MANIFEST).read_bytes()
    for place in range(len(text)):
        flipped = bytearray(text)
        flipped[place] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(flipped)

        try:
            assert read(folder) == sound
        except DamageError:
            found += 1

    assert found > len(text) // 2


def test_cubin_that_is_no_elf_file_is_found(tmp_path: Path) -> None:
    """Bytes with the right digest that no driver would take are damage too."""
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
