"""Folder layout of a store; computes paths and creates nothing.

::

    v1/CACHEDIR.TAG
    v1/size.json                             approximate total size of the entries
    v1/e/<kk>/<key>/<toolchain>/             an entry; kk = the first two digits of the key
    v1/staging/<key>.<host>.<pid>.<random>/  an entry being written
    v1/staging/trash.<host>.<pid>.<random>   an entry being removed
    v1/quarantine/<key>.<ns>.<pid>/          reason.json, and the damaged entry as entry/
"""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOOLCHAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}")
_ABANDONED_AFTER_S = 3600.0


@dataclass(frozen=True)
class Layout:
    """The folders of one store.

    With ``is_shared``, users other than the owner may write in them: they are trusted, and new
    files and folders get the mode of the umask.
    """

    root: Path
    is_shared: bool = False

    @property
    def folder_mode(self) -> int:
        """Mode of a new folder, before the umask."""
        return 0o777 if self.is_shared else 0o700

    @property
    def file_mode(self) -> int:
        """Mode of a new file, before the umask."""
        return 0o666 if self.is_shared else 0o600

    @property
    def version(self) -> Path:
        """The folder of this layout version."""
        return self.root / "v1"

    @property
    def tag(self) -> Path:
        """The file that makes backup programs skip the cache."""
        return self.version / "CACHEDIR.TAG"

    @property
    def size_file(self) -> Path:
        """The file that records the total size of the entries."""
        return self.version / "size.json"

    @property
    def entries(self) -> Path:
        """The folder of all entries."""
        return self.version / "e"

    @property
    def staging(self) -> Path:
        """The folder of entries being written or removed."""
        return self.version / "staging"

    @property
    def quarantine(self) -> Path:
        """The folder of damaged entries."""
        return self.version / "quarantine"

    def key_folder(self, key: str) -> Path:
        """Return the folder of a key, which has an entry for each toolchain."""
        return self.entries / key[:2] / key

    def entry(self, key: str, toolchain: str) -> Path:
        """Return the folder of an entry."""
        assert is_toolchain(toolchain), toolchain
        return self.key_folder(key) / toolchain

    def new_staging(self, stem: str) -> Path:
        """Return a unique path in the staging folder."""
        owner = f"{os.uname().nodename}.{os.getpid()}"
        return self.staging / f"{stem}.{owner}.{secrets.token_hex(4)}"

    def new_quarantine(self, key: str) -> Path:
        """Return a unique path in the quarantine folder."""
        return self.quarantine / f"{key}.{time.time_ns()}.{os.getpid()}"


def is_digest(name: str) -> bool:
    """Whether a string is a SHA-256 in hex, such as a key."""
    return _DIGEST.fullmatch(name) is not None


def is_toolchain(name: str) -> bool:
    """Whether a name is a valid entry name, and no path."""
    return _TOOLCHAIN.fullmatch(name) is not None


def is_abandoned(name: str, changed: float) -> bool:
    """Whether the writer of a staging folder with that name and last change is dead."""
    # The absolute difference: a time far in the future comes from a clock that was set back.
    if abs(time.time() - changed) < _ABANDONED_AFTER_S:
        return False
    owner, _, _random = name.rpartition(".")
    owner, _, pid = owner.rpartition(".")
    is_ours = owner.partition(".")[2] == os.uname().nodename
    return not (is_ours and pid.isdecimal() and _is_running(int(pid)))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it exists, and belongs to another user
    return True
