"""Compilation in a process of its own: the same cubin and errors, an end with any executable."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen import fork_safety
from mlagen.artifacts import Cubin
from mlagen.compiler import nvrtc as nvrtc_module
from mlagen.compiler import process
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.process import CompileProcesses, compile_anywhere
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import CompileError, ToolchainError
from tests.cache.builds import ROOT, in_child, wait_for
from tests.compiler.test_nvrtc import SM_100F, source
from tests.fixture_types import Log, Patch

SOURCE = source()


def compile_apart(time_limit_s: float = 60.0) -> Cubin:
    """Compile the source in a process of its own."""
    return CompileProcesses(time_limit_s).compile(SOURCE, SM_100F, find_nvrtc())


def test_a_process_compiles_the_same() -> None:
    """Cubin, log, resources and toolchain equal those of this process."""
    here, there = compile_source(SOURCE, SM_100F, find_nvrtc()), compile_apart()
    assert there.compile_ms > 0
    assert replace(there, compile_ms=here.compile_ms, log=here.log) == here
    times = re.compile(r"[\d.]+ ms")
    assert times.sub("", there.log) == times.sub("", here.log)
    assert isinstance(there.resources, tuple)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_startup_output_and_the_current_folder_are_ignored(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Output at interpreter startup is not the answer, and the current folder is not imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("print('Welcome')\n")
    for name in ("json.py", "subprocess.py", "mlagen.py", "cuda.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert compile_apart().code.startswith(b"\x7fELF")


def test_a_program_that_ignores_its_children_compiles() -> None:
    """The system then reaps a process before anybody looks."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert compile_apart().code.startswith(b"\x7fELF")
    finally:
        signal.signal(signal.SIGCHLD, before)


# What an executable that is no Python does with the arguments of one.
SLEEPS, TALKS = "exec sleep 600", "while :; do echo rubbish; echo rubbish >&2; done"
EXECUTABLES: dict[str, tuple[str | None, str]] = {
    "one that is gone": (None, "expected a process to compile in, got No such file or directory"),
    "one that fails": ("echo why >&2; exit 3", "got exit status 3: why, from "),
    "one that does nothing": ("exit 0", "got exit status 0: nothing, from "),
    "one that is killed": ("kill -9 $$", "got SIGKILL, from "),
    "one that sleeps": (SLEEPS, "got nothing in 0.5 s, from "),
    "one that starts another and ends": (
        f"({SLEEPS}) & exit 1",
        "got exit status 1: nothing, from ",
    ),
    "one that prints rubbish": (TALKS, "got nothing in 0.5 s, from "),
    "one that fills what it inherits": (
        "exec cat /dev/zero > /proc/self/fd/$3",
        "expected a Python to compile in, got other output, from ",
    ),
    "one that closes what it inherits": (
        f"exec {sys.executable} -c 'import os; os.closerange(3, 99)\nwhile 1: os.write(2, b\"a\")'",
        "got exit status 1: ",
    ),
}


