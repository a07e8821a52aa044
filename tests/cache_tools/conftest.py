"""Fixtures: the command in this process or its own, its valid documents, and a small cache."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

import mlagen
from cache_tools.cli import cli
from mlagen.cache import store
from mlagen.cache.folder import Folder
from mlagen.compiler import process
from mlagen.prewarming import PrewarmUnit
from mlagen.settings import current_settings
from tests.built_once import compiled
from tests.cli_documents import DOCUMENTS, require_document
from tests.fixture_types import Patch


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error."""

    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


ROOT = Path(__file__).resolve().parents[2]
# Packages that no quick command imports.
HEAVY = ("torch", "jinja2", "cuda.bindings.driver", "filelock")

SCREEN = ("COLUMNS", "LINES", "NO_COLOR")

Setting = Callable[[str, object], None]
Serve = Callable[..., AbstractContextManager[str]]


def start(*arguments: str, before: str = "", **options: Any) -> subprocess.Popen[Any]:
    """Start the command in a process that runs ``before`` first; its output goes to pipes."""
    # A shell's background job ignores Ctrl-C, and its children inherit that.
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    script = f"{interruptible}{before}from cache_tools.__main__ import main; main()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    usual = {"cwd": ROOT, "env": os.environ, **pipes}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], **{**usual, **options})


def without(*packages: str) -> str:
    """Return code after which a process cannot import these packages."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages}));"


def on_a_terminal(*arguments: str, interrupt_at: str = "", **environ: str) -> tuple[int, str]:
    """Return exit code and output of the command on a terminal, and press Ctrl-C after a text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 400, 0, 0))
    process = start(
        *arguments,
        before="import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);",  # as a shell does
        env={name: os.environ[name] for name in os.environ if name not in SCREEN} | environ,
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
    )
    os.close(theirs)
    output = b""
    with suppress(OSError):  # Linux raises EIO once the other end is closed
        while part := os.read(ours, 1 << 16):
            output += part
            if interrupt_at and interrupt_at in output.decode(errors="ignore"):
                os.write(ours, b"\x03")
                interrupt_at = ""
    os.close(ours)
    return process.wait(timeout=60), output.decode()


class Cached(NamedTuple):
    """Two cached kernels and their cache folder."""

    units: tuple[PrewarmUnit, ...]
    root: Path

    @property
    def keys(self) -> list[str]:
        """Return their keys."""
        return [unit.key for unit in self.units]

    @property
    def paths(self) -> list[Path]:
        """Return the files of their entries."""
        return [Folder(self.root).path_of(unit.key, unit.toolchain) for unit in self.units]


class Run:
    """The command in this process: the words of a line, and further words as they are."""

    def __init__(self) -> None:
        # Before click 8.2 the two streams are merged by default; later they are always separate.
        is_old = "mix_stderr" in inspect.signature(CliRunner).parameters
        options: dict[str, Any] = {"mix_stderr": False} if is_old else {}
        self._runner = CliRunner(**options)

    def __call__(self, line: str, *words: str, answer: str | None = None) -> Result:
        """Return the result; ``answer`` is the input."""
        store._stores.clear()  # as in a process of its own
        result = self._runner.invoke(cli, [*line.split(), *words], input=answer, prog_name="mlagen")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *words: str, code: int = 0, answer: str | None = None) -> dict[str, Any]:
        """Return the document of a command that exits with ``code``; it has to fit its schema."""
        result = self(*words, "--json", answer=answer)
        assert result.exit_code == code, result.stderr
        parsed: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
        first, second, *_ = [*" ".join(words).split(), ""]
        document = DOCUMENTS.get(f"{first} {second}") or DOCUMENTS.get(first)
        if document is not None:
            require_document(parsed, document)
        return parsed


run = Run()


@pytest.fixture
def setting(monkeypatch: Patch) -> Setting:
    """Return a function that changes a setting."""

    def set_it(name: str, value: object) -> None:
        monkeypatch.setenv(name, str(value))
        current_settings.cache_clear()

    return set_it


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _CutShort(_Files):
    """Declares a hundred bytes more than it sends."""

    def send_header(self, keyword: str, value: str) -> None:
        more = 100 if keyword == "Content-Length" else 0
        super().send_header(keyword, str(int(value) + more) if more else value)


class _Redirecting(_Files):
    """Redirects every name but one to the location that it is started with."""

    def __init__(self, *given: Any, location: str, header: str, **options: Any) -> None:
        self._location, self._header = location, header
        super().__init__(*given, **options)

    def do_GET(self) -> None:
        if self.path == "/there":
            super().do_GET()
        else:
            self.send_response(302)
            self.send_header(self._header, self._location.encode().decode("latin-1"))
            self.end_headers()


@pytest.fixture
def serve(monkeypatch: Patch) -> Serve:
    """Return a context of the URL of a web server for a folder, which no proxy is asked for."""
    monkeypatch.setenv("no_proxy", "*")

    @contextmanager
    def serve_it(
        folder: Path, *, cuts_short: bool = False, location: str = "", header: str = "Location"
    ) -> Iterator[str]:
        options: Any = {"directory": str(folder)}
        options |= {"location": location, "header": header} if location else {}
        kind = _Redirecting if location else _CutShort if cuts_short else _Files
        handler: Any = partial(kind, **options)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()

    return serve_it


@pytest.fixture
def compiled_once(monkeypatch: Patch) -> None:
    """Compile each kernel once for all tests of a run."""
    monkeypatch.setattr(process, "compile_anywhere", lambda source, arch, _: compiled(source, arch))


@pytest.fixture
def cached(cache_dir: Path, compiled_once: None) -> Cached:  # noqa: ARG001 - compiles
    """Cache two kernels."""
    report = mlagen.prewarm("sm_80", families=["combine"], dtype="bf16", kv_lora_rank=[256, 512])
    return Cached(report.units, cache_dir)
