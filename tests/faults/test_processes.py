"""Forks, starts and ends of processes during compilations: no child hangs, no kernel is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlagen import engine
from mlagen.artifacts import Source
from mlagen.codegen.render import render
from mlagen.compiler import process
from mlagen.compiler.process import compile_anywhere
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.engine import find_or_build, kernel_for
from mlagen.runtime.loader import LoadedKernel
from tests.cache.builds import ROOT, in_child, wait_for
from tests.faults.crowds import crowd, received, send
from tests.faults.steps import whole_entries
from tests.fixture_types import Patch
from tests.kernels import COMBINE, DECODE, SM_80, complaints

PROBE = Source(text='extern "C" __global__ void probe() {}\n', origins=("probe.cuh:1",))


@pytest.mark.timeout(60)
def test_a_child_forked_after_a_compilation_hits_and_compiles() -> None:
    """It finds the kernels of its parent, and compiles missing ones itself, with NVRTC loaded."""
    built = find_or_build(COMBINE)
    other = type(COMBINE)(arch=COMBINE.arch, dtype=COMBINE.dtype, head_dim_vo=128)

    def work() -> None:
        hit, made = find_or_build(COMBINE), find_or_build(other)
        assert (hit.built, made.built) == (False, True)
        assert hit.entry == built.entry
        assert not process._forked_mid_compile

    assert in_child(work) == 0
    assert not find_or_build(other).built


@pytest.mark.timeout(90)
def test_children_forked_during_a_compilation_compile_and_do_not_hang(tmp_path: Path) -> None:
    """Twelve children at any moment of it: each gets the right kernel, and so does the parent."""
    nvrtc, decode = find_nvrtc(), render(DECODE)
    right = compile_anywhere(PROBE, SM_80, nvrtc).code

    def work(_: int) -> None:
        send(tmp_path, process._forked_mid_compile)
        assert compile_anywhere(PROBE, SM_80, nvrtc).code == right

    statuses, codes = [], set()
    with ThreadPoolExecutor(1) as pool:
        for moment in (0, 0.15, 0.3):
            parent = pool.submit(compile_anywhere, decode, DECODE.arch, nvrtc)
            wait_for(lambda: process._active_compiles)
            time.sleep(moment)
            statuses += crowd(4, work, seconds=20)
            codes.add(parent.result().code)

    assert statuses == [0] * 12
    assert len(codes) == 1
    # A fast or idle machine may finish the compilation before a fork.
    assert received(tmp_path).count(True) >= 4


# Forks at moments of a thread's first build, which imports what it needs. A moment is a number of
# audit events, so that load moves none. Prints the status of each child, and the longest fork.
FORKING = """
import os, signal, sys, threading, time, traceback
from mlagen.engine import find_or_build
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType

COMBINE = CombineSpec(arch=Arch(80), dtype=DType.BF16, head_dim_vo=512)
SPACING, FORKS = 80, 5
moment = threading.Semaphore(0)
events = 0

def watch(*_):
    global events
    if os.getpid() == own_id and threading.current_thread() is builder:
        events += 1
        if events % SPACING == first:
            moment.release()
            time.sleep(0.005)

def child_of(work):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child

def build_and_fork():
    global own_id, builder
    os.environ["MLAGEN_CACHE_DIR"] += f"/{first}"
    own_id, builder = os.getpid(), threading.Thread(target=find_or_build, args=(COMBINE,))
    sys.addaudithook(watch)
    builder.start()
    children, longest_s = [], 0.0
    for _ in range(FORKS):
        while builder.is_alive() and not moment.acquire(timeout=0.1):
            pass
        start = time.monotonic()
        children.append(child_of(lambda: find_or_build(COMBINE)))
        longest_s = max(longest_s, time.monotonic() - start)
    builder.join()
    print(*(os.waitpid(child, 0)[1] for child in children), longest_s, flush=True)

for first in range(5, SPACING, 13):
    os.waitpid(child_of(build_and_fork), 0)
