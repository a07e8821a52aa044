"""Fork and exit wait for critical sections of other threads, with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from mlagen import fork_safety
from mlagen.fork_safety import defer_exit, defer_forks
from tests.cache.builds import ROOT, fork, in_child


@contextmanager
def another_thread_inside(seconds: float | None) -> Iterator[list[str]]:
    """Hold a critical section in another thread for a time; its list records the end."""
    inside, release, log = threading.Event(), threading.Event(), list[str]()

    def stay() -> None:
        with defer_forks():
            inside.set()
            release.wait(20 if seconds is None else seconds)
            log.append("done")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(stay)
        inside.wait(20)
        try:
            yield log
        finally:
            release.set()


@pytest.mark.timeout(30)
def test_a_fork_waits_for_a_critical_section() -> None:
    """The child sees the section finished, and its lock free."""

    def work() -> None:
        assert log == ["done"]
        assert in_another_thread() == "in"

    with another_thread_inside(0.3) as log:
        status = in_child(work)
    assert status == 0
    assert enter() == "in"


def enter() -> str:
    """Pass through a critical section."""
    with defer_forks():
        return "in"


def in_another_thread() -> str:
    """Pass through a critical section in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result(10)


@pytest.mark.timeout(30)
def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout the fork proceeds, and the child's lock is free."""
    monkeypatch.setattr(fork_safety, "_MAX_FORK_WAIT_S", 0.05)

    def work() -> None:
        assert log == []
        assert in_another_thread() == "in"
        assert in_child(enter) == 0

    with another_thread_inside(None) as log:
        status = in_child(work)

    assert status == 0
    assert enter() == "in"


@pytest.mark.timeout(30)
def test_a_thread_may_fork_inside_its_own_critical_section() -> None:
    """Parent and child both continue and release the lock."""
    with defer_forks():
        status = in_child(enter)
    assert status == 0
    assert in_another_thread() == "in"


REACHED, RELEASE, PARENT = threading.Event(), threading.Event(), os.getpid()


def import_slowly() -> None:
    """Be half-way through an import until the test says so; a child goes on at once."""
    REACHED.set()
    assert os.getpid() != PARENT or RELEASE.wait(20)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_pure", [True, False], ids=["pure", "with a library"])
@pytest.mark.parametrize("slow", ["__init__", "part"])
def test_a_child_does_not_wait_for_an_import_of_another_thread(
    slow: str, is_pure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports a half-imported package or part of one again, or raises ImportError at once."""

    def work() -> None:
        with (
            nullcontext() if is_pure else pytest.raises(ImportError, match=r"half.*forked; import")
        ):
            import_module("half.part")

    if not is_pure:
        library = ModuleType("half._C")
        library.__file__ = f"half/_C{EXTENSION_SUFFIXES[0]}"
        monkeypatch.setitem(sys.modules, "half._C", library)
    (tmp_path / "half").mkdir()
    for name in ("__init__", "part"):
        (tmp_path / f"half/{name}.py").touch()
    (tmp_path / f"half/{slow}.py").write_text(
        f"from {__name__} import import_slowly\nimport_slowly()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    REACHED.clear()
    RELEASE.clear()
    with ThreadPoolExecutor(1) as pool:
        importing = pool.submit(import_module, "half.part")
        REACHED.wait(20)
        status = in_child(work)
        RELEASE.set()
        assert importing.result(20) is sys.modules["half.part"]

    del sys.modules["half"], sys.modules["half.part"]
    assert status == 0


def test_a_fork_inside_an_import_keeps_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that forks while it is imported goes on in the child."""
    (tmp_path / "forks.py").write_text(f"from {fork.__module__} import fork\nchild = fork()\n")
    monkeypatch.syspath_prepend(tmp_path)

    module = import_module("forks")
    if module.child == 0:
        os._exit(0 if sys.modules["forks"] is module else 1)

    del sys.modules["forks"]
    assert os.waitpid(module.child, 0)[1] == 0


# Prints the at-fork handlers that the first build registers in critical sections.
REGISTERED = """
import os
from mlagen import fork_safety
from mlagen.engine import find_or_build
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
def register(**handlers):
    if "before" in handlers and fork_safety._fork_lock._is_owned():
        print(handlers)
    register_anyhow(**handlers)
register_anyhow, os.register_at_fork = os.register_at_fork, register
assert find_or_build(CombineSpec(arch=Arch(80), dtype=DType.BF16, head_dim_vo=512)).built
with fork_safety.defer_forks():
    import mlagen.runtime.loader
"""


def test_critical_sections_register_no_handler_that_waits_before_a_fork() -> None:
    """Such a handler would run before ours, and each would wait for the other."""
    command = [sys.executable, "-c", REGISTERED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ENDING = """
import sys, threading, time
from mlagen import fork_safety
fork_safety._MAX_EXIT_WAIT_S = float(sys.argv[1])
begun = threading.Event()
def work():
    with fork_safety.defer_exit():
        begun.set()
        time.sleep(float(sys.argv[2]))
        print("done", flush=True)
    assert fork_safety.is_exiting()
    while True:
        with fork_safety.defer_exit():
            time.sleep(0.01)
threading.Thread(target=work, daemon=True).start()
begun.wait(20)
assert not fork_safety.is_exiting()
"""


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("patience_s", "takes_s", "output"),
    [("20", "0.3", "done\n"), ("0.1", "60", "")],
    ids=["finished", "too long"],
)
def test_exit_waits_for_started_work(patience_s: str, takes_s: str, output: str) -> None:
    """A daemon thread may finish its work within the time limit, but start no more."""
    command = [sys.executable, "-c", ENDING, patience_s, takes_s]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - start
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")
    assert took_s < 15


def test_finished_work_is_not_waited_for() -> None:
    """Exit waits for no finished or failed work, and not in a child."""

    def work() -> None:
        assert fork_safety._unfinished == set()

    with pytest.raises(LookupError), defer_exit():
        raise LookupError
    after = len(fork_safety._unfinished)
    with defer_exit():
        inside = len(fork_safety._unfinished)
        status = in_child(work)

    assert (after, inside) == (0, 1)
    assert status == 0
