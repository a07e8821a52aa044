"""Settings from the environment, read once into a frozen object."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
    checks_contents: bool = False  # of tensors, at every call; synchronizes with the device
    mla_kernel: str = "auto"  # one of KERNELS, for MLA calls
    mla_p_dtype: str = "auto"  # one of P_DTYPES, the dtype of P in MLA calls
    gqa_kernel: str = "auto"  # one of KERNELS, for grouped-query calls
    cache_layers: tuple[Path, ...] = ()  # read-only, searched after cache_dir
    trusts_shared: bool = False  # trusts cache folders that other users may write
    cache_max_bytes: int | None = DEFAULT_CACHE_MAX_BYTES  # None: no limit
    toolchain: str = "auto"  # one of TOOLCHAIN_POLICIES, or a toolchain such as nvrtc-13.0.88
    jit: str = "on"  # one of JIT_MODES: whether a call may compile
    log: str | None = None  # one of LOG_LEVELS; None: the application configures logging
    reads_hub_cache: bool = False  # for model configurations by Hub id; downloads nothing
    record: Path | None = None  # the file that gets a line for each kernel look-up
    line_info: bool = False  # compiles with line info, for profilers; other keys
    dump: Path | None = None  # the folder that gets a file for each distinct call
    dumps_tensors: bool = False  # with dump: also the contents of tensors; synchronizes


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings of ``environ``.

    Raises
    ------
    ArgumentError
        If the value of a variable breaks its rule.
    """
    cache_dir = _cache_dir(environ)
    return Settings(
        cache_dir=cache_dir,
        lock_dir=_lock_dir(environ),
        lock_timeout_s=_seconds(environ, "MLAGEN_LOCK_TIMEOUT", DEFAULT_LOCK_TIMEOUT_S),
        checks_contents=_switch(environ, "MLAGEN_CHECK"),
        mla_kernel=_word(environ, "MLAGEN_MLA_KERNEL", KERNELS),
        mla_p_dtype=_word(environ, "MLAGEN_MLA_P_DTYPE", P_DTYPES),
        gqa_kernel=_word(environ, "MLAGEN_GQA_KERNEL", KERNELS),
        cache_layers=_folders(environ, "MLAGEN_CACHE_RO"),
        trusts_shared=_switch(environ, "MLAGEN_TRUST_SHARED"),
        cache_max_bytes=_cache_max_bytes(environ),
        toolchain=_toolchain(environ),
        jit=_word(environ, "MLAGEN_JIT", JIT_MODES),
        log=_word(environ, "MLAGEN_LOG", tuple(LOG_LEVELS)) if environ.get("MLAGEN_LOG") else None,
        reads_hub_cache=_switch(environ, "MLAGEN_HF"),
        record=_named(environ, "MLAGEN_RECORD"),
        line_info=_switch(environ, "MLAGEN_LINEINFO"),
        dump=_named(environ, "MLAGEN_DUMP"),
        dumps_tensors=_switch(environ, "MLAGEN_DUMP_TENSORS"),
    )


def observes_calls(environ: Mapping[str, str]) -> bool:
    """Whether ``environ`` requests the log or the dumps of calls.

    Entry points are wrapped when they are imported, so that the other calls cost nothing more. No
    other variable is read that early.
    """
    return environ.get("MLAGEN_LOG") == "api" or bool(environ.get("MLAGEN_DUMP"))


def read_size(name: str, text: str) -> int:
    """Return a size such as ``500M`` or ``1.5 GiB`` in bytes; units are powers of 1024.

    Raises
    ------
    ArgumentError
        If it is no size; the message begins with ``name``.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"{name}: expected a size such as 500M or 2GiB, got {_shown(text)}")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


@cache
def current_settings() -> Settings:
    """Return the settings of this process; the first call reads the environment."""
    asked = _Asked(os.environ)
    settings = read_settings(asked)
    set_up_logging(settings.log)
    for name, nearest in _unread(asked).items():
        hint = f"; did you mean {nearest}?" if nearest else ""
        shown = visible(name, kept="")
        _logger.warning("%s: expected a variable that mlagen reads, got another%s", shown, hint)
    return settings


class _Asked(Mapping[str, str]):
    """An environment that remembers the names that it is asked for."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ, self.names = environ, set[str]()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return self._environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)


def set_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of mlagen's variables in ``environ``, sorted."""
    own = (name for name in environ if name.startswith(_PREFIX))
    return sorted(name for name in own if not _OF_OTHERS.fullmatch(name))


