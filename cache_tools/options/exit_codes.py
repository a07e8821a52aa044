"""Exit codes of the commands; docs/reference/environment.md has the table."""

from __future__ import annotations

from mlagen.errors import (
    ArgumentError,
    CacheError,
    MlagenError,
    ToolchainError,
    UnsupportedError,
)

DONE = 0
FAILED = 1  # an operation failed, or a check found a problem
USAGE = 2
UNSUPPORTED = 3
CACHE_UNUSABLE = 4
TIMEOUT = 5
INTERRUPTED = 130
PIPE_CLOSED = 141  # the shell's code of a command that SIGPIPE ended

_CODES = (
    (ArgumentError, USAGE),
    (ToolchainError, UNSUPPORTED),
    (UnsupportedError, UNSUPPORTED),
    (CacheError, CACHE_UNUSABLE),
)


def exit_code_of(error: MlagenError) -> int:
    """Return the exit code of a command that ``error`` ended."""
    from mlagen.cache.bundle import BundleError  # imported here: only a failed command pays for it

    if isinstance(error, BundleError):  # the bundle's fault, not the cache's
        return FAILED
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
