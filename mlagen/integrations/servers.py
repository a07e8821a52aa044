"""What the plugins of servers share: the tested versions, and a registration that never raises."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from mlagen.settings import current_settings
from mlagen.values import require

# The versions that the plugins are tested with; the extras of pyproject.toml repeat them.
TESTED = {"vllm": "<0.34,>=0.33", "sglang": "<0.5.24,>=0.5.23"}

_logger = logging.getLogger("mlagen")


@contextmanager
def registration(server: str, expected: str) -> Iterator[ExitStack]:
    """Turn any exception of a registration into one warning, since it would end the server.

    The body pushes to the stack what undoes each of its steps: after an exception nothing stays
    registered. ``expected`` is what it needs of the server, a key of :data:`TESTED`. A server of an
    untested version is tried, with a warning.
    """
    undo, version = ExitStack(), version_of(server)
    try:
        yield undo
    except Exception as error:  # noqa: BLE001 - of a server that is not known
        with suppress(Exception):  # every step is withdrawn, whichever fails
            undo.close()
        _logger.warning(
            "%s %s: expected %s, got %s: %s; no backend of mlagen is registered, which is "
            "tested with %s %s",
            *(server, version, expected, type(error).__name__, " ".join(str(error).split())),
            *(server, TESTED[server]),
        )
        return
    if not is_tested(server, version):
        _logger.warning(
            "%s: expected a version %s, which the backends of mlagen are tested with, got %s",
            *(server, TESTED[server], version),
        )


def follow_batch_invariance(is_on: bool) -> bool:
    """Return whether calls of this process are batch-invariant, as a server's own mode asks.

    It turns the setting on, unless the environment says otherwise or the settings are read already.
    """
    if is_on:
        os.environ.setdefault("MLAGEN_BATCH_INVARIANT", "1")
    return current_settings().batch_invariant


def require_batch_invariance(is_on: bool, option: str) -> None:
    """Make calls batch-invariant as :func:`follow_batch_invariance`; ValueError if they are not."""
    is_followed = not is_on or follow_batch_invariance(is_on)
    require(is_followed, option, "MLAGEN_BATCH_INVARIANT=1", "0")


def version_of(server: str) -> str:
    """Return the version of an imported or installed server; ``unknown`` without one."""
    with suppress(Exception):  # of a module that is not known, or without a distribution
        return str(
            getattr(sys.modules.get(server), "__version__", None) or metadata.version(server)
        )
    return "unknown"


def is_tested(server: str, version: str) -> bool:
    """Return whether the plugin of a server is tested with a version."""
    try:
        return SpecifierSet(TESTED[server]).contains(version, prereleases=True)
    except InvalidVersion:
        return False
