"""Where everything lies below the root of a store; names only, nothing is created.

::

    v1/CACHEDIR.TAG
    v1/size.json                             how large the entries are together, as far as is known
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

    ``is_shared`` says that others than the owner may write in them: they are trusted, and what is
    made gets the modes that the umask leaves.
    """

    root: Path
    is_shared: bool = False

    @property
    def folder_mode(self) -> int:
        """What a new folder allows, before the umask."""
        return 0o777 if self.is_shared else 0o700

    @property
    def file_mode(self) -> int:
        """What a new file allows, before the umask."""
        return 0o666 if self.is_shared else 0o600

    @property
    def version(self) -> Path:
        """The folder of this layout; another layout would stand beside it."""
        return self.root / "v1"

    @property
    def tag(self) -> Path:
        """The file that tells backup programs to pass by."""
        return self.version / "CACHEDIR.TAG"

    @property
    def size_note(self) -> Path:
        """The file that remembers the size of all entries."""
        return self.version / "size.json"

    @property
    def entries(self) -> Path:
        """The folder of all entries."""
        return self.version / "e"

    @property
    def staging(self) -> Path:
        """The folder of what is being written or removed."""
        return self.version / "staging"

    @property
    def quarantine(self) -> Path:
        """The folder of damaged entries."""
        return self.version / "quarantine"

    def of_key(self, key: str) -> Path:
        """Return the folder of one key, with an entry for each toolchain."""
        return self.entries / key[:2] / key

    def entry(self, key: str, toolchain: str) -> Path:
        """Return the folder of one entry."""
        assert is_toolchain(toolchain), toolchain
        return self.of_key(key) / toolchain

    def new_staging(self, stem: str) -> Path:
        """Return a name in the staging folder that nobody else uses."""
        owner = f"{os.uname().nodename}.{os.getpid()}"
        return self.staging / f"{stem}.{owner}.{secrets.token_hex(4)}"

    def new_quarantine(self, key: str) -> Path:
        """Return a name in the quarantine folder that nobody else uses."""
        return self.quarantine / f"{key}.{time.time_ns()}.{os.getpid()}"


def is_digest(name: str) -> bool:
    """Whether a name can be that of a key, or a text a SHA-256."""
    return _DIGEST.fullmatch(name) is not None


def is_toolchain(name: str) -> bool:
    """Whether a name can be that of an entry, and leads nowhere else."""
    return _TOOLCHAIN.fullmatch(name) is not None


def is_abandoned(name: str, changed: float) -> bool:
    """Whether the writer of a staging folder of that name and last change has left it for good."""
    # The distance, not the age: a time far in the future comes from a clock that was set back.
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
        pass  # somebody else's process, but a process
    return True
