"""Small keys, builds, stores and child processes for the tests of the cache."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from mlagen.artifacts import Build, Resources
from mlagen.cache.entry import CacheEntry, read_entry
from mlagen.cache.folder import Folder, open_below
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout
from mlagen.cache.store import KernelStore

ROOT = Path(__file__).resolve().parents[2]
TOOLCHAIN = "nvrtc-13.5.37"
Result = TypeVar("Result")
RESOURCES = Resources(
    symbol="mla_sm80",
    registers=168,
    stack_bytes=0,
    spill_store_bytes=0,
    spill_load_bytes=0,
    static_shared_bytes=0,
)
CUBIN = b"\x7fELF" + bytes(range(256)) * 4


def make_key(family: str = "mla_sm80", *, toolchain: str = TOOLCHAIN) -> CacheKey:
    """Return a small key; another family is another kernel."""
    return CacheKey((("family", family), ("spec.page_size", "64")), toolchain)


def make_build(cubin: bytes = CUBIN, *, toolchain: str = TOOLCHAIN) -> Build:
    """Return a finished build around some bytes."""
    return Build(
        files={"kernel.cubin": cubin, "kernel.cu": b"// source\n", "build.log": b""},
        facts={
            "kernel": {"symbol": "mla_sm80", "spec": {}, "dynamic_shared_bytes": 0},
            "resources": [asdict(RESOURCES)],
            "compile_ms": 1.5,
        },
        toolchain=toolchain,
    )


def make_store(folder: Path, *, lock_timeout_s: float = 60.0) -> KernelStore:
    """Return a store in ``folder/cache`` with its locks in ``folder/locks``."""
    return KernelStore(folder / "cache", lock_dir=folder / "locks", lock_timeout_s=lock_timeout_s)


def entry_folder(folder: Path, key: CacheKey) -> Path:
    """Return where ``make_store(folder)`` keeps the entry of ``key``."""
    return folder / "cache/v1/e" / key.digest[:2] / key.digest / key.toolchain


def read_at(folder: Path, *, key: str, toolchain: str) -> CacheEntry:
    """Return the entry in a folder, verified, as a store reads it."""
    with opened(folder) as entry:
        return read_entry(entry, key=key, toolchain=toolchain)


def opened(folder: Path) -> Folder:
    """Return the folder of an entry, open."""
    layout = Layout(folder.parents[4])
    return open_below(layout, *folder.relative_to(layout.version).parts)


def full_path(name: object, folder: int | None = None) -> Path:
    """Return the path of a name that a call was given, with the open folder it starts from."""
    start = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
    return start / str(name)


def tree(folder: Path) -> list[str]:
    """Return every path below a folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def failing(code: int) -> Callable[..., Any]:
    """Return a function that raises an error of the operating system."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


class CountedBuild:
    """A build function that counts its calls, takes its time, and may fail."""

    def __init__(self, *, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.calls = 0
        self._seconds = seconds
        self._error = error
        self._counting = threading.Lock()

    def __call__(self) -> Build:
        """Build, or raise the configured error."""
        with self._counting:
            self.calls += 1
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return make_build()


def together(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run calls concurrently, each in its own thread, and return their results."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Result]) -> Result:
        start.wait(10)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def fork() -> int:
    """Fork; the threads of the test are meant to run meanwhile."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        return os.fork()


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child; return its exit status, a negative signal if killed."""
    child = fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(15)  # a child that hangs is a failure, not a hanging test run
        try:
            work()
        except BaseException:  # noqa: BLE001 - a child must never return into pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(fact: Callable[[], object], *, seconds: float = 15.0) -> None:
    """Return as soon as ``fact`` is true."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
