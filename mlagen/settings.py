"""Settings from the environment, read once into a frozen object."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlagen.errors import ArgumentError
from mlagen.logs import LOG_LEVELS, set_up_logging, visible
from mlagen.paths import is_folder

DEFAULT_LOCK_TIMEOUT_S = 300.0
DEFAULT_CACHE_MAX_BYTES = 1 << 30
KERNELS = ("auto", "sm80", "sm90")
P_DTYPES = ("auto", "fp16")
JIT_MODES = ("on", "freeze", "warn", "error", "off")  # in order of strictness
TOOLCHAIN_POLICIES = ("auto", "exact", "compatible")

_PREFIX = "MLAGEN_"
# Variables of the tests of a checkout, and those that Kubernetes makes of a service named mlagen.
_OF_OTHERS = re.compile(
    r"MLAGEN_(ACCEPT|TEST_.*|SHIM_.*|(.*_)?SERVICE_(HOST|PORT).*|(.*_)?PORT(_\d+_(TCP|UDP).*)?)"
)

_logger = logging.getLogger("mlagen")

_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
# In a list of folders, too; and user:password@ of one with less than two slashes.
_URL = re.compile(r"(^|:)[a-zA-Z][\w+.-]*://|^([a-zA-Z][\w+.-]*:/)?[^/:@]+:[^/@]+@")
_TOOLCHAIN = re.compile(r"nvrtc-\d+\.\d+\.\d+")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a process; see ``docs/reference/environment.md``."""

    cache_dir: Path
    lock_dir: Path
    lock_timeout_s: float
    checks_contents: bool  # of tensors, at every call; synchronizes with the device
    mla_kernel: str  # one of KERNELS, for MLA calls
    mla_p_dtype: str  # one of P_DTYPES, the dtype of P in MLA calls
    gqa_kernel: str  # one of KERNELS, for grouped-query calls
    batch_invariant: bool  # of calls that leave it to the settings
    cache_layers: tuple[Path, ...]  # read-only, searched after cache_dir
    trusts_shared: bool  # trusts cache folders that other users may write
    cache_max_bytes: int | None  # None: no limit
    toolchain: str  # one of TOOLCHAIN_POLICIES, or a toolchain such as nvrtc-13.0.88
    jit: str  # one of JIT_MODES: whether a call may compile
    log: str | None  # one of LOG_LEVELS; None: the application configures logging
    reads_hub_cache: bool  # for model configurations by Hub id; downloads nothing
    record: Path | None  # the file that gets a line for each kernel look-up
    line_info: bool  # compiles with line info, for profilers; other keys
    dump: Path | None  # the folder that gets a file for each distinct call
    dumps_tensors: bool  # with dump: also the contents of tensors; synchronizes
    observes_calls: bool  # whether there is a log or a dump of calls


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings of ``environ``.

    Raises ArgumentError if the value of a variable breaks its rule.
    """
    read = {
        field: reader(name, environ.get(name, "")) for field, (name, reader) in _VARIABLES.items()
    }
    read["cache_dir"] = read["cache_dir"] or _default_cache_dir(environ)
    read["lock_dir"] = read["lock_dir"] or _default_lock_dir(environ)
    read["observes_calls"] = read["log"] == "api" or read["dump"] is not None
    return Settings(**read)


def read_size(name: str, text: str) -> int:
    """Return a size such as ``500M`` or ``1.5 GiB`` in bytes; units are powers of 1024.

    Raises ArgumentError if it is no size; the message begins with ``name``.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"{name}: expected a size such as 500M or 2GiB, got {_shown(text)}")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


@cache
def current_settings() -> Settings:
    """Return the settings of this process; the first call reads the environment."""
    settings = read_settings(os.environ)
    set_up_logging(settings.log)
    for name, nearest in unread_variables(os.environ).items():
        hint = f"; did you mean {nearest}?" if nearest else ""
        shown = visible(name, kept="")
        _logger.warning("%s: expected a variable that mlagen reads, got another%s", shown, hint)
    return settings


def set_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of mlagen's variables in ``environ``, sorted."""
    own = (name for name in environ if name.startswith(_PREFIX))
    return sorted(name for name in own if not _OF_OTHERS.fullmatch(name))


