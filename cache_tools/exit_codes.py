"""What the exit status of a command says; docs/reference/environment.md has the table."""

from __future__ import annotations

from mlagen.errors import (
    ArgumentError,
    CacheError,
    MlagenError,
    ToolchainError,
    UnsupportedError,
)

DONE = 0
FAILED = 1  # something was tried and failed, or was looked at and is bad
USAGE = 2
UNSUPPORTED = 3
CACHE_UNUSABLE = 4
TIMEOUT = 5
INTERRUPTED = 130
PIPE_CLOSED = 141  # as the shell says of a command that SIGPIPE ended

_CODES = (
    (ArgumentError, USAGE),
    (ToolchainError, UNSUPPORTED),
    (UnsupportedError, UNSUPPORTED),
    (CacheError, CACHE_UNUSABLE),
)


def exit_code_of(error: MlagenError) -> int:
    """Return the status of a command that ``error`` ended."""
    from mlagen.cache.bundle import BundleError  # here: only who failed waits for it

    if isinstance(error, BundleError):  # the bundle's fault, not the cache's
        return FAILED
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
