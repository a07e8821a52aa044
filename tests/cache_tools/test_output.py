"""Output: closed pipes, terminals, and locales that cannot print every path."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT
from .many import fill

COMMAND = [sys.executable, "-m", "cache_tools"]
LISTS = [("cache", "ls"), ("cache", "ls", "--json"), ("resources",), ("cache", "stats")]


def output_in(environ: dict[str, str], *arguments: str) -> bytes:
    """Return the output of the command, which has no errors."""
    command = [*COMMAND, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
    return ran.stdout


def on_a_terminal(environ: dict[str, str], *arguments: str) -> str:
    """Return the output of the command on a terminal."""
    ours, theirs = pty.openpty()
    both: Any = {"stdout": theirs, "stderr": theirs}
    with subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=environ, **both) as process:
        os.close(theirs)
        content = b""
        with suppress(OSError):  # Linux raises EIO once the other end is closed
            while part := os.read(ours, 65536):
                content += part
        os.close(ours)
    assert process.returncode == 0, content
    return content.decode()


@pytest.mark.parametrize("arguments", [*LISTS, ("cache", "verify")], ids=" ".join)
def test_a_closed_pipe_is_no_error(arguments: tuple[str, ...], cache_dir: Path) -> None:
    """A pipe closed before the first byte ends the command silently, as SIGPIPE does."""
    fill(cache_dir, 20)
    reading, writing = os.pipe()
    os.close(reading)

    pipes: Any = {"stdout": writing, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, **pipes) as process:
        os.close(writing)
        _, errors = process.communicate()
    assert process.returncode == 141
    assert errors in {"", "verifying 20 entries\n"}


def test_the_first_line_of_a_long_list_can_be_taken(cache_dir: Path) -> None:
    """`mlagen cache ls | head -1` prints the column names, and nothing on stderr."""
    fill(cache_dir, 2000)
    command = ["/bin/sh", "-c", f"'{sys.executable}' -m cache_tools cache ls | head -1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("key  ")
    assert (ran.stdout.count("\n"), ran.stderr) == (1, "")


@pytest.mark.parametrize("arguments", [("cache", "dir"), *LISTS[:2]], ids=" ".join)
@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
    ids=["ASCII", "Latin-1"],
)
def test_any_path_can_be_printed_in_any_locale(
    environment: dict[str, str], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Characters outside of the locale, and bytes that are no text, are escaped; JSON is ASCII."""
    folder = tmp_path / os.fsdecode(b"h\xc3\xa4user \xe2\x98\x83, no text \xff")
    fill(folder, 1)

    environ = os.environ | {**environment, "MLAGEN_CACHE_DIR": str(folder)}
    output = output_in(environ, *arguments)
    if arguments == ("cache", "dir"):
        assert output == os.fsencode(folder) + b"\n"
    elif "--json" in arguments:
        printed = json.loads(output.decode("ascii"))["cache_dir"]
        assert os.fsencode(printed) == os.fsencode(folder)
    else:
        assert os.fsencode(tmp_path) in output


@pytest.mark.parametrize(
    "environment",
    [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}],
    ids=["NO_COLOR", "FORCE_COLOR", "dumb terminal"],
)
def test_nothing_is_coloured(environment: dict[str, str], cache_dir: Path) -> None:
    """The output has no escape sequences, on a terminal or elsewhere."""
    fill(cache_dir, 2)
    environ = os.environ | environment
    for text in (on_a_terminal(environ, *LISTS[0]), output_in(environ, *LISTS[0]).decode()):
        assert text.strip()
        assert "\x1b" not in text