def unread_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return those of them that mlagen does not read, each with the most similar name that it does.

    They may be secrets of another program.
    """
    read = {name for name, _ in _VARIABLES.values()}
    return {name: _nearest(name) for name in set_variables(environ) if name not in read}


def _nearest(name: str) -> str | None:
    from difflib import get_close_matches

    typed = name.removeprefix(_PREFIX)
    known = sorted(each.removeprefix(_PREFIX) for each, _ in _VARIABLES.values())
    similar = get_close_matches(typed, known, n=1)
    similar = similar or [each for each in known if f"{each}_".startswith(f"{typed}_")]
    similar = similar or [each for each in known if typed.startswith(f"{each}_")]
    return f"{_PREFIX}{min(similar, key=len)}" if similar else None


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    xdg = Path(environ.get("XDG_CACHE_HOME") or "relative")
    if xdg.is_absolute():  # the XDG specification requires ignoring a relative path
        return xdg / "mlagen"
    home = Path(environ.get("HOME") or "relative")
    if home.is_absolute():
        return home / ".cache" / "mlagen"
    return _temporary() / f"mlagen-{_user()}"


def _default_lock_dir(environ: Mapping[str, str]) -> Path:
    # Locks are on a local file system: flock on a network folder may bind one node only, or hang.
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or "relative")
    if runtime.is_absolute() and os.access(runtime, os.W_OK):
        return runtime / "mlagen"
    shared_memory = Path("/dev/shm")
    base = shared_memory if is_folder(shared_memory) else _temporary()
    return base / f"mlagen-{_user()}"


def _user() -> str:
    return str(os.getuid()) if sys.platform != "win32" else os.environ.get("USERNAME", "user")


def _folders(name: str, text: str) -> tuple[Path, ...]:
    _reject_url(name, text)
    return tuple(_folder(name, folder) for folder in text.split(os.pathsep) if folder)


def _path(name: str, text: str) -> Path | None:
    return _folder(name, text) if text else None


def _reject_url(name: str, text: str) -> None:
    if _URL.search(text):  # it may hold a password, which messages would show
        raise ArgumentError(f"{name}: expected a path, got a URL")


def _shown(text: str) -> str:
    """Return a value for a message; a URL may hold a password."""
    return "a URL" if _URL.search(text) else repr(text)


def _folder(name: str, text: str) -> Path:
    _reject_url(name, text)
    if "\0" in text:
        raise ArgumentError(f"{name}: expected a path without a null character, got {text!r}")
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no home directory for a tilde, or no current folder
        raise ArgumentError(f"{name}: expected a path, got {text!r}: {error}") from error


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no folder is writable: kernels stay in memory, with a warning
        return Path("/tmp")


def _max_bytes(name: str, text: str) -> int | None:
    return (read_size(name, text) or None) if text else DEFAULT_CACHE_MAX_BYTES  # 0 is no limit


def _toolchain(name: str, text: str) -> str:
    if text and text not in TOOLCHAIN_POLICIES and not _TOOLCHAIN.fullmatch(text):
        allowed = f"{', '.join(TOOLCHAIN_POLICIES)} or one such as nvrtc-13.0.88"
        raise ArgumentError(f"{name}: expected {allowed}, got {_shown(text)}")
    return text or TOOLCHAIN_POLICIES[0]


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text) if text else DEFAULT_LOCK_TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        rule = "a finite number of seconds, 0 or more"
        raise ArgumentError(f"{name}: expected {rule}, got {_shown(text)}")
    return seconds


def _switch(name: str, text: str) -> bool:
    if text not in {"", "0", "1"}:
        raise ArgumentError(f"{name}: expected 0 or 1, got {_shown(text)}")
    return text == "1"


def _word(*allowed: str) -> Callable[[str, str], str]:
    """Return a reader of one of the words, the first if the variable is not set."""

    def read(name: str, text: str) -> str:
        if text and text not in allowed:
            raise ArgumentError(f"{name}: expected {' or '.join(allowed)}, got {_shown(text)}")
        return text or allowed[0]

    return read


def _log_level(name: str, text: str) -> str | None:
    return _word(*LOG_LEVELS)(name, text) if text else None


# The variable of each field, and what reads its text, which is empty where it is not set.
_VARIABLES: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "cache_dir": ("MLAGEN_CACHE_DIR", _path),
    "lock_dir": ("MLAGEN_LOCK_DIR", _path),
    "lock_timeout_s": ("MLAGEN_LOCK_TIMEOUT", _seconds),
    "checks_contents": ("MLAGEN_CHECK", _switch),
    "mla_kernel": ("MLAGEN_MLA_KERNEL", _word(*KERNELS)),
    "mla_p_dtype": ("MLAGEN_MLA_P_DTYPE", _word(*P_DTYPES)),
    "gqa_kernel": ("MLAGEN_GQA_KERNEL", _word(*KERNELS)),
    "batch_invariant": ("MLAGEN_BATCH_INVARIANT", _switch),
    "cache_layers": ("MLAGEN_CACHE_RO", _folders),
    "trusts_shared": ("MLAGEN_TRUST_SHARED", _switch),
    "cache_max_bytes": ("MLAGEN_CACHE_MAX_SIZE", _max_bytes),
    "toolchain": ("MLAGEN_TOOLCHAIN", _toolchain),
    "jit": ("MLAGEN_JIT", _word(*JIT_MODES)),
    "log": ("MLAGEN_LOG", _log_level),
    "reads_hub_cache": ("MLAGEN_HF", _switch),
    "record": ("MLAGEN_RECORD", _path),
    "line_info": ("MLAGEN_LINEINFO", _switch),
    "dump": ("MLAGEN_DUMP", _path),
    "dumps_tensors": ("MLAGEN_DUMP_TENSORS", _switch),
}
