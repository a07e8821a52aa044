"""Standard streams of a command: usable where they are closed, full, or of another locale."""

from __future__ import annotations

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class _Stderr(FileIO):
    """Stderr whose reader may close it, as `head` does: the work goes on without progress."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


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