def unread_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return those of them that mlagen does not read, each with the most similar name that it does.

    Raises
    ------
    ArgumentError
        If the value of a variable breaks its rule.
    """
    asked = _Asked(environ)
    read_settings(asked)
    return _unread(asked)


def _unread(asked: _Asked) -> dict[str, str | None]:
    unread = [name for name in set_variables(asked) if name not in asked.names]
    return {name: _nearest(name, asked.names) for name in unread}


def _nearest(name: str, names: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    typed = name.removeprefix(_PREFIX)
    known = sorted(each.removeprefix(_PREFIX) for each in names if each.startswith(_PREFIX))
    similar = get_close_matches(typed, known, n=1, cutoff=0.8)  # before LOG for LOG_LEVEL
    similar = similar or [each for each in known if typed.startswith(f"{each}_")]
    similar = similar or get_close_matches(typed, known, n=1)
    if not similar and (longer := [each for each in known if each.startswith(f"{typed}_")]):
        similar = [min(longer, key=len)]  # MLA_KERNEL for MLA
    return f"{_PREFIX}{max(similar, key=len)}" if similar else None


def _cache_dir(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("MLAGEN_CACHE_DIR"):
        return _place("MLAGEN_CACHE_DIR", chosen)
    xdg = Path(environ.get("XDG_CACHE_HOME") or "relative")
    if xdg.is_absolute():  # the XDG specification requires ignoring a relative path
        return xdg / "mlagen"
    home = Path(environ.get("HOME") or "relative")
    if home.is_absolute():
        return home / ".cache" / "mlagen"
    return _temporary() / f"mlagen-{_user()}"


def _lock_dir(environ: Mapping[str, str]) -> Path:
    # Locks are on a local file system: flock on a network folder may bind one node only, or hang.
    if chosen := environ.get("MLAGEN_LOCK_DIR"):
        return _place("MLAGEN_LOCK_DIR", chosen)
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or "relative")
    if runtime.is_absolute() and os.access(runtime, os.W_OK):
        return runtime / "mlagen"
    shared_memory = Path("/dev/shm")
    base = shared_memory if is_folder(shared_memory) else _temporary()
    return base / f"mlagen-{_user()}"


def _user() -> str:
    return str(os.getuid()) if sys.platform != "win32" else os.environ.get("USERNAME", "user")


def _folders(environ: Mapping[str, str], name: str) -> tuple[Path, ...]:
    text = environ.get(name, "")
    _reject_url(name, text)
    named = text.split(os.pathsep)
    return tuple(_place(name, folder) for folder in named if folder)


def _named(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name)
    return _place(name, text) if text else None


def _reject_url(name: str, text: str) -> None:
    if _URL.search(text):  # it may hold a password, which messages would show
        raise ArgumentError(f"{name}: expected a path, got a URL")


def _shown(text: str) -> str:
    """Return a value for a message; a URL may hold a password."""
    return "a URL" if _URL.search(text) else repr(text)


def _place(name: str, text: str) -> Path:
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


def _cache_max_bytes(environ: Mapping[str, str]) -> int | None:
    name = "MLAGEN_CACHE_MAX_SIZE"
    text = environ.get(name)
    if not text:
        return DEFAULT_CACHE_MAX_BYTES
    return read_size(name, text) or None  # 0 is no limit


def _toolchain(environ: Mapping[str, str]) -> str:
    name = "MLAGEN_TOOLCHAIN"
    text = environ.get(name, "")
    if _TOOLCHAIN.fullmatch(text):
        return text
    if text and text not in TOOLCHAIN_POLICIES:
        allowed = f"{', '.join(TOOLCHAIN_POLICIES)} or one such as nvrtc-13.0.88"
        raise ArgumentError(f"{name}: expected {allowed}, got {_shown(text)}")
    return text or TOOLCHAIN_POLICIES[0]


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentError(
            f"{name}: expected a finite number of seconds, 0 or more, got {_shown(text)}"
        )
    return seconds


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "")
    if text not in {"", "0", "1"}:
        raise ArgumentError(f"{name}: expected 0 or 1, got {_shown(text)}")
    return text == "1"


def _word(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return the value of a variable out of ``allowed``, the first if it is not set."""
    text = environ.get(name) or allowed[0]
    if text not in allowed:
        raise ArgumentError(f"{name}: expected {' or '.join(allowed)}, got {_shown(text)}")
    return text
