"""Compilation in a fresh process: the same cubin, and the same errors."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen import fork_safety
from mlagen.artifacts import Cubin
from mlagen.compiler import nvrtc as nvrtc_module
from mlagen.compiler import nvrtc_process
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.nvrtc_process import compile_anywhere, compile_in_process
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import ToolchainError
from tests.cache.builds import in_child
from tests.compiler.test_nvrtc import SM_100F, source
from tests.fixture_types import Patch

SOURCE = source()


def test_a_fresh_process_compiles_the_same() -> None:
    """Cubin, log, resources and toolchain equal those of this process."""
    here, there = (
        compiled(SOURCE, SM_100F, find_nvrtc()) for compiled in (compile_source, compile_in_process)
    )
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
    cubin = compile_in_process(SOURCE, SM_100F, find_nvrtc())
    assert cubin.code.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("executable", "message"),
    [
        ("", r"^NVRTC: expected a Python to compile in, got none$"),
        ("/nowhere/python", r"^NVRTC: cannot compile in a fresh process: .*No such file"),
        ("/bin/false", r"^NVRTC: expected to compile in a fresh process, got status 1: nothing$"),
        ("/bin/true", r"^NVRTC: expected to compile in a fresh process, got status 0: nothing$"),
    ],
    ids=["none", "one that is gone", "one that fails", "one that does nothing"],
)
def test_without_a_python_to_start_the_error_is_a_toolchain_error(
    executable: str, message: str, monkeypatch: Patch
) -> None:
    """It is a ToolchainError, in one line."""
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ToolchainError, match=message):
        compile_in_process(SOURCE, SM_100F, find_nvrtc())


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
    monkeypatch.setattr(nvrtc_process, "compile_in_process", _elsewhere)


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
