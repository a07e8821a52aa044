"""Dumps of calls, ``MLAGEN_DUMP``, for bug reports and ``mlagen replay``.

A dump is a JSON file, and with ``MLAGEN_DUMP_TENSORS=1`` a file of contents beside it. The first
call of each signature is dumped, and every call that raises. A dump is written before the call, and
its JSON again with the outcome: after a crash the last file names the call.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from mlagen import __version__
from mlagen.cache.trust import make_folder, remedy_for, require_own
from mlagen.observe.document import CallDocument
from mlagen.observe.tensor_file import write_tensors
from mlagen.paths import reason_of
from mlagen.runtime.device import device_facts, driver_version
from mlagen.settings import set_variables, unread_variables

_ADVICE = "choose another MLAGEN_DUMP, or set MLAGEN_TRUST_SHARED=1"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DumpFolder:
    """The folder of ``MLAGEN_DUMP``, with names that no two processes share."""

    def __init__(self, path: Path, *, is_shared: bool = False) -> None:
        self.path, self._is_shared = path, is_shared  # shared with users that are trusted
        self._names = (0, "", count(1))  # pid, token, numbers

    def new_name(self, entry: str) -> str:
        """Return the name of the next dump, without its suffix."""
        pid, token, numbers = self._names
        if pid != os.getpid():  # a fork; processes in containers may share a pid
            self._names = pid, token, numbers = os.getpid(), secrets.token_hex(4), count(1)
        return f"{entry}-{pid}-{token}-{next(numbers):04}"

    def write(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Publish a file; ``write`` writes its content.

        Raises OSError if the folder is a symbolic link, others can change it, or it cannot be
        written; no part of the file remains.
        """
        temporary = f".{name}.{secrets.token_hex(4)}"
        with self._opened() as folder:
            try:
                with os.fdopen(os.open(temporary, _FLAGS, 0o600, dir_fd=folder), "wb") as file:
                    write(file)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    @contextmanager
    def _opened(self) -> Iterator[int]:
        path = self.path
        if path.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link", str(path))
        with suppress(FileExistsError):
            make_folder(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            if not self._is_shared:
                status = os.fstat(descriptor)
                advice = f"{remedy_for(status, path)}, {_ADVICE}"
                require_own(status, str(path), advice=advice)
            yield descriptor
        finally:
            os.close(descriptor)


_logger = logging.getLogger("mlagen")

FORMAT = 2

# Of the contents, beside the JSON file.
TENSOR_SUFFIX = ".safetensors"

# Limits of a process.
MAX_CALLS = 256
MAX_ERRORS = 256
MAX_TENSOR_BYTES = 4 << 30  # of a call
MAX_ALL_TENSOR_BYTES = 32 << 30

# Largest JSON file that is written and read.
MAX_JSON_BYTES = 4 << 20


@dataclass(kw_only=True)
class DumpedCall:
    """A call to dump."""

    entry: str
    parts: Mapping[str, CallDocument | None]  # the call; for a wrapper, its construction and plan
    is_captured: bool
    gpu: int | None  # the index of the GPU of its tensors
    name: str | None = None  # of the file, once there is one
    document: dict[str, Any] = field(default_factory=dict)


class Dumper:
    """The dumps of this process."""

    def __init__(self, folder: DumpFolder, *, has_tensors: bool) -> None:
        self._folder = folder
        self.has_tensors = has_tensors
        self._signatures: set[Hashable] = set()
        self._errors = 0
        self._tensor_bytes = 0
        self._has_warned = False

    def begin(self, call: DumpedCall) -> None:
        """Dump a call with a new signature, before it runs."""
        parts = (of and of.signature for of in call.parts.values())
        signature = (call.entry, call.is_captured, *parts)
        if signature in self._signatures or len(self._signatures) >= MAX_CALLS:
            return
        self._signatures.add(signature)
        if len(self._signatures) == MAX_CALLS:
            self._warn_once(f"{MAX_CALLS} calls dumped, from now on only those that raise")
        self._write(call)

    def end(self, call: DumpedCall, *, served_by: list[str], error: BaseException | None) -> None:
        """Add the outcome to the dump of a call; a call that raises gets one in any case."""
        if call.name is None:
            if error is None or self._errors >= MAX_ERRORS:
                return
            self._errors += 1
            self._write(call)
        text = None if error is None else f"{type(error).__name__}: {error}"
        call.document["outcome"] = {"served_by": served_by, "error": text}
        self._write_json(call)

    def warn_of(self, error: Exception) -> None:
        """Warn, once in a process, that a call could not be dumped."""
        where = f": {self._folder.path}" if isinstance(error, OSError) else ""
        self._warn_once(f"expected calls that can be dumped, got {reason_of(error)}{where}")

    def _write(self, call: DumpedCall) -> None:
        name = self._folder.new_name(call.entry)
        wants_tensors = self.has_tensors and not call.is_captured
        tensors = self._contents_of(call) if wants_tensors else {}
        call.document = {
            "mlagen_dump": FORMAT,
            "entry": call.entry,
            **_versions(call.gpu),
            "gpu": None if call.gpu is None else vars(device_facts(call.gpu)),
            "environment": _environment(),
            "is_captured": call.is_captured,
            **{part: None if of is None else of.data for part, of in call.parts.items()},
            "has_tensors": bool(tensors),
            "outcome": None,
        }
        call.name = name
        if tensors:
            self._folder.write(f"{name}{TENSOR_SUFFIX}", lambda file: write_tensors(file, tensors))
        self._write_json(call)

    def _write_json(self, call: DumpedCall) -> None:
        content = json.dumps(call.document, allow_nan=False).encode()
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"{len(content)} bytes of metadata")
        self._folder.write(f"{call.name}.json", lambda file: file.write(content))

    def _contents_of(self, call: DumpedCall) -> dict[str, torch.Tensor]:
        """Return the storages of a call by part and index; none if they are above a limit."""
        contents = {
            f"{part}:{index}": content
            for part, described in call.parts.items()
            for index, content in ({} if described is None else described.contents).items()
        }
        size = sum(content.numel() for content in contents.values())
        if size > min(MAX_TENSOR_BYTES, MAX_ALL_TENSOR_BYTES - self._tensor_bytes):
            return {}
        self._tensor_bytes += size
        return contents

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("MLAGEN_DUMP: %s", text)


def _versions(gpu: int | None) -> dict[str, str | None]:
    return {
        "mlagen": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        # A process without a GPU call keeps its driver uninitialized, and may fork.
        "driver": None if gpu is None else driver_version(),
    }


def _environment() -> dict[str, str]:
    unread = unread_variables(os.environ)  # one of another program may be a secret
    names = [name for name in set_variables(os.environ) if name not in unread]
    return {name: os.environ[name] for name in names}