"""


@pytest.mark.timeout(90)
def test_forks_at_thirty_moments_of_a_first_build_stall_and_hang_no_process() -> None:
    """Each takes the parent less than 2 s, and the child builds or finds the kernel within 20 s."""
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORKING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, complaints(done.stderr)) == (0, [])
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [statuses for *statuses, _ in lines] == [["0"] * 5] * 6
    assert max(float(longest_s) for *_, longest_s in lines) < 2


@pytest.mark.timeout(90)
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork", "exec"])
def test_processes_of_any_start_method_share_a_cache(method: str, tmp_path: Path) -> None:
    """Four processes hit an existing kernel, and build a missing one once."""
    command = [sys.executable, "-m", "tests.faults.started", str(tmp_path), method]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}

    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=80
    )

    assert (done.returncode, complaints(done.stderr)) == (0, [])
    messages = received(tmp_path)
    assert (messages.count("ready"), messages.count("built"), messages.count("done")) == (4, 1, 4)
    assert whole_entries(tmp_path) == 2


@pytest.mark.timeout(30)
def test_a_child_forgets_what_its_parent_loaded_and_was_loading(monkeypatch: Patch) -> None:
    """It has neither the CUDA context nor the threads of its parent."""
    kernel, other = (LoadedKernel.__new__(LoadedKernel) for _ in range(2))
    inside, release = threading.Event(), threading.Event()

    def load(*_: object) -> LoadedKernel:
        inside.set()
        release.wait(20)
        return kernel

    def work() -> None:
        assert engine._loaded == {}
        monkeypatch.setattr("mlagen.runtime.loader.load", lambda *_: other)
        assert kernel_for(COMBINE, 0) is other

    monkeypatch.setattr(engine, "_loaded", {(DECODE, 0): kernel})
    monkeypatch.setattr("mlagen.runtime.loader.load", load)
    monkeypatch.setattr("mlagen.runtime.loader.require_no_capture", lambda *_: None)
    with ThreadPoolExecutor(1) as pool:
        parent = pool.submit(kernel_for, COMBINE, 0)
        inside.wait(20)
        status = in_child(work)
        release.set()

    assert status == 0
    assert parent.result() is kernel
    assert engine._loaded[DECODE, 0] is kernel


# A program that ends while a daemon or non-daemon thread compiles.
ENDING = """
import sys, threading, time
from mlagen.engine import find_or_build
from mlagen.jit import on_compile
from tests.kernels import DECODE
begun = threading.Event()
on_compile(lambda _: begun.set())
kinds = {"daemon": True, "thread": False}
threading.Thread(target=find_or_build, args=(DECODE,), daemon=kinds[sys.argv[1]]).start()
begun.wait(60)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "moment"),
    [("daemon", "0"), ("daemon", "0.3"), ("thread", "0.1")],
)
def test_a_process_that_ends_while_it_compiles_ends_well(
    kind: str, moment: str, cache_dir: Path
) -> None:
    """It neither crashes nor hangs; started compilations are finished and published."""
    command = [sys.executable, "-c", ENDING, kind, moment]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    assert len(list(cache_dir.glob("v2/*/*"))) == 1
    assert not find_or_build(DECODE).built


_END = """'''.format(path=sys.path, folder=sys.argv[1])
messages = [interpreters.run_string(interpreters.create(), code) for _ in range(2)]
assert messages == [None, None], messages
"""
SUBINTERPRETER = (
    """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
code = '''
import sys
sys.path[:] = {path!r}
from pathlib import Path
from mlagen.cache.store import KernelStore
from tests.cache.builds import CUBIN, make_build, make_key
store = KernelStore(Path({folder!r}) / "cache", lock_dir=Path({folder!r}) / "l", lock_timeout_s=9)
for name in ("mla_sm80", "another"):
    assert store.find_or_build(make_key(name), make_build).cubin == CUBIN
"""
    + _END
)


@pytest.mark.timeout(30)
def test_a_store_works_in_subinterpreters(tmp_path: Path) -> None:
    """Two successive interpreters of one process build and find in the same cache."""
    standard = SUBINTERPRETER.partition("from pathlib")[0] + "import datetime, hashlib\n" + _END
    probe = [sys.executable, "-c", standard, str(tmp_path)]
    if subprocess.run(probe, cwd=ROOT, capture_output=True, check=False).returncode < 0:
        pytest.skip("modules of this Python's standard library crash in subinterpreters")
    command = [sys.executable, "-c", SUBINTERPRETER, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in done.stderr and "nterpreters" in done.stderr:
        pytest.skip("this Python has no subinterpreters")
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    assert whole_entries(tmp_path) == 2
