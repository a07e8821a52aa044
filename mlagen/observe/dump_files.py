"""Files of a dump folder: private, never overwritten, and written as a whole."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from mlagen.cache.files import make_folder
from mlagen.cache.trust import remedy_for, require_own

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

        Raises
        ------
        OSError
            If the folder is a symbolic link, others can change it, or it cannot be written; no
            part of the file remains.
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
