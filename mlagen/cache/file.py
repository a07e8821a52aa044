"""The file of a cache entry: a manifest, the cubin, and the compressed files beside it.

::

    8 bytes     the mark of the format
    4 bytes     length of the manifest, little endian
    32 bytes    SHA-256 of the manifest
    manifest    JSON: key, key fields, facts, provenance, and size and SHA-256 of each file
    cubin       as the driver loads it
    the rest    all other files, in the order of the manifest, as one zlib stream

Nothing in it is trusted before its digest matches, and nothing is ever imported or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlagen import __version__
from mlagen.artifacts import Build, Resources
from mlagen.cache.key import CacheKey

CUBIN = "kernel.cubin"
ELF_MAGIC = b"\x7fELF"

# Of a file, and of its content unpacked; kernels have a few hundred KiB.
ENTRY_MAX_BYTES = 64 << 20

# Changes with the layout, and so with every change of a manifest.
_MARK = b"mlagen2\n"
_HEAD = struct.Struct("<8sI32s")
HEAD_BYTES = _HEAD.size
_MANIFEST_MAX_BYTES = 1 << 20
_NUMBER_MAX = 1 << 40  # small enough for integer and float arithmetic

_NAME = re.compile(r"([0-9a-f]{64})\.([A-Za-z0-9][A-Za-z0-9._+-]{0,62})")
_FILES = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,62}=[0-9a-f]{64};)*")

# JSON escapes of control characters: no manifest has them, and commands would print them.
_CONTROL_CHARACTERS = re.compile(rb"\\u00(?:[01]|7f|[89])|\x7f", re.IGNORECASE)


class DamageError(Exception):
    """Something in the store differs from what was published; the message names it."""


def entry_name(key: str, toolchain: str) -> str:
    """Return the file name of an entry."""
    name = f"{key}.{toolchain}"
    assert parse_name(name) == (key, toolchain), name
    return name


def parse_name(name: str) -> tuple[str, str] | None:
    """Return the key and the toolchain of a file name; None if it is not one of an entry."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found else None


