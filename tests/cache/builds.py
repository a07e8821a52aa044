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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mlagen.artifacts import Build, Resources
from mlagen.cache.file import HEAD_BYTES, Manifest, encode, entry_name, file_of, manifest_bytes
from mlagen.cache.key import CacheKey
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


def entry_path(folder: Path, key: CacheKey) -> Path:
    """Return where ``make_store(folder)`` keeps the entry of ``key``."""
    return folder / "cache/v2" / key.digest[:2] / entry_name(key.digest, key.toolchain)


def make_file(key: CacheKey | None = None, build: Build | None = None) -> bytes:
    """Return the file of an entry."""
    return encode(key or make_key(), build or make_build(), created_by="jit")[1]


class Parts(NamedTuple):
    """The parts of the file of an entry behind its head."""

    manifest: bytes
    cubin: bytes
    packed: bytes

    @classmethod
    def of(cls, file: bytes) -> Parts:
        """Return the parts of a whole file."""
        start = HEAD_BYTES + manifest_bytes(file)
        manifest = Manifest.from_json(file[HEAD_BYTES:start])
        end = start + manifest.files["kernel.cubin"].size
        return cls(file[HEAD_BYTES:start], file[start:end], file[end:])

    def sealed(self, **changes: object) -> bytes:
        """Return a file of these parts, its manifest changed, under a valid digest."""
        text = self.manifest
        if changes:
            text = replace(Manifest.from_json(text), **changes).to_json()  # type: ignore[arg-type]
        return file_of(text, self.cubin, self.packed)


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the content of a file in place."""
    content = change(path.read_bytes())
    path.write_bytes(content)


def cut(path: Path, size: int = 100) -> None:
    """Truncate a file."""
    os.truncate(path, size)


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
