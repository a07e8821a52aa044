"""The exceptions that mlagen raises.

::

    MlagenError
    ├── ArgumentError(ValueError)               the caller's tensors or scalars are wrong
    ├── UnsupportedError(NotImplementedError)   a valid request that no kernel supports
    ├── CaptureError(RuntimeError)              the call cannot be captured in a CUDA graph
    ├── ToolchainError(RuntimeError)            no NVRTC, or one that does not know the architecture
    ├── MissError(RuntimeError)                 a kernel is not cached and may not be compiled here
    ├── CompileError(RuntimeError)              NVRTC rejected a kernel; ``.log``, ``.source``
    ├── CacheError(OSError)                     the cache cannot be read or written; ``.path``
    └── DriverError(RuntimeError)               loading or launching failed; ``.symbol``

A message is one line: the argument or object, the rule, the value. After any of them the outputs
are unchanged, no partial cache entry is visible and no lock is held.
"""

from __future__ import annotations

from pathlib import Path

# Messages contain names and texts of any length from the caller.
_MAX_MESSAGE = 4000


class MlagenError(Exception):
    """Base of every exception that mlagen raises on purpose."""

    def __init__(self, message: str = "") -> None:
        line = message[:_MAX_MESSAGE]
        if not line.isprintable():
            line = "".join(letter if letter.isprintable() else " " for letter in line)
        super().__init__(line)


class ArgumentError(MlagenError, ValueError):
    """An argument breaks a rule; the message names argument, rule and value."""


class UnsupportedError(MlagenError, NotImplementedError):
    """The request is valid, but no kernel supports it; the message lists the supported ones."""


class CaptureError(MlagenError, RuntimeError):
    """A call cannot be captured in a CUDA graph: most often its kernel is not loaded yet."""


class ToolchainError(MlagenError, RuntimeError):
    """NVRTC is missing, too old, or does not know the architecture."""


class MissError(MlagenError, RuntimeError):
    """A kernel is not in the cache, and this process may not compile it; the message says why."""


class CompileError(MlagenError, RuntimeError):
    """NVRTC rejected a kernel; ``log`` has positions in the templates, ``source`` is CUDA."""

    def __init__(self, message: str, *, log: str, source: str) -> None:
        super().__init__(message)
        self.log = log
        self.source = source


class CacheError(MlagenError, OSError):
    """The kernel cache cannot be read or written; ``path`` is the file or folder."""

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


class DriverError(MlagenError, RuntimeError):
    """The driver failed to load or launch a kernel; ``symbol`` is it, or the driver call."""

    def __init__(self, message: str, *, symbol: str) -> None:
        super().__init__(message)
        self.symbol = symbol