@dataclass(frozen=True)
class FileDigest:
    """Expected size in bytes and SHA-256 of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileDigest:
        """Return the digest of ``content``."""
        return cls(len(content), hashlib.sha256(content).hexdigest())

    def require(self, name: str, content: bytes) -> None:
        """Raise :class:`DamageError` unless ``content``, of the file ``name``, has this digest."""
        got = FileDigest.of(content)
        if got.size != self.size:
            raise DamageError(f"{name}: expected {self.size} bytes, got {got.size}")
        if got != self:
            raise DamageError(f"{name}: expected sha256 {self.sha256}, got {got.sha256}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Key, toolchain, key fields, provenance and file digests of an entry.

    ``files`` begins with the cubin; ``packed_bytes`` is the size of the others, compressed.
    """

    key: str
    toolchain: str
    key_fields: tuple[tuple[str, str], ...]
    files: Mapping[str, FileDigest]
    packed_bytes: int
    facts: Mapping[str, Any]
    created: Mapping[str, Any]
    created_by: str

    def to_json(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Return the manifest in ``text``; anything else is a :class:`DamageError`."""
        try:
            _require_printable(text)
            body = _DECODER.decode(text.decode("ascii"))
            pairs = tuple((label, value) for label, value in body.pop("key_fields"))
            files = {name: FileDigest(**digest) for name, digest in body.pop("files").items()}
            manifest = cls(key_fields=pairs, files=files, **body)
            manifest._require_valid()
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DamageError(f"manifest: expected one of an entry, got {error!r}") from error
        return manifest

    def require(self, name: str) -> None:
        """Raise :class:`DamageError` unless its key and toolchain are those of a file name."""
        if (self.key, self.toolchain) != parse_name(name):
            got = f"{self.key!r} by {self.toolchain!r}"
            raise DamageError(f"manifest: expected that of {name}, got that of {got}")

    def require_size(self, size: int, start: int) -> None:
        """Raise :class:`DamageError` unless its file, with contents from ``start``, is whole."""
        expected = start + self.files[CUBIN].size + self.packed_bytes
        if size != expected:
            raise DamageError(f"expected {expected} bytes, got {size}")

    def _require_valid(self) -> None:
        """Raise unless it has what calls and commands read, in its types.

        Sets and matches of all values at once take half the time of loops: commands list thousands.
        """
        pairs, files, ms = self.key_fields, self.files, self.facts["compile_ms"]
        if len(dict(pairs)) < len(pairs) or {type(text) for pair in pairs for text in pair} - {str}:
            raise ValueError(f"key_fields {pairs}")
        if not any(label == "family" for label, _ in pairs):
            raise LookupError("key_fields without a family")
        if next(iter(files), None) != CUBIN:
            raise LookupError(f"files {list(files)}, not {CUBIN} first")
        if not _FILES.fullmatch("".join([f"{name}={one.sha256};" for name, one in files.items()])):
            raise ValueError(f"files {files}")
        if {*map(type, texts := self._texts())} - {str}:
            raise TypeError(f"texts {texts}")
        numbers = self._numbers()
        is_number = not {*map(type, numbers)} - {int} and type(ms) in (int, float)
        if not is_number or min(*numbers, ms) < 0 or max(*numbers, ms) >= _NUMBER_MAX:
            raise ValueError(f"numbers {numbers}, {ms!r}")
        size = sum([file.size for file in files.values()])
        if max(size, self.packed_bytes) > ENTRY_MAX_BYTES:
            raise ValueError(f"{size} bytes, more than {ENTRY_MAX_BYTES}")

    def _texts(self) -> list[Any]:
        facts, created = self.facts, self.created
        texts = [*facts["kernel"]["spec"].values(), self.created_by, created.get("because") or ""]
        texts += [created[name] for name in ("time", "host", "python", "mlagen")]
        return texts + [one["symbol"] for one in facts["resources"]]

    def _numbers(self) -> list[Any]:
        facts = self.facts
        if not facts["resources"]:
            raise ValueError("resources of no kernel")
        numbers = [self.created["pid"], self.packed_bytes, facts["kernel"]["dynamic_shared_bytes"]]
        numbers += [file.size for file in self.files.values()]
        return numbers + [one[name] for one in facts["resources"] for name in _RESOURCES]


@dataclass(frozen=True)
class CacheEntry:
    """A kernel ready to be loaded.

    ``path`` is its file, or None if it could not be published and is in memory only.
    """

    manifest: Manifest
    cubin: bytes
    path: Path | None


def encode(
    key: CacheKey, build: Build, *, created_by: str, because: str = "absent"
) -> tuple[Manifest, bytes]:
    """Return the manifest and the file of a finished build; ``because`` is why it was missed."""
    cubin = build.files[CUBIN]
    assert cubin.startswith(ELF_MAGIC), cubin[:4]
    names = [CUBIN, *(name for name in build.files if name != CUBIN)]
    packed = zlib.compress(b"".join(build.files[name] for name in names[1:]))
    manifest = Manifest(
        key=key.digest,
        toolchain=build.toolchain,
        key_fields=key.key_fields,
        files={name: FileDigest.of(build.files[name]) for name in names},
        packed_bytes=len(packed),
        # Through JSON, so that the builder and later readers see equal values.
        facts=json.loads(json.dumps(build.facts, allow_nan=False)),
        created={
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "python": sys.version.partition(" ")[0],
            "mlagen": __version__,
            "because": because,
        },
        created_by=created_by,
    )
    return manifest, file_of(manifest.to_json(), cubin, packed)


def file_of(manifest: bytes, cubin: bytes, packed: bytes) -> bytes:
    """Return the file with these parts."""
    head = _HEAD.pack(_MARK, len(manifest), hashlib.sha256(manifest).digest())
    return head + manifest + cubin + packed


def manifest_bytes(head: bytes) -> int:
    """Return the length of the manifest in a file that begins with ``head``."""
    if len(head) < HEAD_BYTES or not head.startswith(_MARK):
        raise DamageError(f"expected the file of an entry, got one that begins {head[:8]!r}")
    length: int = _HEAD.unpack_from(head)[1]
    if length > _MANIFEST_MAX_BYTES:
        raise DamageError(f"manifest: expected at most {_MANIFEST_MAX_BYTES} bytes, got {length}")
    return length


def decode_manifest(start: bytes, size: int) -> tuple[Manifest, int]:
    """Return the manifest in a file of ``size`` bytes, and where the cubin begins.

    ``start`` is the file as far as the end of the manifest, or more of it.
    """
    end = HEAD_BYTES + manifest_bytes(start)
    text = start[HEAD_BYTES:end]
    if hashlib.sha256(text).digest() != _HEAD.unpack_from(start)[2]:
        raise DamageError("manifest: expected the content of its digest, got other content")
    manifest = Manifest.from_json(text)
    manifest.require_size(size, end)
    return manifest, end


def decode(content: bytes) -> tuple[Manifest, bytes]:
    """Return the manifest and the cubin of a file, verified."""
    manifest, start = decode_manifest(content, len(content))
    expected = manifest.files[CUBIN]
    cubin = content[start : start + expected.size]
    expected.require(CUBIN, cubin)
    if not cubin.startswith(ELF_MAGIC):
        raise DamageError(f"{CUBIN}: expected an ELF file, got {cubin[:4]!r}")
    return manifest, cubin


def decode_all(content: bytes) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and all files of an entry, verified, and its key too."""
    manifest, cubin = decode(content)
    digest = CacheKey(manifest.key_fields, manifest.toolchain).digest
    if digest != manifest.key:
        raise DamageError(f"manifest: expected key_fields of {manifest.key}, got of {digest}")
    files = {CUBIN: cubin}
    others = [name for name in manifest.files if name != CUBIN]
    total = sum(manifest.files[name].size for name in others)
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(content[len(content) - manifest.packed_bytes :], total + 1)
    except zlib.error as error:
        raise DamageError(f"expected compressed files, got {error}") from error
    if len(unpacked) != total or not stream.eof or stream.unused_data:
        raise DamageError(f"expected {total} bytes in compressed files, got others")
    for name in others:
        size = manifest.files[name].size
        files[name], unpacked = unpacked[:size], unpacked[size:]
        manifest.files[name].require(name, files[name])
    return manifest, files


def _require_printable(text: bytes) -> None:
    # Most manifests have no backslash, which saves the regex search.
    may_control = b"\\" in text or b"\x7f" in text
    if not text.isascii() or (may_control and _CONTROL_CHARACTERS.search(text)):
        raise ValueError("characters that control a terminal")


def _finite(text: str) -> float:
    """Return a number, or raise for one that JSON does not have: commands would print it."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text}")
    return number


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)

# Fields of a kernel's resources that are numbers.
_RESOURCES = [field.name for field in fields(Resources) if field.name != "symbol"]
