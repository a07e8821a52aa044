"""Byte progress: a line on a file, a transient bar on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from cache_tools.output.byte_progress import byte_progress


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_a_file_gets_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A step prints one line on stderr, however many bytes pass."""
    with byte_progress("packing 2 kernels") as on_progress:
        for done in range(100):
            on_progress(done, 100)

    assert capsys.readouterr() == ("", "packing 2 kernels\n")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows the bytes done, the total and the step; an unknown total is no error."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    with byte_progress("uploading to memory://x") as on_progress:
        on_progress(1 << 19, 0)
        on_progress(1 << 20, 2 << 20)

    assert "1.0/2.0 MiB" in terminal.getvalue()
    assert "uploading to memory://x" in terminal.getvalue()
