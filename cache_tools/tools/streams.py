"""Standard streams of a command: usable where they are closed, full, or of another locale.

Commands print texts of bundles, dumps and other processes. What they print passes :class:`Visible`,
so that none of them controls the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import IO, Any, cast

from mlagen.logs import visible


class _Stderr(FileIO):
    """Stderr whose reader may close it, as `head` does: the work goes on without progress."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class Visible:
    """A text stream that escapes control characters."""

    # click writes around a stream in ASCII, whose wrapper escapes what the locale lacks.
    encoding = "utf-8"

    def __init__(self, stream: IO[str]) -> None:
        self.unescaped = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)

    def write(self, text: str) -> int:
        """Write the visible text."""
        return self.unescaped.write(visible(text))


@contextmanager
def visible_streams() -> Iterator[None]:
    """Escape control characters in what this process prints."""
    out, err = (cast("IO[str]", Visible(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def open_streams() -> None:
    """Replace closed streams: no input, an output without a reader, progress that is lost."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # else a file that is opened later would be stdin, stdout or stderr
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        reading, writing = os.pipe()
        os.close(reading)
        sys.stdout = os.fdopen(writing, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    elif isinstance(sys.stderr, TextIOWrapper):
        stderr = BufferedWriter(_Stderr(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = TextIOWrapper(stderr, sys.stderr.encoding, line_buffering=True)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # The path of a cache may hold characters that the locale cannot print, and an answer
            # bytes that are no text.
            stream.reconfigure(errors="backslashreplace")
