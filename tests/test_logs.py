"""MLAGEN_LOG: the output of the process, with and without the application's logging."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.cache.builds import ROOT

# argv: when the application configures its logging
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
    """Return the log lines of a process, without times and process ids."""
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
        ("api", ["WARNING first", "INFO info", "WARNING warning"]),
    ],
)
def test_a_level_sets_the_output(level: str | None, lines: list[str]) -> None:
    """Unset, Python prints warnings; otherwise lines start with time, level and process id."""
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
    """The order of configuration and first call does not matter; the level applies."""
    assert written("info", configured) == lines
