"""Every environment variable that mlagen reads, read once into one frozen object."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlagen.errors import ArgumentError

DEFAULT_LOCK_TIMEOUT_S = 300.0
MLA_KERNELS = ("auto", "portable", "hopper")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment decided; see ``docs/reference/environment.md``."""

    cache_dir: Path
    lock_dir: Path
    lock_timeout_s: float
    checks_contents: bool = False  # of tensors, at every call; waits for the device
    mla_kernel: str = "auto"  # out of MLA_KERNELS: what MLA calls take


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings that ``environ`` asks for.

    Raises
    ------
    ArgumentError
        If a variable is set to something that breaks its rule.
    """
    cache_dir = _cache_dir(environ)
    return Settings(
        cache_dir=cache_dir,
        lock_dir=_lock_dir(environ),
        lock_timeout_s=_seconds(environ, "MLAGEN_LOCK_TIMEOUT", DEFAULT_LOCK_TIMEOUT_S),
        checks_contents=_switch(environ, "MLAGEN_CHECK"),
        mla_kernel=_word(environ, "MLAGEN_MLA_KERNEL", MLA_KERNELS),
    )


@cache
def current_settings() -> Settings:
    """Return the settings of this process; the environment is read on the first call."""
    return read_settings(os.environ)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("MLAGEN_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    xdg = Path(environ.get("XDG_CACHE_HOME") or "relative")
    if xdg.is_absolute():  # the XDG specification says to ignore a relative path
        return xdg / "mlagen"
    home = Path(environ.get("HOME") or "relative")
    if home.is_absolute():
        return home / ".cache" / "mlagen"
    return Path(tempfile.gettempdir()) / f"mlagen-{_user()}"


def _lock_dir(environ: Mapping[str, str]) -> Path:
    # Locks live on this machine: flock on a network folder may bind one node only, or hang.
    if chosen := environ.get("MLAGEN_LOCK_DIR"):
        return Path(chosen).expanduser().absolute()
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or "relative")
    if runtime.is_absolute() and os.access(runtime, os.W_OK):
        return runtime / "mlagen"
    shared_memory = Path("/dev/shm")
    base = shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
    return base / f"mlagen-{_user()}"


def _user() -> str:
    return str(os.getuid()) if sys.platform != "win32" else os.environ.get("USERNAME", "user")


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentError(f"{name}: expected a finite number of seconds, 0 or more, got {text!r}")
    return seconds


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "")
    if text not in {"", "0", "1"}:
        raise ArgumentError(f"{name}: expected 0 or 1, got {text!r}")
    return text == "1"


def _word(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return one of the words, the first if none is said."""
    text = environ.get(name) or allowed[0]
    if text not in allowed:
        raise ArgumentError(f"{name}: expected {' or '.join(allowed)}, got {text!r}")
    return text