@pytest.mark.parametrize(("script", "message"), EXECUTABLES.values(), ids=EXECUTABLES)
def test_an_executable_that_is_no_python_is_an_error_within_the_limit(
    script: str | None, message: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As of a forked worker of a server that embeds Python; what it started is killed."""
    executable = tmp_path / "server"
    if script is not None:
        executable.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{script}\n")
        executable.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setattr(process, "_START_S", 0.5)
    start = time.monotonic()
    with pytest.raises(ToolchainError, match=r"^NVRTC: expected a ") as caught:
        compile_apart()
    assert message in str(caught.value)
    assert time.monotonic() - start < 20
    if script is not None:
        group = int((tmp_path / "pid").read_text())
        wait_for(lambda: not _is_running(group))


def _is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("executable", "got"), [("", "none"), ("/app", "a frozen program")])
def test_a_frozen_program_is_not_started_again(
    executable: str, got: str, monkeypatch: Patch
) -> None:
    """Its executable is the program itself."""
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", bool(executable), raising=False)
    with pytest.raises(ToolchainError, match=f"^NVRTC: expected a Python to compile in, got {got}"):
        compile_apart()


def boot(monkeypatch: Patch, code: str) -> None:
    """Replace the compilation of a process by this code."""
    hello = "import os, sys; os.write(int(sys.argv[1]), b'+'); "
    monkeypatch.setattr(process, "_BOOT", hello + code)


NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "


@pytest.mark.parametrize(
    ("code", "got", "log"),
    [
        (f"{NO_CORE}import ctypes; ctypes.string_at(0)", "SIGSEGV", ""),
        ("os.kill(os.getpid(), 9)", "SIGKILL", ""),
        ("sys.stderr.write('one\\ntwo\\n'); sys.exit(3)", "exit status 3: two", "one\ntwo\n"),
        ("pass", "exit status 0: nothing", ""),
        ("os.write(int(sys.argv[1]), b'{}')", "exit status 0: nothing", ""),
        ('os.write(int(sys.argv[1]), b\'{"log": "{}\')', "exit status 0: nothing", ""),
        ("os.write(int(sys.argv[1]), b'{]}\\n')", "exit status 0: nothing", ""),
        ("os.write(int(sys.argv[1]), b'{\"code\": 9}\\nELF')", "exit status 0: nothing", ""),
        # Ctrl-C of the terminal does not reach a session of its own.
        ("sys.exit(42 * (os.getsid(0) == os.getpid()))", "exit status 42: ", ""),
    ],
    ids=[
        "segfault",
        "kill -9",
        "exception",
        "silence",
        "no answer",
        "half a head",
        "no JSON",
        "half",
        "session",
    ],
)
def test_a_compiler_that_dies_is_a_compile_error(
    code: str, got: str, log: str, monkeypatch: Patch
) -> None:
    """The error has the exit reason and the output."""
    boot(monkeypatch, code)
    with pytest.raises(CompileError) as caught:
        compile_apart()
    assert str(caught.value).startswith(f"NVRTC: expected a compiled kernel, got {got}")
    assert caught.value.log == log


def test_a_compiler_that_hangs_is_killed(monkeypatch: Patch) -> None:
    """The error names the limit, and no process remains."""
    boot(monkeypatch, "import time; time.sleep(600)")
    processes = CompileProcesses(1.0)
    with pytest.raises(
        CompileError, match=r"^timeout: expected a compiled kernel in 1 s, got none$"
    ):
        processes.compile(SOURCE, SM_100F, find_nvrtc())
    assert processes._running == set()


def test_a_fork_meanwhile_does_not_delay_the_answer(monkeypatch: Patch) -> None:
    """A child of this process may have a copy of the pipe of the answer, and keep it open."""
    start, copies = CompileProcesses._start, list[int]()

    def start_and_copy(self: CompileProcesses, request: bytes, answer_end: int) -> object:
        copies.append(os.dup(answer_end))
        return start(self, request, answer_end)

    monkeypatch.setattr(CompileProcesses, "_start", start_and_copy)
    begin = time.monotonic()
    cubin = compile_apart(1e300)
    for copy in copies:
        os.close(copy)
    assert cubin.code.startswith(b"\x7fELF")
    assert time.monotonic() - begin < 30


def test_stderr_becomes_warnings(monkeypatch: Patch, caplog: Log) -> None:
    """A message of the process is logged here."""
    boot(
        monkeypatch,
        "sys.stderr.write('moved\\n'); from mlagen.compiler.process import main; "
        "sys.path[:] = sys.argv[2:]; main(int(sys.argv[1]))",
    )
    compile_apart()
    assert caplog.messages == ["moved"]


def test_stopping_kills_what_runs_and_starts_nothing(monkeypatch: Patch, tmp_path: Path) -> None:
    """The waiting thread gets an error."""
    ready = tmp_path / "ready"
    boot(monkeypatch, f"import time; open({str(ready)!r}, 'w'); time.sleep(600)")
    processes = CompileProcesses()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(processes.compile, SOURCE, SM_100F, find_nvrtc())
        wait_for(ready.exists)
        processes.stop()
        assert isinstance(waiting.exception(20), CompileError)
    with pytest.raises(ToolchainError, match="got an interrupt"):
        processes.compile(SOURCE, SM_100F, find_nvrtc())


# Compiles in a process that hangs in NVRTC; argv: the file that gets its pid.
HANGING = """
import sys
from mlagen.compiler import process
from mlagen.compiler.toolchain import find_nvrtc
from tests.compiler.test_process import SM_100F, SOURCE
process._BOOT = process._BOOT.replace("main(", "import time; from mlagen.compiler import nvrtc; "
    "nvrtc.compile_source = lambda *_: (open(%r, 'w').write(str(os.getpid())), time.sleep(600)); "
    "main(" % sys.argv[1])
process.CompileProcesses().compile(SOURCE, SM_100F, find_nvrtc())
"""


def test_a_process_ends_with_the_one_that_waits_for_it(tmp_path: Path) -> None:
    """A killed prewarm leaves no compiler behind."""

    def has_ended() -> bool:
        try:
            stat = Path(f"/proc/{int(ready.read_text())}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in {"Z", "X"}  # a zombie is none

    ready = tmp_path / "ready"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", HANGING, str(ready)], env=environ)
    wait_for(lambda: ready.exists() and ready.read_text())
    parent.kill()
    parent.wait()
    wait_for(has_ended)


def _elsewhere(*_: object) -> Cubin:
    return Cubin(code=b"elsewhere", log="", resources=(), toolchain="nvrtc-13.5.37", compile_ms=1.0)


def where() -> str:
    """Return where a kernel is compiled."""
    return compile_anywhere(SOURCE, SM_100F, find_nvrtc()).code.decode()


@pytest.fixture
def places(monkeypatch: Patch) -> None:
    """Make both ways of compiling record their name."""
    here = replace(_elsewhere(), code=b"here")
    monkeypatch.setattr(nvrtc_module, "compile_source", lambda *_: here)
    monkeypatch.setattr(CompileProcesses, "compile", _elsewhere)


@pytest.mark.usefixtures("places")
def test_the_default_is_this_process() -> None:
    """The same holds in a child that was forked between two compilations."""

    def work() -> None:
        assert where() == "here"

    assert where() == "here"
    assert in_child(work) == 0


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("places")
def test_a_child_forked_during_a_compile_uses_a_fresh_process(monkeypatch: Patch) -> None:
    """Its own children do the same; the parent compiles as before."""
    inside, release = threading.Event(), threading.Event()
    here = replace(_elsewhere(), code=b"here")

    def compile_slowly(*_: object) -> Cubin:
        inside.set()
        release.wait(20)
        return here

    def work() -> None:
        monkeypatch.setattr(nvrtc_module, "compile_source", lambda *_: here)
        assert where() == "elsewhere"
        assert in_child(lambda: None if where() == "elsewhere" else sys.exit(1)) == 0

    monkeypatch.setattr(nvrtc_module, "compile_source", compile_slowly)
    with ThreadPoolExecutor(1) as pool:
        parent = pool.submit(where)
        inside.wait(20)
        status = in_child(work)
        release.set()

    assert status == 0
    assert (parent.result(), where()) == ("here", "here")


@pytest.mark.usefixtures("places")
def test_an_ending_process_uses_a_fresh_process(monkeypatch: Patch) -> None:
    """A daemon thread would not finish in this process."""
    monkeypatch.setattr(fork_safety, "_is_exiting", True)
    assert where() == "elsewhere"
