"""Cache entry: the manifest of a published kernel, and verified reads from the disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlagen import __version__
from mlagen.artifacts import Build, Resources
from mlagen.cache.files import DamageError
from mlagen.cache.folder import Folder
from mlagen.cache.key import SCHEMA, CacheKey

MANIFEST = "manifest.json"
CUBIN = "kernel.cubin"
ELF_MAGIC = b"\x7fELF"

MANIFEST_MAX_BYTES = 1 << 20
_MAX_BYTES = (
    1 << 40
)  # of a file: larger than any kernel, small enough for integer and float arithmetic


class OtherSchemaError(DamageError):
    """A manifest of another version of mlagen whose seal is valid."""


@dataclass(frozen=True)
class FileDigest:
    """Expected size in bytes and SHA-256 of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileDigest:
        """Return the digest of ``content``."""
        return cls(len(content), hashlib.sha256(content).hexdigest())

    def require(self, name: str, got: FileDigest) -> None:
        """Raise :class:`DamageError` unless ``got``, of the file ``name``, is equal."""
        if got.size != self.size:
            raise DamageError(f"{name}: expected {self.size} bytes, got {got.size}")
        if got != self:
            raise DamageError(f"{name}: expected sha256 {self.sha256}, got {got.sha256}")


# JSON escapes of control characters: no manifest has them, and commands would print them.
_CONTROL_CHARACTERS = re.compile(rb"\\u00(?:[01]|7f|[89])|\x7f", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Key, toolchain, key fields, provenance and file digests of an entry."""

    schema: int
    key: str
    toolchain: str
    key_fields: tuple[tuple[str, str], ...]
    files: Mapping[str, FileDigest]
    facts: Mapping[str, Any]
    created: Mapping[str, Any]
    created_by: str

    @classmethod
    def of(
        cls, key: CacheKey, build: Build, *, created_by: str, because: str = "absent"
    ) -> Manifest:
        """Return the manifest of a finished build."""
        return cls(
            schema=SCHEMA,
            key=key.digest,
            toolchain=build.toolchain,
            key_fields=key.key_fields,
            files={name: FileDigest.of(content) for name, content in build.files.items()},
            # Through JSON, so that the builder and later readers see equal values.
            facts=json.loads(json.dumps(build.facts, allow_nan=False)),
            created={
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "python": sys.version.partition(" ")[0],
                "mlagen": __version__,
                "because": because,  # reason of the miss
            },
            created_by=created_by,
        )

    def to_json(self) -> bytes:
        """Return the manifest as JSON, sealed with a digest of itself."""
        body = asdict(self)
        return json.dumps({**body, "seal": _seal(body)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes, *, checks_seal: bool = True) -> Manifest:
        """Return the manifest in ``text``; anything else is a :class:`DamageError`.

        Another schema with a valid seal is an :class:`OtherSchemaError`: another version of mlagen
        wrote it, no bit flipped.
        """
        try:
            _require_printable(text)
            body = _DECODER.decode(text.decode("ascii"))
            seal = body.pop("seal")
            is_other = body["schema"] != SCHEMA
            if (checks_seal or is_other) and seal != _seal(body):
                raise DamageError(
                    f"{MANIFEST}: expected the content of its seal, got other content"
                )
            if is_other:
                expected = f"{MANIFEST}: expected schema {SCHEMA}"
                raise OtherSchemaError(f"{expected}, got {body['schema']!r}")
            pairs = [(label, value) for label, value in body.pop("key_fields")]
            files = {name: FileDigest(**facts) for name, facts in body.pop("files").items()}
            _require_valid_fields(pairs, files)
            _require_facts(**body)
            return cls(key_fields=tuple(pairs), files=files, **body)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DamageError(f"{MANIFEST}: expected a manifest, got {error!r}") from error


@dataclass(frozen=True)
class CacheEntry:
    """A kernel ready to be loaded.

    ``path`` is its folder, or None if it could not be published and is in memory only.
    """

    manifest: Manifest
    cubin: bytes
    path: Path | None


def read_manifest(folder: Folder, *, key: str, toolchain: str) -> Manifest:
    """Return the manifest in a folder, which must have that key and toolchain."""
    text = folder.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
    return parse_manifest(text, key=key, toolchain=toolchain)


def parse_manifest(text: bytes, *, key: str, toolchain: str, checks_seal: bool = True) -> Manifest:
    """Return a manifest, which must have that key and toolchain.

    Checking the seal costs more than parsing; listing thousands of entries skips it.
    """
    manifest = Manifest.from_json(text, checks_seal=checks_seal)
    if (manifest.key, manifest.toolchain) != (key, toolchain):
        got = f"{manifest.key} by {manifest.toolchain}"
        raise DamageError(f"{MANIFEST}: expected {key} by {toolchain}, got {got}")
    return manifest


def read_file(folder: Folder, name: str, manifest: Manifest) -> bytes:
    """Return one file of an entry, verified against the manifest."""
    expected = manifest.files.get(name)
    if expected is None:
        raise DamageError(f"{MANIFEST}: expected a file {name}, got {', '.join(manifest.files)}")
    content = folder.read(name, max_bytes=expected.size)
    expected.require(name, FileDigest.of(content))
    return content


def read_entry(folder: Folder, *, key: str, toolchain: str) -> CacheEntry:
    """Return the entry in a folder, with manifest and cubin verified.

    Raises
    ------
    DamageError
        If its manifest or its cubin differs from what was published.
    OSError
        If this process cannot read it, or other users can change a file.
    """
    manifest = read_manifest(folder, key=key, toolchain=toolchain)
    cubin = read_file(folder, CUBIN, manifest)
    require_cubin(cubin)
    return CacheEntry(manifest, cubin, Path(folder.path))


def require_cubin(start: bytes) -> None:
    """Raise :class:`DamageError` unless ``start`` begins an ELF file."""
    if not start.startswith(ELF_MAGIC):
        raise DamageError(f"{CUBIN}: expected an ELF file, got {start[:4]!r}")


def require_matching_key(manifest: Manifest) -> None:
    """Raise :class:`DamageError` unless the key of a manifest is the digest of its key fields."""
    digest = CacheKey(manifest.key_fields, manifest.toolchain).digest
    if digest != manifest.key:
        raise DamageError(f"{MANIFEST}: expected key_fields of {manifest.key}, got of {digest}")


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


def _require_valid_fields(
    pairs: Sequence[tuple[Any, Any]], files: Mapping[str, FileDigest]
) -> None:
    """Raise unless labels are unique, key fields are strings, and files have sizes."""
    # A set of types takes half the time of a loop, for listings of thousands of manifests.
    if len(dict(pairs)) < len(pairs) or {type(text) for pair in pairs for text in pair} - {str}:
        raise ValueError(f"key_fields {pairs}")
    if not any(label == "family" for label, _ in pairs):
        raise LookupError("key_fields without a family")
    for name, file in files.items():
        if type(file.size) is not int or not 0 <= file.size < _MAX_BYTES:
            raise ValueError(f"size of {name} {file.size!r}")


# Fields of a kernel's resources that are numbers.
_RESOURCES = [field.name for field in fields(Resources) if field.name != "symbol"]
_PROVENANCE = ("time", "host", "python", "mlagen")


def _require_facts(
    *, facts: Mapping[str, Any], created: Mapping[str, Any], created_by: str, **_: object
) -> None:
    """Raise unless facts and provenance have what calls and commands read, and its types."""
    kernel, resources = facts["kernel"], facts["resources"]
    if not resources:
        raise ValueError("resources of no kernel")
    texts = [*kernel["spec"].items(), ("created_by", created_by)]
    texts += [(name, created[name]) for name in _PROVENANCE]
    texts += [("because", created["because"])] if created.get("because") is not None else []
    numbers = [("pid", created["pid"])]
    numbers += [("dynamic_shared_bytes", kernel["dynamic_shared_bytes"])]
    for one in resources:
        texts += [("symbol", one["symbol"])]
        numbers += [(name, one[name]) for name in _RESOURCES]
    for name, text in texts:
        if type(text) is not str:
            raise TypeError(f"{name} {text!r}")
    for name, number in numbers:
        if type(number) is not int or not 0 <= number < _MAX_BYTES:
            raise ValueError(f"{name} {number!r}")
    if type(facts["compile_ms"]) not in (int, float) or not 0 <= facts["compile_ms"] < _MAX_BYTES:
        raise ValueError(f"compile_ms {facts['compile_ms']!r}")


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
