"""What `MLAGEN_LOG` has the process write, beside whatever logging an application sets up."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.cache.builds import ROOT

# argv: when the application configures logging itself
PROGRAM = """
import logging, sys
if sys.argv[1] == "before":
    logging.basicConfig(format="app: %(message)s")
from mlagen.settings import current_settings
current_settings()
logger = logging.getLogger("mlagen")
logger.warning("first")
if sys.argv[1] == "after":
    logging.basicConfig(format="app: %(message)s")
for level in ("debug", "info", "warning"):
    getattr(logger, level)(level)
"""


def written(level: str | None, configured: str = "never") -> list[str]:
    """Return the lines of a process, times and process ids left out."""
    environ = {name: value for name, value in os.environ.items() if name != "MLAGEN_LOG"}
    environ |= {} if level is None else {"MLAGEN_LOG": level}
    command = [sys.executable, "-c", PROGRAM, configured]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == ""
    return [
        re.sub(r"^[\d-]+ [\d:,]+ ([A-Z]+) mlagen\[\d+\]: ", r"\1 ", line)
        for line in done.stderr.splitlines()
    ]


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (None, ["first", "warning"]),
        ("", ["first", "warning"]),
        ("off", []),
        ("warn", ["WARNING first", "WARNING warning"]),
        ("info", ["WARNING first", "INFO info", "WARNING warning"]),
        ("debug", ["WARNING first", "DEBUG debug", "INFO info", "WARNING warning"]),
    ],
)
def test_a_level_is_what_is_written(level: str | None, lines: list[str]) -> None:
    """Unset, Python alone decides, and writes warnings; else time, level and process come first."""
    assert written(level) == lines


@pytest.mark.parametrize(
    ("configured", "lines"),
    [
        ("before", ["app: first", "app: info", "app: warning"]),
        ("after", ["WARNING first", "app: info", "app: warning"]),
    ],
)
def test_an_application_that_configures_logging_gets_each_line_once(
    configured: str, lines: list[str]
) -> None:
    """Whether it does so before mlagen's first call or after it; the level counts there too."""
    assert written("info", configured) == lines
