"""Forks and ends of a process wait for what they must not cut in two, and not for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from mlagen import fork_safety
from mlagen.fork_safety import finished_before_exit, in_one_piece
from tests.cache.builds import ROOT, in_child

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@contextmanager
def another_thread_inside(seconds: float | None) -> Iterator[list[str]]:
    """Have a thread stay in one piece so long, or until the end; its list says when it is done."""
    inside, release, said = threading.Event(), threading.Event(), list[str]()

    def stay() -> None:
        with in_one_piece():
            inside.set()
            release.wait(20 if seconds is None else seconds)
            said.append("done")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(stay)
        inside.wait(20)
        try:
            yield said
        finally:
            release.set()


@pytest.mark.timeout(30)
def test_a_fork_waits_for_what_another_thread_does_in_one_piece() -> None:
    """The child finds it done, and its lock open."""

    def work() -> None:
        assert said == ["done"]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(enter).result(10) == "in"

    with another_thread_inside(0.3) as said:
        status = in_child(work)

    assert status == 0
    assert enter() == "in"


def enter() -> str:
    """Do something in one piece."""
    with in_one_piece():
        return "in"


@pytest.mark.timeout(30)
def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its patience the fork goes on, and the child has a lock that nobody holds."""
    monkeypatch.setattr(fork_safety, "_FORK_WAITS_S", 0.05)

    def work() -> None:
        assert said == []
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(enter).result(10) == "in"
        assert in_child(enter) == 0

    with another_thread_inside(None) as said:
        status = in_child(work)

    assert status == 0
    assert enter() == "in"


@pytest.mark.timeout(30)
def test_a_thread_may_fork_in_the_middle_of_its_own_piece() -> None:
    """Parent and child both go on, and both come out of it."""

    def work() -> None:
        enter()

    with in_one_piece():
        status = in_child(work)

    assert status == 0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result(10) == "in"


ENDING = """
import sys, threading, time
from mlagen import fork_safety
fork_safety._EXIT_WAITS_S = float(sys.argv[1])
begun = threading.Event()
def work():
    with fork_safety.finished_before_exit():
        begun.set()
        time.sleep(float(sys.argv[2]))
        print("done", flush=True)
    assert fork_safety.is_ending()
    while True:
        with fork_safety.finished_before_exit():
            time.sleep(0.01)
threading.Thread(target=work, daemon=True).start()
begun.wait(20)
assert not fork_safety.is_ending()
"""


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("patience_s", "takes_s", "said"),
    [("20", "0.3", "done\n"), ("0.1", "60", "")],
    ids=["finished", "too long"],
)
def test_the_end_waits_for_what_has_begun(patience_s: str, takes_s: str, said: str) -> None:
    """A daemon thread may finish it, but begin nothing else, and nothing that takes too long."""
    command = [sys.executable, "-c", ENDING, patience_s, takes_s]

    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - start

    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert took_s < 15


def test_what_is_done_is_waited_for_no_more() -> None:
    """Nothing is left that an end would wait for, after an error neither, and not in a child."""

    def work() -> None:
        assert fork_safety._unfinished == set()

    with pytest.raises(LookupError), finished_before_exit():
        raise LookupError
    after = len(fork_safety._unfinished)
    with finished_before_exit():
        inside = len(fork_safety._unfinished)
        status = in_child(work)

    assert (after, inside) == (0, 1)
    assert status == 0
