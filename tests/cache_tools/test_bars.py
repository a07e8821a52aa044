"""Bars on a terminal: Ctrl-C leaves no part of them, and the last line says what is kept."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

from cache_tools.output.report import count_text

from .conftest import ROOT

_COLUMNS = 160
_SEQUENCE = re.compile(r"\x1b\[(\??\d*)([A-Za-z])|(.)", re.DOTALL)

# The command as a shell on this terminal starts it.
SCRIPT = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from cache_tools.__main__ import main; main()"
)


def screen_of(output: str) -> list[str]:
    """Return the lines of a terminal after this output, which wraps at its width."""
    lines, row, column = [""], 0, 0
    for count, control, char in _SEQUENCE.findall(output):
        if control == "A":
            row = max(row - int(count or 1), 0)
        elif control == "K":
            lines[row] = ""
        elif char == "\r":
            column = 0
        elif char:
            if char == "\n" or column == _COLUMNS:
                row, column = row + 1, column if char == "\n" else 0
                lines += [""] * (row + 1 - len(lines))
            if char != "\n":
                lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
                column += 1
    return [line.rstrip() for line in lines if line.strip()]


def interrupted_on_a_terminal(*arguments: str, when: str) -> tuple[int, str]:
    """Run the command on a terminal, and press Ctrl-C once it shows ``when``."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, _COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=ROOT,
        env=environ,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    output, is_pressed = b"", False
    with suppress(OSError):  # the terminal closes with the process
        while part := os.read(master, 1 << 16):
            output += part
            if not is_pressed and when in output.decode(errors="ignore"):
                os.write(master, b"\x03")
                is_pressed = True
    os.close(master)
    return process.wait(timeout=60), output.decode()


def test_ctrl_c_clears_the_bar() -> None:
    """Only the finished kernels and the summary stay on the screen, each once."""
    kernels = ("--arch", "sm_80", "--family", "combine,gqa_sm80", "--page-size", "16")

    code, output = interrupted_on_a_terminal(
        "prewarm", *kernels, "--dtype", "bf16", "-j", "1", when="compiling gqa_sm80"
    )

    plan, *built, last = screen_of(output)
    assert re.search(r"about \d+ (s|min) left", output)
    assert code == 130
    assert plan.startswith("compiling ")
    assert last == f"mlagen: interrupted, {count_text(len(built), 'kernel')} kept"
    assert {line.split()[0] for line in built} == {"built"}
